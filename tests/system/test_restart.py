# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of the broker: sessions resume, everything is as it was, and a request in flight makes its effect once."""

import os
import signal
import time

import pytest
from broker import ADMIN, CONSUMER, KEEPER, OTHER, OWNER, ROOT, uid_of, until
from protocol_client import NUMBERS, READ, READ_WRITE, STATE, Disconnected, Refused
from restart import LastingBroker, is_as_before, quiet, regions_text, settled
from test_ctl import Ctl

USER = NUMBERS["ACL"]["UID"]
AWAY = NUMBERS["CLIENT"]["AWAY"]
REPLACE = NUMBERS["REGISTER"]["REPLACE"]
# how each of these regions is retired while it is held
RETIRED = {"lazy": "LAZY", "strict": "STRICT", "revoked": "FORCE"}
STATES = {"lazy": STATE["LAZY"], "strict": STATE["RETIRING"], "revoked": STATE["REVOKED"]}


def refused(call, *args, **how):
    with pytest.raises(Refused) as error:
        call(*args, **how)
    return error.value.name


def resume_all(*peers):
    for peer in peers:
        peer.resume()


def give_all_kinds(owner, keeper):
    """Regions: what the broker said of them, by name."""
    given = {"plain": owner.give("plain", size=12288, fill=b"bytes of plain")}
    given["first"] = owner.again("first", "plain", offset=1, size=100)
    given["second"] = owner.again("second", "plain", offset=4096, size=8192)
    given["read-only"] = owner.give_read_only("read-only")
    given["no-companion"] = owner.give("no-companion", read_only=False)
    given["listed"] = owner.give("listed", acl=[(USER, uid_of(CONSUMER)), (USER, uid_of(OTHER))])
    owner.give("replaced", fill=b"old")
    given["replaced"] = owner.give("replaced", fill=b"new", flags=REPLACE)
    for name in RETIRED:
        given[name] = owner.give(name)
    if ROOT:
        given["kept"] = keeper.give("kept", flags=NUMBERS["REGISTER"]["KEEP"])
    return given


def hold(consumer, given, *names):
    for name in names:
        slot, generation = given[name]["slot"], given[name]["generation"]
        consumer.page_map(slot, generation)
        assert consumer.page_do("acquire", slot, generation)


def names_of(admin):
    return {entry["name"].decode() for entry in admin.status()}


def test_everything_is_as_it_was(lasting):
    owner, consumer, keeper, admin = (lasting.peer(uid) for uid in (OWNER, CONSUMER, KEEPER, ADMIN))
    subscriber, ctl = lasting.peer(OTHER), Ctl(lasting)
    given = give_all_kinds(owner, keeper)
    consumer.page_attach()
    hold(consumer, given, "plain", "second", "read-only", "listed", *RETIRED)
    consumer.page_map(given["first"]["slot"], given["first"]["generation"])
    by_message = [consumer.lookup(name)["lease"] for name in ("plain", "plain", "strict", "revoked")]
    for name, mode in RETIRED.items():
        owner.unregister(name, mode=mode)
    subscriber.subscribe("REGISTERED")
    before, text = settled(admin), regions_text(ctl, ADMIN)
    words = {name: consumer.page_do("word", entry["slot"]) for name, entry in given.items()}
    assert {name: words[name][1] for name in RETIRED} == STATES

    for _ in range(2):
        pid = lasting.pid
        lasting.kill()
        assert lasting.pid != pid
        # nobody has come back yet but the one who looks
        admin.resume()
        assert {client["session"]: client["flags"] for client in admin.clients()}[owner.session] & AWAY
        is_as_before(admin, before)
        resume_all(owner, consumer, keeper, subscriber)
        is_as_before(admin, before)
        assert regions_text(ctl, ADMIN) == text
        assert not any(client["flags"] & AWAY for client in admin.clients())
        for name, entry in given.items():
            assert consumer.page_do("word", entry["slot"]) == words[name], name
            assert name in ("strict", "revoked") or consumer.page_do("find", name) == entry["slot"]
        assert consumer.page_do("is_open") and consumer.page_do("attached")
        assert subscriber.wait_event("OVERFLOW")

    # and it all goes on
    found = consumer.read_lookup("replaced", no_lease=True)
    assert found["generation"] == given["replaced"]["generation"] and found["bytes"][:3] == b"new"
    assert consumer.read_lookup("second", no_lease=True)["offset"] == 4096
    assert refused(consumer.lookup, "read-only", access=READ_WRITE) == "ACCESS"
    assert consumer.read_lookup("no-companion", access=READ, no_lease=True)
    if ROOT:
        assert refused(keeper.lookup, "listed") == "PERMISSION"
    for name in RETIRED:
        consumer.page_do("release", given[name]["slot"])
    assert refused(consumer.release, by_message[3]) == "REVOKED"
    for lease in by_message[:3]:
        consumer.release(lease)
    until(lambda: names_of(admin) == set(given) - set(RETIRED), lambda: f"the retiring ones go: {names_of(admin)}")
    newest = owner.give("newest")
    assert newest["generation"] > max(entry["generation"] for entry in given.values())
    assert subscriber.wait_event("REGISTERED", "newest")["generation"] == newest["generation"]
    if ROOT:
        keeper.unregister("kept")


def test_a_wait_goes_on(lasting):
    """UNREGISTER with WAIT in flight is answered after the restart, when the last lease is given back."""
    owner, consumer, admin = (lasting.peer(uid) for uid in (OWNER, CONSUMER, ADMIN))
    given = {name: owner.give(name) for name in ("strict", "lazy", "other")}
    consumer.page_attach()
    hold(consumer, given, *given)
    requests = [([name], {"mode": name.upper()}) for name in ("strict", "lazy")] + [([], {"scope": "SESSION"})]
    serials = [owner.send_unregister(names, wait=True, **how) for names, how in requests]
    until(lambda: lasting.region(admin, "other")["state"] == STATE["RETIRING"], "the last one retires")
    lasting.kill()
    resume_all(owner, consumer, admin)
    # it is not meant by the request that was made before
    later = owner.give("later")
    for serial, (names, how) in zip(serials, requests):
        owner.repeat(serial, "send_unregister", names, wait=True, **how)
    assert lasting.region(admin, "later")["state"] == STATE["ACTIVE"]
    for name in given:
        consumer.page_do("release", given[name]["slot"])
    for serial, name in zip(serials, ("strict", "lazy")):
        reply, (result,) = owner.unregister_wait(serial)
        assert (reply["gone"], reply["draining"], result["code"]) == (1, 0, 0)
        assert result["generation"] == given[name]["generation"]
        assert result["state"] == NUMBERS["UNREGISTERED"]["GONE"]
    reply, _ = owner.unregister_wait(serials[2])
    assert (reply["gone"], reply["draining"]) == (3, 0)
    assert lasting.region(admin, "later")["generation"] == later["generation"]


def test_the_fast_path_meets_no_restart(lasting):
    """Acquire and release in the page go on while there is no broker; what was released then is seen by the next one."""
    owner, consumer, admin = (lasting.peer(uid) for uid in (OWNER, CONSUMER, ADMIN))
    given = {name: owner.give(name) for name in ("r", "retires")}
    consumer.page_attach()
    hold(consumer, given, *given)
    owner.unregister("retires")
    with lasting.down():
        for _ in range(100):
            assert consumer.page_do("acquire", given["r"]["slot"], given["r"]["generation"])
            consumer.page_do("count", given["r"]["slot"], "released")
        consumer.page_do("count", given["r"]["slot"], "released")
        # nobody is there to be told
        consumer.page_do("count", given["retires"]["slot"], "released")
    admin.resume()
    # the consumer has not come back
    until(lambda: not lasting.region(admin, "retires"), "it is gone")
    assert lasting.region(admin, "r")["leases"] == 0


# ---- who may resume ----


def test_who_may_resume(lasting):
    owner, admin = lasting.peer(OWNER), lasting.peer(ADMIN)
    owner.give("r")
    fields = owner.resume_fields()
    # one that is connected; without the token one does not learn even that
    assert refused(owner.hello_beside, **fields) == "BUSY"
    assert refused(owner.hello_beside, **{**fields, "token": bytes(16)}) == "STALE"
    own = owner.hello_beside()
    lasting.kill()
    admin.resume()

    def refusal(uid, **changed):
        peer = lasting.peer(uid, hello=False)
        try:
            return refused(peer.hello, **{**fields, **changed})
        finally:
            assert peer.ended()
            peer.kill()

    assert refused(owner.hello_beside, **{**fields, "token": bytes(16)}) == "PERMISSION"
    assert refused(owner.hello_beside, **{**fields, "token": own["token"]}) == "PERMISSION"
    assert refused(owner.hello_beside, **{**fields, "session": fields["session"] + 1000}) == "STALE"
    # the right token in other processes
    assert refusal(OWNER) == "PERMISSION"
    assert owner.hello_of_child(**fields) == "PERMISSION"
    if ROOT:
        assert refusal(OTHER) == refusal(ADMIN) == "PERMISSION"
    owner.resume()
    assert owner.resume_fields() == fields
    assert refused(owner.hello_beside, **fields) == "BUSY"
    owner.ping()
    assert lasting.region(admin, "r")["session"] == fields["session"]
    # over is over
    owner.close()
    until(lambda: not lasting.region(admin, "r"), "its end")
    assert refused(owner.hello_beside, **fields) == "STALE"
    lasting.kill()
    assert refused(owner.hello_beside, **fields) == "STALE"
    admin.resume()


def test_sessions_that_did_not_open_in_order(lasting):
    """The first to connect is the last to say HELLO; both come back, and no number is given twice."""
    first, second = lasting.peer(OWNER, hello=False), lasting.peer(OWNER)
    numbers = [first.hello()["session"], second.session]
    for peer, name in ((first, "first"), (second, "second")):
        peer.give(name)
    lasting.kill()
    resume_all(first, second)
    late = lasting.peer(OWNER)
    assert len({*numbers, late.session}) == 3 and late.session > max(numbers)


def test_quotas_leave_room_to_come_back(start):
    """A session that is away is charged for; the connection that it comes back by must find room all the same."""
    lasting = start(kind=LastingBroker, config="[quota]\nsessions = 3\n")
    peers = [lasting.peer(OWNER) for _ in range(3 if ROOT else 2)]
    admin = lasting.peer(ADMIN)
    for i, peer in enumerate(peers):
        peer.give(f"r{i}")
    before = settled(admin)
    lasting.kill()
    # which is no way round the quota
    assert refused(peers[0].hello_beside) == "QUOTA"
    resume_all(admin, *peers)
    is_as_before(admin, before)
    with pytest.raises((Refused, Disconnected)):
        peers[0].hello_beside()


def test_fds_leave_room_to_come_back(start):
    """What was recovered is charged once: after the restart there is as much room as before."""
    lasting = start(kind=LastingBroker, nofile=256)
    owner, admin = lasting.peer(OWNER), lasting.peer(ADMIN)

    def fill(prefix):
        for i in range(256):
            try:
                owner.give(f"{prefix}{i}")
            except Refused as error:
                assert error.name in ("NO_FDS", "QUOTA"), error
                return i
        raise AssertionError("no limit")

    n = fill("first")
    for i in range(n // 2, n):
        owner.unregister(f"first{i}")
    before = settled(admin)
    lasting.kill()
    resume_all(owner, admin)
    is_as_before(admin, before)
    # fds that wait to be closed have no room for others
    settled(admin)
    assert abs(fill("second") - (n - n // 2)) <= 3


# ---- requests in flight ----


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "unread"])
def test_requests_make_their_effect_once(lasting, answered):
    """The broker is killed after each request: when it has answered it, or before it has read it. It is sent again."""
    owner, consumer, admin = (lasting.peer(uid) for uid in (OWNER, CONSUMER, ADMIN))

    def do(peer, *request, **how):
        if answered:
            first = getattr(peer, request[0])(*request[1:], **how)
            serial = peer.last_serial()
            lasting.kill()
        else:
            with lasting.deaf():
                serial = peer.only_send(*request, **how)
        resume_all(owner, consumer, admin)
        again = peer.repeat(serial, *request, **how)
        if request[0] == "unregister":
            # the broker has forgotten what it was that is gone
            assert again.pop("generation") == (0 if answered else given["generation"])
        assert not answered or again == first or again.items() <= first.items(), request
        return again

    given = do(owner, "give", "r")
    assert [entry["generation"] for entry in admin.status(name="r", match="EXACT")] == [given["generation"]]
    window = do(owner, "again", "window", "r", offset=4096, size=4096)
    assert window["object"] == given["object"] and names_of(admin) == {"r", "window"}
    do(consumer, "page_attach")
    assert do(consumer, "page_map", given["slot"], given["generation"])["object"] == given["object"]
    lease = do(consumer, "lookup", "r")["lease"]
    assert lasting.region(admin, "r")["leases"] == 1
    assert consumer.page_do("acquire", given["slot"], given["generation"])
    assert lasting.region(admin, "r")["leases"] == 2
    do(consumer, "release", lease)
    assert lasting.region(admin, "r")["leases"] == 1
    consumer.page_do("release", given["slot"])
    do(consumer, "unmap", given["slot"], given["generation"])
    assert do(owner, "unregister", "r")["state"] == NUMBERS["UNREGISTERED"]["GONE"]
    assert names_of(admin) == {"window"}
    replaced = do(owner, "give", "window", flags=REPLACE)
    assert [entry["generation"] for entry in admin.status()] == [replaced["generation"]]


def test_an_unregister_that_is_repeated_means_what_it_meant(lasting):
    """By name, and whoever has the name since stays; also a name that was not there, and a revoked one that is held."""
    owner, other, consumer, admin = (lasting.peer(uid) for uid in (OWNER, OTHER, CONSUMER, ADMIN))
    for name in ("idle", "held", "forced"):
        owner.give(name)
    consumer.page_attach()
    hold(consumer, {name: lasting.region(admin, name) for name in ("held", "forced")}, "held", "forced")
    requests = [("idle", {}), ("held", {}), ("forced", {"mode": "FORCE"}), ("nothing", {})]
    first = [owner.unregister_many([name], **how) for name, how in requests]
    serials = [owner.last_serial() - len(requests) + 1 + i for i in range(len(requests))]
    later = {"idle": owner.give("idle"), "held": other.give("held"), "forced": owner.give("forced"),
             "nothing": owner.give("nothing")}
    lasting.kill()
    resume_all(owner, other, consumer, admin)
    again = [owner.repeat(serial, "unregister_many", [name], **how) for serial, (name, how) in zip(serials, requests)]
    for (_, (then,)), (_, (now,)) in zip(first, again):
        assert (now["code"], now["state"]) == (then["code"], then["state"])
    for name, entry in later.items():
        found = lasting.region(admin, name)
        assert (found["generation"], found["state"]) == (entry["generation"], STATE["ACTIVE"]), name
    # an answer is due for the revoked one too, who waits or not
    (reply, (result,)) = owner.repeat(serials[2], "unregister_many", ["forced"], mode="FORCE", wait=True)
    assert (reply["draining"], result["state"]) == (0, NUMBERS["UNREGISTERED"]["GONE"])


def test_a_lease_that_was_revoked_meanwhile(lasting):
    """The LOOKUP's lease is revoked and its name has a new region: asked again, it is a lease on that, and holds it."""
    owner, consumer, admin = (lasting.peer(uid) for uid in (OWNER, CONSUMER, ADMIN))
    owner.give("r")
    first, serial = consumer.lookup("r"), consumer.last_serial()
    owner.unregister("r", mode="FORCE")
    new = owner.give("r")
    lasting.kill()
    resume_all(owner, consumer, admin)
    again = consumer.repeat(serial, "lookup", "r")
    assert again["generation"] == new["generation"] and again["lease"] != first["lease"]
    assert lasting.region(admin, "r")["leases"] == 1
    assert {client["session"]: client["leases"] for client in admin.clients()}[consumer.session] == 1
    consumer.release(again["lease"])


# ---- who does not come back ----


def test_processes_that_end_while_the_broker_is_down(lasting):
    owner, consumer, admin = (lasting.peer(uid) for uid in (OWNER, CONSUMER, ADMIN))
    keeps = lasting.peer(OTHER)
    given = {"theirs": owner.give("theirs"), "mine": keeps.give("mine")}
    consumer.page_attach()
    hold(consumer, given, *given)
    with lasting.down():
        owner.kill()
        consumer.kill()
    resume_all(admin, keeps)
    until(lambda: names_of(admin) == {"mine"}, lambda: f"the dead owner's region retires: {admin.status()}")
    until(lambda: len(admin.clients()) == 2, "their sessions are over")
    assert lasting.region(admin, "mine")["leases"] == 0
    keeps.unregister("mine")


def test_time_alone_ends_nothing(lasting):
    """A consumer that uses the fast path only never comes back, and an owner may take its time; both are as they were."""
    owner, consumer, admin = (lasting.peer(uid) for uid in (OWNER, CONSUMER, ADMIN))
    given = {name: owner.give(name) for name in ("r", "retires")}
    consumer.page_attach()
    hold(consumer, given, *given)
    owner.unregister("retires")
    lasting.kill()
    admin.resume()
    # seconds, in which a timer that reaps would have run
    end = time.monotonic() + 3
    until(lambda: time.monotonic() > end, "the end of the time")
    assert names_of(admin) == set(given)
    assert {name: lasting.region(admin, name)["leases"] for name in given} == {"r": 1, "retires": 1}
    assert consumer.page_do("attached") and consumer.page_do("is_open")
    # it is killed without having been back
    consumer.kill()
    until(lambda: names_of(admin) == {"r"}, "what it held is gone")
    assert lasting.region(admin, "r")["leases"] == 0
    owner.resume()
    owner.unregister("r")


def test_a_hang_up_that_the_broker_did_not_see(lasting):
    """
    The process ended, or the connection alone, and the broker was killed before it looked. A process that lives may
    still hold what it holds, so its session goes on until it resumes it and ends it, or ends.
    """
    dead, closed, admin = (lasting.peer(uid) for uid in (OWNER, OTHER, ADMIN))
    dead.give("dead's")
    closed.give("closed's")
    fields = closed.resume_fields()
    with lasting.deaf():
        dead.kill()
        closed.close()
    admin.resume()
    until(lambda: names_of(admin) == {"closed's"}, lambda: f"the dead one's is gone: {admin.status()}")
    assert {client["session"]: client["flags"] for client in admin.clients()}[fields["session"]] & AWAY
    closed.resume()
    closed.close()
    until(lambda: not admin.status(), "it is over")


def test_a_hang_up_that_the_broker_had_begun_with(lasting):
    """Sessions that end in the very moment of the kill leave nothing, whether the dead broker got to them or not."""
    admin = lasting.peer(ADMIN)
    for i in range(5):
        peers = [lasting.peer(OWNER) for _ in range(4)]
        for j, peer in enumerate(peers):
            peer.give(f"r{i}.{j}")
        for peer in peers:
            peer.kill()
        lasting.kill()
        admin.resume()
        until(lambda: not admin.status() and len(admin.clients()) == 1, lambda: f"it is over: {admin.status()}")


def test_a_process_that_ends_with_the_broker(lasting):
    """A broker that ends in order looks at a death and at SIGTERM in one turn: the next one finds no contradiction."""
    admin = lasting.peer(ADMIN)
    for i in range(3):
        owners = [lasting.peer(OWNER) for _ in range(4)]
        for owner in owners:
            owner.give(f"r{i}.{owner.pid}")
        with lasting.deaf(signal.SIGTERM):
            for owner in owners:
                owner.kill()
        admin.resume()
        until(lambda: not admin.status(), "their regions are gone")
    assert lasting.log().count("recovered ") == lasting.log().count(" 0 slots mended") == 3


def test_detached_sessions_end_after_a_restart(start):
    """One that the broker ended counts until its page is unmapped, also when that is seen by a later broker."""
    lasting = start(kind=LastingBroker, config="retire_timeout = 100ms\n")
    owner, consumer, admin = (lasting.peer(uid) for uid in (OWNER, CONSUMER, ADMIN))
    given = {"r": owner.give("r")}
    consumer.page_attach()
    hold(consumer, given, "r")
    owner.unregister("r")
    until(lambda: admin.stats()["sessions_detached"] == 1, "it is detached")
    before = settled(admin)
    lasting.kill()
    resume_all(owner, admin)
    is_as_before(admin, before)
    assert not consumer.page_do("attached")
    assert refused(consumer.hello_beside, **consumer.resume_fields()) == "STALE"
    # the process goes on; only that it has unmapped its page tells
    consumer.page_do("close")
    until(lambda: not admin.status() and not admin.stats()["sessions_detached"], lambda: f"{admin.stats()}")


# ---- nothing leaks ----


def test_no_fds_leak(lasting):
    """As many fds as before after 20 restarts, in the broker, its supervisor and its peers."""
    peers = owner, consumer, admin = [lasting.peer(uid) for uid in (OWNER, CONSUMER, ADMIN)]
    given = {f"r{i}": owner.give(f"r{i}") for i in range(10)}
    consumer.page_attach()
    hold(consumer, given, *given)
    owner.unregister("r0")
    before = settled(admin)

    def fds():
        # others than root do not see those of programs that are not dumpable
        parties = [lasting.pid, lasting.process.pid] if ROOT else []
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in parties + [peer.pid for peer in peers]]

    lasting.kill()
    resume_all(*peers)
    first = quiet(fds)
    for _ in range(19):
        lasting.kill()
        resume_all(*peers)
    is_as_before(admin, before)
    until(lambda: fds() == first, lambda: f"{first} fds then, {fds()} now")
