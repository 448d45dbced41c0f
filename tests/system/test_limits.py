# SPDX-License-Identifier: Apache-2.0
"""What a broker refuses because there is too much of it, and which memory its configuration lets in."""

import os

import pytest
from broker import ADMIN, CONSUMER, OTHER, OWNER, ROOT, until
from protocol_client import (
    LIMIT, NO_FD, NUMBERS, READ, REST, STRUCTS, Client, E, Refused, batch, entries, memory, padded, register_entry,
)

REPLACE, WANT_FD = NUMBERS["REGISTER"]["REPLACE"], NUMBERS["LOOKUP"]["WANT_FD"]
NO_SEALS = {"seals": 0}
needs_users = pytest.mark.skipif(not ROOT, reason="needs root: it is about several users")


def refused(name):
    return pytest.raises(Refused, match=f"^{name}:")


def fill(peer, most, first="r0"):
    """Registers windows of one piece of memory until that is refused; returns how many and why."""
    for number in range(most):
        try:
            if number:
                peer.again(f"{first}/{number}", first)
            else:
                peer.give(first)
        except Refused as error:
            return number, error.name
    return most, None


# too much

def test_one_request_too_many_that_waits(broker):
    """64 may wait; the 65th is BUSY, and whatever does not wait is answered meanwhile."""
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    owner.give("x")
    lease = consumer.lookup("x")["lease"]
    serials = [owner.send_unregister(["x"], mode="LAZY", wait=True) for _ in range(LIMIT["OUTSTANDING_MAX"])]
    with refused("BUSY"):
        owner.unregister("x", mode="LAZY", wait=True)
    owner.ping()
    owner.give("y")
    consumer.release(lease)
    assert [owner.unregister_wait(serial)[0]["gone"] for serial in serials] == [1] * len(serials)
    owner.unregister("y", wait=True)


def test_registry_that_is_full(start):
    broker = start(config="capacity = 64\nfair_share = no")
    owner, other = broker.peer(OWNER), broker.peer(OTHER)
    assert fill(owner, 100) == (64, "NO_SLOTS")
    with refused("NO_SLOTS"):
        other.give("x")
    # a region that cannot be replaced stays what it is
    before = owner.lookup("r0")
    with refused("NO_SLOTS"):
        owner.again("r0", "r0", flags=REPLACE)
    assert owner.lookup("r0")["generation"] == before["generation"]
    owner.unregister("r0/7", wait=True)
    other.give("x")
    with refused("NO_SLOTS"):
        owner.again("r0/7", "r0")


@needs_users
def test_nobody_gets_all_slots(start):
    """A user gets half of what remains: there is something left for whoever comes next."""
    broker = start(config="capacity = 64")
    owner, other, third = broker.peer(OWNER), broker.peer(OTHER), broker.peer(CONSUMER)
    assert fill(owner, 100, "a") == (32, "QUOTA")
    assert fill(other, 100, "b") == (16, "QUOTA")
    assert fill(third, 100, "c") == (8, "QUOTA")
    # many sessions are one user
    assert fill(broker.peer(OWNER), 100, "d") == (0, "QUOTA")


@needs_users
@pytest.mark.parametrize("what", ["memory", "connections"])
def test_nobody_gets_all_fds(start, what):
    broker = start(nofile=300, config="fd_reserve = 16\nhello_timeout = 0")
    hostile, admin = broker.peer(OTHER), broker.peer(ADMIN)
    budget = admin.stats()["fd_budget"]
    if what == "memory":
        with refused("QUOTA"):
            for number in range(budget):
                hostile.give(f"r{number}")
    else:
        hostile.crowd(budget)
        until(lambda: admin.stats()["connections_refused"] > 0, "some are turned away")
    held = admin.stats(accounts=True)["held_fds", OTHER]
    assert budget // 3 < held <= budget // 2 + 1
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    for number in range(10):
        owner.give(f"mine{number}")
        consumer.read_lookup(f"mine{number}")


def test_holder_of_too_many_revoked_regions(start):
    """What was taken back by force but is still held is paid for by the holder; over its quota its session ends."""
    broker = start(config="[quota]\nrevoked = 1\n")
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    consumer.page_attach()
    for name in ("x", "y"):
        given = owner.give(name)
        consumer.page_map(given["slot"], given["generation"])
        assert consumer.page_do("acquire", given["slot"], given["generation"])
    owner.unregister("x", mode="FORCE")
    consumer.ping()
    assert admin.stats(accounts=True)["held_revoked", consumer.uid] == 1
    owner.unregister("y", mode="FORCE")
    assert consumer.ended()
    # the process still has the memory mapped: its slots are used again when it has ended
    assert len(admin.status()) == 2
    consumer.kill()
    until(lambda: not admin.status(), lambda: admin.status())


def test_64_fds_in_one_reply(broker):
    """Each LOOKUP of a batch names its own fd."""
    def consumer(names):
        with Client(broker.socket) as client:
            client.hello()
            items = [STRUCTS["LookupEntry"].pack(size=REST, access=READ, flags=WANT_FD, name_length=len(name)) + padded(name)
                     for name in names]
            _, body, fds = client.call("LOOKUP", batch(*items))
            found = [entry for entry, _ in entries(body, STRUCTS["CountHead"].size, len(items), "LookupResult", "text", "handle")]
            return [result["code"] or os.pread(fds[result["fd_index"]], 8, 0) for result in found], len(fds)

    owner = broker.peer(OWNER)
    names = [b"name%04d" % number for number in range(LIMIT["FDS_MAX"])]
    for name in names:
        owner.give(name, fill=name)
    assert broker.run(CONSUMER, consumer, names) == (names, len(names))
    # one that is refused takes no fd, and moves nobody else's
    wanted = names[:5] + [b"absent"] + names[5:10]
    assert broker.run(CONSUMER, consumer, wanted) == (names[:5] + [E["NOT_FOUND"]] + names[5:10], 10)


# which memory

def test_memory_that_is_not_allocated(start):
    broker = start(config="require_allocated = yes")
    owner = broker.peer(OWNER)
    with refused("SPARSE"):
        owner.give("x", fill=b"the first page")
    given = owner.give("x", fill=bytes(8192))
    assert not given["flags"] & NUMBERS["REGION"]["SPARSE"]


def test_memory_that_is_not_allocated_is_marked(broker):
    assert broker.peer(OWNER).give("x")["flags"] & NUMBERS["REGION"]["SPARSE"]


@needs_users
def test_unsealed_memory_of_users_who_are_named(start):
    broker = start(config=f"unsealed_users = {OWNER}")
    given = broker.peer(OWNER).give("x", memory_args=NO_SEALS)
    assert given["flags"] & NUMBERS["REGION"]["UNSEALED"]
    with refused("UNSEALED"):
        broker.peer(OTHER).give("y", memory_args=NO_SEALS)


@pytest.mark.parametrize("policy", ["refuse", "accept"])
def test_posix_shared_memory(start, policy):
    """A file of tmpfs cannot be sealed: it is a region only where unsealed memory is accepted."""
    broker = start(config=f"unsealed = {policy}")
    owner = broker.peer(OWNER)
    path = f"/dev/shm/shmbroker-test-{os.getpid()}"
    owner.open("file", path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        owner.truncate("file", 8192)
        if policy == "refuse":
            with refused("UNSEALED"):
                owner.again("x", "file")
            return
        assert owner.again("x", "file")["flags"] & NUMBERS["REGION"]["UNSEALED"]
        with open(path, "r+b") as file:
            file.write(b"through ")
        assert broker.peer(CONSUMER).read_lookup("x")["bytes"] == b"through "
    finally:
        os.unlink(path)


@pytest.mark.parametrize("kind, code", [("CUDA_IPC", "UNSUPPORTED"), ("CUDA_VMM", "BAD_FD")])
def test_gpu_memory_is_refused_by_name(broker, kind, code):
    """What is no GPU memory, or cannot be tried here, gets a code and a sentence; its neighbours in the batch are served."""
    def owner():
        with Client(broker.socket) as client:
            client.hello()
            fields = {"kind": NUMBERS["KIND"][kind], "object_size": 4096, "device": b"\x01" * 16}
            if kind == "CUDA_IPC":
                gpu = register_entry("gpu", 4096, fd=NO_FD, handle=b"h" * LIMIT["HANDLE_SIZE"], **fields)
            else:
                gpu = register_entry("gpu", 4096, fd=1, **fields)
            fds = [memory()] if kind == "CUDA_IPC" else [memory(), memory()]
            refusal, good = client.register_many([gpu, register_entry("good", 8192, fd=0)], fds)
            return refusal["code"], refusal["text"], good["code"]

    got, text, good = broker.run(OWNER, owner)
    assert (got, good) == (E[code], 0) and (b"GPU memory" in text or b"not a CUDA allocation" in text), text


def test_session_that_is_not_there_to_be_resumed(broker):
    first = broker.peer(OTHER)
    for session, token in ((first.session, bytes(16)), (2**64 - 1, b"t" * 16)):
        peer = broker.peer(OTHER, hello=False)
        with refused("STALE"):
            peer.hello(session=session, token=token)
        assert peer.ended()
    first.ping()
