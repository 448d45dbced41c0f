# SPDX-License-Identifier: Apache-2.0
"""Lease pages at their edges: counters that wrap, pages that are sealed, and sessions and brokers that end before them."""

import fcntl
import time

import pytest
from broker import ADMIN, CONSUMER, KEEPER, OTHER, OWNER, until
from protocol_client import NUMBERS, STATE, Refused
from test_fallbacks import NO_PEERPIDFD, NO_PIDFD_OPEN

DETACHED = NUMBERS["HOLDER"]["DETACHED"]
SEALS = {
    "future write": fcntl.F_SEAL_FUTURE_WRITE if hasattr(fcntl, "F_SEAL_FUTURE_WRITE") else 0x10,
    "seal": fcntl.F_SEAL_SEAL,
    "write": fcntl.F_SEAL_WRITE,
}


def refused(name):
    return pytest.raises(Refused, match=f"^{name}:")


def hold(broker, consumer, owner, name="x"):
    """A region with one lease through the page of @consumer: (slot, generation)."""
    given = owner.give(name)
    at = given["slot"], given["generation"]
    consumer.page_attach()
    consumer.page_map(*at)
    assert consumer.page_do("acquire", *at)
    return at


def gone(admin):
    until(lambda: not admin.status(), lambda: admin.status())


def test_counters_wrap(broker):
    """Counts are modulo 2^32: what was acquired 2^32 times and released as often is not held."""
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    given = owner.give("x")
    slot, generation = given["slot"], given["generation"]
    consumer.page_attach()
    consumer.page_map(slot, generation)
    for field in ("acquired", "released"):
        consumer.page_do("count", slot, field, by=2**32 - 1)
    assert broker.region(admin, "x")["leases"] == 0
    assert consumer.page_do("acquire", slot, generation)
    assert broker.region(admin, "x")["leases"] == 1
    owner.unregister("x")
    assert broker.region(admin, "x")["state"] == STATE["RETIRING"]
    consumer.page_do("release", slot)
    gone(admin)


def test_release_that_a_barrier_missed(broker):
    """
    A release that was counted after the scan has read the page, by somebody who had not seen that the region is over, and so
    does not say so: a second look finds it.
    """
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    consumer.page_attach(mode="ASYMMETRIC")
    # on a slow machine the second look may be over before it is released
    for i in range(100):
        given = owner.give("x")
        at = given["slot"], given["generation"]
        consumer.page_map(*at)
        assert consumer.page_do("acquire", *at)
        assert owner.unregister("x")["state"] == NUMBERS["UNREGISTERED"]["DRAINING"]
        consumer.page_do("count", at[0], "released")
        end = time.monotonic() + 1
        while admin.status() and time.monotonic() < end:
            time.sleep(0.01)
        if not admin.status():
            break
        consumer.notify(*at, 0)
        gone(admin)
    assert admin.stats()["releases_missed"] >= 1


def test_unmap_of_what_is_held(broker):
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    slot, generation = hold(broker, consumer, owner)
    with refused("IN_USE"):
        consumer.unmap(slot, generation)
    consumer.page_do("release", slot)
    consumer.unmap(slot, generation)
    with refused("STALE"):
        consumer.unmap(slot, generation)


@pytest.mark.parametrize("mode,code", [("STRICT", "RETIRING"), ("FORCE", "REVOKED")])
def test_map_of_what_is_over(broker, mode, code):
    owner, holder, late = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(CONSUMER)
    slot, generation = hold(broker, holder, owner)
    owner.unregister("x", mode=mode)
    late.page_attach()
    with refused(code):
        late.page_map(slot, generation)
    holder.page_do("release", slot)
    until(lambda: not broker.region(owner, "x"), "it is gone")
    with refused("STALE"):
        late.page_map(slot, generation)


@pytest.mark.parametrize("what", SEALS)
def test_page_that_its_consumer_seals(broker, what):
    """It may; its leases count as before, or are given back where it has proved that it maps the page no more."""
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    hold(broker, consumer, owner)
    consumer.page_seal(SEALS[what])
    owner.unregister("x")
    assert broker.region(admin, "x")["state"] == STATE["RETIRING"]
    consumer.ping()
    consumer.kill()
    gone(admin)


def test_sealed_page_cannot_hold_a_region_for_ever(start):
    """
    A page that its consumer has sealed never shows that it is unmapped, and where there is no pidfd nothing tells of its
    process's end: such a page counts no longer than its connection.
    """
    broker = start(config="retire_timeout = 100ms", denied=[NO_PEERPIDFD, NO_PIDFD_OPEN])
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    hold(broker, consumer, owner)
    consumer.page_seal(fcntl.F_SEAL_SEAL)
    owner.unregister("x")
    assert consumer.ended()
    consumer.kill()
    gone(admin)


def test_holder_that_sends_garbage(broker):
    """It loses its connection and its right to acquire, but what it has mapped is its until its process ends."""
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    slot, generation = hold(broker, consumer, owner)
    consumer.send_raw(b"garbage")
    assert consumer.ended()
    until(lambda: not consumer.page_do("attached"), "the session table says so")
    owner.unregister("x")
    entry = broker.region(admin, "x")
    assert entry["state"] == STATE["RETIRING"] and [holder["flags"] & DETACHED for holder in entry["holders"]] == [DETACHED]
    consumer.kill()
    gone(admin)


def test_detached_session_counts_until_its_page_is_unmapped(broker):
    """The process lives, but it has unmapped its page: that is proof enough."""
    owner, consumer, admin = broker.peer(OWNER), broker.peer(CONSUMER), broker.peer(ADMIN)
    hold(broker, consumer, owner)
    consumer.send_raw(b"garbage")
    assert consumer.ended()
    owner.unregister("x")
    assert broker.region(admin, "x")["state"] == STATE["RETIRING"]
    consumer.page_do("close")
    gone(admin)


def test_stopped_broker_closes_its_registry(broker):
    """SIGTERM: who is left behind with its page acquires nothing any more, and what it holds stays mapped."""
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    slot, generation = hold(broker, consumer, owner)
    assert consumer.page_do("is_open")
    broker.stop()
    assert not consumer.page_do("is_open")
    assert not consumer.page_do("acquire", slot, generation)
    assert owner.ended() and consumer.ended()


def test_broker_stops_whatever_is_held(start):
    """SIGTERM frees what sessions own, hold and wait for in an order that never looks at what is freed."""
    broker = start(config="retire_timeout = 60min")
    owner, second, consumer, keeper = (broker.peer(uid) for uid in (OWNER, OWNER, CONSUMER, KEEPER))
    hold(broker, consumer, owner, "retiring")
    for name in ("held", "lazy", "revoked"):
        owner.give(name)
        consumer.lookup(name)
    owner.again("window", "held")
    keeper.give("kept", flags=NUMBERS["REGISTER"]["KEEP"])
    second.give("mine")
    second.subscribe("GONE", "LEFT")
    owner.unregister("revoked", mode="FORCE")
    # each waits for a region of the first session
    second.send_unregister(["retiring"], wait=True, timeout_ms=1000000)
    owner.send_unregister(["lazy"], mode="LAZY", wait=True)
    for peer in (owner, second):
        peer.ping()
    # one session is detached, another ends just before the signal
    detached, dying = broker.peer(CONSUMER), broker.peer(OTHER)
    at = broker.region(detached, "held")
    detached.page_attach()
    detached.page_map(at["slot"], at["generation"])
    assert detached.page_do("acquire", at["slot"], at["generation"])
    detached.send_raw(b"garbage")
    assert detached.ended()
    dying.give("dying")
    dying.kill()
    broker.stop()
