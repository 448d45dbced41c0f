# SPDX-License-Identifier: Apache-2.0
"""shmbrokerd --supervise: the broker as the child of a process that starts it again, and that new versions replace."""

import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

import pytest

from broker import ADMIN, BROKER, BUILD, DEADLINE, OWNER, ROOT, Peer, become, check_sanitizers, until
from protocol_client import Disconnected

BAD_CONFIG = 78


def parents():
    """(pid, parent, state) of all processes."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            # names of programs are any bytes
            fields = (entry / "stat").read_text(errors="replace").rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(entry.name), int(fields[1]), fields[0]


def children(pid):
    return [child for child, parent, state in parents() if parent == pid and state != "Z"]


def exists(pid):
    """Also as a zombie."""
    return pathlib.Path(f"/proc/{pid}").exists()


class Supervised:
    """A supervisor with its broker. The program is a copy, which a test may replace."""

    def __init__(self, directory, loop, *options, config="", prefix=(), identity=True):
        self.directory, self.peers = directory, []
        directory.chmod(0o755)
        self.socket, self.log_path, self.program = directory / "s", directory / "log", directory / "shmbrokerd"
        shutil.copy(BUILD / "shmbrokerd", self.program)
        self.configure(config)
        if ROOT:
            os.chown(directory, BROKER, BROKER)
        command = [*prefix, self.program, "--supervise", f"--loop={loop}", f"--socket={self.socket}",
                   f"--config={directory / 'conf'}", *options]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                                            preexec_fn=(lambda: become(BROKER)) if identity else None)
        self.pid = self.process.pid

    def configure(self, text):
        (self.directory / "conf").write_text("[broker]\nsocket_mode = 0666\n" + ("" if ROOT else "shared_uid = yes\n") + text +
                                             (f"\n[access]\nadmin = {ADMIN}\n" if ROOT else ""))
        (self.directory / "conf").chmod(0o644)

    def log(self):
        return self.log_path.read_text(errors="replace")

    def said(self, text, times=1):
        until(lambda: self.log().count(text) >= times, lambda: f"{text!r} in {self.log()}")

    def child(self):
        """The pid of the broker."""
        return until(lambda: children(self.pid), self.log)[0]

    def serves(self):
        """Somebody new gets an answer."""
        until(self.socket.exists, self.log)

        def ask():
            try:
                peer = Peer(self, OWNER)
            except (ConnectionError, Disconnected, EOFError, FileNotFoundError, PermissionError):
                # also from one that was killed while its socket is still there; and between bind() and chmod() nobody may
                return False
            peer.ping()
            peer.kill()
            return True

        until(ask, self.log)

    def end(self, status=0):
        """SIGTERM ends both, and leaves nothing."""
        child = self.child()
        os.kill(self.pid, signal.SIGTERM)
        assert self.process.wait(DEADLINE) == status, self.log()
        assert not exists(child) and not self.socket.exists()
        check_sanitizers(self.log())

    def clean(self):
        for peer in self.peers:
            peer.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            print(self.log()[-8000:])


@pytest.fixture
def supervise(loop):
    """Starts supervisors."""
    started, directories = [], []

    def start(*options, **how):
        # not in pytest's own place, which it closes to other uids again whenever it is started
        directories.append(tempfile.TemporaryDirectory(prefix="shmb", ignore_cleanup_errors=True))
        started.append(Supervised(pathlib.Path(directories[-1].name), loop, *options, **how))
        return started[-1]

    yield start
    for one in started:
        one.clean()
    for directory in directories:
        directory.cleanup()


def test_a_broker_that_dies_comes_back(supervise):
    it = supervise()
    it.serves()
    for _ in range(3):
        old = it.child()
        os.kill(old, signal.SIGKILL)
        until(lambda: it.child() != old, it.log)  # pylint: disable=cell-var-from-loop
        it.serves()
    assert it.log().count("signal 9") == 3
    it.end()


def test_stopped_while_no_broker_is_ready(supervise):
    it = supervise()
    it.child()
    os.kill(it.pid, signal.SIGTERM)
    assert it.process.wait(DEADLINE) == 0
    assert not children(it.pid) and not it.socket.exists()


def test_the_supervisor_and_the_broker_are_two(supervise):
    """Their arguments differ by --supervise, and that is not the broker's."""
    it = supervise()
    it.serves()
    own = pathlib.Path(f"/proc/{it.pid}/cmdline").read_bytes().split(b"\0")
    assert b"--supervise" in own
    own.remove(b"--supervise")
    assert pathlib.Path(f"/proc/{it.child()}/cmdline").read_bytes().split(b"\0") == own
    it.end()


def test_reload(supervise):
    it = supervise()
    it.serves()
    child = it.child()
    os.kill(it.pid, signal.SIGHUP)
    it.said("the configuration was read again")
    it.configure("nonsense = 1\n")
    os.kill(it.pid, signal.SIGHUP)
    it.said("the configuration in force stays")
    assert it.child() == child
    # not even a broker that cannot start any more ends the supervisor
    os.kill(child, signal.SIGKILL)
    it.said(f"exit status {BAD_CONFIG}", 2)
    it.configure("")
    it.serves()
    it.end()


def test_bad_configuration(supervise):
    it = supervise(config="nonsense = 1\n")
    assert it.process.wait(DEADLINE) == BAD_CONFIG
    assert "nonsense" in it.log() and not it.socket.exists()


def test_a_first_broker_that_cannot_make_its_socket_ends_both(supervise):
    it = supervise("--socket=/nonexistent/directory/s")
    assert it.process.wait(DEADLINE) == 1
    assert it.log().count("/nonexistent/directory/s") and "could not start: exit status 1" in it.log()
    assert it.log().count(" starts, with 0 kept") == 1


def test_a_first_broker_that_is_killed_is_started_again(supervise):
    """Ready or not: a signal says nothing of whether it could start."""
    it = supervise()
    os.kill(it.child(), signal.SIGKILL)
    it.said(" starts, with", 2)
    it.serves()
    it.end()


def test_a_new_version_takes_over(supervise):
    it = supervise()
    it.serves()
    child = it.child()
    new = it.directory / "new"
    shutil.copy(it.program, new)
    os.rename(new, it.program)
    os.kill(it.pid, signal.SIGUSR2)
    it.said(f"executing {it.program}")
    until(lambda: not exists(child), it.log)
    it.serves()
    if ROOT:
        for pid in (it.pid, it.child()):
            assert os.stat(f"/proc/{pid}/exe").st_ino == it.program.stat().st_ino
    os.kill(it.child(), signal.SIGKILL)
    it.said("signal 9")
    it.serves()
    it.end()


def test_a_new_version_that_does_not_work(supervise):
    it = supervise()
    it.serves()
    child = it.child()
    new = it.directory / "new"
    new.write_text("#!/bin/sh\necho no such library >&2\nexit 127\n")
    new.chmod(0o755)
    os.rename(new, it.program)
    os.kill(it.pid, signal.SIGUSR2)
    it.said("ended with exit status 127")
    assert "no such library" in it.log()
    it.serves()
    assert it.child() == child
    it.end()


def test_watchdog(supervise):
    # longer than a machine with much to do makes a broker wait for its turn
    it = supervise("--watchdog=3s")
    it.serves()
    child = it.child()
    os.kill(child, signal.SIGSTOP)
    it.said("no sign of life")
    until(lambda: not exists(child), it.log)
    it.serves()
    # one that works is left alone for longer than that
    child = it.child()
    until(lambda: float(pathlib.Path("/proc/uptime").read_text().split()[0]) > start_of(child) + 4, "four seconds")
    assert it.child() == child
    it.end()


def start_of(pid):
    """When it began, in seconds of uptime."""
    ticks = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_the_supervisor_dies(supervise):
    it = supervise()
    it.serves()
    child = it.child()
    os.kill(it.pid, signal.SIGKILL)
    it.process.wait(DEADLINE)
    until(lambda: not exists(child) or dict((p, s) for p, _, s in parents()).get(child) == "Z", "the broker's end")


@pytest.mark.skipif(not ROOT, reason="needs root: makes a pid namespace")
def test_as_pid_1(supervise):
    """It reaps what others leave behind, comes back, re-executes and ends as anywhere."""
    it = supervise(prefix=("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "setpriv",
                           f"--reuid={BROKER}", f"--regid={BROKER}", "--clear-groups"), identity=False)
    outer = it.process
    it.pid = until(lambda: children(outer.pid), it.log)[0]
    it.serves()
    assert pathlib.Path(f"/proc/{it.pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[1] == "1"
    subprocess.run(["nsenter", f"--target={it.pid}", "--pid", "sh", "-c", "sleep 1000 >/dev/null 2>&1 &"],
                   stdin=subprocess.DEVNULL, timeout=DEADLINE, check=True)
    broker = it.child()
    orphan = until(lambda: [pid for pid in children(it.pid) if b"sleep" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()],
                   "the orphan")[0]
    os.kill(orphan, signal.SIGKILL)
    until(lambda: not exists(orphan), "it is reaped")
    os.kill(broker, signal.SIGKILL)
    it.said("signal 9")
    it.serves()
    os.kill(it.pid, signal.SIGUSR2)
    it.said("executing")
    it.serves()
    os.kill(it.pid, signal.SIGTERM)
    assert outer.wait(DEADLINE) == 0
    assert not it.socket.exists()
