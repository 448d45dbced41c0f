# SPDX-License-Identifier: Apache-2.0
"""Memory as the C library makes it: sealed, read-only, allocated, bound to a node, of huge pages; and many windows."""

import pathlib
import subprocess

import pytest
from broker import DEADLINE, OWNER, ROOT, become
from programs import program

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
    POOL.write_text(str(before + 2))
    try:
        assert int(POOL.read_text()) == before + 2, "the machine has no two huge pages to spare"
        yield
    finally:
        POOL.write_text(str(before))


def test_huge_pages_are_shared(huge_pages, broker):  # pylint: disable=unused-argument
    run(broker, "huge")
