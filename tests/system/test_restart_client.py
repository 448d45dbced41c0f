# SPDX-License-Identifier: Apache-2.0
"""The library waits through restarts: not one of its calls fails, whatever was in flight when the broker was killed."""

import os
import random
import re
import subprocess

import pytest
from broker import ADMIN, DEADLINE, OWNER, become, until
from programs import program
from protocol_client import ERROR_NAMES

KILLS = 12


class Busy:
    """client-restart, which makes calls all the time."""

    def __init__(self, broker):
        self.process = subprocess.Popen([program("client-restart"), broker.socket], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, preexec_fn=lambda: become(OWNER))

    def rounds(self):
        """How many each of its threads has made."""
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline().strip()
        assert "=" in line and "line" not in line, f"{line!r}, then {self.process.communicate(timeout=DEADLINE)[0]!r}"
        return {name: int(n) for name, n in (word.split("=") for word in line.split())}

    def goes_on(self):
        """Each thread makes another round or two from here on."""
        before = self.rounds()
        until(lambda: all(n > before[name] + 1 for name, n in self.rounds().items()),
              lambda: f"{before}, then {self.rounds()}")

    def end(self):
        rest, _ = self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 0, rest

    def fds(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@pytest.fixture
def busy(lasting):
    one = Busy(lasting)
    yield one
    one.process.kill()
    one.process.communicate()


def test_no_call_fails(lasting, busy):
    admin, moments = lasting.peer(ADMIN), random.Random(3)
    busy.goes_on()
    for _ in range(KILLS):
        # somewhere in the middle of some round
        for _ in range(moments.randrange(4)):
            busy.rounds()
        lasting.kill()
        busy.goes_on()
    admin.resume()
    assert [entry["name"] for entry in admin.status() if entry["name"] == b"stays"] == [b"stays"]
    busy.end()
    until(lambda: not admin.status() and len(admin.clients()) == 1, lambda: f"it leaves nothing: {admin.status()}")


def test_calls_wait_while_there_is_no_broker(lasting, busy):
    """All that ask the broker stand still; the fast path does not."""
    busy.goes_on()
    with lasting.down():
        until(lambda: stands_still(busy), "the others wait")
        before = busy.rounds()
        until(lambda: busy.rounds()["page"] > before["page"] + 1000, "the fast path goes on")
    busy.goes_on()
    busy.end()


def stands_still(busy):
    before = busy.rounds()
    until(lambda: busy.rounds()["page"] > before["page"] + 1000, "rounds of the fast path")
    after = busy.rounds()
    return all(after[name] == before[name] for name in before if name != "page")


def test_no_fds_leak(lasting, busy):
    """Neither in the library nor in the broker, while requests with fds are in flight."""
    busy.goes_on()
    for _ in range(3):
        lasting.kill()
        busy.goes_on()
    # what rounds have open for a moment comes and goes: the least is what stays
    first = min(busy.fds() for _ in range(100))
    for _ in range(10):
        lasting.kill()
        busy.goes_on()
    until(lambda: busy.fds() <= first, lambda: f"{first} at first, {busy.fds()} now")
    busy.end()


def test_after_the_end_of_the_supervisor(lasting, busy):
    """The fast path stops with DETACHED, and what asks the next broker is told that the session is over."""
    busy.goes_on()
    lasting.process.terminate()
    assert lasting.process.wait(DEADLINE) == 0
    lasting.launch(lasting.prepare)
    until(lambda: ": ready" in lasting.log(), lasting.log)
    rest, _ = busy.process.communicate(timeout=DEADLINE)
    number = int(re.search(r"^line \d+: .* is (-?\d+) ", rest, re.M)[1])
    assert ERROR_NAMES.get(number) in ("DETACHED", "STALE"), rest
