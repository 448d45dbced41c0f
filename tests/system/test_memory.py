# SPDX-License-Identifier: Apache-2.0
"""Memory as the C library makes it: sealed, read-only, allocated, bound to a node, of huge pages; and many windows."""

import pathlib
import subprocess

import pytest
from broker import ADMIN, CONSUMER, DEADLINE, OWNER, ROOT, become, until
from programs import program
from protocol_client import NUMBERS

POOL = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")


def run(broker, case):
    done = subprocess.run([program("client-memory"), broker.socket, case], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL, timeout=2 * DEADLINE, preexec_fn=lambda: become(OWNER))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", ["default", "read-only", "populate", "shortage", "role", "numa", "huge-shortage", "windows"])
def test_memory_is_as_it_was_asked_for(broker, case):
    run(broker, case)


@pytest.fixture
def huge_pages():
    """Two pages more in the pool of the machine, and as many as before at the end."""
    if not ROOT:
        pytest.skip("needs root: only root may add huge pages to the machine's pool")
    before = int(POOL.read_text())

    def grown():
        # where memory is in pieces the kernel makes room, but not at the first try for sure
        POOL.write_text(str(before + 2))
        return int(POOL.read_text()) >= before + 2

    try:
        until(grown, "two huge pages to spare on this machine")
        yield
    finally:
        POOL.write_text(str(before))


def test_huge_pages_are_shared(huge_pages, broker):  # pylint: disable=unused-argument
    run(broker, "huge")


def test_memory_that_is_filled_is_sparse_no_longer(broker):
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    sparse = NUMBERS["REGION"]["SPARSE"]
    owner.give("r", size=8192)
    assert broker.region(admin, "r")["flags"] & sparse
    owner.poke("r", b"x" * 8192)
    assert not broker.region(admin, "r")["flags"] & sparse


def test_only_lost_leases_are_deaths_of_consumers(broker):
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    given = owner.give("r")
    for holds, deaths in ((False, 0), (True, 1)):
        consumer = broker.peer(CONSUMER)
        consumer.page_attach()
        consumer.page_map(given["slot"], given["generation"])
        if holds:
            assert consumer.page_do("acquire", given["slot"], given["generation"])
        consumer.kill()
        until(lambda: admin.stats()["sessions"] == 2, "the consumer's end")
        assert admin.stats()["consumer_deaths"] == deaths
