# SPDX-License-Identifier: Apache-2.0
"""1,000 SIGKILLs of a peer that is owner and consumer, each at a system call of its own: nothing is left of any.

Half of the peers are the client in Python, half use the library. The peer is stopped by ptrace at its n-th entry to or
exit from the kernel, for every n; half of the kills hit it while it holds a lease through its lease page, which
`shmbrokerctl status --json` has named under its pid before.
"""

import collections
import ctypes
import itertools
import mmap
import os
import signal

import pytest
from broker import ADMIN, BUILD, LIBC, OTHER, OWNER, become, until
from programs import program
from protocol_client import READ, Client, memory, reopen
from test_ctl import Ctl

ROUNDS = 500
PTRACE_TRACEME, PTRACE_SYSCALL = 0, 24
LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Trace:
    """A peer that goes through STEPS and can be stopped at each system call, in Python."""

    # the page's lease is acquired before "register" and released before "unmap", neither of which is a system call
    STEPS = ["connect", "hello", "attach", "map", "register", "lookup", "status", "subscribe", "unregister", "unmap",
             "release", "end"]

    def __init__(self, path, name, given):
        # one byte says the step, another whether a lease is held
        self.seen_fd = os.memfd_create("seen", 0)
        os.ftruncate(self.seen_fd, 4096)
        self.seen = mmap.mmap(self.seen_fd, 4096)
        self.pid = os.fork()
        if not self.pid:
            try:
                become(OTHER)
                LIBC.ptrace(PTRACE_TRACEME, 0, None, None)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._steps(path, name, given)
            finally:
                os._exit(0)
        _, status = os.waitpid(self.pid, 0)
        assert os.WIFSTOPPED(status)

    def _steps(self, path, name, given):
        slot, generation = given
        numbers = iter(range(len(self.STEPS)))

        def step():
            self.seen[0] = next(numbers)

        step()
        client = Client(path)
        step()
        client.hello()
        step()
        page = client.attach()
        step()
        fd = client.map(slot, generation)["fd"]
        assert page.acquire(slot, generation)
        self.seen[1] = 1
        step()
        mine = memory()
        client.register(name, mine, read_only_fd=reopen(mine))
        step()
        lease = client.lookup("theirs", access=READ, want_fd=True)
        step()
        client.status()
        step()
        client.subscribe("REGISTERED", "GONE", "LEFT")
        step()
        client.unregister(name)
        self.seen[1] = 0
        page.release(slot)
        step()
        client.unmap(slot, generation)
        os.close(fd)
        step()
        client.release(lease["lease"])
        step()
        client.close()

    def go(self):
        """To the next entry or exit; False when the process has ended."""
        assert LIBC.ptrace(PTRACE_SYSCALL, self.pid, None, None) == 0
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSTOPPED(status):
            return True
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, status
        self.pid = 0
        return False

    def go_on(self, stops):
        for _ in range(stops):
            if not self.go():
                break

    def hold(self, further):
        """To the first stop with a lease, and @further ones if it is held until there."""
        while not self.seen[1] and self.go():
            pass
        for _ in range(further):
            if not self.seen[1] or not self.go():
                break

    def kill(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.seen.close()
        os.close(self.seen_fd)


class LibraryTrace(Trace):
    """The same with the library: tests/system/peer.c."""

    STEPS = ["start", "connect", "map", "create", "lookup", "status", "subscribe", "retire", "release", "free"]

    def __init__(self, path, name, given):
        self.program = program("peer")
        super().__init__(path, name, given)

    def _steps(self, path, name, given):
        # a tracer keeps the sanitizer's leak check from working
        environment = {**os.environ, "LD_LIBRARY_PATH": str(BUILD / ".libs"), "ASAN_OPTIONS": "detect_leaks=0"}
        os.execve(self.program, ["peer", str(path), name, str(self.seen_fd)], environment)


@pytest.mark.parametrize("kind", [Trace, LibraryTrace], ids=["python", "library"])
def test_kills_leave_nothing(broker, capsys, kind):
    ctl = Ctl(broker)
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    given = owner.give("theirs")
    given = given["slot"], given["generation"]

    # a first one that is not killed says how many stops there are, and at which a lease is held
    trace = kind(broker.socket, "whole", given)
    step_at, held_at = [], []
    while trace.go():
        step_at.append(trace.seen[0])
        held_at.append(bool(trace.seen[1]))
    trace.kill()
    # of what a program does before its first step one kill is enough, amid it: how much that is differs by some stops
    begun = step_at.index(1) if kind is LibraryTrace else 0
    everywhere = itertools.cycle([max(1, begun // 2), *range(begun + 1, len(held_at))])
    held = itertools.cycle(range(sum(held_at)))

    histogram, with_lease = collections.Counter(), 0
    for number in range(ROUNDS):
        trace = kind(broker.socket, f"mine{number}", given)
        try:
            if number % 2:
                trace.hold(next(held))
            else:
                trace.go_on(next(everywhere))
            histogram[kind.STEPS[trace.seen[0]]] += 1
            if trace.pid and trace.seen[1]:
                (entry,) = ctl.regions("theirs", uid=ADMIN)
                assert trace.pid in [holder["pid"] for holder in entry["holders"]], entry
                with_lease += 1
        finally:
            trace.kill()
    with capsys.disabled():
        print(f"\n{ROUNDS} kills on {broker.loop}, {with_lease} with a lease held:",
              ", ".join(f"{histogram[step]} at {step}" for step in kind.STEPS))
    for step in kind.STEPS:
        assert histogram[step], f"no kill at: {step}"
    assert with_lease >= ROUNDS // 2 - ROUNDS // 20

    until(lambda: {client["session"] for client in admin.clients()} == {owner.session, admin.session}, "the sessions' ends")
    until(lambda: len(admin.status()) == 1, lambda: admin.status())
    (entry,) = admin.status()
    assert (entry["name"], entry["leases"], entry["holders"]) == (b"theirs", 0, [])
    assert owner.unregister("theirs", wait=True)["code"] == 0
