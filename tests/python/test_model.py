# SPDX-License-Identifier: Apache-2.0
"""Owners that register, retire and are killed, and consumers with leases of which one is killed, too, against a small model
of them.
"""

import os
import subprocess
import sys
import tempfile

from conftest import Daemon, until
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

import shmbroker

SIZE = 4096
NAMES = st.sampled_from(["a", "b", "c/d", "é"])
OWNERS = st.integers(0, 1)

OWNER = f"""
import sys
import shmbroker
broker, regions = shmbroker.connect(), {{}}
print("ready", flush=True)
for line in sys.stdin:
    verb, name, value = line.split()
    try:
        if verb == "register":
            regions[name] = broker.create(name, nbytes={SIZE})
            memoryview(regions[name])[:] = bytes([int(value)]) * {SIZE}
        else:
            regions.pop(name).retire(value)
        print("done", flush=True)
    except shmbroker.Error as error:
        print(error.name, flush=True)
"""


# its leases are only ever dropped by its end
CONSUMER = """
import sys
import shmbroker
broker, leases = shmbroker.connect(), []
print("ready", flush=True)
for name in sys.stdin:
    try:
        leases.append(broker.get_memory_info(name.strip()))
        print(memoryview(leases[-1])[0], flush=True)
    except shmbroker.Error as error:
        print(error.name, flush=True)
"""


class Other:
    """Another process."""

    def __init__(self, program, socket):
        self.process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**os.environ, "SHMBROKER_SOCKET": socket})
        assert self.process.stdout.readline() == "ready\n"

    def do(self, *words):
        print(*words, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.process.communicate()


class Model(RuleBasedStateMachine):
    """names: what is registered, as (owner, fill); leases: what is held, with the bytes that it must show, and whether it was
    revoked; elsewhere: fill and whether it was revoked of what the other consumer holds.
    """

    def __init__(self):
        super().__init__()
        self.names, self.leases, self.elsewhere, self.fill = {}, [], [], 0

    @initialize()
    def begin(self):
        self.place = tempfile.TemporaryDirectory(prefix="shmb")
        self.daemon = Daemon(self.place.name)
        self.owners = [Other(OWNER, self.daemon.socket) for _ in range(2)]
        self.consumer = Other(CONSUMER, self.daemon.socket)
        self.broker = shmbroker.connect(self.daemon.socket)

    @rule(owner=OWNERS, name=NAMES)
    def register(self, owner, name):
        self.fill = self.fill % 255 + 1
        expected = "EXISTS" if name in self.names else "done"
        assert self.owners[owner].do("register", name, self.fill) == expected
        if expected == "done":
            self.names[name] = owner, self.fill

    @precondition(lambda self: self.names)
    @rule(data=st.data(), mode=st.sampled_from(["strict", "force"]))
    def retire(self, data, mode):
        name = data.draw(st.sampled_from(sorted(self.names)))
        owner, fill = self.names.pop(name)
        assert self.owners[owner].do("retire", name, mode) == "done"
        if mode == "force":
            for held in self.leases + self.elsewhere:
                if held[-2] == fill:
                    held[-1] = True

    @rule(name=NAMES, offset=st.sampled_from([0, 1, 4095]), handle=st.booleans())
    def acquire(self, name, offset, handle):
        try:
            if handle:
                lease = self.broker.lookup(name).get_memory_info(offset)
            else:
                lease = self.broker.get_memory_info(name, offset)
        except shmbroker.NotFound:
            assert name not in self.names
            return
        _, fill = self.names[name]
        assert lease.nbytes == SIZE - offset
        self.leases.append([lease, fill, False])

    @rule(name=NAMES)
    def acquire_elsewhere(self, name):
        got = self.consumer.do(name)
        if name not in self.names:
            assert got == "NOT_FOUND"
            return
        _, fill = self.names[name]
        assert got == str(fill)
        self.elsewhere.append([fill, False])

    @rule()
    def crash_of_the_consumer(self):
        self.consumer.kill()
        self.elsewhere.clear()
        until(lambda: self.counted() == self.expected(), "the leases of the dead process")
        self.consumer = Other(CONSUMER, self.daemon.socket)

    @rule(name=NAMES)
    def out_of_bounds(self, name):
        try:
            self.broker.get_memory_info(name, 1, SIZE)
            raise AssertionError("granted")
        except shmbroker.OutOfBounds:
            assert name in self.names
        except shmbroker.NotFound:
            assert name not in self.names

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease, fill, revoked = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        assert bytes(lease) == bytes([fill]) * lease.nbytes
        try:
            assert lease.release() and not revoked
        except shmbroker.Revoked:
            assert revoked
        assert lease.released

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def let_go_behind_a_view(self, data):
        lease, fill, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        view = memoryview(lease)
        assert not lease.release()
        assert view[0] == fill
        view.release()
        assert lease.released

    @rule(owner=OWNERS)
    def crash(self, owner):
        self.owners[owner].kill()
        self.names = {name: of for name, of in self.names.items() if of[0] != owner}
        until(lambda: self.active() == set(self.names), "the broker has noticed")
        self.owners[owner] = Other(OWNER, self.daemon.socket)

    def active(self):
        return {entry.name for entry in self.broker.status(states=[shmbroker.RegionState.ACTIVE])}

    def counted(self):
        """Leases that the broker knows of, on what was not revoked."""
        return sum(entry.leases for entry in self.broker.status() if entry.state != shmbroker.RegionState.REVOKED)

    def expected(self):
        return sum(not held[-1] for held in self.leases + self.elsewhere)

    @invariant()
    def the_broker_agrees(self):
        if hasattr(self, "broker"):
            assert self.active() == set(self.names)
            assert self.counted() == self.expected()
            for lease, fill, _ in self.leases:
                assert memoryview(lease)[0] == fill and memoryview(lease)[-1] == fill

    def teardown(self):
        if not hasattr(self, "broker"):
            return
        try:
            self.leases.clear()
            self.broker.close()
            for other in (*self.owners, self.consumer):
                other.kill()
            self.daemon.finish()
        finally:
            self.daemon.process.kill()
            self.daemon.process.wait()
            self.place.cleanup()


def test_model():
    run_state_machine_as_test(Model, settings=settings(
        max_examples=15, stateful_step_count=30, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck)))
