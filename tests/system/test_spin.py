# SPDX-License-Identifier: Apache-2.0
"""A broker that looks for work before it sleeps, and one that has nothing to do."""

import os
import pathlib
import time

import pytest

from broker import OTHER
from protocol_client import Client

SECOND = 1.0


def switches(pid):
    """Times that a thread of the process gave up the CPU to wait, all threads together."""
    total = 0
    for status in pathlib.Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            # a worker of io_uring that has ended
            continue
        for line in lines:
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


@pytest.mark.parametrize("spin", ["no", "yes"])
def test_idle_wakes_nobody(start, spin):
    """Also with connections that are open: what it did not sleep through would be counted."""
    broker = start(config=f"spin = {spin}")
    peers = [broker.peer() for _ in range(3)]
    for peer in peers:
        peer.ping()
    # closes and the service manager's status line are over when two looks in a row are alike
    deadline, before = time.monotonic() + 10, switches(broker.pid)
    while time.monotonic() < deadline:
        time.sleep(SECOND)
        now = switches(broker.pid)
        if now == before:
            break
        before = now
    assert now == before
    for peer in peers:
        peer.ping()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: nobody spins")
def test_spinning_answers_as_well(start):
    for spin, spins in (("yes", True), ("no", False)):
        broker = start(config=f"spin = {spin}")

        def consumer(socket=broker.socket):
            with Client(socket) as client:
                client.hello()
                page = client.attach()
                for _ in range(200):
                    client.ping()
                return page.header["spin_us"]

        assert (broker.run(OTHER, consumer) > 0) == spins
