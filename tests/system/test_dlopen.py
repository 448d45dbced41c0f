# SPDX-License-Identifier: Apache-2.0
"""The library loaded by a program that runs already, and unloaded again."""

import subprocess

from broker import BUILD, DEADLINE, OWNER, become
from programs import program


def test_threads_are_older_than_the_library(broker):
    """Their leases count, and they may end after the library was closed."""
    library = BUILD / ".libs/libshmbroker.so"
    done = subprocess.run([program("client-dlopen"), broker.socket, library], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=6 * DEADLINE, preexec_fn=lambda: become(OWNER))
    assert done.returncode == 0, done.stdout + done.stderr
