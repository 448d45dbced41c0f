# SPDX-License-Identifier: Apache-2.0
"""The life of regions: who may have them, how they end, and that whoever dies leaves nothing behind."""

import fcntl
import os

import pytest
from broker import ADMIN, CONSUMER, KEEPER, OTHER, OWNER, ROOT, uid_of, until
from protocol_client import (
    EVENT, LIMIT, NUMBERS, READ, READ_WRITE, STATE, Client, E, Refused, memory, register_entry, reopen,
)

KEEP, REPLACE = NUMBERS["REGISTER"]["KEEP"], NUMBERS["REGISTER"]["REPLACE"]
REGION, UNREGISTERED, ACL = NUMBERS["REGION"], NUMBERS["UNREGISTERED"], NUMBERS["ACL"]
SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
needs_users = pytest.mark.skipif(not ROOT, reason="needs root: it is about several users")


def refused(name):
    return pytest.raises(Refused, match=f"^{name}:")


def gone(admin, name):
    until(lambda: not admin.status(name=name, match="EXACT"), lambda: admin.status())


def take_page_lease(peer, given):
    peer.page_attach()
    peer.page_map(given["slot"], given["generation"])
    assert peer.page_do("acquire", given["slot"], given["generation"])


def test_the_loop_that_runs_is_the_one_that_was_asked_for(broker):
    assert broker.info["loop"] == broker.loop
    if not ROOT:
        pytest.skip("needs root: the broker is not dumpable, so that others do not see its fds")
    assert ("anon_inode:[io_uring]" in broker.fd_names()) == (broker.loop == "io_uring"), broker.fd_names()


def test_broker_and_peers_have_no_privileges(broker):
    if not ROOT:
        pytest.skip("needs root: without it all have the uid of the test")
    peer = broker.peer(CONSUMER)
    for pid in (broker.pid, peer.pid):
        with open(f"/proc/{pid}/status", encoding="ascii") as status:
            lines = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
        assert int(lines["CapEff"], 16) == 0 and int(lines["CapPrm"], 16) == 0
        assert set(lines["Uid"].split()) != {"0"} and not lines["Groups"].strip()


def test_bytes_are_those_of_the_owner(broker):
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    given = owner.give("frame", size=1 << 20, fill=bytes(range(256)) * 4096)
    owner.again("window", "frame", offset=777, size=1000)
    for name, offset in (("frame", 0), ("window", 777)):
        lease = consumer.read_lookup(name, size=1000)
        assert lease["bytes"] == (bytes(range(256)) * 10)[offset : offset + 1000]
        assert (lease["object"], lease["offset"], lease["object_size"]) == (given["object"], offset, 1 << 20)


def test_the_index_finds_every_name(broker):
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    names = [("n" * length) + str(length) for length in (0, 1, 2, 3, 6, 7, 8, 13, 14, 15, 16, 30, 31, 32, 33, 100, 250)]
    slots = {name: owner.give(name)["slot"] for name in names}
    consumer.page_attach()
    assert {name: consumer.page_do("find", name) for name in names} == slots
    assert consumer.page_do("find", "absent") is None
    for name in names[::2]:
        owner.unregister(name, wait=True)
    assert {name: consumer.page_do("find", name) for name in names} == \
        {name: None if i % 2 == 0 else slots[name] for i, name in enumerate(names)}


def test_generations_are_never_used_again(broker):
    owner = broker.peer(OWNER)
    seen = set()
    for _ in range(50):
        given = owner.give("x")
        assert given["generation"] and given["generation"] not in seen
        seen.add(given["generation"])
        owner.unregister("x", wait=True)


def test_batch_entries_stand_alone(broker):
    def owner():
        with Client(broker.socket) as client:
            client.hello()
            fds = [memory(), os.pipe()[0], memory(seals=0)]
            items = [register_entry("good", 8192), register_entry("bad\n", 8192), register_entry("pipe", 1, fd=1, access=READ),
                     register_entry("unsealed", 8192, fd=2), register_entry("good", 8192), register_entry("good2", 4096)]
            results = client.register_many(items, fds)
            _, retired = client.unregister_many(["good", "absent", "good2"])
            return [r["code"] for r in results], [r["code"] for r in retired]

    assert broker.run(OWNER, owner) == (
        [0, E["BAD_NAME"], E["BAD_FD"], E["UNSEALED"], E["EXISTS"], 0], [0, E["NOT_FOUND"], 0])


# KEEP, REPLACE

def test_kept_region_outlives_its_session(broker):
    keeper, consumer, admin = broker.peer(KEEPER), broker.peer(CONSUMER), broker.peer(ADMIN)
    given = keeper.give("kept", flags=KEEP, fill=b"12345678")
    keeper.give("mine")
    assert given["flags"] & REGION["KEPT"]
    keeper.kill()
    gone(admin, "mine")
    assert consumer.read_lookup("kept")["bytes"] == b"12345678"
    (entry,) = admin.status()
    assert (entry["session"], entry["pid"], entry["uid"]) == (0, 0, uid_of(KEEPER))
    assert admin.stats(accounts=True)["held_regions", uid_of(KEEPER)] == 1
    consumer.kill()
    second = broker.peer(KEEPER)
    second.unregister("kept", wait=True)
    assert not admin.status()


@needs_users
def test_keep_needs_the_right(broker):
    peer = broker.peer(OWNER)
    with refused("PERMISSION"):
        peer.give("x", flags=KEEP)
    peer.give("x")


@needs_users
def test_acting_for_another_user_needs_the_right(broker):
    peer = broker.peer(OWNER)
    with refused("PERMISSION"):
        peer.give("x", principal=OTHER)
    peer.give("x", principal=OWNER)


def test_replace_is_a_new_generation_under_the_name(broker):
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    old = owner.give("x", fill=b"old old ")
    lease = consumer.lookup("x")["lease"]
    new = owner.give("x", fill=b"new new ", flags=REPLACE)
    assert new["generation"] > old["generation"] and new["slot"] != old["slot"]
    assert consumer.read_lookup("x")["bytes"] == b"new new "
    states = {entry["generation"]: entry["state"] for entry in admin.status()}
    assert states == {old["generation"]: STATE["RETIRING"], new["generation"]: STATE["ACTIVE"]}
    consumer.release(lease)
    until(lambda: [entry["generation"] for entry in admin.status()] == [new["generation"]], lambda: admin.status())
    with refused("STALE"):
        owner.unregister("x", generation=old["generation"])
    owner.unregister("x", generation=new["generation"])


def test_replace_of_another_sessions_region(broker):
    first, second = broker.peer(OWNER), broker.peer(OWNER)
    given = first.give("x")
    with refused("EXISTS"):
        second.give("x", flags=REPLACE)
    assert first.lookup("x")["generation"] == given["generation"]


# who may use a region

@needs_users
def test_access_list(broker):
    owner, listed, other, admin = (broker.peer(uid) for uid in (OWNER, CONSUMER, OTHER, ADMIN))
    given = owner.give("x", acl=[(ACL["UID"], CONSUMER)])
    listed.lookup("x")
    owner.lookup("x")
    for peer in (other, admin):
        with refused("PERMISSION"):
            peer.lookup("x")
        peer.page_attach()
        with refused("PERMISSION"):
            peer.page_map(given["slot"], given["generation"])
    owner.give("y", acl=[(ACL["GID"], OTHER)])
    other.lookup("y")
    with refused("PERMISSION"):
        listed.lookup("y")


def test_access_list_belongs_to_the_object(broker):
    owner = broker.peer(OWNER)
    owner.give("x", acl=[(ACL["UID"], CONSUMER)])
    for acl in ((), [(ACL["UID"], OTHER)], [(ACL["GID"], CONSUMER)], [(ACL["UID"], CONSUMER)] * 2):
        with refused("ACCESS_DIFFERS"):
            owner.again("y", "x", acl=acl)
    owner.again("y", "x", acl=[(ACL["UID"], CONSUMER)])


@needs_users
def test_reserved_names(start):
    broker = start(config=f"[access]\nreserve = cam/ {OWNER}\nreserve = cam/other/ {OTHER}\n")
    owner, other = broker.peer(OWNER), broker.peer(OTHER)
    with refused("RESERVED"):
        other.give("cam/x")
    with refused("RESERVED"):
        owner.give("cam/other/x")
    owner.give("cam/x")
    other.give("cam/other/x")
    other.give("camera")


def test_roles_that_were_not_asked_for(broker):
    owner, consumer = broker.peer(OWNER, roles=NUMBERS["ROLE"]["OWNER"]), broker.peer(CONSUMER, roles=NUMBERS["ROLE"]["CONSUMER"])
    owner.give("x")
    with refused("PERMISSION"):
        owner.lookup("x")
    with refused("PERMISSION"):
        owner.page_attach()
    consumer.lookup("x")


def test_read_only_leases_get_a_read_only_fd(broker):
    def consumer():
        with Client(broker.socket) as client:
            client.hello()
            fd = client.lookup("x", access=READ, want_fd=True)["fd"]
            write_fd = client.lookup("x", access=READ_WRITE, want_fd=True)["fd"]
            return [fcntl.fcntl(at, fcntl.F_GETFL) & os.O_ACCMODE for at in (fd, write_fd)]

    owner = broker.peer(OWNER)
    owner.give("x")
    assert broker.run(CONSUMER, consumer) == [os.O_RDONLY, os.O_RDWR]


@needs_users
def test_without_a_read_only_fd_read_leases_are_refused(broker):
    """The broker cannot reopen memory of mode 0600 of another user, and never upgrades a lease instead."""
    def owner_that_waits():
        with Client(broker.socket) as client:
            client.hello()
            fd = memory()
            os.fchmod(fd, 0o600)
            flags = client.register("x", fd)["flags"]
            with refused("NO_READ_ONLY_FD"):
                client.lookup("x")
            client.lookup("x", access=READ_WRITE)
            os.fchmod(fd, 0o644)
            return flags

    assert broker.run(OWNER, owner_that_waits) & REGION["NO_READ_ONLY_FD"]


def test_region_of_access_read(broker):
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    given = owner.give("x", access=READ)
    assert given["flags"] & REGION["READ_ONLY_ADVISORY"]
    with refused("ACCESS"):
        consumer.lookup("x", access=READ_WRITE)
    consumer.lookup("x")
    sealed = owner.give("y", access=READ, memory_args={"seals": SEALED | fcntl.F_SEAL_WRITE})
    assert not sealed["flags"] & REGION["READ_ONLY_ADVISORY"]


def test_writable_region_of_a_read_only_fd(broker):
    def owner():
        with Client(broker.socket) as client:
            client.hello()
            fd = reopen(memory())
            with refused("ACCESS"):
                client.register("x", fd)
            client.register("x", fd, access=READ)
            client.lookup("x")

    broker.run(OWNER, owner)


def test_have_object_spares_the_fd(broker):
    def consumer(given):
        with Client(broker.socket) as client:
            client.hello()
            client.attach()
            first = client.map(given["slot"], given["generation"])
            again = client.map(given["slot"], given["generation"], have_object=first["object"])
            other = client.map(given["slot"], given["generation"], have_object=first["object"] + 1)
            return [reply["fd"] is not None for reply in (first, again, other)]

    owner = broker.peer(OWNER)
    assert broker.run(CONSUMER, consumer, owner.give("x")) == [True, False, True]


# the end

def test_discard_spares_what_other_regions_cover(broker):
    owner = broker.peer(OWNER)
    owner.give("whole", size=16384, fill=b"x" * 16384)
    owner.unregister("whole")
    owner.again("a", "whole", offset=0, size=5000)
    owner.again("b", "whole", offset=5000, size=16384 - 5000)
    result = owner.unregister("b", mode="DISCARD")
    assert result["discarded"] == 8192 and result["text"]
    assert owner.peek("whole", 16384) == b"x" * 8192 + bytes(8192)
    result = owner.unregister("a", mode="DISCARD")
    assert owner.peek("whole", 4096) == bytes(4096)


def test_discard_says_when_it_could_not(broker):
    owner = broker.peer(OWNER)
    owner.give("x", fill=b"12345678", access=READ, memory_args={"seals": SEALED | fcntl.F_SEAL_WRITE})
    result = owner.unregister("x", mode="DISCARD")
    assert result["state"] == UNREGISTERED["GONE"] and result["discarded"] == 0 and b"sealed" in result["text"]
    assert owner.peek("x") == b"12345678"


@pytest.mark.parametrize("hold", ["message", "page"])
def test_wait_answers_when_the_last_lease_goes(broker, hold):
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    given = owner.give("x")
    if hold == "message":
        lease = consumer.lookup("x")["lease"]
    else:
        take_page_lease(consumer, given)
    serial = owner.send_unregister(["x"], wait=True)
    # answered while the other request waits
    owner.ping()
    if hold == "message":
        consumer.release(lease)
    else:
        consumer.page_do("release", given["slot"])
    reply, (result,) = owner.unregister_wait(serial)
    assert (reply["gone"], reply["draining"], result["state"], result["code"]) == (1, 0, UNREGISTERED["GONE"], 0)


def test_wait_times_out_and_undoes_nothing(broker):
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    owner.give("x")
    owner.give("y")
    lease = consumer.lookup("x")["lease"]
    reply, results = owner.unregister_many(["x", "y"], wait=True, timeout_ms=50)
    assert (reply["gone"], reply["draining"]) == (1, 1)
    assert b"timed out" in results[0]["text"] and results[1]["code"] == 0
    with refused("TIMED_OUT"):
        owner.unregister_many(scope="SESSION", wait=True, timeout_ms=50)
    assert broker.region(admin, "x")["state"] == STATE["RETIRING"]
    consumer.release(lease)
    gone(admin, "x")


def test_unregister_all(broker):
    owner, second, admin = broker.peer(OWNER), broker.peer(OWNER), broker.peer(ADMIN)
    for i in range(100):
        owner.give(f"a{i}")
    second.give("b0")
    second.give("b1")
    reply, _ = second.unregister_many(scope="SESSION", wait=True)
    assert reply["gone"] == 2
    second.give("b2")
    reply, _ = second.unregister_many(scope="UID", wait=True)
    assert reply["gone"] == 101 and not admin.status()
    owner.give("c")
    assert admin.unregister_many(scope="ALL", wait=True)[0]["gone"] == 1


def test_retire_timeout_ends_a_holders_session(start):
    broker = start(config="retire_timeout = 100ms")
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    owner.give("x")
    consumer.lookup("x")
    assert owner.unregister("x", wait=True)["state"] == UNREGISTERED["GONE"]
    assert consumer.ended()


def test_a_detached_sessions_page_counts_until_its_process_ends(start):
    """retire_timeout ends the session, but the memory is mapped: the region is gone when the process is."""
    broker = start(config="retire_timeout = 100ms")
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    given = owner.give("x")
    take_page_lease(consumer, given)
    serial = owner.send_unregister(["x"], wait=True)
    assert consumer.ended()
    until(lambda: not consumer.page_do("attached"), "the session table says so")
    (entry,) = admin.status()
    assert entry["state"] == STATE["RETIRING"] and entry["holders"][0]["flags"] & NUMBERS["HOLDER"]["DETACHED"]
    consumer.kill()
    assert owner.unregister_wait(serial)[0]["gone"] == 1


# events

def test_events(broker):
    watcher, owner, consumer = broker.peer(ADMIN), broker.peer(OWNER), broker.peer(CONSUMER)
    watcher.subscribe(*EVENT)
    given = owner.give("x")
    event = watcher.wait_event("REGISTERED", "x")
    assert [event[key] for key in ("slot", "generation", "size", "session", "pid", "uid")] == \
        [given["slot"], given["generation"], 8192, owner.session, owner.pid, uid_of(OWNER)]
    lease = consumer.lookup("x")["lease"]
    owner.unregister("x")
    watcher.wait_event("RETIRING", "x")
    consumer.release(lease)
    watcher.wait_event("GONE", "x")
    owner.give("y")
    consumer.lookup("y")
    owner.unregister("y", mode="FORCE")
    watcher.wait_event("REVOKED", "y")
    # a holder is told without a subscription
    assert consumer.wait_event("REVOKED", "y")["generation"]
    owner.give("z")
    owner.kill()
    assert watcher.wait_event("OWNER_DIED")["session"] == owner.session
    watcher.wait_event("GONE", "z")
    assert watcher.wait_event("LEFT")["session"] == owner.session
    late = broker.peer(OTHER)
    until(lambda: watcher.wait_event("JOINED")["session"] == late.session, "the late one joins")


@needs_users
def test_events_do_not_tell_who(broker):
    watcher, owner = broker.peer(OTHER), broker.peer(OWNER)
    watcher.subscribe("REGISTERED")
    owner.give("x")
    event = watcher.wait_event("REGISTERED", "x")
    assert (event["pid"], event["uid"]) == (0, LIMIT["ANY_UID"])


def test_slow_subscriber_gets_one_overflow(start):
    broker = start(config="unread_messages = 16")
    watcher, owner, admin = broker.peer(CONSUMER), broker.peer(OWNER), broker.peer(ADMIN)
    watcher.subscribe("REGISTERED")
    sent = 0
    while not admin.stats()["events_dropped"]:
        for _ in range(50):
            owner.give("x")
            owner.unregister("x")
            sent += 1
    overflow = watcher.wait_event("OVERFLOW")
    seen = sum(event["type"] == EVENT["REGISTERED"] for event in watcher.events_seen())
    assert overflow["count"] > 0 and seen + overflow["count"] == sent
    owner.give("after")
    watcher.wait_event("REGISTERED", "after")


# deaths

@pytest.mark.parametrize("hold", ["nothing", "message", "page"])
def test_owner_is_killed(broker, hold):
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    given = owner.give("x", fill=b"12345678")
    for i in range(20):
        owner.give(f"more{i}")
    if hold == "message":
        lease = consumer.lookup("x")["lease"]
    elif hold == "page":
        take_page_lease(consumer, given)
    owner.kill()
    if hold != "nothing":
        until(lambda: [entry["name"] for entry in admin.status()] == [b"x"], lambda: admin.status())
        assert broker.region(admin, "x")["state"] == STATE["RETIRING"]
        with refused("NOT_FOUND"):
            consumer.lookup("x")
    if hold == "message":
        consumer.release(lease)
    elif hold == "page":
        consumer.page_do("release", given["slot"])
    until(lambda: not admin.status(), lambda: admin.status())
    assert broker.peer(OTHER).give("x")["generation"] != given["generation"]


@pytest.mark.parametrize("hold", ["message", "page", "both"])
@pytest.mark.parametrize("mode", ["STRICT", "LAZY", "FORCE"])
def test_consumer_is_killed(broker, hold, mode):
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    given = owner.give("x")
    if hold != "page":
        consumer.lookup("x")
    if hold != "message":
        take_page_lease(consumer, given)
    (entry,) = admin.status()
    (holder,) = entry["holders"]
    assert (holder["pid"], holder["leases"], entry["leases"]) == ((consumer.pid,) + (2 if hold == "both" else 1,) * 2)
    serial = owner.send_unregister(["x"], mode=mode, wait=True)
    owner.ping()
    consumer.kill()
    assert owner.unregister_wait(serial)[0]["gone"] == 1
    until(lambda: not admin.status(), lambda: admin.status())


def test_a_forked_child_that_holds_the_socket_does_not_prolong_a_session(broker):
    """A session ends with its process, whoever else holds its connection."""
    admin = broker.peer(ADMIN)

    def owner():
        client = Client(broker.socket)
        client.hello()
        client.register("x", memory())
        if not os.fork():
            keep = sorted((held, client.socket.fileno()))
            for first, last in zip([3] + [fd + 1 for fd in keep], keep + [4096]):
                os.closerange(first, last)
            # the child lives for as long as the test has the other end
            os.read(held, 1)
            os._exit(0)
        os.kill(os.getpid(), 9)

    held, ours = os.pipe()
    try:
        with pytest.raises((EOFError, ConnectionError)):
            broker.run(OWNER, owner)
        gone(admin, "x")
    finally:
        os.close(ours)
        os.close(held)


def test_status_is_paged_and_filtered(broker):
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    names = {f"region/{i:04}".encode() for i in range(700)}
    owner.give("region/0000")
    for name in sorted(names)[1:]:
        owner.again(name.decode(), "region/0000")
    assert {entry["name"] for entry in admin.status()} == names
    assert len(admin.status(max=7)) == 700
    assert {entry["name"] for entry in admin.status(name="region/00", match="PREFIX")} == {n for n in names if n < b"region/0100"}
    assert [entry["name"] for entry in admin.status(name="region/0042", match="EXACT")] == [b"region/0042"]
    assert not admin.status(states=1 << STATE["RETIRING"]) and not admin.status(uid=uid_of(OWNER) + 1000)
    assert len(admin.status(uid=uid_of(OWNER), states=1 << STATE["ACTIVE"], kinds=1 << NUMBERS["KIND"]["MEMORY"])) == 700
