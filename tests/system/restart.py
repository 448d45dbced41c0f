# SPDX-License-Identifier: Apache-2.0
"""Brokers that tests kill: under `shmbrokerd --supervise`, which starts them again, and what must be as it was then."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess

from broker import BUILD, Broker, until
from protocol_client import DEADLINE, NUMBERS

# what differs from moment to moment, not by what happened
MOMENTARY = ("age", "age_ns", "unread", "length")


class LastingBroker(Broker):
    """A supervisor with its broker, whose pid is .pid. The program is a copy, which a test may replace."""

    def launch(self, prepare):
        self.prepare = prepare
        self.program = self.socket.parent / "shmbrokerd"
        # one that is executed still cannot be written over
        self.program.unlink(missing_ok=True)
        shutil.copy(BUILD / "shmbrokerd", self.program)
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([self.program, "--supervise", *self.arguments], stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, env=self.environment, preexec_fn=prepare, cwd="/")

    def _children(self):
        main = self.process.pid
        return [int(pid) for pid in pathlib.Path(f"/proc/{main}/task/{main}/children").read_text().split()
                if self._runs(pid)]

    @staticmethod
    def _runs(pid):
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            # the supervisor has waited for it meanwhile
            return False

    @property
    def pid(self):
        return until(self._children, self.log)[0]

    def said(self, text, times=1):
        until(lambda: self.log().count(text) >= times, lambda: f"{text!r} in {self.log()[-8000:]}")

    def kill(self, number=signal.SIGKILL):
        """Ends the broker and waits for the next one, which serves."""
        ready = self.log().count(": ready")
        os.kill(self.pid, number)
        self.said(": ready", ready + 1)

    @contextlib.contextmanager
    def down(self, number=signal.SIGKILL):
        """Inside there is no broker."""
        ready = self.log().count(": ready")
        broker = self.pid
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            os.kill(broker, number)
            until(lambda: not self._children(), "the broker's end")
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)
        self.said(": ready", ready + 1)

    @contextlib.contextmanager
    def deaf(self, number=signal.SIGKILL):
        """Inside the broker reads nothing; then it is ended, and the next one serves."""
        ready = self.log().count(": ready")
        broker = self.pid
        os.kill(broker, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(broker, number)
            if number != signal.SIGKILL:
                os.kill(broker, signal.SIGCONT)
        self.said(": ready", ready + 1)


def lasting(entry):
    """What of an entry stays as it is."""
    return {key: value for key, value in entry.items() if key not in MOMENTARY}


def state_of(admin):
    """Everything that a restart leaves as it was, as an admin sees it: regions, their holders, sessions, accounts."""
    regions = [dict(lasting(entry), holders=[lasting(holder) for holder in entry["holders"]]) for entry in admin.status()]
    clients = [lasting(entry) for entry in admin.clients()]
    for client in clients:
        client["flags"] &= ~NUMBERS["CLIENT"]["AWAY"]
    # not held_fds, in which are also those that a peer has not yet read, as far as the broker knows
    stats = {key: value for key, value in admin.stats(accounts=True).items()
             if (key[0].startswith("held_") and key[0] != "held_fds") or key[0] in ("regions", "objects", "parked", "sessions", "sessions_detached")}
    return {"regions": regions, "clients": clients, "stats": stats}


def settled(admin):
    """The state once nothing is being closed."""
    until(lambda: not admin.stats()["fds_closing"], "all is closed")
    return state_of(admin)


def differences(before, after):
    """What is not the same, by part and key."""
    found = []
    for part, then in before.items():
        now = after[part]
        if isinstance(then, dict):
            found += [(key, then.get(key), now.get(key)) for key in then.keys() | now.keys() if then.get(key) != now.get(key)]
        else:
            found += [("was", entry) for entry in then if entry not in now] + [("is", entry) for entry in now if entry not in then]
    return found


def is_as_before(admin, before):
    """Once the connections that became old sessions are done with, nothing differs."""
    until(lambda: not differences(before, state_of(admin)), lambda: f"{differences(before, state_of(admin))}")


def regions_text(ctl, uid):
    """The regions of `shmbrokerctl status --json`."""
    return [lasting(region) for region in ctl.regions(uid=uid)]


def quiet(measure, times=30):
    """What @measure gives when it has given the same so many times in a row."""
    seen = []

    def is_quiet():
        seen.append(measure())
        return len(seen) > times and len({str(value) for value in seen[-times:]}) == 1

    until(is_quiet, lambda: f"still changing: {seen[-times:]}")
    return seen[-1]


def starting_empty(broker, why):
    """The broker says loudly that it starts empty, and why."""
    until(lambda: "STARTING EMPTY" in broker.log(), broker.log, 2 * DEADLINE)
    line = [line for line in broker.log().splitlines() if "STARTING EMPTY" in line][-1]
    assert why in line, line
