# SPDX-License-Identifier: Apache-2.0
"""GPU memory by messages alone: what the broker keeps, refuses, hands out and finds again, with no driver and no GPU."""

import fcntl

import pytest
from broker import ADMIN, CONSUMER, KEEPER, OTHER, OWNER, ROOT, uid_of, until
from protocol_client import NUMBERS, READ, READ_WRITE, REGION, Refused
from restart import LastingBroker, is_as_before, settled

RELAY = "[cuda]\nmode = relay\n"
ANY_FD = RELAY + "check_fd = no\n"
HANDLE, OTHER_HANDLE = bytes(range(64)), bytes(range(64, 128))
DEVICE = b"\x47" * 16
MIB2 = 1 << 21
KEEP = NUMBERS["REGISTER"]["KEEP"]
ACL_UID = NUMBERS["ACL"]["UID"]


def refused(name, text=""):
    return pytest.raises(Refused, match=f"^{name}:.*{text}")


def one(admin, name):
    (entry,) = admin.status(name=name, match="EXACT")
    return entry


def gone(admin, name):
    until(lambda: not admin.status(name=name, match="EXACT"), lambda: admin.status())


def test_a_handle_goes_from_owner_to_consumer(start):
    broker = start(config=RELAY)
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    given = owner.give_cuda("kv", size=4096, handle=HANDLE, offset=512, object_size=MIB2, owner_pid=77, owner_pid_namespace=5)
    assert given["flags"] & REGION["UNVALIDATED"]
    consumer.page_attach()
    reply = consumer.page_map(given["slot"], given["generation"])
    assert (reply["handle"], reply["device"], reply["kind"]) == (HANDLE, DEVICE, NUMBERS["KIND"]["CUDA_IPC"])
    assert (reply["offset"], reply["size"], reply["object_size"]) == (512, 4096, MIB2)
    assert (reply["owner_pid"], reply["owner_pid_namespace"]) == (77, 5)
    found = consumer.lookup("kv", want_fd=True, access=READ_WRITE)
    assert (found["handle"], found["device"], found["fd"]) == (HANDLE, DEVICE, None)
    entry = one(admin, "kv")
    assert (entry["device"], entry["object_size"], entry["leases"]) == (DEVICE, MIB2, 1)
    assert admin.stats()["held_gpu_bytes"] == MIB2 and admin.stats()["held_bytes"] == 0
    consumer.release(found["lease"])


def test_a_file_descriptor_goes_from_owner_to_consumer(start):
    broker = start(config=ANY_FD)
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    given = owner.give_cuda("pool", size=MIB2, file="memfd")
    owner.poke("pool", b"of a GPU")
    # for reading too: whoever has the fd has all of it
    for access in (READ, READ_WRITE):
        found = consumer.read_lookup("pool", access=access)
        assert (found["bytes"], found["device"]) == (b"of a GPU", DEVICE)
    consumer.page_attach()
    assert consumer.page_map(given["slot"], given["generation"])["handle"] == b""
    owner.kill()
    entry = until(lambda: one(admin, "pool") if one(admin, "pool")["state"] == NUMBERS["STATE"]["RETIRING"] else None, "retired")
    assert entry["leases"] == 2 and entry["object_size"] == MIB2
    consumer.kill()
    gone(admin, "pool")
    assert admin.stats()["held_gpu_bytes"] == 0


def test_windows_of_an_allocation_pay_once(start):
    broker = start(config=RELAY + "[quota]\ngpu_bytes = 6M\n")
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    given = [owner.give_cuda(f"layer{i}", size=4096, handle=HANDLE, offset=4096 * i, object_size=MIB2) for i in range(8)]
    assert len({entry["object"] for entry in given}) == 1
    other = owner.give_cuda("other", size=4096, handle=OTHER_HANDLE, object_size=2 * MIB2)
    assert other["object"] != given[0]["object"] and admin.stats()["held_gpu_bytes"] == 3 * MIB2
    with refused("QUOTA", "GPU"):
        owner.give_cuda("more", size=1, handle=bytes(64 - 1) + b"x", object_size=1)
    with refused("ACCESS_DIFFERS"):
        owner.give_cuda("list", size=1, handle=HANDLE, object_size=MIB2, acl=[(ACL_UID, 1)])
    for name in [f"layer{i}" for i in range(8)]:
        owner.unregister(name)
    # the same bytes from somebody else are that one's own claim
    third = broker.peer(OTHER).give_cuda("third", size=4096, handle=HANDLE, object_size=MIB2)
    assert third["object"] not in (given[0]["object"], other["object"])


@pytest.mark.parametrize("what,code,text,fields", [
    ("too large", "OUT_OF_BOUNDS", "exceeds the allocation", {"handle": HANDLE, "offset": MIB2, "size": 1, "object_size": MIB2}),
    ("wraps", "OUT_OF_BOUNDS", "exceeds", {"handle": HANDLE, "offset": 2**64 - 1, "size": 2}),
    ("no handle", "INVALID", "empty", {"handle": bytes(64)}),
    ("no device", "NO_DEVICE", "UUID", {"handle": HANDLE, "device": bytes(16)}),
    ("no bytes", "OUT_OF_BOUNDS", "0", {"handle": HANDLE, "size": 0}),
    ("no object size", "OUT_OF_BOUNDS", "missing", {"file": "/dev/null", "object_size": 0}),
    ("memory", "BAD_FD", "system memory", {"file": "memfd"}),
    ("sealed memory", "BAD_FD", "system memory", {"file": "memfd", "seals": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL}),
    ("another device", "BAD_FD", "195:255", {"file": "/dev/null"}),
    ("a tmpfs directory's file", "BAD_FD", "195:255", {"file": "/proc/self/attr/current"}),
])
def test_what_is_refused_without_a_driver(start, what, code, text, fields):
    broker = start(config=RELAY)
    owner = broker.peer(OWNER)
    with refused(code, text):
        owner.give_cuda(what, **fields)
    owner.give("memory still works")


@pytest.mark.parametrize("handle", [b"h" * 63, b"h" * 65, b"h" * 32])
def test_a_handle_of_another_length_is_malformed(start, handle):
    broker = start(config=RELAY)
    with refused("INVALID", "64 bytes"):
        broker.peer(OWNER).give_cuda("x", handle=handle)


@pytest.mark.parametrize("mode,text", [("off", "mode = off"), ("auto", "system memory still works")])
def test_where_no_gpu_memory_is_wanted(start, mode, text):
    broker = start(config=f"[cuda]\nmode = {mode}\n")
    owner = broker.peer(OWNER)
    with refused("UNSUPPORTED", text):
        owner.give_cuda("x", handle=HANDLE)
    owner.give("x")
    assert broker.info["cuda"].startswith("off")


def test_access_lists_and_read_only_regions(start):
    broker = start(config=RELAY)
    owner, consumer, other = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(OTHER)
    if ROOT:
        given = owner.give_cuda("mine", handle=HANDLE, acl=[(ACL_UID, uid_of(CONSUMER))])
        with refused("PERMISSION"):
            other.lookup("mine", want_fd=True)
        other.page_attach()
        with refused("PERMISSION"):
            other.page_map(given["slot"], given["generation"])
        assert consumer.lookup("mine", want_fd=True)["handle"] == HANDLE
    given = owner.give_cuda("read", handle=OTHER_HANDLE, access=READ)
    assert given["flags"] & REGION["READ_ONLY_ADVISORY"]
    with refused("ACCESS"):
        consumer.lookup("read", access=READ_WRITE)
    assert consumer.lookup("read", want_fd=True)["handle"] == OTHER_HANDLE


def test_one_name_space_for_all_memory(start):
    broker = start(config=RELAY)
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    owner.give("x")
    with refused("EXISTS"):
        owner.give_cuda("x", handle=HANDLE)
    owner.give_cuda("x", handle=HANDLE, flags=NUMBERS["REGISTER"]["REPLACE"])
    assert one(admin, "x")["kind"] == NUMBERS["KIND"]["CUDA_IPC"]
    kinds = admin.status(kinds=1 << NUMBERS["KIND"]["CUDA_IPC"])
    assert [entry["name"] for entry in kinds] == [b"x"]


def test_force_takes_it_from_the_broker_only(start):
    broker = start(config=ANY_FD)
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    owner.give_cuda("x", file="memfd")
    found = consumer.lookup("x")
    assert owner.unregister("x", mode="DISCARD")["text"].startswith(b"GPU memory goes back")
    with refused("REVOKED"):
        consumer.release(found["lease"])
    gone(admin, "x")


def test_gpu_memory_outlives_the_broker(start):
    broker = start(kind=LastingBroker, config=ANY_FD)
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    keeper = broker.peer(KEEPER if ROOT else OWNER)
    handle = owner.give_cuda("handle", size=4096, handle=HANDLE, object_size=MIB2, owner_pid=9, owner_pid_namespace=8)
    owner.give_cuda("fd", size=4096, file="memfd")
    owner.poke("fd", b"lasting!")
    owner.give("memory")
    keeper.give_cuda("kept", handle=OTHER_HANDLE, flags=KEEP)
    lease = consumer.lookup("handle")
    before = settled(admin)
    for _ in range(2):
        broker.kill()
        for peer in (owner, consumer, admin, keeper):
            peer.resume()
        is_as_before(admin, before)
        assert consumer.read_lookup("fd")["bytes"] == b"lasting!"
        found = consumer.lookup("handle", want_fd=True)
        assert found["handle"] == HANDLE and found["object"] == handle["object"]
        consumer.release(found["lease"])
        before = settled(admin)
    consumer.release(lease["lease"])
    # what is a window of the same allocation after the restart is that of the same object
    assert owner.give_cuda("more", size=1, handle=HANDLE, object_size=MIB2)["object"] == handle["object"]
    keeper.kill()
    owner.kill()
    consumer.kill()
    gone(admin, "handle")
    gone(admin, "fd")
    (kept,) = admin.status(name="kept", match="EXACT")
    assert kept["state"] == NUMBERS["STATE"]["ACTIVE"]
    admin.unregister("kept", mode="FORCE")


def test_a_registration_that_is_asked_again(start):
    broker = start(kind=LastingBroker, config=RELAY)
    owner = broker.peer(OWNER)
    with broker.deaf():
        serial = owner.only_send("give_cuda", "x", handle=HANDLE)
    owner.resume()
    first = owner.repeat(serial, "give_cuda", "x", handle=HANDLE)
    broker.kill()
    owner.resume()
    again = owner.repeat(serial, "give_cuda", "x", handle=HANDLE)
    assert (first["generation"], first["object"]) == (again["generation"], again["object"])
