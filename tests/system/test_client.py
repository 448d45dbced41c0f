# SPDX-License-Identifier: Apache-2.0
"""The library's leases without a system call, from C: threads, forks, retirement under a lease, a broker that has gone."""

import os
import select
import subprocess

import pytest
from broker import ADMIN, BUILD, CONSUMER, DEADLINE, OWNER, become, until
from programs import program
from protocol_client import NUMBERS, READ, STATE

THREADS = 40
MODES = ["asymmetric", "rmw"]


class Consumer:
    """client-threads under a uid of its own: a case of it, which is stopped at each line that it says."""

    def __init__(self, broker, case, mode="asymmetric", before=lambda: None):
        def prepare():
            become(CONSUMER)
            before()

        arguments = [program("client-threads"), broker.socket, case] + ([mode] if mode == "rmw" else [])
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=prepare,
                                        env={**os.environ, "LD_LIBRARY_PATH": str(BUILD / ".libs")})
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def said(self, expected):
        """Its next line is @expected."""
        ready, _, _ = select.select([self.process.stdout], [], [], 2 * DEADLINE)
        assert ready, f"{expected!r} is not said"
        line = self.process.stdout.readline().decode().strip()
        assert line == expected, f"{line!r}, exit status {self.process.wait(DEADLINE) if not line else None}"

    def go_on(self, expected=None):
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        if expected:
            self.said(expected)

    def end(self):
        """It goes on to its end, and all was as it expects."""
        rest, _ = self.process.communicate(b"\n", timeout=2 * DEADLINE)
        assert self.process.returncode == 0, rest.decode()


def leases(broker, admin, pid, name="r"):
    """How many leases the process is said to hold."""
    entry = broker.region(admin, name)
    return sum(holder["leases"] for holder in entry["holders"] if holder["pid"] == pid) if entry else None


@pytest.fixture
def peers(broker):
    """(owner of "r", admin)"""
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    owner.give("r", fill=b"content")
    return owner, admin


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case,held", [
    ("other-thread", 1), ("ending-threads", THREADS), ("many-threads", THREADS), ("fork", 1), ("double-release", 1),
])
def test_leases_are_counted(broker, peers, case, held, mode):
    """As many as are held, from whatever thread; retirement waits for the last one, and is told of it."""
    owner, admin = peers
    with Consumer(broker, case, mode) as consumer:
        consumer.said("held")
        assert leases(broker, admin, consumer.pid) == held
        owner.start("unregister", "r", wait=True)
        until(lambda: broker.region(admin, "r")["state"] == STATE["RETIRING"], "it retires")
        assert leases(broker, admin, consumer.pid) == held
        consumer.go_on("released")
        assert owner.finish()["code"] == 0
        assert broker.region(admin, "r") is None
        consumer.end()


@pytest.mark.parametrize("mode,number", [("asymmetric", 1), ("rmw", 2)])
def test_mode(broker, peers, mode, number):
    _, admin = peers
    with Consumer(broker, "hold", mode) as consumer:
        consumer.said(f"held {number}")
        assert leases(broker, admin, consumer.pid) == 1
        consumer.go_on("released")
        assert leases(broker, admin, consumer.pid) == 0
        consumer.end()


@pytest.mark.parametrize("mode", MODES)
def test_lazy(broker, peers, mode):
    """While one lease is held more are granted, also to threads that take and release all the time."""
    owner, admin = peers
    with Consumer(broker, "lazy", mode) as consumer:
        consumer.said("held")
        assert owner.unregister("r", mode="LAZY")["code"] == 0
        assert broker.region(admin, "r")["state"] == STATE["LAZY"]
        consumer.go_on("granted")
        assert broker.region(admin, "r")["state"] == STATE["LAZY"]
        consumer.go_on("released")
        until(lambda: broker.region(admin, "r") is None, "it is gone")
        consumer.end()


@pytest.mark.parametrize("mode", MODES)
def test_replace(broker, peers, mode):
    """A handle names one generation; the name goes on to the next."""
    owner, admin = peers
    with Consumer(broker, "replace", mode) as consumer:
        consumer.said("held")
        owner.give("r", fill=b"another", flags=NUMBERS["REGISTER"]["REPLACE"])
        assert len(admin.status()) == 2
        consumer.go_on("released")
        until(lambda: len(admin.status()) == 1, "the old one is gone")
        consumer.end()


@pytest.mark.parametrize("mode", MODES)
def test_revoked(broker, peers, mode):
    owner, admin = peers
    with Consumer(broker, "revoked", mode) as consumer:
        consumer.said("held")
        assert owner.unregister("r", mode="FORCE")["code"] == 0
        assert broker.region(admin, "r")["state"] == STATE["REVOKED"]
        consumer.go_on("released")
        until(lambda: broker.region(admin, "r") is None, "the slot is free")
        consumer.end()


def test_truncated(start):
    """A guarded copy of memory that its owner cuts is an error, not a signal."""
    broker = start(config="unsealed = accept")
    owner = broker.peer(OWNER)
    owner.give("r", fill=b"content", access=READ, memory_args={"seals": 0})
    with Consumer(broker, "truncated") as consumer:
        consumer.said("held")
        owner.truncate("r", 4096)
        consumer.go_on("released")
        consumer.end()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM"])
def test_broker_has_gone(broker, peers, mode, end):
    """What is held stays mapped without a broker, and a release works; whatever needs one says so."""
    with Consumer(broker, "without-broker", mode) as consumer:
        consumer.said("held")
        if end == "SIGTERM":
            broker.stop()
        else:
            broker.finished = True
            for peer in peers:
                peer.kill()
            broker.process.kill()
            broker.process.wait()
        consumer.go_on("released")
        consumer.end()
