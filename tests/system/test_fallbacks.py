# SPDX-License-Identifier: Apache-2.0
"""What the broker and the library do where a sandbox refuses a system call to them: each fall-back is taken once."""

import errno
import os
import signal
import subprocess

import pytest
from broker import ADMIN, BROKER, BUILD, CONSUMER, DEADLINE, OWNER, ROOT, become, until
from protocol_client import NUMBERS, STATE, Client, Refused, memory
from sandbox import OPTION, SO_PASSRIGHTS, SO_PEERPIDFD, deny
from test_client import Consumer, leases

NO_PEERPIDFD = ("getsockopt", errno.ENOPROTOOPT, OPTION, SO_PEERPIDFD)
NO_PIDFD_OPEN = ("pidfd_open", errno.EPERM)
NO_PASSRIGHTS = ("setsockopt", errno.ENOPROTOOPT, OPTION, SO_PASSRIGHTS)
RMW = NUMBERS["ATTACH"]["RMW"]
ASYMMETRIC = NUMBERS["ATTACH"]["ASYMMETRIC"]


def check_leases(broker, mode, denied=()):
    """From end to end: a C consumer's lease is counted, holds a region back, and its release is noticed."""
    owner, admin = broker.peer(OWNER), broker.peer(ADMIN)
    owner.give("r", fill=b"content")
    with Consumer(broker, "hold", before=lambda: deny(*denied) if denied else None) as consumer:
        consumer.said(f"held {mode}")
        assert leases(broker, admin, consumer.pid) == 1
        owner.start("unregister", "r", wait=True)
        until(lambda: broker.region(admin, "r")["state"] == STATE["RETIRING"], "it retires")
        consumer.go_on("released")
        assert owner.finish()["code"] == 0
        consumer.end()
    # one that dies gives its lease back
    owner.give("r", fill=b"content")
    with Consumer(broker, "hold") as consumer:
        consumer.said(f"held {mode if not denied else ASYMMETRIC}")
        assert leases(broker, admin, consumer.pid) == 1
    until(lambda: leases(broker, admin, consumer.pid) == 0, "the lease of the dead")
    owner.unregister("r", wait=True)
    owner.kill()
    admin.kill()


@pytest.mark.parametrize("loop", ["auto"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_io_uring_refused(start, number):
    """The broker says so and takes epoll."""
    broker = start(denied=[("io_uring_setup", number)])
    assert broker.info["loop"] == "epoll"
    reason = broker.info["loop_reason"]
    assert reason.startswith("no io_uring: ") and reason in broker.log()
    check_leases(broker, ASYMMETRIC)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_io_uring_refused_but_demanded(tmp_path, number):
    """--loop=io_uring is not put off with epoll."""
    def prepare():
        become(BROKER)
        deny(("io_uring_setup", number))

    done = subprocess.run([BUILD / "shmbrokerd", "--loop=io_uring", f"--socket={tmp_path / 's'}"], capture_output=True,
                          preexec_fn=prepare, text=True, timeout=DEADLINE, check=False, cwd="/")
    assert done.returncode not in (0, -signal.SIGKILL)
    assert "io_uring" in done.stderr and "ready" not in done.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_membarrier_refused_to_the_broker(start, number):
    """Whoever asks for an asymmetric page gets one for locked counters."""
    broker = start(denied=[("membarrier", number)])
    assert broker.info["membarrier"] == "no" and broker.info["membarrier_reason"]
    assert "membarrier is not available" in broker.log()
    check_leases(broker, RMW)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_membarrier_refused_to_a_client(broker, number):
    """The library asks for locked counters; others are not slowed down by that."""
    assert broker.info["membarrier"] == "yes"
    check_leases(broker, RMW, denied=[("membarrier", number)])


class Orphan:
    """An owner of "r" that has died while a child of it holds its connection."""

    def __init__(self, broker):
        self.held, self.ours = os.pipe()
        with pytest.raises((EOFError, ConnectionError)):
            broker.run(OWNER, self._own, broker.socket)

    def _own(self, path):
        client = Client(path)
        client.hello()
        client.register("r", memory())
        if not os.fork():
            keep = sorted((self.held, client.socket.fileno()))
            for first, last in zip([3] + [fd + 1 for fd in keep], keep + [4096]):
                os.closerange(first, last)
            os.read(self.held, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def hang_up(self):
        """The child ends, and the connection with it."""
        for fd in (self.held, self.ours):
            os.close(fd)


def test_no_peerpidfd(start):
    """The process is opened by its pid, and its death is still noticed while another holds its connection."""
    broker = start(denied=[NO_PEERPIDFD])
    admin, orphan = broker.peer(ADMIN), Orphan(broker)
    try:
        until(lambda: not admin.status(), "the owner's death")
    finally:
        orphan.hang_up()
    check_leases(broker, ASYMMETRIC)


def test_no_pidfd_at_all(start):
    """The end of the connection is what remains of a death."""
    broker = start(denied=[NO_PEERPIDFD, NO_PIDFD_OPEN])
    admin, orphan = broker.peer(ADMIN), Orphan(broker)
    try:
        # nothing but the connection tells of it
        assert not ROOT or not any("pidfd" in name for name in broker.fd_names())
        assert broker.region(admin, "r")["state"] == STATE["ACTIVE"]
    finally:
        orphan.hang_up()
    until(lambda: not admin.status(), "the end of the connection")
    check_leases(broker, ASYMMETRIC)


@pytest.mark.parametrize("denied", [[], [NO_PASSRIGHTS]])
def test_fds_of_who_may_not_register(start, denied):
    """Where the kernel cannot keep them away they are refused one by one, and none stays."""
    broker = start(denied=denied)
    consumer = broker.peer(CONSUMER, roles=NUMBERS["ROLE"]["CONSUMER"])
    for i in range(100):
        try:
            consumer.give(f"x{i}")
            pytest.fail("it was registered")
        except PermissionError:
            assert not denied, "fds were kept away, though that was not to be had"
        except Refused as refusal:
            assert refusal.name == "PERMISSION"
    consumer.kill()
    check_leases(broker, ASYMMETRIC)
