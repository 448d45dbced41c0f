# SPDX-License-Identifier: Apache-2.0
"""
Recovery that believes nothing: the test holds what the broker left, alters it while none runs, and hands it over. Never
a crash; what makes no sense is dropped and counted, and the rest is served.
"""

import ctypes
import os
import random
import socket

import pytest
from broker import ADMIN, CONSUMER, OWNER, uid_of, until
from holder import PARKED, RECORD, STRUCTS, Books, HeldBroker, park, parked, records
from protocol_client import Refused, memory
from restart import is_as_before, settled, starting_empty

OBJECT, PIDFD, PAGE = 1, 2, 3
RECOVER_TRIES = 5
HUGE = 1 << 60


class Scene:
    """Regions "a" and "window" of one memory and "b" of another, and a consumer that holds each in some way."""

    def __init__(self, start, **how):
        self.broker = start(kind=HeldBroker, **how)
        self.owner, self.consumer, self.admin = (self.broker.peer(uid) for uid in (OWNER, CONSUMER, ADMIN))
        self.given = {"a": self.owner.give("a", fill=b"bytes of a"), "b": self.owner.give("b", fill=b"bytes of b")}
        self.given["window"] = self.owner.again("window", "a", offset=4096, size=4096)
        self.consumer.page_attach()
        for name in ("a", "b"):
            self.consumer.page_map(self.given[name]["slot"], self.given[name]["generation"])
            assert self.consumer.page_do("acquire", self.given[name]["slot"], self.given[name]["generation"])
        self.leases = [self.consumer.lookup("b")["lease"] for _ in range(2)]

    def alter(self, change, tries=1):
        """@change gets the scene and the books."""
        with self.broker.dead(tries):
            change(self, Books(self.broker.store))

    def object(self, books, name):
        return next(at for at in books.objects() if at.id == self.given[name]["object"])

    def session(self, books, peer):
        return books.session_of(peer.session)

    def region(self, books, name):
        return books.region(self.given[name]["slot"])

    def resume(self, *gone):
        """All sessions but those of @gone, which are over."""
        for peer in (self.owner, self.consumer, self.admin):
            if peer in gone:
                with pytest.raises(Refused) as error:
                    peer.resume()
                assert error.value.name == "STALE"
            else:
                peer.resume()

    def serves(self, *names):
        """These regions are there, with their bytes, and new ones can be made and retired."""
        admin = self.broker.peer(ADMIN)
        until(lambda: {entry["name"].decode() for entry in admin.status()} == set(names),
              lambda: f"{names}: {admin.status()}")
        other = self.broker.peer(CONSUMER)
        for name in names:
            found = other.read_lookup(name, no_lease=True)
            assert found["generation"] == self.given[name]["generation"]
            assert name == "window" or found["bytes"] == b"bytes of"
        newest = admin.give("newest")
        if names:
            assert newest["generation"] > max(entry["generation"] for entry in self.given.values())
        admin.unregister("newest")
        for peer in (admin, other):
            peer.kill()


@pytest.fixture
def scene(start):
    return Scene(start)


def messages(*entries):
    """A message that parks these (kind, id, fds)."""
    data = PARKED.pack(0x6B706D73, len(entries)) + b"".join(RECORD.pack(kind, len(fds), 0, number) for kind, number, fds in entries)
    return data, [fd for _, _, fds in entries for fd in fds]


# ---- records that say nothing that can be ----


def half_written(scene, books):
    """As it is between the redo record and the id, in the registry too."""
    scene.region(books, "b").generation = 0
    books.ledger.redo = 3
    slot = books.slot(scene.given["b"]["slot"])
    slot.name, slot.size, slot.offset, slot.access, slot.object = b"garbage" * 4, HUGE, HUGE, 255, HUGE


def not_in_the_ledger(scene, books):
    scene.region(books, "b").generation = 0


def in_region(**fields):
    def change(scene, books):
        for field, value in fields.items():
            setattr(scene.region(books, "b"), field, value)
    return change


def in_object(**fields):
    def change(scene, books):
        for field, value in fields.items():
            setattr(scene.object(books, "b"), field, value)
    return change


def object_of_nobody(scene, books):
    scene.region(books, "b").object = books.ledger.region_capacity - 1


def object_of_another(scene, books):
    """The memory of a session that is over, as far as the ledger knows."""
    scene.object(books, "b").session = scene.admin.session


def object_of_another_uid(scene, books):
    scene.object(books, "b").uid = 12345


def object_that_is_over(scene, books):
    scene.object(books, "b").id = 0


def another_generation(scene, books):
    scene.region(books, "b").generation += 1 << 30


def another_epoch(scene, books):
    scene.region(books, "b").generation += 1 << 40


def key_that_is_none(scene, books):
    """It is told to others as it is."""
    scene.region(books, "b").key_length = 5
    at = books.ledger.keys_offset + 256 * scene.given["b"]["slot"]
    books.ledger_map[at : at + 5] = b"a\nb\x1b["


@pytest.mark.parametrize("change", [
    key_that_is_none, in_region(name=b"\n"), in_region(name=b"\xf0"),
    half_written, not_in_the_ledger, object_of_nobody, object_of_another, object_of_another_uid, object_that_is_over, another_generation, another_epoch,
    in_region(state=77), in_region(name_length=0), in_region(name_length=300), in_region(name_length=65535),
    in_region(object=0xFFFFFFFE), in_region(offset=HUGE), in_region(size=HUGE),
    in_region(offset=2**64 - 4096, size=8192), in_region(access=255), in_object(size=HUGE), in_object(n_acl=1000),
    in_object(inode=1), in_object(device=12345), in_object(mode=os.O_RDONLY), in_object(id=2**64 - 1)],
    ids=lambda value: getattr(value, "__name__", "?") if value.__name__ != "change" else None)
def test_a_region_that_makes_no_sense_is_dropped(scene, change):
    scene.alter(change)
    scene.resume()
    scene.serves("a", "window")
    assert scene.broker.region(scene.admin, "a")["leases"] == 1
    # leases by message on what is no more are no more than that
    for lease in scene.leases:
        with pytest.raises(Refused) as error:
            scene.consumer.release(lease)
        assert error.value.name == "REVOKED"


def test_what_was_recovered_is_counted(scene):
    scene.alter(half_written)
    assert "recovered 2 regions, " in scene.broker.log() and "; 1 records half written, 2 slots mended, " in scene.broker.log()
    scene.alter(lambda scene, books: setattr(scene.region(books, "window"), "state", 77))
    assert 'region "window" of uid' in scene.broker.log() and ", 1 regions lost" in scene.broker.log()
    scene.resume()
    scene.serves("a")


# ---- the registry says what the ledger says ----


def name_index(scene, books):
    del scene
    index, numbers = books.index(), random.Random(1)
    for at in range(len(index)):
        index[at] = numbers.getrandbits(64)


def empty_index(scene, books):
    del scene
    index = books.index()
    for at in range(len(index)):
        index[at] = 0


def doubled_index(scene, books):
    del scene
    index = books.index()
    for at in range(len(index) - 1, 0, -1):
        if index[at] and not index[at + 1 & len(index) - 1]:
            index[at + 1 & len(index) - 1] = index[at]


def slots(scene, books):
    for name in scene.given:
        slot = books.slot(scene.given[name]["slot"])
        slot.word, slot.name, slot.size, slot.name_length, slot.flags = 2**64 - 1, b"x" * 32, HUGE, 65535, 2**32 - 1


def session_table(scene, books):
    del scene
    at = books.registry.sessions_offset
    books.registry_map[at : at + 8 * books.registry.session_capacity] = b"\xff" * (8 * books.registry.session_capacity)


@pytest.mark.parametrize("change", [name_index, empty_index, doubled_index, slots, session_table])
def test_the_registry_is_mended(scene, change):
    words = {name: scene.consumer.page_do("word", entry["slot"]) for name, entry in scene.given.items()}
    scene.alter(change)
    scene.resume()
    for name, entry in scene.given.items():
        assert scene.consumer.page_do("word", entry["slot"]) == words[name]
        assert scene.consumer.page_do("find", name) == entry["slot"]
    assert scene.consumer.page_do("attached")
    scene.serves(*scene.given)
    scene.owner.unregister("window")
    assert scene.consumer.page_do("find", "window") is None
    books = Books(scene.broker.store)
    assert sum(1 for entry in books.index() if entry not in (0, 0xFFFFFFFF)) == 2


# ---- who has what ----


def doubled_maps(scene, books):
    del scene
    n = books.ledger.n_used_maps
    for i in range(n):
        for field in ("session", "generation", "slot", "access"):
            setattr(books.map(n + i), field, getattr(books.map(i), field))
    books.ledger.n_used_maps = 2 * n


def maps_of_nothing(scene, books):
    session, n = scene.session(books, scene.consumer).id, books.ledger.n_used_maps
    for i, (number, slot, generation) in enumerate((
            (session, 2**32 - 1, 1), (session, scene.given["a"]["slot"], 12345), (HUGE, 0, scene.given["a"]["generation"]),
            (session, books.ledger.region_capacity, 7))):
        at = books.map(n + i)
        at.session, at.slot, at.generation, at.access = number, slot, generation, 2**32 - 1
    books.ledger.n_used_maps = n + 4


def leases_of_nothing(scene, books):
    session, n = scene.session(books, scene.consumer).id, books.ledger.n_used_leases
    for i, (number, owner) in enumerate(((scene.leases[0], session), (2**64 - 1, session), (scene.leases[1], HUGE))):
        at = books.lease(n + i)
        at.id, at.session, at.slot, at.generation = number, owner, scene.given["b"]["slot"], scene.given["b"]["generation"]
    books.ledger.n_used_leases = n + 3


def doubled_objects(scene, books):
    at, twin = scene.object(books, "b"), books.object(books.ledger.n_used_objects)
    for field, _ in type(at)._fields_:
        setattr(twin, field, getattr(at, field))
    books.ledger.n_used_objects += 1


@pytest.mark.parametrize("change", [doubled_maps, maps_of_nothing, leases_of_nothing, doubled_objects])
def test_what_is_held_is_held_once(scene, change):
    before = settled(scene.admin)
    scene.alter(change)
    scene.resume()
    is_as_before(scene.admin, {"stats": before["stats"]})
    assert {name: scene.broker.region(scene.admin, name)["leases"] for name in ("a", "b")} == {"a": 1, "b": 3}
    scene.serves(*scene.given)
    for lease in scene.leases:
        scene.consumer.release(lease)
    for name in ("a", "b"):
        scene.consumer.page_do("release", scene.given[name]["slot"])
    scene.owner.unregister_many(["a", "b", "window"])
    until(lambda: not scene.admin.status(), "all is gone")


# ---- sessions ----


def in_session(who, **fields):
    def change(scene, books):
        for field, value in fields.items():
            setattr(scene.session(books, getattr(scene, who)), field, value)
    return change


@pytest.mark.parametrize("change", [
    in_session("consumer", page_lanes=0), in_session("consumer", page_lanes=10**6), in_session("consumer", page_mode=9),
    in_session("consumer", page_lanes=3), in_session("consumer", id=HUGE * 8)], ids=range(5))
def test_a_consumer_whose_page_is_not_known_has_nothing(scene, change):
    """It is detached, so that it acquires no more; what it held is free, and all others go on."""
    scene.alter(change)
    scene.resume(scene.consumer)
    assert not scene.consumer.page_do("attached")
    assert not scene.consumer.page_do("acquire", scene.given["a"]["slot"], scene.given["a"]["generation"])
    scene.serves(*scene.given)
    until(lambda: scene.broker.region(scene.admin, "b")["leases"] == 0, "it holds nothing")


def test_other_fields_of_a_session(scene):
    """Roles and rights are those that the configuration gives; a listener that is not there is nobody's."""
    def change(scene, books):
        for who in (scene.owner, scene.consumer, scene.admin):
            at = scene.session(books, who)
            at.roles = at.rights = at.event_mask = 2**32 - 1
            at.serial_next, at.comm, at.container = 2**32 - 1, b"x" * 16, b"y" * 64
        scene.session(books, scene.consumer).listener = 99

    scene.alter(change)
    with pytest.raises(Refused) as error:
        scene.consumer.resume()
    assert error.value.name == "PERMISSION"
    for peer in (scene.owner, scene.admin):
        peer.resume()
    scene.serves(*scene.given)
    if uid_of(OWNER) != uid_of(ADMIN):
        with pytest.raises(Refused) as error:
            scene.owner.unregister_many(scope="ALL")
        assert error.value.name == "PERMISSION"
    scene.consumer.kill()
    until(lambda: len(scene.admin.clients()) == 2, "its end")


def test_two_sessions_with_one_number(scene):
    def change(scene, books):
        scene.session(books, scene.consumer).id = scene.owner.session

    scene.alter(change)
    scene.broker.lives()
    for peer in (scene.owner, scene.consumer):
        peer.kill()
    scene.admin.resume()
    until(lambda: not scene.admin.status(), lambda: f"{scene.admin.status()}")


# ---- fds ----


def is_of(data, kind):
    return any(record[0] == kind for record in records(data))


def close_all(fds):
    for fd in fds:
        os.close(fd)


def without(kind):
    def change(data, fds):
        if not is_of(data, kind):
            return [(data, fds)]
        close_all(fds)
        return []
    return change


def test_regions_without_their_fds_are_lost(scene):
    with scene.broker.dead():
        scene.broker.alter_parked(without(OBJECT))
    assert scene.broker.log().count("is lost") == 3
    scene.resume()
    scene.serves()


def test_processes_are_found_without_their_pidfds(scene):
    with scene.broker.dead():
        scene.broker.alter_parked(without(PIDFD))
    scene.resume()
    scene.serves(*scene.given)
    assert scene.broker.region(scene.admin, "a")["leases"] == 1
    with scene.broker.dead():
        scene.broker.alter_parked(without(PIDFD))
        scene.consumer.kill()
    scene.admin.resume()
    scene.owner.resume()
    until(lambda: scene.broker.region(scene.admin, "b")["leases"] == 0, "the dead process holds nothing")


def test_a_session_without_its_page_is_over(scene):
    with scene.broker.dead():
        scene.broker.alter_parked(without(PAGE))
    scene.resume(scene.consumer)
    assert not scene.consumer.page_do("attached")
    scene.serves(*scene.given)


def test_no_segment_at_all(scene):
    with scene.broker.dead():
        for name in scene.broker.segments():
            scene.broker.replace(name, None)
    scene.resume(scene.consumer)
    scene.serves()


def test_other_memory_in_the_place_of_a_region(scene):
    """The fd is not that of the record: nobody may be shown what it has in it."""
    def change(data, fds):
        out, at = list(fds), 0
        for kind, n, _, number in records(data):
            if kind == OBJECT and number == scene.given["b"]["object"]:
                for fd in out[at : at + n]:
                    os.close(fd)
                out[at : at + n] = [memory(8192, fill=b"a secret of another") for _ in range(n)]
            at += n
        return [(data, out)]

    with scene.broker.dead():
        scene.broker.alter_parked(change)
    scene.resume()
    scene.serves("a", "window")


def test_unknown_fds_are_closed(scene):
    with scene.broker.dead():
        strange = [messages((OBJECT, 999999, [memory()])), messages((77, 1, [memory()])), messages((OBJECT, 5, [])),
                   messages((PIDFD, scene.owner.session, [memory()])), messages((PAGE, scene.consumer.session, [memory()])),
                   messages((PAGE, scene.owner.session, [memory(1 << 20)])),
                   messages((OBJECT, scene.given["a"]["object"], [memory(), memory()]))]
        scene.broker.store["shmb-s77"] = [park(strange)]
        scene.broker.store = {"shmb-s77": scene.broker.store.pop("shmb-s77"), **scene.broker.store}
        scene.broker.store["shmb-foo"] = [memory()]
        scene.broker.store["shmb-s0"] = [memory()]
        scene.broker.store["shmb-s1x"] = [memory()]
        scene.broker.store["anything"] = [memory(), memory()]
    scene.resume()
    scene.serves(*scene.given)
    until(lambda: all(name.startswith("shmb-") and name not in ("shmb-foo", "shmb-s0", "shmb-s1x", "shmb-s77")
                      for name in list(scene.broker.store)), lambda: f"they are unstored: {list(scene.broker.store)}")


@pytest.mark.parametrize("segment", [
    lambda: memory(), lambda: park([(b"garbage", [])]), lambda: park([(b"", [])]), lambda: park([(b"x" * 5000, [memory()])]),
    lambda: park([(PARKED.pack(0x6B706D73, 65), [])]), lambda: park([(PARKED.pack(0x6B706D73, 2**32 - 1), [memory()])]),
    lambda: park([(PARKED.pack(0x6B706D73, 1) + RECORD.pack(OBJECT, 2, 0, 1), [memory()])]),
    lambda: park([(PARKED.pack(0x6B706D73, 1) + RECORD.pack(OBJECT, 65535, 0, 1), [memory()])]),
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).detach()], ids=range(9))
def test_a_segment_that_is_none(scene, segment):
    with scene.broker.dead():
        scene.broker.store["shmb-s99"] = [segment()]
    scene.resume()
    scene.serves(*scene.given)
    until(lambda: "shmb-s99" not in scene.broker.store, "it is removed")
    # and no number is used twice
    assert all(int(name[6:]) > 99 or name in scene.broker.store for name in scene.broker.segments())


def test_a_segment_that_was_parked_twice(scene):
    """Duplicates are legal: a compaction that was cut short leaves them."""
    with scene.broker.dead():
        for i, name in enumerate(scene.broker.segments()):
            scene.broker.store[f"shmb-s{200 + i}"] = [park(parked(scene.broker.store[name][0]))]
    scene.resume()
    scene.serves(*scene.given)


# ---- starting empty ----


def replaced_ledger(make):
    def change(scene, books):
        del books
        scene.broker.replace("shmb-ledger", make())
    return change


def in_ledger(**fields):
    def change(scene, books):
        del scene
        for field, value in fields.items():
            setattr(books.ledger, field, value)
    return change


def in_registry(**fields):
    def change(scene, books):
        del scene
        for field, value in fields.items():
            setattr(books.registry, field, value)
    return change


def read_only_ledger(scene, books):
    del books
    fd = scene.broker.store["shmb-ledger"][0]
    scene.broker.replace("shmb-ledger", os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))


def no_ledger(scene, books):
    del books
    scene.broker.replace("shmb-ledger", None)


VERSION = "the layout of another version"
EMPTY = {
    "version": (in_ledger(version=99), VERSION),
    "old version": (in_ledger(version=1), VERSION),
    "magic": (in_ledger(magic=1), "none of shmbrokerd's"),
    "capacity": (in_ledger(region_capacity=2**32 - 1), "damaged"),
    "no capacity": (in_ledger(region_capacity=0), "damaged"),
    "size": (in_ledger(total_size=HUGE), "damaged"),
    "offset": (in_ledger(regions_offset=HUGE), "damaged"),
    "used sessions": (in_ledger(n_used_sessions=2**32 - 1), "damaged"),
    "used regions": (in_ledger(n_used_regions=2**32 - 1), "damaged"),
    "used objects": (in_ledger(n_used_objects=2**32 - 1), "damaged"),
    "used maps": (in_ledger(n_used_maps=2**32 - 1), "damaged"),
    "used leases": (in_ledger(n_used_leases=2**32 - 1), "damaged"),
    "epoch": (in_ledger(epoch=5, generation=5 << 40), "do not belong together"),
    "generation": (in_ledger(generation=2**64 - 1), "damaged"),
    "garbage": (replaced_ledger(lambda: memory(1 << 20, fill=random.Random(1).randbytes(1 << 20))), "none of"),
    "zeroes": (replaced_ledger(lambda: memory(1 << 20)), "none of"),
    "truncated": (replaced_ledger(lambda: memory(100)), "too short"),
    "a socket": (replaced_ledger(lambda: socket.socket().detach()), "too short"),
    "read-only": (read_only_ledger, "cannot be mapped"),
    "no ledger": (no_ledger, "not handed over"),
    "registry's magic": (in_registry(magic=1), "registry"),
    "registry's version": (in_registry(version=99), "registry"),
    "registry's capacity": (in_registry(capacity=2**32 - 1), "registry"),
    "registry's index": (in_registry(index_offset=HUGE), "registry"),
    "registry's epoch": (in_registry(epoch=5), "do not belong together"),
    "closed": (in_registry(state=2), "closed"),
    "tries": (in_ledger(n_recoveries=RECOVER_TRIES), "did not last"),
}


@pytest.mark.parametrize("case", EMPTY, ids=lambda name: name.replace(" ", "-"))
def test_starting_empty(scene, case):
    """A state that cannot be taken over: the broker says so, and consumers of the old registry acquire no more."""
    change, why = EMPTY[case]
    scene.alter(change)
    starting_empty(scene.broker, why)
    if case != "registry's magic":
        assert not scene.consumer.page_do("is_open")
        assert not scene.consumer.page_do("acquire", scene.given["a"]["slot"], scene.given["a"]["generation"])
    scene.resume(scene.owner, scene.consumer, scene.admin)
    scene.serves()
    # the old state is kept for a report, and is no part of what is recovered next
    if case != "no ledger":
        until(lambda: [len(scene.broker.store.get(f"shmb-aside-{book}", ())) for book in ("registry", "ledger")] == [1, 1],
              lambda: f"{list(scene.broker.store)}")
    owner = scene.broker.peer(OWNER)
    given = owner.give("new")
    with scene.broker.dead():
        pass
    assert scene.broker.log().count("STARTING EMPTY") == 1
    owner.resume()
    assert scene.broker.peer(ADMIN).status()[0]["generation"] == given["generation"]


def test_tries_that_succeed_are_forgotten(scene):
    for _ in range(2 * RECOVER_TRIES):
        with scene.broker.dead():
            pass
        scene.resume()
    scene.serves(*scene.given)


# ---- anything at all ----


def test_bytes_that_are_garbage(scene):
    """Bytes of the used part of both books are changed at random, again and again."""
    numbers = random.Random(7)

    def change(_, books):
        ledger, areas = books.ledger, []
        for kind, offset, n in (("LedgerSession", "sessions", ledger.n_used_sessions),
                                ("LedgerObject", "objects", ledger.n_used_objects),
                                ("LedgerRegion", "regions", ledger.n_used_regions),
                                ("LedgerMap", "maps", ledger.n_used_maps), ("LedgerLease", "leases", ledger.n_used_leases)):
            areas.append((books.ledger_map, getattr(ledger, offset + "_offset"), n * ctypes.sizeof(STRUCTS[kind])))
        areas.append((books.registry_map, books.registry.slots_offset, 4 * books.registry.slot_size))
        areas.append((books.ledger_map, STRUCTS["LedgerHeader"].generation.offset, 60))
        for where, offset, size in areas:
            for _ in range(numbers.randrange(4) if size else 0):
                where[offset + numbers.randrange(size)] = numbers.choice((0, 1, 255, numbers.randrange(256)))

    for _ in range(40):
        scene.alter(change, tries=RECOVER_TRIES + 2)
        peer = scene.broker.peer(OWNER)
        try:
            peer.give("again")
            peer.unregister("again")
        except Refused:
            pass
        peer.kill()
    # what was put aside is not looked at again
    with scene.broker.dead():
        pass
    scene.broker.lives()
