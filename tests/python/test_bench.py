# SPDX-License-Identifier: Apache-2.0
"""The measurements of the Python module run, and have a figure for each subject; which one is not asserted."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "libbroker/python/bench"


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("name", ["lease", "pool"])
def test_bench(name):
    done = subprocess.run([sys.executable, "-B", BENCH / f"{name}.py", "--rounds", "1", "--json"], capture_output=True,
                          text=True, timeout=300, check=True)
    rows = json.loads(done.stdout)
    assert len(rows) == 5 and rows[0]["ratio"] == 1 and all(row["ns"] > 0 for row in rows)
