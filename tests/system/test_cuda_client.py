# SPDX-License-Identifier: Apache-2.0
"""The library with GPU memory, on the fake driver: real processes, whose opens and closes are counted at the end."""

import pathlib
import re
import shutil

import pytest
from broker import ADMIN, CONSUMER, KEEPER, OTHER, OWNER, ROOT, until
from cuda_programs import CONTEXT, COPY, CPU, GPU, MIB2, NO_WAIT, READ, WRITE, Failed, gpus  # noqa: F401
from gpus import is_built
from protocol_client import NUMBERS, STATE
from restart import LastingBroker

EVENT = NUMBERS["EVENT"]
UNVALIDATED = 128
HELPER = "shmbroker-cuda-helper"[:15]
STRICT, FORCE, WAIT = 0, 2, 0x100
UNPUBLISHED, KEEP, READ_ONLY = 16, 1, 4
STUB = pathlib.Path("/usr/local/cuda/lib64/stubs/libcuda.so")

pytestmark = pytest.mark.skipif(not is_built(), reason="built without GPU memory")
# pylint: disable=redefined-outer-name


def failed(name, text=""):
    return pytest.raises(Failed, match=f"^{name} .*{text}")


def gone(admin, name):
    until(lambda: not admin.status(name=name, match="EXACT"), lambda: admin.status())


def one(admin, name):
    (entry,) = admin.status(name=name, match="EXACT")
    return entry


def balanced(fake, *programs):
    """Nothing is open in programs that have ended in order, but what they have opened themselves."""
    for program in programs:
        program.end()
        left = fake.balance(pid=program.pid)
        # the program's own context, which ends with it
        assert left in ({}, {"context": 1}), (left, [call for call in fake.log(pid=program.pid)])


@pytest.mark.parametrize("kind", ["ipc", "vmm", "alloc"])
def test_memory_goes_from_owner_to_consumers(gpus, kind):
    fake = gpus()
    owner, consumers = fake.client(), [fake.client(uid=CONSUMER) for _ in range(2)]
    if kind == "alloc":
        region = owner.cuda_alloc("x", 3 << 20)
        pointer = region.data
    else:
        pointer = owner.alloc(3 << 21) if kind == "ipc" else int(owner.do("vmm", 3 << 21, 1))
        pointer += 4096
        region = owner.export("x", pointer, 3 << 20)
        assert region.data == pointer
    assert (region.fd >= 0) == (kind != "ipc")
    owner.fill(pointer, 0x11, 3 << 20)
    owner.fill(pointer + 100, 0x22, 4)
    for consumer in consumers:
        lease = consumer.get("x", offset=98, size=8, access=READ)
        assert (lease.memory, lease.device, lease.size) == (GPU, 0, 8)
        assert consumer.read(lease.address, 8) == bytes.fromhex("1111222222221111")
        other = consumer.get("x", access=WRITE)
        consumer.fill(other.address, 0x33, 2)
        assert owner.read(pointer, 4) == bytes.fromhex("33331111")
        owner.fill(pointer, 0x11, 2)
        assert lease.uuid == other.uuid != bytes(16)
        consumer.release(lease)
        consumer.release(other)
    owner.do("retire", region.id, STRICT | WAIT, 60000)
    for consumer in consumers:
        consumer.do("process")
    balanced(fake, *consumers, owner)


def test_a_mapping_is_opened_once_and_closed_when_its_generation_is_gone(gpus):
    fake = gpus()
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    admin = fake.broker.peer(ADMIN)
    pointer = owner.alloc(MIB2)
    regions = [owner.export(f"layer{i}", pointer + 4096 * i, 4096) for i in range(4)]

    def opens():
        return len(fake.log("cuIpcOpenMemHandle_v2", pid=consumer.pid)), len(fake.log("cuIpcCloseMemHandle", pid=consumer.pid))

    held = [consumer.get(f"layer{i}") for i in range(4)]
    for _ in range(20):
        consumer.release(consumer.get("layer0", access=READ | NO_WAIT))
    assert opens() == (1, 0) and len({lease.address - 4096 * i for i, lease in enumerate(held)}) == 1
    consumer.do("threads", "layer1", 8, 200)
    assert opens() == (1, 0)
    for region in regions[:3]:
        owner.do("retire", region.id, STRICT, 0)
    for lease in held[:3]:
        consumer.release(lease)
    for i in range(3):
        gone(admin, f"layer{i}")
    consumer.do("process")
    assert opens() == (1, 0)
    owner.do("retire", regions[3].id, STRICT, 0)
    assert one(admin, "layer3")["state"] == STATE["RETIRING"]
    # what is held stays as it is
    consumer.read(held[3].address)
    consumer.release(held[3])
    gone(admin, "layer3")
    consumer.do("process")
    assert opens() == (1, 1)
    # the same memory under a new generation
    owner.export("layer0", pointer, 4096)
    consumer.release(consumer.get("layer0"))
    assert opens() == (2, 1)
    balanced(fake, consumer, owner)


def test_threads_that_open_at_once(gpus):
    fake = gpus()
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    for i in range(4):
        owner.export(f"ipc{i}", owner.alloc(MIB2), MIB2)
        owner.cuda_alloc(f"vmm{i}", MIB2)
        consumer.do("threads", f"ipc{i}", 16, 3)
        consumer.do("threads", f"vmm{i}", 16, 3)
    balanced(fake, consumer, owner)


def test_the_owner_dies(gpus):
    """Leases go on, nobody gets a new one, everybody is told, and the memory goes with the last lease."""
    fake = gpus()
    owner, consumer, other = fake.client(), fake.client(uid=CONSUMER), fake.client(uid=OTHER)
    admin = fake.broker.peer(ADMIN)
    pointer = owner.alloc(MIB2)
    owner.fill(pointer, 0x5a, MIB2)
    owner.export("x", pointer, MIB2)
    owner.cuda_alloc("y", MIB2)
    leases = [consumer.get("x"), consumer.get("y")]
    owner.kill()
    until(lambda: one(admin, "x")["state"] == STATE["RETIRING"], lambda: admin.status())
    entry = one(admin, "x")
    assert entry["object_size"] == MIB2 and [holder["leases"] for holder in entry["holders"]] == [1]
    until(lambda: {name for number, name in consumer.events() if int(number) in (EVENT["RETIRING"], EVENT["OWNER_DIED"])} >= {"x", "y"},
          consumer.events)
    assert consumer.read(leases[0].address) == b"\x5a" * 4
    for program in (other, consumer):
        with failed("NOT_FOUND"):
            program.get("x")
    for lease in leases:
        consumer.release(lease)
    gone(admin, "x")
    gone(admin, "y")
    consumer.do("process")
    assert fake.balance(pid=consumer.pid) in ({}, {"context": 1})
    assert admin.stats()["held_gpu_bytes"] == 0
    balanced(fake, consumer, other)


def test_force_cannot_recall_what_is_mapped(gpus):
    fake = gpus()
    owner, consumer, admin = fake.client(), fake.client(uid=CONSUMER), fake.broker.peer(ADMIN)
    region = owner.cuda_alloc("x", MIB2)
    owner.fill(region.data, 7, MIB2)
    lease = consumer.get("x")
    owner.do("retire", region.id, FORCE | WAIT, 60000)
    assert consumer.read(lease.address) == b"\x07" * 4
    # whoever keeps it is seen with what that is
    entry = one(admin, "x")
    assert (entry["state"], entry["object_size"], entry["leases"]) == (STATE["REVOKED"], MIB2, 1)
    until(lambda: ("x" in dict((name, number) for number, name in consumer.events())), consumer.events)
    with failed("REVOKED"):
        consumer.release(lease)
    gone(admin, "x")
    balanced(fake, consumer, owner)


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
def test_what_a_holder_keeps_is_known_after_a_restart(gpus, kind):
    """Status said 0 bytes of a region that had been revoked before the broker died, and of no GPU."""
    fake = gpus(broker={"kind": LastingBroker})
    owner, consumer, admin = fake.client(), fake.client(uid=CONSUMER), fake.broker.peer(ADMIN)
    region = owner.cuda_alloc("x", 2 * MIB2) if kind == "vmm" else owner.export("x", owner.alloc(2 * MIB2), MIB2)
    lease, device = consumer.get("x"), one(admin, "x")["device"]
    owner.do("retire", region.id, FORCE | WAIT, 60000)
    for _ in range(3):
        entry = one(admin, "x")
        assert (entry["state"], entry["object_size"], entry["leases"]) == (STATE["REVOKED"], 2 * MIB2, 1)
        assert entry["device"] == device == lease.uuid
        fake.broker.kill()
        admin.resume()
    with failed("REVOKED"):
        consumer.release(lease)
    gone(admin, "x")
    balanced(fake, consumer, owner)


def test_vmm_memory_outlives_its_owner_when_it_is_kept(gpus):
    fake = gpus()
    owner, admin = fake.client(uid=KEEPER), fake.broker.peer(ADMIN)
    region = owner.cuda_alloc("x", MIB2, flags=KEEP)
    owner.fill(region.data, 9, MIB2)
    owner.kill()
    consumer = fake.client(uid=CONSUMER)
    lease = consumer.get("x")
    assert consumer.read(lease.address) == b"\x09" * 4
    consumer.release(lease)
    admin.unregister("x", mode="STRICT", wait=True)
    balanced(fake, consumer)


def test_a_dead_owners_handle_is_refused_with_the_reason(gpus):
    fake = gpus(answers={"U1": "refuse", "U4": "1"})
    owner = fake.client(uid=KEEPER)
    owner.export("x", owner.alloc(MIB2), MIB2, flags=KEEP)
    owner.kill()
    consumer = fake.client(uid=CONSUMER)
    with failed("UNSUPPORTED", "CUDA_ERROR_INVALID_VALUE .1.: .*owner has freed the memory or has exited"):
        consumer.get("x")
    fake.broker.peer(ADMIN).unregister("x", mode="FORCE")
    balanced(fake, consumer)


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
def test_the_owners_own_process(gpus, kind):
    fake = gpus()
    both = fake.client()
    pointer = both.alloc(MIB2) if kind == "ipc" else int(both.do("vmm", MIB2, 1))
    both.export("x", pointer + 512, 4096)
    lease = both.get("x", offset=8, access=WRITE)
    both.fill(lease.address, 4, 4)
    assert both.read(pointer + 520) == b"\x04" * 4
    assert kind == "vmm" or lease.address == pointer + 520
    both.release(lease)
    balanced(fake, both)


def test_read_only_leases_of_vmm_memory(gpus):
    """The mapping is for reading where the lease is: who writes dies of it, and nobody else notices."""
    fake = gpus()
    owner, reader, consumer = fake.client(), fake.client(uid=CONSUMER), fake.client(uid=CONSUMER)
    region = owner.cuda_alloc("x", MIB2)
    owner.cuda_alloc("read", MIB2, flags=READ_ONLY)
    owner.fill(region.data, 1, 8)
    lease = reader.get("x")
    reader.begin("fill", lease.address, 2, 4)
    with pytest.raises((AssertionError, Failed)):
        reader.finish()
    assert owner.read(region.data) == b"\x01" * 4
    with failed("ACCESS"):
        consumer.get("read", access=WRITE)
    consumer.release(consumer.get("read"))
    reader.kill()
    balanced(fake, consumer, owner)


def test_no_context_is_made_unasked(gpus):
    fake = gpus(answers={"U8": "all"})
    owner = fake.client()
    owner.export("ipc", owner.alloc(MIB2), MIB2)
    owner.cuda_alloc("vmm", MIB2)
    without, may = fake.client(context=None, uid=CONSUMER), fake.client(context=None, flags=CONTEXT, uid=CONSUMER)
    with failed("STATE", "no CUDA context on device 0"):
        without.get("ipc")
    without.release(without.get("vmm"))
    assert not fake.log("cuDevicePrimaryCtxRetain", pid=without.pid)
    may.release(may.get("ipc"))
    for words in (("export", "z", 4096, 1), ("cuda_alloc", "z", MIB2, 0)):
        with pytest.raises(Failed):
            without.do(*words)
    for program in (without, may):
        program.end()
        assert fake.balance(pid=program.pid) == {}


@pytest.mark.parametrize("answer", ["all", "import", "none"])
def test_vmm_memory_without_a_context(gpus, answer):
    """Whatever the driver says of that, with a context it works."""
    fake = gpus(U8=answer)
    owner, without, consumer = fake.client(), fake.client(context=None, uid=CONSUMER), fake.client(uid=CONSUMER)
    owner.cuda_alloc("x", MIB2)
    if answer == "all":
        without.release(without.get("x"))
    else:
        with failed("UNSUPPORTED", "CUDA_ERROR_INVALID_CONTEXT .201.: this driver needs a context"):
            without.get("x")
    consumer.release(consumer.get("x"))
    balanced(fake, without, consumer, owner)


def test_devices_are_uuids(gpus):
    fake = gpus(DEVICES="2")
    owner, consumer = fake.client(), fake.client(uid=CONSUMER, environment={"CUDA_VISIBLE_DEVICES": "1,0"}, flags=CONTEXT)
    blind = fake.client(uid=CONSUMER, environment={"CUDA_VISIBLE_DEVICES": "1"})
    owner.export("x", owner.alloc(MIB2), MIB2)
    lease = consumer.get("x")
    assert lease.device == 1
    consumer.release(lease)
    with failed("NO_DEVICE", r"device GPU-[0-9a-f-]{36} is not visible to this process .CUDA_VISIBLE_DEVICES=1; it sees: GPU-"):
        blind.get("x")
    balanced(fake, consumer, blind, owner)


@pytest.mark.skipif(not ROOT, reason="needs root: makes a pid namespace")
def test_equal_pids_are_told_apart_before_the_driver_is_asked(gpus):
    fake = gpus()
    owner, consumer = fake.client(new_pids=True), fake.client(new_pids=True)
    assert owner.do("pid") == consumer.do("pid") == "1"
    pointer = owner.alloc(MIB2)
    owner.fill(pointer, 3, 4)
    owner.export("ipc", pointer, MIB2)
    region = owner.cuda_alloc("vmm", MIB2)
    owner.fill(region.data, 6, 4)
    with failed("UNSUPPORTED", "both have PID 1 in different PID namespaces; .* shmb_cuda_alloc"):
        consumer.get("ipc")
    lease = consumer.get("vmm")
    assert consumer.read(lease.address) == b"\x06" * 4
    consumer.release(lease)
    other = fake.client(uid=CONSUMER)
    lease = other.get("ipc")
    assert other.read(lease.address) == b"\x03" * 4
    other.release(lease)


def test_memory_that_cannot_be_offered(gpus):
    fake = gpus()
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    for how, text in (("managed", "memory from cudaMallocManaged cannot be exported"),
                      ("async", "memory from cuMemAllocAsync and other pools cannot be exported")):
        with failed("UNSUPPORTED", text):
            owner.export("x", owner.alloc(MIB2, how), MIB2)
    with failed("UNSUPPORTED", "without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"):
        owner.export("x", int(owner.do("vmm", MIB2, 0)), MIB2)
    with failed("UNSUPPORTED", "the pointer is not into GPU memory"):
        owner.export("x", 4096, MIB2)
    with failed("OUT_OF_BOUNDS", "exceeds the allocation .2097152 bytes.: does it span allocations"):
        owner.export("x", owner.alloc(MIB2) + 4096, MIB2)
    # as with expandable segments: a row of allocations, each of which can be offered, and not two as one
    row = int(owner.do("vmm", MIB2, 1, 2))
    with failed("OUT_OF_BOUNDS", "offset 4096 . size 2097152 exceeds the allocation .2097152 bytes.: does it span allocations"):
        owner.export("x", row + 4096, MIB2)
    owner.export("row0", row, MIB2)
    owner.export("row1", row + MIB2, MIB2)
    with failed("INVALID"):
        owner.cuda_alloc("x", MIB2, flags=8)
    with failed("OUT_OF_BOUNDS"):
        owner.cuda_alloc("x", 0)
    with failed("BAD_NAME"):
        owner.cuda_alloc("n" * 256, MIB2)
    owner.export("ipc", owner.alloc(MIB2), MIB2)
    lease = consumer.get("ipc")
    owner.cuda_alloc("vmm", MIB2)
    vmm = consumer.get("vmm")
    for one_lease in (lease, vmm):
        with failed("UNSUPPORTED", "memory from another process.* cannot be exported: its owner must offer it"):
            consumer.export("again", one_lease.address, 4096)
    consumer.release(vmm)
    with failed("UNSUPPORTED", "no guarded copies"):
        consumer.do("copy", lease.id)
    with failed("UNSUPPORTED", "no guarded copies"):
        consumer.get("ipc", access=READ | COPY)
    with failed("INVALID", "GPU memory"):
        consumer.do("pool", "ipc")
    consumer.release(lease)
    balanced(fake, consumer, owner)


@pytest.mark.parametrize("mode", ["relay", "validate"])
def test_memory_is_offered_by_an_fd(gpus, mode):
    """By who has the fd alone, and no pointer: a window, for reading where that is said."""
    fake = gpus(mode=mode)
    owner, consumer, admin = fake.client(), fake.client(uid=CONSUMER), fake.broker.peer(ADMIN)
    made = owner.cuda_alloc("whole", 2 * MIB2)
    owner.fill(made.data + 4096, 0x33, 8)
    uuid = one(admin, "whole")["device"].hex()

    def adopt(name, fd=made.fd, device=uuid, allocation=2 * MIB2, offset=4096, size=4096, flags=0):
        owner.do("adopt_fd", name, device, fd, allocation, offset, size, flags)

    adopt("window")
    adopt("read", flags=READ_ONLY)
    entry = one(admin, "window")
    assert (entry["kind"], entry["offset"], entry["size"], entry["object_size"]) == (
        NUMBERS["KIND"]["CUDA_VMM"], 4096, 4096, 2 * MIB2)
    lease = consumer.get("window", access=WRITE)
    assert lease.memory == GPU and lease.uuid.hex() == uuid and consumer.read(lease.address) == b"\x33" * 4
    consumer.fill(lease.address, 0x44, 8)
    assert owner.read(made.data + 4096) == b"\x44" * 4
    consumer.release(lease)
    with failed("ACCESS"):
        consumer.get("read", access=WRITE)
    consumer.release(consumer.get("read"))
    for code, how in (("BAD_FD", {"fd": 9999}), ("BAD_FD", {"fd": -1}), ("OUT_OF_BOUNDS", {"allocation": 0}),
                      ("OUT_OF_BOUNDS", {"offset": 2 * MIB2}), ("OUT_OF_BOUNDS", {"size": 0}), ("NO_DEVICE", {"device": "00" * 16})):
        with failed(code):
            adopt("bad", **how)
    if mode == "validate":
        with failed("OUT_OF_BOUNDS", "the allocation has not the 8388608 bytes that are claimed"):
            adopt("bad", allocation=4 * MIB2)
    assert sorted(entry["name"] for entry in admin.status()) == [b"read", b"whole", b"window"]
    balanced(fake, consumer, owner)


def test_what_an_owner_says_is_checked_when_it_is_opened(gpus):
    """The broker relays: sizes, devices and handles that are lies are found by whoever opens them."""
    fake = gpus(DEVICES="2", answers={"U4": "1"})
    owner, consumer, second = fake.client(), fake.client(uid=CONSUMER), fake.client(context=1)
    owner.export("good", owner.alloc(MIB2), MIB2)
    good = consumer.get("good")
    peer = fake.broker.peer(CONSUMER)
    handle = peer.lookup("good", want_fd=True)["handle"].hex()
    uuid = good.uuid.hex()
    second.export("second", second.alloc(MIB2), MIB2)
    other = peer.lookup("second", want_fd=True)["device"].hex()

    def adopt(name, handle, device=uuid, allocation=0, offset=0, size=MIB2):
        owner.do("adopt", name, device, handle, allocation, offset, size)

    adopt("long", handle, size=2 * MIB2)
    adopt("beyond", handle, offset=MIB2, size=1)
    adopt("wrong", handle, device=other)
    adopt("absent", handle, device="11" * 16)
    adopt("random", "17" * 64)
    adopt("right", handle, offset=MIB2 - 1, size=1)
    for name, code, text in (("long", "OUT_OF_BOUNDS", "offset 0 . size 4194304 exceeds the allocation .2097152 bytes."),
                             ("beyond", "OUT_OF_BOUNDS", "exceeds the allocation"),
                             ("absent", "NO_DEVICE", "is not visible to this process"),
                             ("random", "UNSUPPORTED", "the handle names nothing here")):
        with failed(code, text):
            consumer.get(name)
    with pytest.raises(Failed):
        consumer.get("wrong")
    consumer.release(consumer.get("right"))
    consumer.release(good)
    balanced(fake, consumer, owner, second)


def test_publish_waits_for_the_stream_and_then_shows_the_region(gpus):
    fake = gpus()
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    region = owner.cuda_alloc("x", MIB2, flags=UNPUBLISHED)
    stream = owner.do("stream")
    fake.hold()
    owner.do("fill", region.data, 0x77, 16, stream)
    owner.begin("publish", region.id, stream)
    with failed("NOT_FOUND"):
        consumer.get("x")
    fake.hold(False)
    owner.finish()
    lease = consumer.get("x")
    assert consumer.read(lease.address) == b"\x77" * 4
    consumer.release(lease)
    owner.do("publish", region.id, 0)
    with failed("INVALID", "not of GPU memory"):
        owner.do("publish", owner.create("cpu", 4096).id, 0)
    with failed("INVALID", "only GPU memory"):
        owner.create("cpu2", 4096, flags=UNPUBLISHED)
    # one that nobody ever sees
    owner.do("region_free", owner.cuda_alloc("never", MIB2, flags=UNPUBLISHED).id)
    balanced(fake, consumer, owner)


@pytest.mark.parametrize("memory", ["gpu", "cpu"])
def test_release_after_a_stream(gpus, memory):
    fake = gpus()
    owner, consumer, admin = fake.client(), fake.client(uid=CONSUMER), fake.broker.peer(ADMIN)
    region = owner.cuda_alloc("x", MIB2) if memory == "gpu" else owner.create("x", MIB2)
    lease = consumer.get("x", access=WRITE)
    stream = consumer.do("stream")
    fake.hold()
    consumer.do("fill", consumer.alloc(4096), 1, 16, stream)
    consumer.do("release_after", lease.id, stream)
    with failed("STALE"):
        consumer.release(lease)
    owner.do("retire", region.id, STRICT, 0)
    assert one(admin, "x")["leases"] == 1
    fake.hold(False)
    gone(admin, "x")
    consumer.do("process")
    balanced(fake, consumer, owner)


def test_pinned_system_memory(gpus):
    fake = gpus()
    owner, consumer, admin = fake.client(), fake.client(uid=CONSUMER), fake.broker.peer(ADMIN)
    region = owner.create("x", 1 << 20, flags=8)
    lease, other = consumer.get("x", offset=64, access=WRITE), consumer.get("x", access=WRITE)
    assert lease.memory == CPU
    assert int(consumer.do("pin", lease.id, 0)) == lease.address
    assert int(consumer.do("pin", other.id, 0)) == other.address
    assert len(fake.log("cuMemHostRegister_v2", pid=consumer.pid)) == 1
    owner.do("retire", region.id, STRICT, 0)
    consumer.release(lease)
    consumer.release(other)
    gone(admin, "x")
    consumer.do("process")
    assert len(fake.log("cuMemHostUnregister", pid=consumer.pid)) == 1
    owner.create("sparse", 1 << 20)
    with failed("SPARSE"):
        consumer.do("pin", consumer.get("sparse").id, 0)
    owner.cuda_alloc("gpu", MIB2)
    with failed("INVALID", "only a lease with a pointer to system memory"):
        consumer.do("pin", consumer.get("gpu").id, 0)
    owner.create("y", 1 << 20, flags=8)
    lease = consumer.get("y", access=WRITE)
    with failed("NO_DEVICE"):
        consumer.do("pin", lease.id, 99)
    balanced(fake, consumer, owner)


@pytest.mark.parametrize("code,name,text", [
    (712, "IN_USE", "page-locked a part of the memory by itself: undo that with cuMemHostUnregister"),
    (2, "Cannot allocate memory|ENOMEM", "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY .2."),
    (801, "UNSUPPORTED", "cuMemHostRegister: CUDA_ERROR_NOT_SUPPORTED .801."),
])
def test_memory_that_cannot_be_pinned(gpus, code, name, text):
    """The sentence has the cause, the lease is as good as before, and the next time may be better."""
    fake = gpus()
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    owner.create("x", 1 << 20, flags=8)
    lease = consumer.get("x", access=WRITE)
    fake.inject(f"cuMemHostRegister_v2 {code} comm=client-cuda")
    with failed(f"({name})", text):
        consumer.do("pin", lease.id, 0)
    fake.inject()
    assert int(consumer.do("pin", lease.id, 0)) == lease.address
    consumer.release(lease)
    balanced(fake, consumer, owner)


def test_after_a_fork(gpus):
    fake = gpus()
    owner = fake.client()
    owner.cuda_alloc("x", MIB2)
    with failed("FORKED"):
        owner.do("fork", "get", "x")
    with failed("FORKED"):
        owner.do("fork", "cuda_alloc", "y", MIB2)
    owner.release(owner.get("x"))
    balanced(fake, owner)


@pytest.mark.parametrize("settings,code,text", [
    ({"TEGRA": "1"}, "UNSUPPORTED", "integrated GPU .Jetson.*use system memory"),
    ({"WSL": "1"}, "UNSUPPORTED", ""),
])
def test_gpus_that_share_nothing(gpus, settings, code, text):
    fake = gpus(**settings)
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    if "WSL" in settings:
        owner.export("x", owner.alloc(MIB2), MIB2)
        with failed(code, "CUDA_ERROR_INVALID_HANDLE .400."):
            consumer.get("x")
    else:
        with failed(code, text):
            owner.export("x", owner.alloc(MIB2), MIB2)
    owner.create("cpu", 4096)
    consumer.release(consumer.get("cpu"))
    balanced(fake, consumer, owner)


@pytest.mark.parametrize("line,code,text", [
    ("cuInit 100", "UNSUPPORTED", "cuInit: CUDA_ERROR_NO_DEVICE .100.: no GPU is visible"),
    ("cuInit 304", "UNSUPPORTED", "cuInit: .*AF_UNIX"),
    ("cuInit 803", "UNSUPPORTED", "different versions"),
    ("cuInit 999", "UNSUPPORTED", "cuInit: CUDA_ERROR_UNKNOWN .999."),
    ("cuDevicePrimaryCtxRetain 46", "UNSUPPORTED", "exclusive or prohibited compute mode"),
    ("cuDevicePrimaryCtxRetain 2", "Cannot allocate memory|ENOMEM", ""),
    ("cuIpcOpenMemHandle_v2 208", "UNSUPPORTED", "an older mapping of this process"),
    ("cuIpcOpenMemHandle_v2 217", "UNSUPPORTED", "cannot reach the memory of the other"),
    ("cuIpcOpenMemHandle_v2 700", "Input/output error", "started anew"),
    ("cuMemGetAddressRange_v2 1", "UNSUPPORTED", "cuMemGetAddressRange"),
])
def test_what_the_driver_says_is_told(gpus, line, code, text):
    fake = gpus()
    owner = fake.client()
    owner.export("x", owner.alloc(MIB2), MIB2)
    owner.create("cpu", 4096)
    consumer = fake.client(context=None, flags=CONTEXT, uid=CONSUMER)
    fake.inject(f"{line} comm=client-cuda")
    with pytest.raises(Failed) as caught:
        consumer.get("x")
    assert re.match(f"({code})", str(caught.value)) and re.search(text, caught.value.text), caught.value
    consumer.release(consumer.get("cpu"))
    fake.inject()
    if "700" not in line:
        consumer.release(consumer.get("x"))
        consumer.end()
        assert fake.balance(pid=consumer.pid) == {}


def test_an_older_mapping_is_in_the_way_once(gpus):
    fake = gpus()
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    owner.export("x", owner.alloc(MIB2), MIB2)
    fake.inject("cuIpcOpenMemHandle_v2 208 nth=1")
    consumer.release(consumer.get("x"))
    balanced(fake, consumer, owner)


@pytest.mark.parametrize("function", ["cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle", "cuMemAddressReserve",
                                      "cuMemMap", "cuMemSetAccess", "cuMemCreate", "cuMemExportToShareableHandle",
                                      "cuMemGetAllocationGranularity", "cuMemRetainAllocationHandle", "cuIpcGetMemHandle",
                                      "cuPointerGetAttribute", "cuCtxPushCurrent_v2", "cuDeviceGetUuid_v2"])
def test_nothing_leaks_where_the_driver_fails(gpus, function):
    fake = gpus()
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    pointer = owner.alloc(MIB2)
    owner.cuda_alloc("good", MIB2)
    for code in (1, 2, 201, 999):
        fake.inject(f"{function} {code}")
        for program, words in ((owner, ("cuda_alloc", "a", MIB2, 0)), (owner, ("export", "b", pointer, MIB2)), (consumer, ("get", "good"))):
            try:
                program.do(*words)
            except Failed:
                pass
    fake.inject()
    balanced(fake, consumer, owner)


def test_without_a_driver(gpus):
    fake = gpus()
    fake.needs_fake()
    owner = fake.client()
    owner.export("x", owner.alloc(MIB2), MIB2)
    owner.create("cpu", 4096)
    consumer = fake.program(fake=None, uid=CONSUMER, environment={"LD_LIBRARY_PATH": ""})
    consumer.do("client", CONTEXT)
    with failed("UNSUPPORTED", "libcuda.so.1: .*System memory still works"):
        consumer.get("x")
    consumer.release(consumer.get("cpu"))
    with failed("UNSUPPORTED"):
        consumer.do("cuda_alloc", "y", MIB2)


@pytest.mark.skipif(not STUB.exists(), reason="needs the toolkit's stub of libcuda")
def test_the_toolkits_stub(gpus):
    fake = gpus()
    fake.needs_fake()
    owner = fake.client()
    owner.export("x", owner.alloc(MIB2), MIB2)
    place = fake.path / "stub"
    place.mkdir()
    shutil.copy(STUB, place / "libcuda.so.1")
    consumer = fake.program(fake=None, path=place, uid=CONSUMER)
    consumer.do("client", CONTEXT)
    with failed("UNSUPPORTED", "CUDA_ERROR_STUB_LIBRARY .34.: libcuda is the toolkit's stub"):
        consumer.get("x")


def test_an_old_driver(gpus):
    fake = gpus(kind="driver-11.2")
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    owner.export("x", owner.alloc(MIB2), MIB2)
    owner.cuda_alloc("y", MIB2)
    for name in "xy":
        consumer.release(consumer.get(name))
    balanced(fake, consumer, owner)


def test_the_broker_is_started_anew(gpus):
    """Leases and mappings go on, and what is asked for afterwards is found."""
    fake = gpus(broker={"kind": LastingBroker})
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    region = owner.cuda_alloc("vmm", MIB2)
    owner.fill(region.data, 8, 4)
    pointer = owner.alloc(MIB2)
    owner.export("ipc", pointer, MIB2)
    lease = consumer.get("vmm")
    fake.broker.kill()
    assert consumer.read(lease.address) == b"\x08" * 4
    consumer.release(lease)
    consumer.release(consumer.get("vmm"))
    consumer.release(consumer.get("ipc"))
    late = fake.client(uid=OTHER)
    lease = late.get("vmm")
    assert late.read(lease.address) == b"\x08" * 4
    late.release(lease)
    assert len(fake.log("cuMemMap", pid=consumer.pid)) == 1
    balanced(fake, late, consumer, owner)


def test_what_is_held_is_held_after_a_restart_too(gpus):
    """The memory of an owner that dies then is there for who has a lease, by the new helper's hold alone."""
    fake = gpus(mode="hold", broker={"kind": LastingBroker})
    owner, consumer, admin = fake.client(), fake.client(uid=CONSUMER), fake.broker.peer(ADMIN)
    owner.export("x", owner.alloc(MIB2), MIB2)
    lease = consumer.get("x")

    def held():
        return fake.balance(comm=HELPER).get("ipc")

    assert held() == 1
    opens = len(fake.log("cuIpcOpenMemHandle_v2", comm=HELPER))
    fake.broker.kill()
    admin.resume()
    until(lambda: len(fake.log("cuIpcOpenMemHandle_v2", comm=HELPER)) == opens + 1, fake.log)
    owner.kill()
    until(lambda: one(admin, "x")["state"] == STATE["RETIRING"], lambda: admin.status())
    consumer.read(lease.address)
    consumer.release(lease)
    gone(admin, "x")
    until(lambda: fake.log("cuIpcCloseMemHandle", comm=HELPER), fake.log)


@pytest.mark.parametrize("kind,function", [("ipc", "cuIpcOpenMemHandle_v2"), ("vmm", "cuMemImportFromShareableHandle")])
def test_the_broker_is_killed_while_memory_is_tried(gpus, kind, function):
    """The next one tries it anew, and it is registered once."""
    fake = gpus(mode="validate", broker={"kind": LastingBroker})
    owner, consumer, admin = fake.client(), fake.client(uid=CONSUMER), fake.broker.peer(ADMIN)
    pointer = owner.alloc(MIB2) if kind == "ipc" else int(owner.do("vmm", MIB2, 1))
    fake.inject(f"{function} hang comm={HELPER}")
    owner.begin("export", "x", pointer, MIB2, 0)
    until(lambda: fake.log("cuInit", comm=HELPER), "a helper")
    assert not admin.status()
    fake.inject()
    fake.broker.kill()
    owner.finish()
    admin.resume()
    assert len(admin.status()) == 1 and admin.stats()["held_gpu_bytes"] == MIB2
    consumer.release(consumer.get("x"))
    balanced(fake, consumer, owner)


@pytest.mark.parametrize("mode", ["auto", "validate", "hold"])
def test_with_a_helper(gpus, mode):
    """What is registered has been tried, and what is none is refused before any consumer sees it."""
    fake = gpus(mode=mode)
    owner, consumer = fake.client(), fake.client(uid=CONSUMER)
    region = owner.export("ipc", owner.alloc(MIB2), MIB2)
    assert not region.flags & UNVALIDATED and not owner.cuda_alloc("vmm", MIB2).flags & UNVALIDATED
    for name in ("ipc", "vmm"):
        consumer.release(consumer.get(name, access=WRITE))
    uuid = consumer.get("ipc").uuid.hex()
    with pytest.raises(Failed):
        owner.do("adopt", "none", uuid, "17" * 64, 0, 0, MIB2)
    with failed("OUT_OF_BOUNDS"):
        handle = fake.broker.peer(CONSUMER).lookup("ipc", want_fd=True)["handle"].hex()
        owner.do("adopt", "long", uuid, handle, 0, 0, 2 * MIB2)
    owner.create("cpu", 4096)
    balanced(fake, consumer, owner)


def test_a_consumer_is_killed_wherever_it_is(gpus):
    """A killed consumer leaves nothing with the broker, whatever the driver was doing."""
    fake = gpus()
    owner, admin = fake.client(), fake.broker.peer(ADMIN)
    region = owner.cuda_alloc("x", MIB2)
    owner.export("y", owner.alloc(MIB2), MIB2)
    for name, function in (("x", "cuMemMap"), ("x", "cuMemImportFromShareableHandle"), ("y", "cuIpcOpenMemHandle_v2")):
        consumer = fake.client(uid=CONSUMER)
        calls = len(fake.log(function))
        fake.inject(f"{function} abort comm=client-cuda")
        consumer.begin("get", name)
        consumer.process.wait(60)
        fake.inject()
        assert len(fake.log(function)) >= calls
    consumer = fake.client(uid=CONSUMER)
    consumer.get("x")
    consumer.kill()
    owner.do("retire", region.id, STRICT | WAIT, 60000)
    gone(admin, "x")
    balanced(fake, owner)
