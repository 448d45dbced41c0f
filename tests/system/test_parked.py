# SPDX-License-Identifier: Apache-2.0
"""What is parked outside the broker: its memory goes when it should, no byte of it changes, and there is an end to it."""

import os
import pathlib

import pytest
from broker import ADMIN, BROKER, CONSUMER, OWNER, ROOT, until
from holder import HeldBroker
from protocol_client import Refused
from restart import LastingBroker, is_as_before, settled

GIB = 1 << 30
PER_SEGMENT = 250
# registry, ledger, listener, the segment in use and the spare one; and two that are being compacted
FEW = 5 + 2


def shmem():
    """Bytes of shared memory in use on this machine."""
    text = pathlib.Path("/proc/meminfo").read_text()
    return int(text.partition("Shmem:")[2].split()[0]) * 1024


def room_for(size):
    available = int(pathlib.Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    return available > 2 * size


def test_the_owners_bytes_stay(start):
    """Unregistered, compacted, unregistered with more than a segment may pin: the owner reads what it wrote."""
    broker = start(kind=HeldBroker)
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    sizes = {f"r{i}": 8192 for i in range(100)} | {"large": 80 << 20}
    for name, size in sizes.items():
        owner.give(name, size=size, fill=name.encode().ljust(32, b"."))
        owner.poke(name, b"the end", size - 7)
    segments = set(broker.segments())
    owner.unregister("large")
    until(lambda: not segments & set(broker.segments()) or len(set(broker.segments()) - segments) > 0, "it is compacted")
    for i in range(90):
        owner.unregister(f"r{i}")
    with broker.dead():
        pass
    owner.resume()
    admin.resume()
    owner.unregister_many([f"r{i}" for i in range(90, 100)])
    until(lambda: not admin.stats()["objects"], "all is gone")
    for name, size in sizes.items():
        assert owner.peek(name, 32) == name.encode().ljust(32, b"."), name
        assert owner.peek(name, 7, size - 7) == b"the end", name


@pytest.mark.parametrize("last", ["owner", "consumer", "next broker"])
def test_a_gib_comes_back(start, last):
    """Although it was parked: with the last lease, and also when the broker dies before it has compacted."""
    size = GIB if room_for(GIB) else GIB // 8
    lasting = start(kind=LastingBroker)
    owner, consumer, admin = (lasting.peer(uid) for uid in (OWNER, CONSUMER, ADMIN))
    before = shmem()
    owner.give("small")
    owner.give_full("large", size)
    owner.give("another")
    assert shmem() > before + size * 0.9
    if last == "consumer":
        lease = consumer.lookup("large")["lease"]
    owner.unregister("large")
    if last == "consumer":
        assert lasting.region(admin, "large") and shmem() > before + size * 0.9
        consumer.release(lease)
    elif last == "next broker":
        lasting.kill()
    until(lambda: shmem() < before + size * 0.1, lambda: f"{shmem()} bytes, {before} before")
    if last == "next broker":
        owner.resume()
    assert {name: owner.peek(name) for name in ("small", "another")} == {"small": bytes(8), "another": bytes(8)}


def test_registrations_in_turn_do_not_fill_the_store(start):
    broker = start(kind=HeldBroker)
    owner, stays = broker.peer(OWNER), broker.peer(CONSUMER)
    for turn in range(4):
        stays.give(f"stays{turn}")
        assert owner.give_singly("r", 2 * PER_SEGMENT)[0] == 2 * PER_SEGMENT
        owner.unregister_singly("r", 2 * PER_SEGMENT)
        until(lambda: broker.count() <= FEW, lambda: f"{broker.count()}: {list(broker.store)}")
    with broker.dead():
        pass
    stays.resume()
    admin = broker.peer(ADMIN)
    assert {entry["name"].decode() for entry in admin.status()} >= {f"stays{turn}" for turn in range(4)}


def test_a_store_that_is_full(start):
    """What it does not keep is refused with that reason, what was accepted survives, and where room comes it goes on."""
    broker = start(kind=HeldBroker)
    # the listener is stored last
    until(lambda: broker.count() == 5, lambda: f"{list(broker.store)}")
    broker.limit = 5
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    taken, code, text = owner.give_singly("r", 3 * PER_SEGMENT)
    assert code == "NO_FDS" and "keeps no more fds" in text and taken >= PER_SEGMENT
    before = settled(admin)
    assert len(before["regions"]) == taken
    # whoever is there goes on; who is new cannot be kept either
    with pytest.raises(Refused) as error:
        broker.peer(CONSUMER)
    assert error.value.name == "NO_FDS" and "keeps no more fds" in error.value.text
    with pytest.raises(Refused) as error:
        admin.attach()
    assert error.value.name == "NO_FDS"
    for _ in range(2):
        with broker.dead():
            pass
        owner.resume()
        admin.resume()
        is_as_before(admin, before)
    broker.limit = 4096

    def goes():
        try:
            owner.give("more")
            return True
        except Refused as refused:
            assert refused.name in ("NO_FDS", "AGAIN")
            return False

    until(goes, "there is room again")


def test_no_store_at_all(start):
    """A holder that keeps nothing is found out at the start: nothing is promised, and all else works."""
    class Keepless(HeldBroker):
        """Says yes to all, as a service manager with FileDescriptorStoreMax=0 does."""

        def _hear(self, lines, fds):
            for fd in fds:
                os.close(fd)

    broker = start(kind=Keepless)
    assert "nothing will survive this process" in broker.log()
    owner = broker.peer(OWNER)
    owner.give("r")
    assert broker.peer(ADMIN).status()[0]["session"] == owner.session


@pytest.mark.skipif(not ROOT, reason="needs root: fds in flight are counted by user")
def test_no_more_fds_in_flight(start):
    """The kernel lets the broker's user have no more of them in flight: refused with that reason, until it does."""
    lasting = start(kind=LastingBroker, nofile=256)
    owner = lasting.peer(OWNER)
    owner.give("first")
    crowd = lasting.peer(BROKER, hello=False)
    crowd.fly(300)
    with pytest.raises(Refused) as error:
        owner.give("second")
    assert error.value.name == "NO_FDS" and "in flight" in error.value.text
    crowd.kill()

    def goes():
        try:
            return owner.give("third")
        except Refused as refused:
            assert refused.name == "NO_FDS"
            return None

    third = until(goes, "it goes again")
    lasting.kill()
    owner.resume()
    admin = lasting.peer(ADMIN)
    assert {entry["name"]: entry["generation"] for entry in admin.status()}[b"third"] == third["generation"]
