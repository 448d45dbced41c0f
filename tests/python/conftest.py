# SPDX-License-Identifier: Apache-2.0
"""The Python module of a build directory, and a broker for each test.

A test that ends leaves a broker without regions and leases that answers and ends in order; what it connects to the broker
is closed by then.
"""

import contextlib
import fcntl
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("SHMBROKER_BUILDDIR", ".")).resolve()
DEADLINE = 60
PLACE = tempfile.TemporaryDirectory(prefix="shmb")  # pylint: disable=consider-using-with


def package():
    """A directory with the package: $SHMBROKER_PYTHON, or the build's extension beside the sources' Python."""
    if "SHMBROKER_PYTHON" in os.environ:
        return os.environ["SHMBROKER_PYTHON"]
    directory = pathlib.Path(PLACE.name) / "shmbroker"
    if not directory.exists():
        source = TOP / "libbroker/python/shmbroker"
        for path in source.rglob("*.py*"):
            place = directory / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path)
        (directory / "_shmbroker.abi3.so").symlink_to(BUILD / "libbroker/python/.libs/_shmbroker.so")
    return str(directory.parent)


sys.path.insert(0, package())
os.environ["PYTHONPATH"] = package()

import shmbroker  # noqa: E402  pylint: disable=wrong-import-position


def until(condition, what):
    """Polls until @condition gives something true, and returns that."""
    end = time.monotonic() + DEADLINE
    while True:
        got = condition()
        if got:
            return got
        assert time.monotonic() < end, f"not within {DEADLINE} s: {what}"
        time.sleep(0.005)


def resident():
    """Bytes of memory of this process, page by page: the sums that the kernel keeps of them are not exact."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as rollup:
        return 1024 * next(int(line.split()[1]) for line in rollup if line.startswith("Rss:"))


def check_growth(work, room):
    """That @work leaves less than @room bytes behind. A leak shows each time; what an allocator keeps for later does not."""
    grown = []
    for _ in range(3):
        before = resident()
        work()
        grown.append(resident() - before)
        if grown[-1] < room:
            return
    raise AssertionError(f"grown by {grown}, not by less than {room}")


class Daemon:
    """A broker that a test may stop and start."""

    def __init__(self, directory, config=""):
        self.directory = pathlib.Path(directory)
        self.socket = str(self.directory / "s")
        (self.directory / "conf").write_text(f"[broker]\nshared_uid = yes\n{config}")
        self.process = None
        self.start()

    def start(self):
        """Starts it, and waits until it answers."""
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(  # pylint: disable=consider-using-with
                [BUILD / "shmbrokerd", "--config", self.directory / "conf", "--socket", self.socket],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "LD_PRELOAD": ""})

        def answers():
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(OSError):
                shmbroker.connect(self.socket).close()
                return True

        until(answers, "the broker answers")

    def log(self):
        """What it has said."""
        return (self.directory / "log").read_text(errors="replace")

    def finish(self):
        """Nothing is left in it, and it ends in order."""
        if self.process.poll() is not None:
            return
        try:
            with shmbroker.connect(self.socket) as admin:
                until(lambda: not list(admin.status()), lambda: list(admin.status(holders=True)))
                until(lambda: len(admin.clients()) == 1, "all clients have gone")
            self.process.terminate()
            assert self.process.wait(DEADLINE) == 0, self.log()
            assert "Sanitizer" not in self.log(), self.log()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


@pytest.fixture
def config():
    """More lines of the broker's configuration."""
    return ""


@pytest.fixture
def daemon(monkeypatch, config):  # pylint: disable=redefined-outer-name
    """The broker of a test; connections find it by themselves."""
    with tempfile.TemporaryDirectory(prefix="shmb") as directory:
        one = Daemon(directory, config)
        monkeypatch.setenv("SHMBROKER_SOCKET", one.socket)
        try:
            yield one
        except BaseException:
            one.process.kill()
            one.process.wait()
            raise
        one.finish()


@pytest.fixture
def broker(daemon):  # pylint: disable=redefined-outer-name
    """A connection to it."""
    with shmbroker.connect(daemon.socket) as one:
        yield one


@pytest.fixture
def file():
    """100,000 bytes of memory, by its fd."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 100000)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    yield fd
    os.close(fd)


@pytest.fixture
def run(daemon):  # pylint: disable=redefined-outer-name
    """Runs a program of Python to its end and returns what it printed; it must say nothing on stderr."""

    def run_one(text, *args):
        done = subprocess.run([sys.executable, "-X", "dev", "-c", text, *map(str, args)], capture_output=True,
                              text=True, timeout=4 * DEADLINE, check=False, env={**os.environ, "SHMBROKER_SOCKET": daemon.socket})
        assert done.returncode == 0 and not done.stderr, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run_one
