# SPDX-License-Identifier: Apache-2.0
"""GPU memory with a broker that has a helper, on machines with fake GPUs: what is validated, by whom, and what when that
one hangs, dies, or is of no use. Numbers in the names of tests are those of the facts' list (cuda § 9.8)."""

import os
import pathlib
import signal

import pytest
from broker import ADMIN, BUILD, CONSUMER, KEEPER, OTHER, OWNER, ROOT, until
from fakecuda import MIB2
from gpus import because, end_helpers, helpers_of, is_built, make_machine, parent_of, text_uuid, the_helper
from protocol_client import NUMBERS, READ, READ_WRITE, REGION, Refused

pytestmark = pytest.mark.skipif(not is_built(), reason="built without GPU memory")

HELPER_COMM = "shmbroker-cuda-"


@pytest.fixture
def machine(start):
    """Makes machines; after the brokers have ended, nothing that a helper opened may be open."""
    machines = []

    def make(**settings):
        machines.append(make_machine(start, **settings))
        return machines[-1]

    yield make
    for one in machines:
        one.close()


def refused(name, text=""):
    return pytest.raises(Refused, match=f"(?s)^{name}:.*{text}")


def serves_system_memory(broker, owner):
    """Whatever is the matter with GPUs: a region of system memory is registered, read and retired as ever."""
    consumer = broker.peer(CONSUMER)
    owner.give("system memory", fill=b"as ever")
    found = consumer.read_lookup("system memory", 7)
    assert found["bytes"] == b"as ever"
    consumer.release(found["lease"])
    owner.unregister("system memory", wait=True)


def idle(machine, broker):
    """Waits until no helper is left; those that ended by themselves have given everything back."""
    until(lambda: not helpers_of(broker), "no helper")
    assert machine.balance(comm=HELPER_COMM) == {}


def test_1_three_processes(machine):
    there = machine()
    broker = there.broker(helper_idle="60s")
    owner, consumer, admin = there.peer(broker, OWNER), there.peer(broker, CONSUMER), broker.peer(ADMIN)
    ipc = owner.offer_ipc("ipc", alloc=3 * MIB2, data=b"by a handle")
    vmm = owner.offer_vmm("vmm", data=b"by an fd")
    assert not (ipc["flags"] | vmm["flags"]) & REGION["UNVALIDATED"]
    assert consumer.read_found("ipc", 11) == b"by a handle"
    assert consumer.read_found("vmm", 8) == b"by an fd"
    # one for both, and the broker itself has never seen the driver
    helper = the_helper(broker)
    assert "libcuda" in pathlib.Path(f"/proc/{helper}/maps").read_text()
    if ROOT:
        assert "libcuda" not in pathlib.Path(f"/proc/{broker.pid}/maps").read_text()
    entry = broker.region(admin, "ipc")
    assert entry["object_size"] == 3 * MIB2 and entry["device"] == owner.gpu("uuid")
    assert there.balance(pid=consumer.pid) == {"context": 1} and there.balance(pid=helper) == {"context": 1}
    end_helpers(broker)


def test_the_helper_has_nothing_of_the_broker(machine):
    there = machine()
    broker = there.broker(helper_idle="60s")
    there.peer(broker, OWNER).offer_ipc("x")
    helper = the_helper(broker)
    status = pathlib.Path(f"/proc/{helper}/status").read_text()
    assert "NoNewPrivs:\t1" in status and "SigBlk:\t0000000000000000" in status
    if ROOT:
        names = {fd.name: os.readlink(fd) for fd in pathlib.Path(f"/proc/{helper}/fd").iterdir()}
        foreign = [name for name in names.values() if "memfd" in name or "pidfd" in name or str(broker.socket) in name]
        # its own of the fake driver: the socket that cuInit() binds, and its record
        assert not foreign and len(names) <= 6, names
    end_helpers(broker)


def test_the_tools_do_not_load_the_driver():
    def code_of(program):
        """Where libtool makes a script of that name, the program is beside it."""
        path = BUILD / ".libs" / program
        return (path if path.exists() else BUILD / program).read_bytes()

    for program in ("shmbrokerd", "shmbrokerctl", "shmbroker-gateway", "shmbroker-bench"):
        if not (BUILD / program).exists():
            continue
        data = code_of(program)
        assert data[:4] == b"\x7fELF" and b"nvmlInit" not in data, program
        # the benchmark is owner and consumer, and has a GPU's memory only as those have
        if program != "shmbroker-bench":
            assert b"cuInit" not in data and b"cuIpcOpenMemHandle" not in data, program
        # the broker knows the name as a default of its configuration, and no function to load it with
        if program not in ("shmbroker-bench", "shmbrokerd"):
            assert b"libcuda.so" not in data, program
    assert b"cuInit" in code_of("shmbroker-cuda-helper") and b"nvmlInit" in code_of("shmbroker-cuda-helper")


@pytest.mark.parametrize("answer", ["refuse", "allow"])
def test_2_the_owner_dies(machine, answer):
    there = machine(U1=answer, answers={"U4": "1"})
    broker = there.broker()
    owner, consumer, late, admin = (there.peer(broker, OWNER), there.peer(broker, CONSUMER), there.peer(broker, OTHER),
                                    broker.peer(ADMIN))
    consumer.subscribe("OWNER_DIED", "RETIRING", "GONE")
    owner.offer_ipc("x", data=b"it stays")
    handle = late.lookup("x", want_fd=True, no_lease=True)["handle"]
    lease, pointer = consumer.open_found("x")
    owner.kill()
    assert consumer.wait_event("RETIRING", "x")
    assert consumer.gpu("read", pointer, 8) == b"it stays"
    with pytest.raises(Refused):
        late.lookup("x")
    # what the driver says to one who kept the handle is not known
    if answer == "refuse":
        with pytest.raises(Exception, match="1"):
            late.gpu("open", handle)
    else:
        late.gpu("open", handle)
    assert broker.region(admin, "x")["leases"] == 1
    consumer.gpu("close_handle", pointer)
    consumer.release(lease)
    until(lambda: not admin.status(), "gone")
    assert there.balance(pid=consumer.pid) == {"context": 1}
    idle(there, broker)


def test_3_unregister_waits_for_holders(machine):
    there = machine()
    broker = there.broker()
    owner, consumer = there.peer(broker, OWNER), there.peer(broker, CONSUMER)
    owner.offer_ipc("x")
    lease, pointer = consumer.open_found("x")
    with refused("TIMED_OUT"):
        owner.unregister("x", wait=True, timeout_ms=50)
    consumer.gpu("close_handle", pointer)
    consumer.release(lease)
    # now it is safe to free
    owner.offer_ipc("x")
    owner.unregister("x", wait=True)


def test_4_hints_tell_an_owner_its_own_memory(machine):
    there = machine()
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    given = owner.offer_ipc("x")
    owner.page_attach()
    reply = owner.page_map(given["slot"], given["generation"])
    assert (reply["owner_pid"], reply["owner_pid_namespace"]) == (owner.pid, os.stat("/proc/self/ns/pid").st_ino)
    with pytest.raises(Exception, match="201"):
        owner.gpu("open", reply["handle"])


def test_5_the_helper_changes_its_pid(machine):
    there = machine()
    broker = there.broker(helper_idle="60s")
    owner = there.peer(broker, OWNER)
    owner.offer_ipc("first")
    old = the_helper(broker)
    # another process may have the same pid in its own namespace
    owner.offer_ipc("second", owner_pid=old, owner_pid_namespace=1)
    until(lambda: len(helpers_of(broker)) == 1 and helpers_of(broker) != [old], "another one")
    new = the_helper(broker)
    owner.offer_ipc("third", owner_pid=old, owner_pid_namespace=1)
    assert the_helper(broker) == new
    # nobody has helpers started for ever by what it says its pid is
    for number in range(3):
        owner.offer_ipc(f"more{number}", owner_pid=the_helper(broker))
    with because("BUSY", "had the owner's pid"):
        owner.offer_ipc("x", owner_pid=the_helper(broker))
    end_helpers(broker)


def test_5_equal_pids_in_two_namespaces(machine):
    if not ROOT:
        pytest.skip("needs root: makes a pid namespace")
    there = machine()
    broker = there.broker(helper_idle="60s")
    there.peer(broker, OTHER).offer_ipc("starts the helper")
    old = the_helper(broker)
    owner = there.peer(broker, OWNER, as_pid=old)
    assert owner.pid_here() == old
    owner.offer_ipc("x", data=b"not a clash")
    assert the_helper(broker) != old
    assert there.peer(broker, CONSUMER).read_found("x", 11) == b"not a clash"
    # an owner that does not say its pid is refused by the driver, and told why that may be
    second = there.peer(broker, OWNER, as_pid=the_helper(broker))
    with refused("(PERMISSION|INVALID)", "201"):
        second.offer_ipc("y", owner_pid=0)
    serves_system_memory(broker, second)
    end_helpers(broker)


def test_6_devices_are_uuids(machine):
    there = machine(DEVICES=3)
    broker = there.broker(environment={"CUDA_VISIBLE_DEVICES": "2,0"})
    owner = there.peer(broker, OWNER, environment={"CUDA_VISIBLE_DEVICES": "0,1,2"}, ordinal=2)
    uuids = [owner.gpu("uuid", ordinal) for ordinal in range(3)]
    owner.offer_ipc("two", ordinal=2)
    owner.offer_vmm("two too", ordinal=2)
    with because("OTHER_GPU", f"on {text_uuid(uuids[2])}, not on {text_uuid(uuids[0])}"):
        owner.offer_ipc("wrong", ordinal=2, device=uuids[0])
    with because("OTHER_GPU"):
        owner.offer_vmm("wrong", ordinal=2, device=uuids[0])
    for _ in range(2):
        with because("NOT_VISIBLE", f"{text_uuid(uuids[1])} is not .*{text_uuid(uuids[0])}"):
            owner.offer_ipc("hidden", ordinal=2, device=uuids[1])
    until(lambda: not helpers_of(broker), "no helper")


def test_7_sizes(machine):
    there = machine()
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    for fields in ({"size": 2 * MIB2}, {"offset": 1}, {"offset": MIB2}, {"object_size": 0, "size": MIB2 + 1},
                   {"object_size": 2 * MIB2}, {"offset": 2**64 - 1}):
        with because("TOO_BIG"):
            owner.offer_ipc("x", **fields)
    # an owner that does not know is told
    owner.offer_ipc("x", object_size=0)
    for fields in ({"object_size": 2 * MIB2}, {"object_size": MIB2 - 4096, "size": 4096}, {"object_size": 4096, "size": 4096}):
        with because("SIZE"):
            owner.offer_vmm("y", **fields)
    with because("NO_SIZE"):
        owner.offer_vmm("y", object_size=0)
    serves_system_memory(broker, owner)
    idle(there, broker)


@pytest.mark.parametrize("length", [63, 65])
def test_7_short_and_long_handles(machine, length):
    there = machine()
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    with refused("INVALID", "a CUDA IPC handle has 64 bytes"):
        owner.offer_ipc("x", handle=b"h" * length)
    # that client is put out, as one whose message is malformed
    serves_system_memory(broker, broker.peer(OTHER))


@pytest.mark.parametrize("answer", ["exact", "block"])
def test_7_small_allocations(machine, answer):
    there = machine(U3=answer)
    broker = there.broker()
    owner, consumer = there.peer(broker, OWNER), there.peer(broker, CONSUMER)
    owner.offer_ipc("first", alloc=100, data=b"first")
    owner.offer_ipc("second", alloc=100, data=b"second")
    assert consumer.read_found("first", 5) == b"first" and consumer.read_found("second", 6) == b"second"
    if answer == "exact":
        with because("TOO_BIG"):
            owner.offer_ipc("third", alloc=100, size=101, object_size=0)
    idle(there, broker)


@pytest.mark.parametrize("code", ["1", "400", "201"])
def test_8_what_is_no_handle(machine, code):
    there = machine(U4=code)
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    texts = []
    for attempt in range(2):
        # once the helper has opened a handle of that user, the user is not the reason
        if attempt:
            owner.offer_ipc("good")
        with refused("(INVALID|PERMISSION|UNSUPPORTED)", f"cuIpcOpenMemHandle_v2: CUDA_ERROR_.* \\({code}\\)") as caught:
            owner.offer_ipc("bad", handle=b"garbage!" * 8)
        texts.append(str(caught.value))
    if code != "400":
        assert ("owner is uid" in texts[0]) == ROOT and "it is none" in texts[1]
    else:
        assert "WSL" in texts[0]
    idle(there, broker)


def test_10_a_call_that_hangs(machine):
    there = machine()
    there.needs_fake()
    broker = there.broker(operation_timeout="60s", helper_idle="60s")
    owner, other = there.peer(broker, OWNER), there.peer(broker, OTHER)
    owner.offer_ipc("x")
    old = the_helper(broker)
    # short only while everything hangs: what works takes as long as it likes
    there.reload(broker, operation_timeout="200ms")
    there.inject(f"cuIpcOpenMemHandle_v2 hang comm={HELPER_COMM}", f"cuMemMap hang comm={HELPER_COMM}")
    for kind in ("offer_ipc", "offer_vmm", "offer_ipc"):
        owner.start(kind, "hangs")
        # the broker does not wait
        other.give("served meanwhile")
        other.unregister("served meanwhile")
        with because("TIMEOUT", "within 200 ms"):
            owner.finish()
    there.inject()
    there.reload(broker, operation_timeout="60s")
    owner.offer_ipc("works again")
    assert the_helper(broker) != old
    owner.offer_vmm("y")
    end_helpers(broker)


def test_10_a_start_that_hangs(machine):
    there = machine()
    there.needs_fake()
    there.inject(f"cuInit hang comm={HELPER_COMM}")
    broker = there.broker(start_timeout="200ms")
    owner, other = there.peer(broker, OWNER), there.peer(broker, OTHER)
    owner.start("offer_ipc", "x")
    with because("TIMEOUT"):
        other.offer_vmm("y")
    with because("TIMEOUT"):
        owner.finish()
    there.inject()
    there.reload(broker, start_timeout="60s")
    owner.offer_ipc("x")
    until(lambda: not helpers_of(broker), "no helper")


def test_11_a_helper_that_dies(machine):
    there = machine()
    there.needs_fake()
    broker = there.broker(helper_idle="60s")
    owner = there.peer(broker, OWNER)
    there.inject(f"cuMemGetAddressRange_v2 abort comm={HELPER_COMM}")
    with because("DIED", "was killed by signal 6"):
        owner.offer_ipc("x")
    there.inject(f"cuInit abort comm={HELPER_COMM}")
    with because("DIED", "was killed by signal 6"):
        owner.offer_ipc("x")
    there.inject()
    owner.offer_ipc("x")
    # whoever kills it
    os.kill(the_helper(broker), signal.SIGKILL)
    until(lambda: not helpers_of(broker), "it is gone")
    owner.offer_ipc("y")
    # five times in a minute are enough
    there.inject(f"cuIpcOpenMemHandle_v2 abort comm={HELPER_COMM}")
    for _ in range(2):
        with because("DIED", "was killed by signal 6"):
            owner.offer_ipc("z")
    there.inject()
    with because("BUSY", "failed 5 times within a minute .was killed by signal 6"):
        owner.offer_ipc("z")
    assert not helpers_of(broker)
    owner.give("system memory works")
    # whose memory it was not goes on
    if ROOT:
        there.peer(broker, OTHER).offer_ipc("w")
        with because("BUSY"):
            owner.offer_ipc("z")
        end_helpers(broker)


def test_users_take_turns(machine):
    if not ROOT:
        pytest.skip("needs root: it is about several users")
    there = machine()
    there.needs_fake()
    broker = there.broker(start_timeout="5min", operation_timeout="5min", helper_idle="60min")
    many = [there.peer(broker, OWNER) for _ in range(6)]
    other, admin = there.peer(broker, OTHER), broker.peer(ADMIN)
    many[0].start("offer_ipc", "many0")
    helper = the_helper(broker)
    os.kill(helper, signal.SIGSTOP)
    for number, owner in enumerate(many[1:]):
        owner.start("offer_ipc", f"many{number + 1}")
    # the first one may be over
    until(lambda: admin.stats()["held_messages"] >= len(many) - 1, admin.stats)
    waiting = admin.stats()["held_messages"]
    other.start("offer_vmm", "other")
    until(lambda: admin.stats()["held_messages"] > waiting, admin.stats)
    os.kill(helper, signal.SIGCONT)
    for owner in (other, *many):
        owner.finish()
    # two kinds of calls tell who was when
    calls = [call.function for call in there.log(comm=HELPER_COMM) if not call.result]
    before = calls[:calls.index("cuMemImportFromShareableHandle")].count("cuIpcOpenMemHandle_v2")
    assert before < len(many) - 1
    end_helpers(broker)


def test_12_a_context_that_breaks(machine):
    there = machine()
    there.needs_fake()
    broker = there.broker(helper_idle="60s")
    owner = there.peer(broker, OWNER)
    owner.offer_ipc("x")
    old = the_helper(broker)
    there.inject(f"cuMemGetAddressRange_v2 sticky=700 comm={HELPER_COMM}")
    with because("STICKY", "CUDA_ERROR_ILLEGAL_ADDRESS .700"):
        owner.offer_ipc("y")
    there.inject()
    owner.offer_ipc("y")
    assert the_helper(broker) != old
    end_helpers(broker)


# what the machine is like, the broker's environment and configuration, and what the refusal says
REFUSALS = {
    "INTEGRATED": ({"TEGRA": "1"}, {}, {}, ""),
    "STUB": ({"STUB": "1"}, {}, {}, "STUB_LIBRARY .34"),
    "NO_DRIVER": ({}, {}, {"library": "/nonexistent/libcuda.so.1"}, "nonexistent"),
    "NO_HELPER": ({}, {}, {"helper": "/nonexistent/helper"}, "/nonexistent/helper"),
    "OFF": ({}, {}, {"mode": "off"}, ""),
    "NO_GPU": ({}, {"FAKECUDA_ABSENT": "0,1"}, {}, "CUDA_ERROR_NO_DEVICE .100"),
    "NOT_VISIBLE": ({}, {"FAKECUDA_ABSENT": "0"}, {}, ""),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_13_what_cannot_work(machine, what):
    settings, environment, keys, text = REFUSALS[what]
    there = machine()
    broker = there.broker(environment=environment, **keys)
    owner = there.peer(broker, OWNER)
    handle, uuid = owner.gpu("get_handle", owner.gpu("alloc", MIB2)), owner.gpu("uuid")
    there.set(**settings)
    for _ in range(3):
        with because(what, text):
            owner.register_cuda("x", 1, handle, device=uuid)
    serves_system_memory(broker, owner)
    until(lambda: not helpers_of(broker), "no helper")


def test_13_wsl(machine):
    there = machine(WSL="1")
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    with because("WSL", "CUDA_ERROR_INVALID_HANDLE .400"):
        owner.offer_ipc("x")
    serves_system_memory(broker, owner)
    idle(there, broker)


@pytest.mark.parametrize("code", ["1", "400", "201"])
def test_13_mig(machine, code):
    there = machine(MIG="1", U4=code)
    broker = there.broker(environment={"CUDA_VISIBLE_DEVICES": "0"})
    owner = there.peer(broker, OWNER, environment={"CUDA_VISIBLE_DEVICES": "0"})
    other = there.peer(broker, OTHER, environment={"CUDA_VISIBLE_DEVICES": "1"})
    owner.offer_ipc("x")
    owner.offer_vmm("y")
    ours = owner.gpu("uuid")
    for kind in ("offer_ipc", "offer_vmm"):
        with because("MIG"):
            getattr(other, kind)("z", device=ours)
        with because("NOT_VISIBLE"):
            getattr(other, kind)("z")
    serves_system_memory(broker, other)
    idle(there, broker)


def test_13_exclusive_mode(machine):
    there = machine(EXCLUSIVE="1", answers={"U8": "all"})
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    with because("EXCLUSIVE", "CUDA_ERROR_DEVICE_UNAVAILABLE .46"):
        owner.offer_ipc("x")
    serves_system_memory(broker, owner)
    # an fd needs no context
    owner.offer_vmm("x")
    idle(there, broker)


def test_13_an_old_driver(machine):
    there = machine(kind="driver-11.2", DRIVER_VERSION=11020)
    broker = there.broker()
    owner = there.peer(broker, OWNER, start=False)
    owner.gpu("init")
    owner.gpu("start")
    uuid = owner.gpu("uuid", 0, "cuDeviceGetUuid")
    pointer = owner.gpu("alloc", MIB2)
    owner.register_cuda("x", MIB2, owner.gpu("get_handle", pointer), device=uuid)
    idle(there, broker)


def test_13_a_driver_that_is_too_old(machine):
    there = machine(kind="driver-10.2")
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    with because("OLD_DRIVER", "lacks cuIpcOpenMemHandle_v2"):
        owner.register_cuda("x", 1, b"h" * 64, device=owner.gpu("uuid", 0, "cuDeviceGetUuid"))
    serves_system_memory(broker, owner)


@pytest.mark.parametrize("answer", ["refuse", "allow"])
def test_13_mps(machine, answer):
    there = machine(MPS="1", U5=answer)
    pipes = there.path / "mps"
    pipes.mkdir()
    pipes.chmod(0o755)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    broker = there.broker(environment=environment)
    owner = there.peer(broker, OWNER, environment=environment)
    if answer == "allow":
        owner.offer_ipc("x")
    else:
        with because("MPS"):
            owner.offer_ipc("x")
        serves_system_memory(broker, owner)
        # as a client of the server it sees what the others see
        second = there.broker(environment=environment, bypass_mps="no")
        there.peer(second, OWNER, environment=environment).offer_ipc("x")
        idle(there, second)
    owner.offer_vmm("y")
    # another user's server makes its clients wait: ours is none
    there.set(MPS_UID=4242)
    idle(there, broker)
    owner.offer_vmm("z")
    idle(there, broker)


@pytest.mark.parametrize("answer", ["refuse", "allow"])
def test_13_other_users(machine, answer):
    if not ROOT:
        pytest.skip("needs root: it is about several users")
    there = machine(U7=answer, answers={"U4": "1"})
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    if answer == "allow":
        owner.offer_ipc("x")
    else:
        with because("UID", f"the owner is uid {OWNER}, the broker's helper uid"):
            owner.offer_ipc("x")
        serves_system_memory(broker, owner)
    owner.offer_vmm("y")
    idle(there, broker)


def test_15_an_exporter_that_forked(machine):
    there = machine()
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    pointer = owner.gpu("alloc", MIB2)
    assert owner.gpu("in_child", "get_handle", pointer) == 3
    owner.offer_ipc("x")


@pytest.mark.parametrize("answer", ["all", "import", "none"])
def test_16_vmm(machine, answer):
    there = machine(U8=answer)
    broker = there.broker()
    owner, consumer = there.peer(broker, OWNER), there.peer(broker, CONSUMER)
    owner.offer_vmm("x", data=b"in an fd")
    # a context only where the driver wants one
    contexts = [call for call in there.log("cuDevicePrimaryCtxRetain", comm=HELPER_COMM) if not call.result]
    assert bool(contexts) == (answer != "all")
    assert consumer.read_found("x", 8) == b"in an fd"
    idle(there, broker)


def test_16_an_fd_outlives_its_owner(machine):
    there = machine()
    broker = there.broker()
    owner = there.peer(broker, KEEPER if ROOT else OWNER)
    flags = NUMBERS["REGISTER"]["KEEP"] if ROOT else 0
    consumer = there.peer(broker, CONSUMER)
    owner.offer_vmm("x", data=b"kept", flags=flags)
    if not ROOT:
        pytest.skip("needs root: regions are kept for users with that right")
    owner.kill()
    assert consumer.read_found("x", 4) == b"kept"
    broker.peer(KEEPER).unregister("x")
    idle(there, broker)


def test_16_a_read_only_mapping(machine):
    there = machine()
    there.needs_fake()
    broker = there.broker()
    owner, consumer = there.peer(broker, OWNER), there.peer(broker, CONSUMER)
    owner.offer_vmm("x", data=b"read me", access=READ)
    with refused("ACCESS"):
        consumer.lookup("x", access=READ_WRITE)
    lease, pointer = consumer.open_found("x", READ, flags=1)
    assert consumer.gpu("peek", pointer, 7) == b"read me"
    assert consumer.gpu("in_child", "poke", pointer, b"x") == -signal.SIGSEGV
    consumer.release(lease)


def test_16_bad_fds(machine):
    there = machine()
    there.needs_fake()
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    uuid = owner.gpu("uuid")
    for file in ("/dev/null", "/dev/zero", "memfd"):
        with because("BAD_FD", "cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE"):
            owner.give_cuda("x", file=file, device=uuid)
    serves_system_memory(broker, owner)
    idle(there, broker)


def test_16_memory_of_the_host(machine):
    there = machine(LOCATION="host")
    broker = there.broker()
    with because("NOT_SHAREABLE"):
        there.peer(broker, OWNER).offer_vmm("x")
    idle(there, broker)


def test_what_an_owner_forgot(machine):
    there = machine()
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    with because("NO_UUID"):
        owner.offer_ipc("x", device=bytes(16))
    with because("EMPTY_HANDLE"):
        owner.offer_ipc("x", handle=bytes(64))
    until(lambda: not helpers_of(broker), "no helper")


def test_16_fds_that_cannot_be_cuda(machine):
    there = machine()
    there.needs_fake()
    broker = there.broker(check_fd="yes")
    owner = there.peer(broker, OWNER)
    with because("SYSTEM_FD"):
        owner.offer_vmm("x")
    with because("BAD_FD"):
        owner.give_cuda("x", file="/dev/null", device=owner.gpu("uuid"))
    serves_system_memory(broker, owner)
    assert not there.log(comm=HELPER_COMM)


def test_18_an_idle_helper_gives_its_memory_back(machine):
    there = machine(CTX_BYTES=777 << 20)
    broker = there.broker(helper_idle="60min")
    owner = there.peer(broker, OWNER)
    before = owner.gpu("free_bytes")
    owner.offer_ipc("x")
    assert before - owner.gpu("free_bytes") == (777 << 20) + MIB2
    there.reload(broker, helper_idle="100ms")
    owner.offer_vmm("y")
    owner.unregister("y", wait=True)
    idle(there, broker)
    # y is still the owner's
    assert before - owner.gpu("free_bytes") == 2 * MIB2


def test_hold_keeps_memory_beyond_its_owner(machine):
    there = machine(CTX_BYTES=0)
    broker = there.broker("hold")
    owner, consumer, admin = there.peer(broker, OWNER), there.peer(broker, CONSUMER), broker.peer(ADMIN)
    owner.offer_ipc("x", alloc=4 * MIB2, data=b"held")
    owner.offer_ipc("y")
    assert there.balance(comm=HELPER_COMM) == {"ipc": 2, "context": 1}
    lease, pointer = consumer.open_found("x")
    owner.kill()
    # y has no lease, and is not held any more
    until(lambda: there.balance(comm=HELPER_COMM).get("ipc") == 1, there.log)
    assert consumer.gpu("read", pointer, 4) == b"held"
    consumer.gpu("close_handle", pointer)
    # the helper alone has it
    assert there.used() == 4 * MIB2
    consumer.release(lease)
    until(lambda: not admin.status(), "gone")
    idle(there, broker)
    assert there.used() == 0


def test_hold_and_a_helper_that_must_change_its_pid(machine):
    there = machine()
    broker = there.broker("hold")
    owner = there.peer(broker, OWNER)
    owner.offer_ipc("x")
    old = the_helper(broker)
    owner.offer_ipc("y", owner_pid=old)
    # the old one stays for what it holds
    assert len(helpers_of(broker)) == 2
    owner.unregister("x", wait=True)
    until(lambda: len(helpers_of(broker)) == 1 and old not in helpers_of(broker), "the old one has gone")
    owner.unregister("y", wait=True)
    idle(there, broker)


def test_what_waits_is_dropped_with_its_session(machine):
    there = machine()
    there.needs_fake()
    there.inject(f"cuIpcOpenMemHandle_v2 delay=500 comm={HELPER_COMM}")
    broker = there.broker("hold")
    owner, other = there.peer(broker, OWNER), there.peer(broker, OTHER)
    owner.start("offer_ipc", "x")
    until(lambda: there.log("cuInit", comm=HELPER_COMM), "it began")
    owner.kill()
    there.inject()
    other.offer_ipc("x")
    other.unregister("x", wait=True)
    idle(there, broker)


def test_many_at_a_time(machine):
    there = machine()
    broker = there.broker()
    owners = [there.peer(broker, OWNER, ordinal=number % 2) for number in range(6)]
    for number, owner in enumerate(owners):
        owner.start("offer_ipc", f"ipc{number}", ordinal=number % 2)
    for owner in owners:
        owner.finish()
    # one for each GPU
    assert len({call.pid for call in there.log("cuIpcOpenMemHandle_v2", comm=HELPER_COMM)}) == 2
    idle(there, broker)


def test_the_helpers_end_with_the_broker(machine):
    there = machine()
    broker = there.broker(helper_idle="60s")
    there.peer(broker, OWNER).offer_ipc("x")
    pid = the_helper(broker)
    for peer in broker.peers:
        peer.kill()
    broker.stop()
    until(lambda: parent_of(pid) is None, "it is gone")


def test_a_helper_that_hangs_ends_with_a_killed_broker(machine):
    there = machine()
    there.needs_fake()
    there.inject(f"cuIpcOpenMemHandle_v2 hang comm={HELPER_COMM}")
    broker = there.broker(operation_timeout="60min")
    owner = there.peer(broker, OWNER)
    owner.start("offer_ipc", "x")
    pid = the_helper(broker)
    until(lambda: there.log("cuCtxPushCurrent_v2", pid=pid), "it begins")
    broker.finished = True
    broker.process.kill()
    broker.process.wait()
    until(lambda: parent_of(pid) is None, "it is gone")


@pytest.mark.parametrize("answer", ["refuse", "allow"])
def test_an_import_is_offered_again(machine, answer):
    there = machine(U2=answer)
    broker = there.broker()
    owner, consumer = there.peer(broker, OWNER), there.peer(broker, CONSUMER)
    owner.offer_ipc("x", data=b"whose?")
    _, pointer = consumer.open_found("x")
    if answer == "refuse":
        with pytest.raises(Exception, match="cuIpcGetMemHandle"):
            consumer.gpu("get_handle", pointer)
    else:
        consumer.register_cuda("y", MIB2, consumer.gpu("get_handle", pointer), device=consumer.gpu("uuid"))
        assert there.peer(broker, OTHER).read_found("y", 6) == b"whose?"
    idle(there, broker)


def test_a_reload_changes_the_mode(machine):
    there = machine()
    broker = there.broker()
    owner = there.peer(broker, OWNER)
    owner.offer_ipc("x")
    there.reload(broker, mode="off")
    with because("OFF"):
        owner.offer_ipc("y")
    assert there.peer(broker, CONSUMER).lookup("x", no_lease=True)["handle"] is not None
    until(lambda: not helpers_of(broker), "no helper")
