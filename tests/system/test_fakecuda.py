# SPDX-License-Identifier: Apache-2.0
"""The fake driver does what tests/fakecuda/rules says, with each answer to what is not known of the real one."""

import ctypes
import mmap
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

import fakecuda
import pytest
from broker import ROOT, until
from fakecuda import MIB2, READ, READ_WRITE, CudaError, Fake, GpuProcess

HERE = pathlib.Path(__file__).resolve().parent
STUB = pathlib.Path("/usr/local/cuda/lib64/stubs/libcuda.so")


@pytest.fixture
def machine():
    """Makes machines with fake GPUs, and processes on them; all go with the test."""
    things = []

    class Machine(Fake):
        """A Fake whose processes are closed with it."""

        def process(self, start=True, **how):
            process = GpuProcess(self, **how)
            things.append(process)
            if start:
                process.start()
            return process

        def pair(self, **how):
            return self.process(**how), self.process(**how)

    def make(**settings):
        things.append(Machine(**settings))
        return things[-1]

    yield make
    for thing in reversed(things):
        if isinstance(thing, GpuProcess):
            thing.kill()
    for thing in things:
        thing.close()


def test_every_rule_has_its_tests():
    source = {path.stem: path.read_text() for path in HERE.glob("test_*.py")}
    rows = [line.split("|") for line in (HERE.parent / "fakecuda/rules").read_text().splitlines() if not line.startswith("#")]
    assert len(rows) > 30
    for row in rows:
        rule, _, mark, switch, tests = (field.strip() for field in row)
        assert mark in ("documented", "observed", "measured", "unverified"), rule
        for test in tests.split(", "):
            module, name = test.split("::")
            assert f"\ndef {name}(" in source[module], rule
            # what is not known is tried with every answer
            if mark == "unverified":
                key, answers = switch.split("=")
                assert key in source[module], rule
                assert all(f'"{answer}"' in source[module] for answer in answers.split(",")), rule
        assert mark != "unverified" or switch != "-", rule
    printed = subprocess.run([sys.executable, "-B", HERE.parent / "fakecuda/print-rules"], check=True, capture_output=True, text=True)
    assert len(printed.stdout.splitlines()) == len(rows) + 2 + 22


def test_the_suite_runs_with_every_answer():
    """But those that all tests of several users or of MPS would fail with, and which have tests of their own."""
    def rows(name):
        return [line for line in (HERE.parent / "fakecuda" / name).read_text().splitlines() if not line.startswith("#")]

    switches = dict(field.strip().split("=") for field in (row.split("|")[3] for row in rows("rules")) if "=" in field)
    tried = {pair for line in rows("answers") for pair in line.split()}
    others = {f"{key}={answer}" for key, answers in switches.items() for answer in answers.split(",")[1:]}
    assert tried == {pair for pair in others if pair[:3] not in ("U5=", "U7=")}


def test_every_test_of_the_facts_is_there():
    source = {path.stem: path.read_text() for path in [*HERE.glob("test_*.py"), *(HERE.parent / "python").glob("test_*cuda*.py")]}
    rows = [line.split("|") for line in (HERE.parent / "fakecuda/scenarios").read_text().splitlines() if not line.startswith("#")]
    assert [int(row[0]) for row in rows] == list(range(1, 22))
    for number, _, tests in rows:
        for test in tests.strip().split(", "):
            module, name = test.split("::")
            assert f"\ndef {name}(" in source[module], (number, test)


def test_a_handle_is_of_its_allocation(machine):
    one, other = machine().pair()
    pointer = one.alloc(4 * MIB2)
    handle = one.get_handle(pointer)
    assert len(handle) == 64 and one.get_handle(pointer) == handle
    one.write(pointer, b"of the exporter")
    there = other.open(handle)
    assert other.read(there, 15) == b"of the exporter" and other.range(there) == (there, 4 * MIB2)
    other.write(there + 3, b"THE")
    assert one.read(pointer, 15) == b"of THE exporter"
    one.free(pointer)
    # the address may come back; the handle does not
    again = one.get_handle(one.alloc(4 * MIB2))
    assert again != handle


def test_interior_pointers(machine):
    one, other = machine().pair()
    pointer = one.alloc(MIB2)
    assert one.get_handle(pointer + 4096) == one.get_handle(pointer)
    assert one.range(pointer + 4096) == (pointer, MIB2)
    one.write(pointer + 4096, b"there")
    assert other.read(other.open(one.get_handle(pointer + 4096)) + 4096, 5) == b"there"


@pytest.mark.parametrize("answer", ["exact", "block"])
def test_small_allocations_share_a_block(machine, answer):
    one, other = machine(U3=answer).pair()
    first, second = one.alloc(100), one.alloc(65)
    assert second == first + 512
    assert one.range(second) == ((second, 65) if answer == "exact" else (first, MIB2))
    one.write(first, b"a neighbour's")
    there = other.open(one.get_handle(second))
    assert other.range(there)[1] == (65 if answer == "exact" else MIB2)
    # what is in the same block is seen by whoever opened any of it
    neighbour = there - 512 if answer == "exact" else there
    assert other.peek(neighbour, 13) == b"a neighbour's"
    one.free(second)
    assert one.range(first)[1] in (100, MIB2)


def test_what_has_no_handle(machine):
    one = machine().process()
    pool = one.alloc(MIB2, "cuMemAllocAsync", None)
    for pointer in (one.alloc(MIB2, "cuMemAllocManaged", 1), pool, one.vmm(MIB2)[0]):
        assert one.pointer(fakecuda.POINTER_LEGACY, pointer) & 0xFF == 0
        assert one.code("get_handle", pointer) == 1
    assert one.pointer(fakecuda.POINTER_LEGACY, one.alloc(100)) & 0xFF == 1
    assert one.code("get_handle", 4096) == 1 and one.code("range", 4096) == 1


@pytest.mark.parametrize("answer", ["refuse", "allow"])
def test_a_handle_of_an_import(machine, answer):
    one, other = machine(U2=answer).pair()
    there = other.open(one.get_handle(one.alloc(MIB2)))
    assert other.pointer(fakecuda.POINTER_LEGACY, there) & 0xFF == (answer == "allow")
    assert other.code("get_handle", there) == (0 if answer == "allow" else 1)


def test_flags_and_contexts(machine):
    fake = machine()
    one, other = fake.process(), fake.process(start=False)
    handle = one.get_handle(one.alloc(MIB2))
    assert other.code("open", handle) == 3
    other.init()
    assert other.code("open", handle) == 201
    other.start()
    assert other.code("open", handle, 0) == 1
    other.open(handle)
    other.create_context()
    assert other.code("open", handle) == 201


def test_opens_are_counted(machine):
    fake = machine()
    one, other = fake.pair()
    handle = one.get_handle(one.alloc(MIB2))
    there = other.open(handle)
    assert other.open(handle) == there
    assert fake.balance(pid=other.getpid()) == {"ipc": 2, "context": 1}
    other.close_handle(there)
    assert other.range(there) == (there, MIB2)
    other.close_handle(there)
    assert other.code("range", there) == 1 and other.code("close_handle", there) == 1
    assert fake.balance(pid=other.getpid()) == {"context": 1}
    # others are not concerned
    assert one.get_handle(one.alloc(MIB2)) != handle


def test_the_same_process(machine):
    one = machine().process()
    assert one.code("open", one.get_handle(one.alloc(MIB2))) == 201


def test_equal_pid_values(machine):
    if not ROOT and subprocess.run(["unshare", "-Urpf", "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs root: or user namespaces")
    fake = machine()
    one, same = fake.process(new_pids=True), fake.process(new_pids=True)
    outside = fake.process()
    assert one.getpid() == same.getpid() != outside.getpid()
    handle = one.get_handle(one.alloc(MIB2))
    assert same.code("open", handle) == 201
    assert outside.code("open", handle) == 0


@pytest.mark.parametrize("answer", ["refuse", "allow"])
def test_death_of_the_exporter(machine, answer):
    fake = machine(U1=answer, CTX_BYTES=1000)
    one, other = fake.pair()
    third = fake.process()
    pointer = one.alloc(2 * MIB2)
    one.write(pointer, b"it stays")
    handle = one.get_handle(pointer)
    there = other.open(handle)
    before = other.free_bytes()
    one.kill()
    assert other.read(there, 8) == b"it stays"
    assert other.free_bytes() == before + 1000
    assert third.code("open", handle) == (0 if answer == "allow" else 1)
    third.kill()
    other.close_handle(there)
    assert other.free_bytes() == before + 2000 + 2 * MIB2


@pytest.mark.parametrize("code", ["1", "400", "201"])
def test_what_is_no_handle(machine, code):
    fake = machine(U4=code)
    one, other = fake.pair()
    assert other.code("open", b"x" * 64) == int(code)
    pointer = one.alloc(MIB2)
    handle = one.get_handle(pointer)
    one.free(pointer)
    assert other.code("open", handle) == int(code)
    handle = one.get_handle(one.alloc(MIB2))
    one.kill()
    assert other.code("open", handle) == int(code)


@pytest.mark.parametrize("answer", ["keep", "poison", "unmap"])
def test_freed_while_imported(machine, answer):
    one, other = machine(FREE=answer).pair()
    pointer = one.alloc(MIB2)
    one.write(pointer, b"bytes")
    there = other.open(one.get_handle(pointer))
    one.free(pointer)
    if answer == "unmap":
        assert other.in_child("peek", there, 5) == -signal.SIGBUS
    else:
        assert other.peek(there, 5) == (b"bytes" if answer == "keep" else b"\xdd" * 5)


@pytest.mark.parametrize("answer", ["refuse", "allow"])
def test_other_users(machine, answer):
    if not ROOT:
        pytest.skip("needs root: it is about several users")
    fake = machine(U7=answer)
    one, same, other = (fake.process(uid=uid) for uid in (20002, 20002, 20003))
    handle = one.get_handle(one.alloc(MIB2))
    assert same.code("open", handle) == 0
    assert other.code("open", handle) == (0 if answer == "allow" else 1)


@pytest.mark.parametrize("answer", ["refuse", "allow"])
def test_mps(machine, answer):
    fake = machine(MPS="1", U5=answer)
    one, other = fake.pair()
    without = fake.process(environment={"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"})
    handle = one.get_handle(one.alloc(MIB2))
    assert other.code("open", handle) == 0
    assert without.code("open", handle) == (0 if answer == "allow" else 1)
    # the server of another user makes wait, but not those who go without it
    fake.set(MPS_UID=os.geteuid() + 1)
    waits = fake.process(start=False)
    waits.begin("init")
    fake.process(environment={"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"})
    assert not fake.log("cuInit", waits.pid)
    fake.set(MPS_UID=os.geteuid())
    waits.finish()


def test_exclusive_mode(machine):
    fake = machine(EXCLUSIVE="1")
    one, other = fake.process(), fake.process(start=False)
    assert other.code("start") == 46 and other.code("start", 1) == 0
    one.kill()
    assert other.code("start") == 0


def test_visible_devices(machine):
    fake = machine(DEVICES=3)
    every = fake.process()
    uuids = [every.uuid(ordinal) for ordinal in range(every.count())]
    assert len(set(uuids)) == 3
    reordered = fake.process(environment={"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [reordered.uuid(ordinal) for ordinal in range(reordered.count())] == [uuids[2], uuids[0]]
    text = uuids[1].hex()
    named = fake.process(environment={"CUDA_VISIBLE_DEVICES": f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"})
    assert [named.uuid(ordinal) for ordinal in range(named.count())] == [uuids[1]]
    assert fake.process(start=False, environment={"CUDA_VISIBLE_DEVICES": "7,0"}).code("init") == 100
    # memory of a GPU that is not visible
    assert named.code("open", every.get_handle(every.alloc(MIB2))) == 0


def test_absent_devices(machine):
    fake = machine()
    one, other = fake.process(), fake.process(environment={"FAKECUDA_ABSENT": "0"})
    assert other.count() == 1 and other.uuid() == one.uuid(1)
    assert other.code("open", one.get_handle(one.alloc(MIB2))) == 1
    fd = one.take_fd(one.vmm(MIB2)[1])
    assert other.code("import_fd", other.send_fd(fd)) == 101
    os.close(fd)
    assert fake.process(start=False, environment={"FAKECUDA_ABSENT": "0,1"}).code("init") == 100


@pytest.mark.parametrize("code", ["1", "400", "201"])
def test_mig(machine, code):
    fake = machine(MIG="1", U4=code)
    instances = [fake.process(environment={"CUDA_VISIBLE_DEVICES": number}) for number in "01"]
    one, other = instances
    assert one.uuid() != other.uuid()
    assert one.uuid(function="cuDeviceGetUuid") == other.uuid(function="cuDeviceGetUuid")
    assert other.code("open", one.get_handle(one.alloc(MIB2))) == int(code)
    fd = one.take_fd(one.vmm(MIB2)[1])
    assert other.code("import_fd", other.send_fd(fd)) == int(code)
    os.close(fd)


def test_tegra(machine):
    one, other = machine(TEGRA="1").pair()
    assert one.attribute(fakecuda.ATTRIBUTE_INTEGRATED) == 1 and one.attribute(fakecuda.ATTRIBUTE_IPC_EVENT) == 1
    assert one.code("get_handle", one.alloc(MIB2)) == 801
    assert other.code("open", b"x" * 64) == 801
    assert one.code("create", MIB2) == 801


def test_wsl(machine):
    one, other = machine(WSL="1", TOTAL_BYTES=40 << 30).pair()
    assert other.code("open", one.get_handle(one.alloc(MIB2))) == 400
    assert one.code("get_handle", one.alloc(18 << 30)) == 2


def test_forked_child(machine):
    one = machine().process()
    pointer = one.alloc(MIB2)
    assert one.in_child("get_handle", pointer) == 3 and one.in_child("init") == 3
    assert one.code("get_handle", pointer) == 0


def test_stub(machine):
    fake = machine(STUB="1")
    paths = [fake.library] + ([STUB] if STUB.exists() else [])
    for path in paths:
        stub = fake.process(start=False, path=path)
        assert stub.code("init") == 34 and stub.code("alloc", 100) == 34
        assert stub.text_of(34) == (34, None)


def test_texts_of_errors(machine):
    assert machine().process().text_of(201) == (0, b"CUDA_ERROR_INVALID_CONTEXT")


def test_cuinit_listens(machine):
    fake = machine()
    one = fake.process(start=False)
    name = f"fakecuda-uvmfd-{os.stat('/proc/self/ns/pid').st_ino}-{one.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind("\0" + name)
        assert one.code("init") == 304
    assert one.code("init") == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect("\0" + name)


def test_injected(machine):
    fake = machine()
    one, other = fake.pair()
    fake.inject("cuMemAlloc_v2 2 nth=2")
    assert [one.code("alloc", 100) for _ in range(3)] == [0, 2, 0]
    fake.inject("cuMemAlloc_v2 sticky=700 nth=4")
    assert one.code("alloc", 100) == 700
    fake.inject()
    assert one.code("alloc", 100) == 700 and one.code("count") == 700
    assert other.code("alloc", 100) == 0
    fake.inject("cuMemAlloc_v2 hang")
    other.begin("alloc", 100)
    until(lambda: pathlib.Path(f"/proc/{other.pid}/wchan").exists(), "it is there")
    other.kill()
    fake.inject("* abort comm=nobody")
    assert fake.process().code("alloc", 100) == 0
    fake.inject("cuMemAlloc_v2 abort")
    dies = fake.process()
    dies.begin("alloc", 100)
    with pytest.raises((EOFError, ConnectionError)):
        dies.finish()


def test_vmm_sizes(machine):
    fake = machine()
    one, other = fake.pair()
    assert one.granularity() == MIB2
    assert one.code("create", MIB2 + 4096) == 1 and one.code("reserve", 4096) == 1
    pointer, number = one.vmm(2 * MIB2, b"made here")
    assert one.pointer(fakecuda.POINTER_TYPES, pointer) == 1 and one.range(pointer + 5) == (pointer, 2 * MIB2)
    fd = one.take_fd(number)
    handle = other.import_fd(other.send_fd(fd))
    os.close(fd)
    assert other.properties(handle) == (1, 0, 1)
    there = other.reserve(8 * MIB2)
    assert other.code("map_at", there, 4 * MIB2, handle) == 1
    assert other.code("map_at", there, MIB2, handle, MIB2) == 1
    assert other.code("map_at", there + 4096, MIB2, handle) == 1
    other.map_at(there, 2 * MIB2, handle)
    assert other.code("map_at", there, 2 * MIB2, handle) == 1
    assert other.in_child("peek", there, 9) == -signal.SIGSEGV
    other.access(there, 2 * MIB2)
    other.release(handle)
    assert other.read(there, 9) == b"made here" and other.range(there) == (there, 2 * MIB2)
    assert other.retain(there + 10) == handle
    other.release(handle)
    assert other.code("unreserve", there, 8 * MIB2) == 1
    other.call("cuMemUnmap", ctypes.c_uint64(there), ctypes.c_size_t(2 * MIB2))
    other.unreserve(there, 8 * MIB2)
    assert fake.balance(pid=other.getpid()) == {"context": 1} and other.code("release", handle) == 1


def test_vmm_outlives_its_maker(machine):
    one, other = machine().pair()
    fd = one.take_fd(one.vmm(MIB2, b"still there")[1])
    one.kill()
    for flags in (READ, READ_WRITE):
        number = other.send_fd(fd)
        assert other.read(other.map(other.import_fd(number), MIB2, flags), 11) == b"still there"
    os.close(fd)


def test_vmm_bad_fds(machine):
    one = machine().process()
    with tempfile.TemporaryFile() as file, open("/dev/null", "rb") as null:
        file.write(b"x" * MIB2)
        file.flush()
        pipe = os.pipe()
        memory = os.memfd_create("m", os.MFD_ALLOW_SEALING)
        os.ftruncate(memory, 2 * MIB2)
        for fd in (file.fileno(), null.fileno(), *pipe, memory):
            assert one.code("import_fd", one.send_fd(fd)) == 1
        for fd in (*pipe, memory):
            os.close(fd)
    assert one.code("import_fd", 999) == 1 and one.code("import_fd", -1) == 1


def test_vmm_read_only(machine):
    one, other = machine().pair()
    fd = one.take_fd(one.vmm(MIB2, b"read only")[1])
    there = other.map(other.import_fd(other.send_fd(fd)), MIB2, READ)
    os.close(fd)
    assert other.in_child("poke", there, b"x") == -signal.SIGSEGV
    assert other.peek(there, 9) == b"read only"
    other.access(there, MIB2, READ_WRITE)
    assert other.in_child("poke", there, b"x") == 0


@pytest.mark.parametrize("answer", ["all", "import", "none"])
def test_vmm_without_a_context(machine, answer):
    fake = machine(U8=answer)
    one, other = fake.process(), fake.process(start=False)
    other.init()
    fd = one.take_fd(one.vmm(MIB2)[1])
    number = other.send_fd(fd)
    os.close(fd)
    assert other.code("import_fd", number) == (201 if answer == "none" else 0)
    if answer == "none":
        return
    handle = other.import_fd(number)
    assert other.properties(handle) == (1, 0, 1)
    assert other.code("map", handle, MIB2) == (0 if answer == "all" else 201)


def test_old_driver(machine):
    one = machine(kind="driver-11.2", DRIVER_VERSION=11020).process()
    assert one.has("cuDeviceGetUuid") and one.has("cuMemCreate")
    assert not one.has("cuDeviceGetUuid_v2") and not one.has("cuGetProcAddress_v2")
    assert one.uuid(function="cuDeviceGetUuid") and one.get(ctypes.c_int, "cuDriverGetVersion") == 11020


def test_contexts_cost_memory(machine):
    fake = machine(CTX_BYTES=12345678)
    one, other = fake.pair()
    one_more = one.free_bytes()
    other.leave()
    assert one.free_bytes() == one_more + 12345678
    other.start()
    assert one.free_bytes() == one_more
    other.kill()
    assert one.free_bytes() == one_more + 12345678
    assert one.code("alloc", 16 << 30) == 2


def test_pinned_memory(machine):
    fake = machine(PINNED_MAX=3 * mmap.PAGESIZE)
    one = fake.process()
    page = one.host_page()
    one.pin(page, mmap.PAGESIZE)
    assert one.code("pin", page, 100) == 712
    assert one.code("unpin", page + 4096) == 713
    one.unpin(page)
    assert one.code("unpin", page) == 713
    assert one.code("pin", page, 4 * mmap.PAGESIZE) == 2
    assert not {"pin"} & set(fake.balance())


def test_streams(machine):
    fake = machine()
    one = fake.process()
    pointer, stream = one.alloc(100), one.stream()
    fake.hold()
    one.fill_later(pointer, b"a", 3, stream)
    one.fill_later(pointer + 1, b"b", 1, stream)
    one.note_later(stream)
    event = one.record(stream)
    assert one.code("call", "cuStreamQuery", ctypes.c_uint64(stream)) == 600
    assert one.code("call", "cuEventQuery", ctypes.c_uint64(event)) == 600
    assert one.peek(pointer, 3) == b"\0\0\0" and one.notes() == 0
    one.begin("call", "cuStreamSynchronize", ctypes.c_uint64(stream))
    fake.hold(False)
    one.finish()
    assert one.peek(pointer, 3) == b"aba" and one.notes() == 1
    assert one.code("call", "cuEventSynchronize", ctypes.c_uint64(event)) == 0
    assert one.code("call", "cuEventQuery", ctypes.c_uint64(event)) == 0
    one.call("cuCtxSynchronize")
    with pytest.raises(CudaError):
        one.write(pointer + 99, b"beyond")


def test_functions_by_name(machine):
    one = machine().process()
    assert one.function_named("cuIpcOpenMemHandle", 12000) == one.address_of("cuIpcOpenMemHandle_v2")
    assert one.function_named("cuDeviceGetUuid", 11020) == one.address_of("cuDeviceGetUuid")
    assert one.function_named("cuDeviceGetUuid", 13000) == one.address_of("cuDeviceGetUuid_v2")
    assert one.function_named("cuNoSuchThing", 13000) is None


def test_the_experiments_for_a_real_gpu():
    """Nothing is wrong with them, and without a GPU they are counted as not run."""
    script = HERE.parent / "gpu/check"
    run = subprocess.run([sys.executable, "-B", script, "--fake"], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "FAILED" not in run.stdout and " 0 failed" in run.stdout
    none = subprocess.run([sys.executable, "-B", script, "--library=/nonexistent/libcuda.so.1"], check=False, capture_output=True,
                          text=True)
    assert none.returncode == 77 and "experiments and the system tests of GPU memory were not run" in none.stdout
