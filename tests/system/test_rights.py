# SPDX-License-Identifier: Apache-2.0
"""Who may do what: roles by configuration, reload, delegates, and administrators of another pid namespace."""

import ctypes
import os
import signal

import pytest
from broker import ADMIN, CONSUMER, KEEPER, LIBC, OTHER, OWNER, ROOT, until
from calls import Calls
from protocol_client import ERROR_NAMES, MODE, NUMBERS, REGION, STATE, Client, Refused

CLONE_NEWPID = 0x20000000
KEPT = REGION["KEPT"]
KEEP, REPLACE = (NUMBERS["REGISTER"][name] for name in ("KEEP", "REPLACE"))
needs_users = pytest.mark.skipif(not ROOT, reason="needs root: it is about several users")


def refused(call, code):
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.name == code, caught.value


@needs_users
def test_a_delegate_acts_for_another_user(start):
    broker = start(config=f"[access]\nadmin = {ADMIN}\nkeep = {KEEPER}\ndelegate = {OTHER}\n[quota]\nregions = 2\n", access=False)
    admin, delegate = broker.peer(ADMIN), broker.peer(OTHER)
    given = delegate.give("for the owner", principal=OWNER)
    assert given["code"] == 0
    assert broker.region(admin, "for the owner")["uid"] == OWNER
    # the principal pays, and may retire it
    owner = broker.peer(OWNER)
    assert owner.give("mine")["code"] == 0
    refused(lambda: owner.give("one too many"), "QUOTA")
    assert owner.unregister("for the owner", wait=True)["code"] == 0
    delegate.kill()


@needs_users
def test_nobody_else_acts_for_another_user(broker):
    owner, other = broker.peer(OWNER), broker.peer(OTHER)
    owner.give("r")
    for call in (lambda: other.give("not mine to give", principal=OWNER), lambda: other.unregister("r", principal=OWNER),
                 lambda: other.unregister_many(scope="UID", principal=OWNER),
                 # an administrator is no delegate
                 lambda: broker.peer(ADMIN).unregister("r", principal=OWNER)):
        refused(call, "PERMISSION")
    # for oneself everybody may
    other.give("own", principal=OTHER)
    assert other.unregister("own", principal=OTHER, wait=True)["code"] == 0
    assert [entry["name"] for entry in owner.status()] == [b"r"]


def delegating(start, more=""):
    """A broker with a delegate of two users, who is an administrator too: (broker, delegate, owner, keeper, admin)."""
    broker = start(config=f"[access]\nadmin = {ADMIN} {OTHER}\nkeep = {KEEPER} {OTHER}\ndelegate = {OTHER}\n{more}",
                   access=False)
    return (broker, *(broker.peer(uid) for uid in (OTHER, OWNER, KEEPER, ADMIN)))


@needs_users
def test_a_delegate_keeps_regions_for_another_user(start):
    broker, delegate, owner, _, admin = delegating(start, "[quota]\nregions = 2\n")
    delegate.give("kept", principal=OWNER, flags=KEEP)
    entry = broker.region(admin, "kept")
    assert (entry["uid"], entry["session"], entry["flags"] & KEPT) == (OWNER, 0, KEPT)
    assert admin.stats(accounts=True)["held_regions", OWNER] == 1
    assert admin.stats(accounts=True).get(("held_regions", OTHER), 0) == 0
    # without the session that asked for it
    delegate.kill()
    until(lambda: all(client["uid"] != OTHER for client in admin.clients()), "the end of the delegate's session")
    assert broker.region(admin, "kept")["state"] == STATE["ACTIVE"]
    # another session of the delegate retires it, and the account is free again
    again = broker.peer(OTHER)
    assert again.unregister("kept", principal=OWNER, wait=True)["code"] == 0
    assert admin.stats(accounts=True).get(("held_regions", OWNER), 0) == 0
    owner.give("a")
    owner.give("b")
    again.kill()


@needs_users
def test_whoever_names_a_principal_has_its_rights_and_no_other(start):
    broker, delegate, owner, keeper, admin = delegating(start)
    delegate.give("own")
    owner.give("owner's")
    keeper.give("keeper's", flags=KEEP)
    delegate.give("for the keeper", principal=KEEPER)
    # neither what is the delegate's nor what an administrator may
    for name in ("own", "owner's"):
        refused(lambda name=name: delegate.unregister(name, principal=KEEPER), "PERMISSION")
    refused(lambda: delegate.unregister("own", principal=OWNER), "PERMISSION")
    # not even under its own name: who asks for a user does not ask for an administrator
    refused(lambda: delegate.unregister("owner's", principal=OTHER), "PERMISSION")
    reply, results = delegate.unregister_many(["keeper's", "owner's", "for the keeper", "none"], principal=KEEPER)
    assert [ERROR_NAMES.get(result["code"]) for result in results] == [None, "PERMISSION", None, "NOT_FOUND"]
    assert reply["count"] == 4
    # all of a user
    keeper.give("one", flags=KEEP)
    keeper.give("two")
    reply, _ = delegate.unregister_many(scope="UID", principal=KEEPER)
    assert (reply["gone"], reply["draining"]) == (2, 0)
    assert {entry["name"] for entry in admin.status()} == {b"own", b"owner's"}
    # and without a principal an administrator retires what it likes
    assert delegate.unregister("owner's", wait=True)["code"] == 0
    broker.lives()


@needs_users
def test_a_delegate_replaces_only_what_is_its_principals(start):
    broker, delegate, owner, keeper, admin = delegating(start)
    names = ("own", "owner's", "keeper's", "kept", "given")
    delegate.give("own")
    owner.give("owner's")
    keeper.give("keeper's")
    keeper.give("kept", flags=KEEP)
    delegate.give("given", principal=KEEPER)
    generations = {name: broker.region(admin, name)["generation"] for name in names}
    taken = set()
    for name in names:
        try:
            delegate.give(name, principal=KEEPER, flags=REPLACE | KEEP)
            taken.add(name)
        except Refused as refusal:
            assert refusal.name == "EXISTS"
    # a kept one of the principal, and what the session itself registered for it
    assert taken == {"kept", "given"}
    assert {name for name in names if broker.region(admin, name)["generation"] != generations[name]} == taken
    for name in taken:
        keeper.unregister(name, wait=True)


@needs_users
def test_nobody_acts_for_users_that_the_host_cannot_tell_apart(start):
    _, delegate, *_ = delegating(start)
    with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
        nobody = int(file.read())
    delegate.give("r", principal=nobody)
    refused(lambda: delegate.give("kept", principal=nobody, flags=KEEP), "PERMISSION")
    refused(lambda: delegate.unregister("r", principal=nobody), "PERMISSION")
    refused(lambda: delegate.unregister_many(scope="UID", principal=nobody), "PERMISSION")
    assert delegate.unregister("r", wait=True)["code"] == 0


@needs_users
def test_the_library_acts_for_another_user(start):
    broker, _, owner, keeper, admin = delegating(start)
    owner.give("owner's")
    keeper.give("kept", flags=KEEP)
    with Calls(broker, OTHER) as calls:
        assert calls.call("adopt", "given", KEEPER + 1, KEEP) == "OK"
        assert calls.results("unregister", KEEPER + 1, MODE["LAZY"], "kept", "owner's", "none", "own") == [
            "OK", "PERMISSION", "NOT_FOUND", "NOT_FOUND"]
        assert calls.results("unregister", KEEPER + 1, MODE["STRICT"], "given") == ["OK"]
    with Calls(broker, CONSUMER) as calls:
        assert calls.results("unregister", KEEPER + 1, MODE["LAZY"], "kept") == "PERMISSION"
        assert calls.results("unregister", 0, MODE["LAZY"], "owner's", "\x01") == ["PERMISSION", "BAD_NAME"]
    assert [entry["name"] for entry in admin.status()] == [b"owner's"]


@needs_users
def test_roles_go_to_those_who_are_named(start):
    broker = start(config=f"[access]\nadmin = {ADMIN}\nowner = {OWNER}\nconsumer = {CONSUMER}\n", access=False)
    owner, consumer = broker.peer(OWNER), broker.peer(CONSUMER)
    assert owner.give("r")["code"] == 0
    refused(lambda: owner.lookup("r"), "PERMISSION")
    assert consumer.lookup("r")["code"] == 0
    refused(lambda: broker.peer(OTHER), "PERMISSION")
    refused(lambda: broker.peer(OWNER, roles=4), "PERMISSION")


def test_a_reload_changes_rights_for_new_requests_only(start):
    if not ROOT:
        pytest.skip("needs root: rights differ between users")
    broker = start(config=f"[access]\nadmin = {ADMIN}\nowner = {OWNER}\n", access=False)
    owner = broker.peer(OWNER)
    assert owner.give("held")["code"] == 0
    conf = broker.socket.parent / "conf"
    conf.write_text(conf.read_text().replace(f"owner = {OWNER}", f"owner = {OTHER}"))
    os.kill(broker.pid, signal.SIGHUP)
    other = until(lambda: try_peer(broker), "the new owner")
    assert other.give("new")["code"] == 0
    # the first owner may pass nothing any more, in whichever way the kernel or the broker says it
    with pytest.raises((Refused, PermissionError)):
        owner.give("too late")
    assert broker.region(other, "held") is not None


def try_peer(broker):
    try:
        return broker.peer(OTHER, roles=1)
    except Refused:
        return None


def test_root_of_another_pid_namespace_is_no_admin(broker):
    if not ROOT:
        pytest.skip("needs root: makes a pid namespace")

    def roles(namespace):
        """The roles of a root process, in a pid namespace of its own or not."""
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            try:
                if namespace:
                    assert not LIBC.unshare(ctypes.c_int(CLONE_NEWPID))
                grandchild = os.fork()
                if not grandchild:
                    os.write(theirs, bytes([Client(broker.socket).hello()["roles"]]))
                    os._exit(0)
                os.waitpid(grandchild, 0)
            finally:
                os._exit(0)
        os.close(theirs)
        os.waitpid(child, 0)
        try:
            return os.read(ours, 1)[0]
        finally:
            os.close(ours)

    assert roles(namespace=False) & 4
    assert roles(namespace=True) & 7 == 3
