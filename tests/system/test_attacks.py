# SPDX-License-Identifier: Apache-2.0
"""What attacks on the broker have found, each named after what broke."""

from broker import ADMIN, OWNER, ROOT, until


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
