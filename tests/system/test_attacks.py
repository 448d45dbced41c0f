# SPDX-License-Identifier: Apache-2.0
"""What attacks on the broker have found, each named after what broke."""

import pytest
from broker import ADMIN, OTHER, OWNER, ROOT, until
from protocol_client import ANY_UID

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
