# SPDX-License-Identifier: Apache-2.0
"""A gateway of its own for a test, in front of a broker of its own.

`gateway` is under the uid of the test, as is the broker; with root, `parties` has them under uids of their own. A test
that ends leaves a gateway and a broker that end in order, and no region.
"""

import contextlib
import ctypes
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.parse

import pytest

# gRPC in a child that is about to become another program would look after threads that it has not
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

BUILD = pathlib.Path(os.environ.get("SHMBROKER_BUILDDIR", ".")).resolve()
ROOT = os.geteuid() == 0
DEADLINE = 60
BROKER, GATEWAY, CLIENT, OTHER = 20001, 20011, 20012, 20013
MEMORY_MAX = 64 << 10  # KiB, of a gateway
SHM = pathlib.Path("/dev/shm")
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1


def until(condition, what):
    """Polls until @condition gives something true, and returns that."""
    end = time.monotonic() + DEADLINE
    while True:
        got = condition()
        if got:
            return got
        assert time.monotonic() < end, f"not within {DEADLINE} s: {what() if callable(what) else what}"
        time.sleep(0.005)


def become(uid):
    """Leaves root for good; and ends with the test."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Place:
    """A directory of a test, which every uid reaches, and the programs in it."""

    def __init__(self):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="shmg"))
        self.path.chmod(0o755)
        for name in ("shmbrokerd", "shmbrokerctl", "shmbroker-gateway"):
            real = BUILD / ".libs" / name
            shutil.copy(real if real.exists() else BUILD / name, self.path / name)
        for library in (BUILD / ".libs").glob("libshmbroker.so*"):
            shutil.copy(library, self.path / library.name)

    def directory(self, name, uid=None):
        """One below it, which belongs to @uid."""
        path = self.path / name
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
        if uid is not None:
            os.chown(path, uid, uid)
        return path

    def start(self, program, *arguments, uid=None, log=None, capability=None):
        """Starts @program under @uid with @capability, and with what it says in @log."""
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.path), "LD_PRELOAD": ""}
        command = [self.path / program, *map(str, arguments)]
        if capability:
            command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", f"--inh-caps=-all,+{capability}",
                       f"--ambient-caps=+{capability}", "--pdeathsig=KILL", *command]
        with open(log, "ab") as output:
            return subprocess.Popen(  # pylint: disable=consider-using-with
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", env=environment,
                preexec_fn=lambda: become(None if capability else uid))


class Program:
    """One that runs: its process, and the file of what it says."""

    process, log_path = None, None

    def log(self):
        return self.log_path.read_text(errors="replace")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """SIGTERM: it ends in order."""
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.wait(DEADLINE) == 0, self.log()
        for sign in ("AddressSanitizer", "LeakSanitizer", "runtime error:"):
            assert sign not in self.log(), self.log()[-8000:]


class Broker(Program):
    """shmbrokerd, which may be stopped and started again."""

    def __init__(self, place, config, uid=None):
        self.place, self.uid = place, uid
        directory = place.directory("broker", uid)
        self.socket, self.log_path = directory / "s", directory / "log"
        (directory / "conf").write_text(f"[broker]\nsocket_mode = 0666\nshared_uid = yes\n{config}")
        (directory / "conf").chmod(0o644)
        self.config = directory / "conf"
        self.process = None
        self.start()

    def start(self):
        self.process = self.place.start("shmbrokerd", "--config", self.config, "--socket", self.socket, uid=self.uid,
                                        log=self.log_path)
        until(self.listens, self.log)

    def listens(self):
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.connect(str(self.socket))
            return True

    def ctl(self, *arguments):
        """shmbrokerctl of the test's own uid."""
        return subprocess.run([self.place.path / "shmbrokerctl", "-s", str(self.socket), *arguments], check=False, text=True,
                              capture_output=True, env={**os.environ, "LD_LIBRARY_PATH": str(self.place.path)}, timeout=DEADLINE)

    def regions(self):
        done = self.ctl("--json", "status")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["regions"]


class Reply:
    """What an HTTP request got."""

    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        """The sentence of an error, which is all there is."""
        assert self.headers["content-type"] == "application/json", self.headers
        assert set(self.json) == {"error"}
        return self.json["error"]

    def __repr__(self):
        return f"<{self.status} {self.body[:500]!r}>"


class Gateway(Program):
    """shmbroker-gateway, which may be stopped and started again."""

    def __init__(self, place, broker, *options, uid=None, name="gateway", start=True, capability=None):
        self.place, self.broker, self.uid, self.capability = place, broker, uid, capability
        directory = place.directory(name, uid)
        self.options = ["--socket", broker.socket, "--http-port=0", "--grpc-port=0", "--metrics-port=0",
                        "--ports-file", directory / "ports", "--http-socket", directory / "http",
                        "--grpc-socket", directory / "grpc", "--metrics-socket", directory / "metrics", *options]
        self.directory, self.log_path, self.ports_file = directory, directory / "log", directory / "ports"
        self.process, self.ports = None, None
        if start:
            self.start()

    def start(self, connected=True):
        self.ports_file.unlink(missing_ok=True)
        self.process = self.place.start("shmbroker-gateway", *self.options, uid=self.uid, log=self.log_path,
                                        capability=self.capability)
        until(lambda: self.ports_file.exists() or self.process.poll() is not None, self.log)
        assert self.process.poll() is None, self.log()
        self.ports = json.loads(self.ports_file.read_text())
        if connected:
            until(self.ready, self.log)

    def ready(self):
        return self.get("/v2/health/ready").status == 200

    @property
    def http(self):
        """host:port, as tritonclient takes it."""
        return f"127.0.0.1:{self.ports['http']['port']}"

    @property
    def http_port(self):
        return self.ports["http"]["port"]

    @property
    def http_socket(self):
        return self.ports["http"]["socket"]

    @property
    def grpc(self):
        """host:port, as tritonclient takes it."""
        return f"127.0.0.1:{self.ports['grpc']['port']}"

    def connect(self):
        """A TCP connection."""
        return socket.create_connection(("127.0.0.1", self.http_port), DEADLINE)

    def connect_unix(self):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(DEADLINE)
        connection.connect(self.http_socket)
        return connection

    def request(self, method, path, body=None, headers=None, unix=False):
        """One request on a connection of its own; @body bytes, or a dict or list for JSON."""
        connection = http.client.HTTPConnection("localhost", timeout=DEADLINE)
        connection.sock = self.connect_unix() if unix else self.connect()
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        reply = Reply(response.status, {key.lower(): value for key, value in response.getheaders()}, response.read())
        connection.close()
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in reply.headers
        return reply

    def get(self, path, **how):
        return self.request("GET", path, **how)

    def post(self, path, body=b"", **how):
        return self.request("POST", path, body, **how)

    def region(self, kind, name, verb, body=b"", **how):
        """The verb of one region, whose name is quoted in full."""
        path = f"/v2/{kind}sharedmemory/region/{urllib.parse.quote(name, safe='')}/{verb}"
        return self.request("GET" if verb == "status" else "POST", path, None if verb == "status" else body, **how)

    def register(self, name, key, byte_size, offset=None, **how):
        body = {"key": key, "byte_size": byte_size}
        if offset is not None:
            body["offset"] = offset
        return self.region("system", name, "register", body, **how)

    def status(self, kind="system", **how):
        reply = self.get(f"/v2/{kind}sharedmemory/status", **how)
        assert reply.status == 200, reply
        return reply.json

    def held(self):
        """Bytes of requests and replies."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["metrics"]["port"], timeout=DEADLINE)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return float(re.search(r"^shmbroker_gateway_buffered_bytes (\S+)$", text, re.MULTILINE).group(1))

    def fds(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss(self):
        """KiB."""
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
        raise AssertionError("no VmHWM")

    def check_memory(self):
        """It never had more; the sanitizers' own is not counted."""
        maps = pathlib.Path(f"/proc/{self.process.pid}/maps").read_text()
        print(f"the gateway had {self.rss()} KiB at most")
        if "libasan" not in maps and "libclang_rt" not in maps:
            assert self.rss() < MEMORY_MAX

    def stop(self):
        super().stop()
        assert not pathlib.Path(self.http_socket).exists()


@contextlib.contextmanager
def running(config="unsealed = accept\n", options=("--allow-client-shm",), uids=(None, None), capability=None):
    """A broker and a gateway, both of which end in order."""
    place = Place()
    broker = gateway = None
    try:
        broker = Broker(place, config, uids[0])
        gateway = Gateway(place, broker, *options, uid=uids[1], capability=capability)
        yield gateway
        gateway.stop()
        broker.stop()
    finally:
        for one in (gateway, broker):
            if one and one.process:
                if one.process.poll() is None:
                    one.kill()
                print(one.log()[-8000:])
        shutil.rmtree(place.path)


@pytest.fixture
def broker_config():
    """Of the section [broker], and what follows it."""
    return "unsealed = accept\n"


@pytest.fixture
def options():
    """Of the gateway."""
    return ["--allow-client-shm"]


@pytest.fixture
def gateway(broker_config, options):  # pylint: disable=redefined-outer-name
    """One of the test's own uid."""
    with running(broker_config, options) as one:
        yield one


@pytest.fixture
def key():
    """Makes POSIX shared memory: key(name, size, uid=None) is its name with a slash."""
    made = []

    def make(name, size, uid=None, mode=0o600):
        path = SHM / f"shmg-{os.getpid()}-{name}"
        with open(path, "xb") as file:
            made.append(path)
            file.truncate(size)
        path.chmod(mode)
        if uid is not None:
            os.chown(path, uid, uid)
        return f"/{path.name}"

    yield make
    for path in made:
        path.unlink(missing_ok=True)
