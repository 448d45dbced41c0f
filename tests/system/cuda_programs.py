# SPDX-License-Identifier: Apache-2.0
"""Owners and consumers of GPU memory for tests: processes of the program client-cuda on a machine with fake GPUs."""

import collections
import os
import signal
import subprocess

import pytest
from broker import OWNER, become
from gpus import REAL, RealMachine, section
from gpus import Machine as FakeMachine
from programs import program

MIB2 = 1 << 21
CONTEXT, READ, WRITE, COPY, NO_WAIT = 16, 1, 3, 4, 8
CPU, GPU = 1, 2

Lease = collections.namedtuple("Lease", "id address size memory device flags uuid")
Region = collections.namedtuple("Region", "id data flags fd")


class Failed(Exception):
    """What the library or the driver has refused; .name is the code's name."""

    def __init__(self, line):
        super().__init__(line)
        self.name, _, self.text = line.partition(" ")


class Program:
    """A process that uses the library and, as an application does, the driver."""

    def __init__(self, broker, fake=None, uid=OWNER, path=None, environment=None, new_pids=False):
        environment = {**os.environ, **(environment or {})}
        if fake:
            environment |= fake.environment()
            path = path or fake.library_place()
        if path:
            environment["LD_LIBRARY_PATH"] = str(path)
        command = [program("client-cuda"), broker.socket]
        if new_pids:
            command = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", *command]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
                                        text=True, preexec_fn=None if new_pids else lambda: become(uid))
        self.pid = self.process.pid

    def begin(self, *words):
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()

    def finish(self):
        line = self.process.stdout.readline()
        assert line, f"the program has ended: {self.process.wait()}"
        answer, _, rest = line.rstrip("\n").partition(" ")
        if answer == "no":
            raise Failed(rest)
        return rest

    def do(self, *words):
        self.begin(*words)
        return self.finish()

    def start(self, flags=0, context=0):
        """A context, unless it is None, and a client."""
        if context is not None:
            self.do("context", context)
        self.do("client", flags)
        return self

    def alloc(self, size, *how):
        return int(self.do("alloc", size, *how))

    def fill(self, pointer, byte, size):
        self.do("fill", pointer, byte, size)

    def read(self, pointer, size=4):
        return bytes.fromhex(self.do("read", pointer, size))

    def _region(self, *words):
        return Region(*map(int, self.do(*words).split()))

    def export(self, name, pointer, size, flags=0):
        return self._region("export", name, pointer, size, flags)

    def cuda_alloc(self, name, size, device=0, flags=0):
        return self._region("cuda_alloc", name, size, device, flags)

    def create(self, name, size, flags=0):
        return self._region("create", name, size, flags)

    def get(self, name, offset=0, size=2**64 - 1, access=READ):
        fields = self.do("get", name, offset, size, access).split()
        return Lease(*map(int, fields[:6]), bytes.fromhex(fields[6]))

    def release(self, lease):
        self.do("release", lease.id)

    def events(self):
        """Pairs of number and name."""
        return [tuple(event.split(":", 1)) for event in self.do("events").split()]

    def end(self):
        """Ends in order; the client is freed."""
        if self.process.poll() is None:
            self.process.stdin.close()
            assert self.process.wait(60) == 0
        self.process.stdout.close()

    def kill(self):
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def gpus(start):
    """Makes machines with fake GPUs: a broker (in mode relay unless said otherwise) and programs beside it."""
    machines, made = [], []

    class Machine(RealMachine if REAL else FakeMachine):
        """A machine with its broker."""

        def __init__(self, mode="relay", broker=None, **settings):
            super().__init__(**settings)
            self.broker = start(config=section(mode=mode, library=self.library), environment=self.environment(), **(broker or {}))

        def library_place(self):
            """Where the driver is, if that is not where programs look for it anyway."""
            place = os.path.dirname(str(self.library))
            return place or None

        def hold(self, is_held=True):
            """What is in streams goes on, or does not."""
            self.needs_fake()
            super().hold(is_held)

        def program(self, **how):
            made.append(Program(self.broker, **{"fake": self, **how}))
            return made[-1]

        def client(self, flags=0, context=0, **how):
            return self.program(**how).start(flags, context)

    def make(**how):
        machines.append(Machine(**how))
        return machines[-1]

    yield make
    for one in made:
        one.kill()
    for machine in machines:
        machine.close()
