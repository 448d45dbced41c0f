# SPDX-License-Identifier: Apache-2.0
"""What attacks on the broker have found, each named after what broke."""

import os
import select
import threading

import pytest
from broker import ADMIN, CONSUMER, OTHER, OWNER, ROOT, until
from protocol_client import (
    ANY_UID, LIMIT, NUMBERS, READ, REST, STRUCTS, Client, Disconnected, Refused, batch, message, padded,
)

WANT_FD, NO_LEASE = NUMBERS["LOOKUP"]["WANT_FD"], NUMBERS["LOOKUP"]["NO_LEASE"]
needs_users = pytest.mark.skipif(not ROOT, reason="needs root: it is about several users")


def test_read_only_memory_costs_one_fd(broker):
    """Memory given by a read-only fd needs no second one: it was kept uncharged, or closed twice when it was the same."""
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)

    for same in (False, True):
        before = broker.fds(), admin.stats()["held_fds"]
        assert owner.give_read_only("x", same=same)["code"] == 0
        until(lambda: admin.stats()["fds_closing"] == 0, "closed fds")
        assert (broker.fds(), admin.stats()["held_fds"]) == (before[0] + ROOT, before[1] + 1)
        owner.unregister("x")
        until(lambda: admin.stats()["fds_closing"] == 0, "closed fds")


@needs_users
def test_asking_for_a_uid_does_not_tell_whose_a_region_is(broker):
    """STATUS hid the owner's uid, and yet found the region when that very uid was asked for."""
    owner, other, admin = broker.peer(OWNER), broker.peer(OTHER), broker.peer(ADMIN)
    owner.give("x")
    assert [entry["uid"] for entry in other.status()] == [ANY_UID]
    assert other.status(uid=owner.uid) == []
    assert len(owner.status(uid=owner.uid)) == len(admin.status(uid=owner.uid)) == 1


def ask_without_reading(path, connections, requests):
    """LOOKUPs of "x" with 64 fds each of which no reply is read; returns the connections."""
    item = STRUCTS["LookupEntry"].pack(size=REST, access=READ, flags=WANT_FD | NO_LEASE, name_length=1) + padded(b"x")
    body = batch(*[item] * LIMIT["BATCH_MAX"])
    clients = []
    for _ in range(connections):
        client = Client(path)
        client.hello()
        clients.append(client)
        try:
            for serial in range(requests):
                client.send_raw(message("LOOKUP", body, serial + 10))
        except Disconnected:
            pass
    return clients


@needs_users
def test_fds_that_are_not_read_do_not_starve_others(start):
    """Replies full of fds that nobody read used up the broker's fds and those that may be in flight."""
    broker = start(nofile=1000)
    owner, bystander = broker.peer(OWNER), broker.peer(CONSUMER)
    owner.give("x", fill=b"bytes of x")

    def attack(path):
        clients = ask_without_reading(path, 4, 100)
        # what they were sent stays unread while the bystander asks
        with Client(path) as last:
            last.hello()
            last.ping()
            os.write(ready, b"1")
            select.select([release], [], [])
        return len(clients)

    (wait, ready), (release, go) = os.pipe(), os.pipe()
    attacker = threading.Thread(target=lambda: done.append(broker.run(OTHER, attack, broker.socket)))
    done = []
    attacker.start()
    try:
        assert os.read(wait, 1) == b"1"
        for _ in range(50):
            assert bystander.read_lookup("x")["bytes"] == b"bytes of"
        broker.peer(CONSUMER).ping()
    finally:
        os.write(go, b"1")
        attacker.join()
        for fd in (wait, ready, release, go):
            os.close(fd)
    assert done == [4]
    assert "Too many open files" not in broker.log()


def test_who_reads_gets_fds_without_paying_for_them(broker):
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    owner.give("x")
    before = admin.stats()["held_fds"]
    for _ in range(3):
        consumer.read_lookup("x", no_lease=True)
        assert admin.stats()["held_fds"] == before


@needs_users
def test_a_repeated_unregister_asks_for_the_right(broker):
    """RETRY under the serial of one's own RELEASE retired, and discarded, whatever region the new message named."""
    victim, attacker = broker.peer(OWNER), broker.peer(CONSUMER)
    victim.give("victim", fill=b"precious")
    attacker.release(attacker.lookup("victim")["lease"])
    with pytest.raises(Refused, match="PERMISSION"):
        attacker.repeat(attacker.last_serial(), "unregister", "victim", mode="DISCARD")
    assert victim.peek("victim")[:8] == b"precious"
    victim.unregister("victim")
