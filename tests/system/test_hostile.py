# SPDX-License-Identifier: Apache-2.0
"""What bad input gets: a hostile peer's worst case is its own disconnect, the broker's is a refusal with a reason."""

import errno
import fcntl
import os
import resource
import socket

import pytest
from broker import ADMIN, BROKER, CONSUMER, OTHER, OWNER, ROOT, until
from protocol_client import (
    ANY_UID, HEADER, NUMBERS, OP, READ, REST, STATE, STRUCTS, Client, Disconnected, Refused, batch, memory, message, padded,
    register_entry, reopen,
)

NO_SEALS = 0


def refused(name):
    return pytest.raises(Refused, match=f"^{name}:")


def opened(path):
    client = Client(path)
    client.hello()
    return client


# messages that are no messages

MALFORMED = {
    "one byte": b"x",
    "half a header": message("PING")[:8],
    "header shorter than itself": message("PING", length=8),
    "length too small": message("PING", STRUCTS["Ping"].pack(payload=1), length=16),
    "length too large": message("PING", STRUCTS["Ping"].pack(payload=1), length=4096),
    "length 2^32-1": message("PING", STRUCTS["Ping"].pack(payload=1), length=2**32 - 1),
    "truncated body": message("PING", bytes(4)),
    "no body": message("PING"),
    "bytes left over": message("PING", bytes(16)),
    "serial 0": message("PING", bytes(8), serial=0),
    "flags in a request": message("PING", bytes(8), flags=1),
    "empty list": message("LOOKUP", STRUCTS["CountHead"].pack(count=0)),
    "list of 65": message("RELEASE", STRUCTS["CountHead"].pack(count=65) + bytes(8 * 65)),
    "count beyond the message": message("RELEASE", STRUCTS["CountHead"].pack(count=3) + bytes(8)),
    "count 2^32-1": message("RELEASE", STRUCTS["CountHead"].pack(count=2**32 - 1) + bytes(8)),
    "name beyond the message": message("LOOKUP", batch(STRUCTS["LookupEntry"].pack(access=READ, name_length=255))),
    "name_length 65535": message("LOOKUP", batch(STRUCTS["LookupEntry"].pack(access=READ, name_length=65535) + bytes(8))),
    "padding not zero": message("LOOKUP", batch(STRUCTS["LookupEntry"].pack(access=READ, name_length=1) + b"abcdefgh")),
    "reserved not zero": message("SUBSCRIBE", STRUCTS["SubscribeRequest"].pack(mask=1, reserved=1)),
    "unknown flags": message("STATUS", STRUCTS["StatusRequest"].pack(flags=0xFF00)),
    "unknown scope": message("UNREGISTER", STRUCTS["UnregisterRequest"].pack(scope=9, principal=ANY_UID)),
    "unknown mode": message("UNREGISTER", STRUCTS["UnregisterRequest"].pack(scope=1, mode=9, principal=ANY_UID)),
    "region without an fd": message("REGISTER", batch(register_entry("x", 1, fd=0xFFFF))),
    "an fd that did not come": message("REGISTER", batch(register_entry("x", 1, fd=0))),
    "fd index 64": message("REGISTER", batch(register_entry("x", 1, fd=64))),
    "lanes 1": message("ATTACH", STRUCTS["AttachRequest"].pack(lanes=1)),
    "lanes 2^32-1": message("ATTACH", STRUCTS["AttachRequest"].pack(lanes=2**32 - 1)),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_message_ends_its_connection(broker, what):
    def hostile():
        client = opened(broker.socket)
        client.send_raw(MALFORMED[what])
        assert client.ended()
        return client.last_error

    assert broker.run(OTHER, hostile) == "INVALID"
    broker.lives()


def test_oversized_message(broker):
    def hostile(size):
        client = opened(broker.socket)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        client.send_raw(message("PING", bytes(size - HEADER.size)))
        assert client.ended()
        return client.last_error

    for size in (65536, 65544, 100000, 200000):
        assert broker.run(OTHER, hostile, size) == "INVALID"
    broker.lives()


def test_zero_length_message(broker):
    """A packet of no bytes looks like the end of the connection: it costs the peer its connection at most."""
    def hostile():
        client = opened(broker.socket)
        client.send_raw(b"")
        assert client.ended()

    broker.run(OTHER, hostile)
    broker.lives()


@pytest.mark.parametrize("opcode", [0, OP["EVENT"], OP["EVENT"] + 1, 0xFFFF])
def test_unknown_opcode_is_refused_and_nothing_ends(broker, opcode):
    def hostile():
        client = opened(broker.socket)
        with refused("UNKNOWN_OP"):
            client.call(opcode)
        client.ping()

    broker.run(OTHER, hostile)


def test_anything_before_hello(broker):
    def hostile():
        client = Client(broker.socket)
        client.send("PING", bytes(8))
        assert client.ended()
        return client.last_error

    assert broker.run(OTHER, hostile) == "STATE"


def test_second_hello(broker):
    peer = broker.peer(OTHER)
    with refused("STATE"):
        peer.hello()
    peer.ping()


def test_hello_of_no_common_version(broker):
    peer = broker.peer(OTHER, hello=False)
    with refused("VERSION"):
        peer.hello(version=0)
    assert peer.ended()


def test_hello_for_a_role_that_is_not_ones_own(broker):
    if not ROOT:
        pytest.skip("needs root: with one uid everybody is admin")
    peer = broker.peer(OTHER, hello=False)
    with refused("PERMISSION"):
        peer.hello(roles=NUMBERS["ROLE"]["ADMIN"])
    assert peer.ended()


# fds

def send_fds_with(path, fds, *items, opcode="REGISTER", body=None):
    """What a message with these fds and entries gets: its error, or the codes of its entries."""
    client = opened(path)
    if body is not None or not items:
        client.send(opcode, body if body is not None else batch(register_entry("x", 1)), fds)
        assert client.ended()
        return client.last_error
    return [result["code"] for result in client.register_many(items, fds)]


def test_fds_with_no_slot_for_them(broker):
    def hostile(n):
        return send_fds_with(broker.socket, [memory() for _ in range(n)], body=batch(register_entry("x", 1, fd=0)))

    for n in (2, 3, 64):
        assert broker.run(OTHER, hostile, n) == "INVALID"


def test_fewer_fds_than_entries_name(broker):
    def hostile():
        return send_fds_with(broker.socket, [memory()], body=batch(register_entry("x", 1, fd=0), register_entry("y", 1, fd=1)))

    assert broker.run(OTHER, hostile) == "INVALID"


@pytest.mark.parametrize("n", [65, 128, 253])
def test_more_than_64_fds(broker, n):
    def hostile():
        fd = memory()
        return send_fds_with(broker.socket, [fd] * n, body=batch(register_entry("x", 1)))

    assert broker.run(OTHER, hostile) == "INVALID"
    broker.lives()


@pytest.mark.parametrize("opcode", ["HELLO", "PING", "LOOKUP", "UNREGISTER", "NOTIFY", "STATUS"])
def test_fds_with_a_message_that_takes_none(broker, opcode):
    def hostile():
        return send_fds_with(broker.socket, [memory()], opcode=opcode, body=bytes(8))

    assert broker.run(OTHER, hostile) == "INVALID"


def test_64_fds_in_one_message_are_64_regions(broker):
    def owner():
        client = opened(broker.socket)
        items = [register_entry(f"r{i}", 8192, fd=i) for i in range(64)]
        return [result["code"] for result in client.register_many(items, [memory() for _ in items])]

    assert broker.run(OWNER, owner) == [0] * 64


def test_no_room_for_fds_is_the_brokers_shortage(start):
    """MSG_CTRUNC: the kernel could not install the fds; the peer is kept and may ask again."""
    if not ROOT:
        pytest.skip("needs root: the broker is not dumpable, so that others do not see its fds")
    broker = start(nofile=170, config="fair_share = no\nfd_reserve = 16")
    idle = broker.peer(CONSUMER)
    soft = broker.fds() + 20
    broker.run(BROKER, resource.prlimit, broker.pid, resource.RLIMIT_NOFILE, (soft, 170))

    def hostile():
        client = opened(broker.socket)
        items = [register_entry(f"r{i}", 8192, fd=i) for i in range(60)]
        fds = [memory() for _ in items]
        try:
            client.register_many(items, fds)
            return None
        except Refused as error:
            assert error.name == "AGAIN"
        client.ping()

        def fits():
            """Those that did arrive are closed by and by: until then it is told the same again."""
            try:
                return client.register("fits", fds[0])
            except Refused as error:
                assert error.name == "AGAIN"
                return None

        return until(fits, "room for one fd")["code"]

    assert broker.run(OWNER, hostile) == 0
    idle.ping()
    admin = broker.peer(ADMIN)
    assert admin.stats()["fds_lost"] >= 1


def not_memory(what):
    """An fd of each sort that is not memory; opened by who may."""
    if what == "pipe":
        return os.pipe()[0]
    if what == "socket":
        return socket.socketpair()[0].detach()
    if what == "listening socket":
        return socket.socket(socket.AF_INET).detach()
    if what == "directory":
        return os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    if what == "path":
        return os.open("/etc/passwd", os.O_PATH)
    if what == "memory as a path":
        return reopen(memory(), os.O_PATH)
    if what == "device":
        return os.open("/dev/null", os.O_RDWR)
    if what == "zero device":
        return os.open("/dev/zero", os.O_RDWR)
    if what == "disk file":
        return os.open("/etc/passwd", os.O_RDONLY)
    if what == "proc file":
        return os.open("/proc/self/status", os.O_RDONLY)
    if what == "eventfd":
        return os.eventfd(0) if hasattr(os, "eventfd") else os.pipe()[1]
    assert what == "write-only"
    return reopen(memory(), os.O_WRONLY)


NOT_MEMORY = ["pipe", "socket", "listening socket", "directory", "path", "memory as a path", "device", "zero device",
              "disk file", "proc file", "eventfd", "write-only"]


@pytest.mark.parametrize("what", NOT_MEMORY)
def test_fd_that_is_not_memory(broker, what):
    def hostile():
        client = opened(broker.socket)
        fd = not_memory(what)
        with refused("BAD_FD"):
            client.register("x", fd, size=1, access=READ)
        good = memory()
        with refused("BAD_FD"):
            client.register("x", good, read_only_fd=fd)
        client.register("x", good)

    broker.run(OTHER, hostile)


def test_read_only_fd_of_other_memory(broker):
    def hostile():
        client = opened(broker.socket)
        fd, other = memory(), memory()
        with refused("BAD_FD"):
            client.register("x", fd, read_only_fd=reopen(other))
        with refused("BAD_FD"):
            client.register("x", fd, read_only_fd=os.dup(fd))
        client.register("x", fd, read_only_fd=reopen(fd))

    broker.run(OTHER, hostile)


# windows

@pytest.mark.parametrize("offset,size", [
    (0, 0), (4096, 0), (0, 8193), (8192, 1), (8193, 1), (1, 8192), (2**63, 1), (2**64 - 1, 1), (1, 2**64 - 1), (0, 2**64 - 1),
    (2**64 - 1, 2**64 - 1), (2**64 - 4096, 8192), (2**63, 2**63),
])
def test_window_that_is_not_within_the_memory(broker, offset, size):
    def hostile():
        client = opened(broker.socket)
        with refused("OUT_OF_BOUNDS"):
            client.register("x", memory(8192), offset=offset, size=size)
        client.register("x", memory(8192), offset=8191, size=1)

    broker.run(OTHER, hostile)


@pytest.mark.parametrize("offset,size", [(100, 1), (101, REST), (0, 101), (1, 100), (2**64 - 1, 2), (2**64 - 1, REST), (0, 2**64 - 2)])
def test_lookup_that_is_not_within_the_region(broker, offset, size):
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    owner.give("x", size=100, memory_args={})
    with refused("OUT_OF_BOUNDS"):
        consumer.lookup("x", offset=offset, size=size)
    lease = consumer.lookup("x", offset=99)
    assert (lease["offset"], lease["size"]) == (99, 1)


def test_unsealed_memory_is_refused(broker):
    peer = broker.peer(OTHER)
    for seals in (NO_SEALS, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SEAL, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL):
        with refused("UNSEALED"):
            peer.give("x", memory_args={"seals": seals})


def test_shrinking_after_registration(start):
    """The broker never touches the bytes: it lives, and goes on serving, when the memory under a region has gone."""
    broker = start(config="unsealed = accept")
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    result = owner.give("x", fill=b"12345678", memory_args={"seals": NO_SEALS})
    assert result["flags"] & NUMBERS["REGION"]["UNSEALED"]
    owner.truncate("x", 0)
    assert consumer.read_lookup("x")["bytes"] == b""
    with refused("OUT_OF_BOUNDS"):
        owner.again("y", "x")
    owner.unregister("x", mode="DISCARD")
    broker.lives()


# names

def test_duplicate_name_says_nothing_about_the_other(broker):
    owner = broker.peer(OWNER)
    owner.give("taken")
    peer = broker.peer(OTHER)
    with refused("EXISTS") as caught:
        peer.give("taken")
    assert not any(character.isdigit() for character in caught.value.text)
    with refused("EXISTS"):
        owner.give("taken")
    with refused("EXISTS") as caught:
        peer.give("taken", flags=NUMBERS["REGISTER"]["REPLACE"])
    assert not any(character.isdigit() for character in caught.value.text)


BAD_NAMES = {
    "empty": b"", "NUL": b"a\0b", "only NUL": b"\0", "newline": b"a\nb", "DEL": b"a\x7f", "C1": "a\u0085".encode(), "256 bytes": b"n" * 256,
    "65535 bytes": b"n" * 60000, "lone continuation": b"\x80", "cut character": b"a\xc3", "overlong": b"\xc0\xaf",
    "overlong of three": b"\xe0\x80\xaf", "surrogate": b"\xed\xa0\x80", "beyond Unicode": b"\xf4\x90\x80\x80", "0xff": b"\xff",
}


@pytest.mark.parametrize("what", BAD_NAMES)
def test_bad_name(broker, what):
    peer = broker.peer(OTHER)
    for request in ("give", "lookup", "unregister"):
        with refused("BAD_NAME"):
            getattr(peer, request)(BAD_NAMES[what])
    peer.ping()


@pytest.mark.parametrize("name", [b"n" * 255, "ä".encode() * 127, "\U0001f600".encode(), b" ", b"a/../b", b"\xf4\x8f\xbf\xbf"])
def test_odd_name_that_is_good(broker, name):
    peer = broker.peer(OTHER)
    peer.give(name)
    peer.lookup(name)
    assert [entry["name"] for entry in peer.status()] == [name]


# peers that behave badly over time

def test_peer_that_never_reads(start):
    broker = start(config="unread_messages = 16\nunread_bytes = 128K")
    other = broker.peer(CONSUMER)

    def hostile():
        client = opened(broker.socket)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(1000000):
            client.send("INFO")
        return False

    with pytest.raises(Disconnected):
        broker.run(OTHER, hostile)
    other.ping()
    assert "does not read its replies" in broker.log()


def test_half_a_hello_then_nothing(start, broker):
    """A connection that says nothing, or half of it, does not stay."""
    # short, but long enough for those of this broker who do say something
    impatient = start(config="hello_timeout = 3s")

    def silent():
        client = Client(impatient.socket)
        assert client.ended()
        return client.last_error

    def half():
        client = Client(broker.socket)
        client.send_raw(message("HELLO", STRUCTS["HelloRequest"].pack(version=1))[:40])
        assert client.ended()
        return client.last_error

    assert impatient.run(OTHER, silent) == "TIMED_OUT"
    assert broker.run(OTHER, half) == "INVALID"


def test_5000_connections_of_one_user(start):
    """A user gets its quota of connections, the others are told, and other users are served meanwhile."""
    broker = start(config="[quota]\nsessions = 100\n")
    peer = broker.peer(CONSUMER)

    def hostile():
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        served, told, held = 0, 0, []
        for _ in range(5000):
            client = Client(broker.socket)
            try:
                client.hello()
                served += 1
                held.append(client)
            except Refused as error:
                assert error.name == "QUOTA"
                told += 1
                client.close()
            except Disconnected:
                told += 1
                client.close()
        return served, told

    peer.start("ping")
    served, told = broker.run(OTHER, hostile)
    peer.finish()
    # with one uid for all the bystander is of the same user
    assert (served, told) == ((100, 4900) if ROOT else (99, 4901))
    peer.ping()
    admin = broker.peer(ADMIN)
    assert admin.stats()["connections_refused"] == told


def test_5000_connections_at_once(start):
    """All are held and none is read: others are served while they are there, and the quota bounds what they cost."""
    broker = start(config="hello_timeout = 0\n[quota]\nsessions = 100\n")
    bystander, hostile, admin = broker.peer(CONSUMER), broker.peer(OTHER), broker.peer(ADMIN)
    count = min(5000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 64)
    assert hostile.crowd(count) == count
    until(lambda: admin.stats()["connections_refused"] >= count - 99, lambda: admin.stats())
    stats = admin.stats(accounts=True)
    assert stats["held_sessions", hostile.uid] == 100
    if ROOT:
        bystander.ping()
        broker.peer(OWNER).give("x")
        bystander.lookup("x")
    else:
        # all are of one user, which has its quota
        bystander.ping()
    hostile.kill()
    until(lambda: admin.stats()["sessions"] <= 3, lambda: admin.clients())
    broker.lives()


STEPS = ["connect", "hello", "register", "lookup", "attach", "map", "acquire", "subscribe", "unregister"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("read_reply", [True, False], ids=["after the reply", "before the reply"])
def test_peer_that_dies_between_two_messages(broker, step, read_reply):
    """SIGKILL after each step, with and without the reply to it; finish() checks that nothing is left."""
    owner = broker.peer(OWNER)
    given = owner.give("theirs")

    def hostile():
        client = Client(broker.socket)
        page = [None]

        def register():
            return client.send("REGISTER", batch(register_entry("mine", 8192)), [memory()])

        def acquire():
            page[0].acquire(given["slot"], given["generation"])

        actions = {
            "hello": lambda: client.send("HELLO", STRUCTS["HelloRequest"].pack(version=1)),
            "register": register,
            "lookup": lambda: client.send("LOOKUP", batch(STRUCTS["LookupEntry"].pack(size=REST, access=READ, name_length=6)
                                                          + padded(b"theirs"))),
            "attach": lambda: client.send("ATTACH", STRUCTS["AttachRequest"].pack(mode=2)),
            "map": lambda: client.send("MAP", STRUCTS["MapRequest"].pack(slot=given["slot"], generation=given["generation"],
                                                                       access=READ)),
            "acquire": acquire,
            "subscribe": lambda: client.send("SUBSCRIBE", STRUCTS["SubscribeRequest"].pack(mask=255)),
            "unregister": lambda: client.send_unregister(["mine"], wait=True),
        }
        for name in STEPS[1 : STEPS.index(step) + 1]:
            last = name == step
            if name == "attach" and not (last and not read_reply):
                page[0] = client.attach()
                continue
            serial = actions[name]()
            if serial and (read_reply or not last):
                client.wait(serial)
        os.kill(os.getpid(), 9)

    with pytest.raises((EOFError, ConnectionError)):
        broker.run(OTHER, hostile)
    admin = broker.peer(ADMIN)
    until(lambda: {c["session"] for c in admin.clients()} == {owner.session, admin.session}, lambda: admin.clients())
    assert [entry["name"] for entry in admin.status()] == [b"theirs"]
    assert admin.status()[0]["leases"] == 0


# regions that are held, or somebody else's

@pytest.mark.parametrize("hold", ["message", "page"])
@pytest.mark.parametrize("mode", ["STRICT", "LAZY", "FORCE", "DISCARD"])
def test_unregister_of_a_leased_region(broker, mode, hold):
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    given = owner.give("x", fill=b"12345678")
    slot, generation = given["slot"], given["generation"]
    if hold == "message":
        lease = consumer.lookup("x")["lease"]
    else:
        consumer.page_attach()
        consumer.page_map(slot, generation)
        assert consumer.page_do("acquire", slot, generation)
    (holder,) = broker.region(admin, "x")["holders"]
    assert (holder["pid"], holder["leases"]) == (consumer.pid, 1)

    result = owner.unregister("x", mode=mode)
    if mode in ("STRICT", "LAZY"):
        assert result["state"] == NUMBERS["UNREGISTERED"]["DRAINING"]
        assert broker.region(admin, "x")["state"] == STATE["RETIRING" if mode == "STRICT" else "LAZY"]
        assert owner.peek("x") == b"12345678"
    else:
        assert result["state"] == NUMBERS["UNREGISTERED"]["GONE"]
        assert result["discarded"] == (8192 if mode == "DISCARD" else 0)
        assert owner.peek("x") == (bytes(8) if mode == "DISCARD" else b"12345678")

    if mode == "LAZY":
        second = consumer.lookup("x")["lease"]
        with refused("EXISTS"):
            owner.give("x")
        consumer.release(second)
        assert broker.region(admin, "x")["state"] == STATE["LAZY"]
    else:
        with refused("NOT_FOUND"):
            consumer.lookup("x")
        assert owner.again("x", "x")["generation"] != generation
        owner.unregister("x", mode="FORCE")

    if hold == "message":
        if mode in ("FORCE", "DISCARD"):
            with refused("REVOKED"):
                consumer.release(lease)
        else:
            consumer.release(lease)
        with refused("STALE"):
            consumer.release(lease)
    else:
        if mode == "LAZY":
            assert consumer.page_do("acquire", slot, generation)
            consumer.page_do("release", slot)
        else:
            assert not consumer.page_do("acquire", slot, generation)
        consumer.page_do("release", slot)
    until(lambda: not admin.status(), lambda: admin.status())
    assert admin.stats()["held_regions"] == 0


def test_another_users_region(broker):
    if not ROOT:
        pytest.skip("needs root: it is about two users")
    owner, peer = broker.peer(OWNER), broker.peer(OTHER)
    given = owner.give("x")
    for mode in ("STRICT", "LAZY", "FORCE", "DISCARD"):
        with refused("PERMISSION"):
            peer.unregister("x", mode=mode)
    with refused("PERMISSION"):
        peer.unregister_many(scope="ALL")
    reply, _ = peer.unregister_many(scope="UID", mode="FORCE")
    assert reply["gone"] == 0
    (entry,) = peer.status()
    assert (entry["pid"], entry["uid"], entry["container"], entry["holders"]) == (0, 2**32 - 1, b"", [])
    assert entry["comm"] == bytes(16)
    assert {client["uid"] for client in peer.clients()} == {OTHER}
    assert {uid for _, uid in peer.stats(accounts=True)} == {OTHER, 2**32 - 1}
    with refused("STALE"):
        peer.release(1)
    assert owner.lookup("x")["generation"] == given["generation"]


def test_a_lease_is_only_its_sessions(broker):
    owner, victim, peer = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(OTHER)
    owner.give("x")
    lease = victim.lookup("x")["lease"]
    for number in (0, lease, lease + 1, 2**64 - 1):
        with refused("STALE"):
            peer.release(number)
    victim.release(lease)


QUOTAS = {
    "regions": ("regions = 3", lambda peer, i: peer.give(f"r{i}")),
    "bytes": ("bytes = 24K", lambda peer, i: peer.give(f"r{i}")),
    "fds": ("fds = 8", lambda peer, i: peer.give(f"r{i}")),
    "leases": ("leases = 3", lambda peer, i: peer.lookup("x")),
}


@pytest.mark.parametrize("what", QUOTAS)
def test_quota_one_over(start, what):
    config, action = QUOTAS[what]
    broker = start(config=f"[quota]\n{config}\n")
    if what == "leases":
        owner = broker.peer(OWNER)
        owner.give("x")
    peer = broker.peer(OTHER)
    taken = [action(peer, i) for i in range(3)]
    with refused("QUOTA"):
        action(peer, 3)
    peer.ping()
    if what == "leases":
        peer.release(taken[0]["lease"])
        action(peer, 4)
    else:
        peer.unregister("r1")
        action(peer, 4)
    with refused("QUOTA"):
        action(peer, 5)


def test_quota_of_maps(start):
    broker = start(config="[quota]\nmaps = 1\n")
    owner, peer = broker.peer(OWNER), broker.peer(OTHER)
    first, second = owner.give("x"), owner.give("y")
    peer.page_attach()
    peer.page_map(first["slot"], first["generation"])
    peer.page_map(first["slot"], first["generation"])
    with refused("QUOTA"):
        peer.page_map(second["slot"], second["generation"])
    peer.unmap(first["slot"], first["generation"])
    peer.page_map(second["slot"], second["generation"])


def test_quota_of_messages_that_wait(start):
    broker = start(config="[quota]\nmessages = 2\n")
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    for name in ("x", "y", "z"):
        owner.give(name)
    leases = [consumer.lookup(name)["lease"] for name in ("x", "y", "z")]
    serials = [owner.send_unregister([name], wait=True) for name in ("x", "y", "z")]
    with refused("QUOTA"):
        owner.wait(serials[2])
    for lease in leases:
        consumer.release(lease)
    for serial in serials[:2]:
        assert owner.unregister_wait(serial)[0]["gone"] == 1


def test_out_of_fds(start):
    """Beyond the budget `no fds` is the answer, and what is held is served."""
    broker = start(nofile=200, config="fair_share = no\nfd_reserve = 16")
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    given = 0
    with refused("NO_FDS"):
        for given in range(200):
            owner.give(f"r{given}")
    assert given > 20
    consumer.lookup("r0")
    owner.ping()
    owner.unregister("r0", mode="FORCE")
    owner.unregister("r1")
    until(lambda: owner.stats()["fds_closing"] == 0, "closed fds")
    owner.give("again")


# lease pages that lie

def test_hostile_lease_page_frees_no_victims_region(broker):
    """released = acquired + 1 in one's own page: pages are never summed."""
    owner, victim, peer, admin = (broker.peer(uid) for uid in (OWNER, CONSUMER, OTHER, ADMIN))
    given = owner.give("x")
    slot, generation = given["slot"], given["generation"]
    for consumer in (victim, peer):
        consumer.page_attach()
        consumer.page_map(slot, generation)
    assert victim.page_do("acquire", slot, generation)
    peer.page_do("count", slot, "released")
    owner.unregister("x")
    peer.notify(slot, generation, 0)
    peer.ping()
    assert broker.region(admin, "x")["state"] == STATE["RETIRING"]
    victim.page_do("release", slot)
    victim.ping()
    # what is left is held by the liar's page alone, and goes with its process
    peer.kill()
    until(lambda: not admin.status(), lambda: admin.status())


def test_hostile_lease_page_that_is_written_all_over(broker):
    """The broker trusts its own copy of the shape: a header of garbage costs the liar its own leases at most."""
    owner, peer, admin = broker.peer(OWNER), broker.peer(OTHER), broker.peer(ADMIN)
    given = owner.give("x")

    def hostile():
        client = opened(broker.socket)
        page = client.attach()
        os.close(client.map(given["slot"], given["generation"])["fd"])
        page.page[0:4096] = b"\xff" * 4096
        page.page[page.shape["lanes_offset"] : page.shape["lanes_offset"] + 4096] = os.urandom(4096)
        for _ in range(10):
            client.status()
            client.notify(given["slot"], given["generation"], 7)
        client.ping()

    broker.run(OTHER, hostile)
    owner.unregister("x")
    until(lambda: not admin.status(), lambda: admin.status())
    peer.ping()


def test_the_registry_cannot_be_written(broker):
    def hostile():
        client = opened(broker.socket)
        page = client.attach()
        try:
            fd = reopen(page.registry_fd, os.O_RDWR)
        except OSError as error:
            assert error.errno == errno.EACCES
        else:
            os.close(fd)
            return "the registry was opened for writing"
        with pytest.raises(OSError):
            os.write(page.registry_fd, b"x")
        with pytest.raises(OSError):
            os.ftruncate(page.registry_fd, 0)
        return None

    if not ROOT:
        pytest.skip("needs root: the registry's mode keeps out other users than the broker's")
    assert broker.run(OTHER, hostile) is None


def test_the_lease_page_cannot_be_resized(broker):
    def hostile():
        client = opened(broker.socket)
        page = client.attach()
        for size in (0, 4096, page.reply["page_size"] * 2):
            with pytest.raises(OSError):
                os.ftruncate(page.page_fd, size)
        client.ping()

    broker.run(OTHER, hostile)


@pytest.mark.parametrize("slot,generation", [(0, 0), (0, 1), (2**32 - 1, 1), (65536, 1), (65535, 2**64 - 1)])
def test_slots_that_are_not_there(broker, slot, generation):
    peer = broker.peer(OTHER)
    peer.page_attach()
    with refused("STALE"):
        peer.page_map(slot, generation)
    with refused("STALE"):
        peer.unmap(slot, generation)
    peer.notify(slot, generation, 0)
    peer.ping()


def test_second_attach(broker):
    peer = broker.peer(OTHER)
    peer.page_attach()
    with refused("STATE"):
        peer.page_attach()


@pytest.mark.parametrize("opcode", ["STATUS", "CLIENTS", "STATS"])
def test_cursors_that_were_never_given(broker, opcode):
    peer, owner = broker.peer(OTHER), broker.peer(OWNER)
    owner.give("x")
    struct_of = {"STATUS": "StatusRequest", "CLIENTS": "ClientsRequest", "STATS": "StatsRequest"}[opcode]
    for cursor in (1, 2**31, 2**32 + 1, 2**63, 2**64 - 1):
        _, body, _ = peer.call(opcode, STRUCTS[struct_of].pack(cursor=cursor))
        assert len(body) >= STRUCTS["PageHead"].size
    peer.ping()
