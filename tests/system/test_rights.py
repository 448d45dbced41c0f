# SPDX-License-Identifier: Apache-2.0
"""Who may do what: roles by configuration, reload, delegates, and administrators of another pid namespace."""

import ctypes
import os
import signal

import pytest
from broker import ADMIN, CONSUMER, KEEPER, LIBC, OTHER, OWNER, ROOT, until
from protocol_client import Client, Refused

CLONE_NEWPID = 0x20000000
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
    refused(lambda: broker.peer(OTHER).give("not mine to give", principal=OWNER), "PERMISSION")


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
