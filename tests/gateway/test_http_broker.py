# SPDX-License-Identifier: Apache-2.0
"""The broker behind the door: away, back, with regions of others; and the gateway killed and started again."""

import json
import os
import signal
import subprocess

import pytest

from conftest import DEADLINE, ROOT, running, until


class Native:
    """A region of 12,345 bytes that its owner registered natively."""

    def __init__(self, gateway, uid=None):
        self.process = gateway.place.start("shmbrokerctl", "-s", gateway.broker.socket, "register", "native", "--create=12345B",
                                           uid=uid, log=gateway.directory / "owner")
        until(lambda: self.process.poll() is not None or any(entry["name"] == "native" for entry in gateway.broker.regions()),
              "the owner")
        assert self.process.poll() is None, (gateway.directory / "owner").read_text()

    def end(self):
        """1 says that the region had been retired by somebody else."""
        self.process.terminate()
        assert self.process.wait(DEADLINE) in (0, 1)


@pytest.fixture
def native(gateway):
    one = Native(gateway)
    yield one
    if one.process.poll() is None:
        one.end()


ENTRY = {"name": "native", "key": "shmbroker:native", "offset": 0, "byte_size": 12345}
NOT_YOURS = "cannot unregister shared memory region 'native': it was registered natively, and is not the caller's"


class TestNative:
    """Regions that were registered without the gateway."""

    def test_are_listed(self, gateway, native):
        assert gateway.status() == [ENTRY]
        assert gateway.region("system", "native", "status").json == [ENTRY]
        native.end()
        until(lambda: gateway.status() == [], "it goes with its owner")

    def test_keep_their_name(self, gateway, native, key):
        reply = gateway.register("native", key("k", 64), 64)
        assert (reply.status, reply.error) == (400, "shared memory region 'native' already in manager")
        assert gateway.status() == [ENTRY]

    def test_are_nobodys_over_tcp(self, gateway, native):
        """Which says nothing about who calls."""
        reply = gateway.region("system", "native", "unregister")
        assert (reply.status, reply.error) == (403, NOT_YOURS)
        assert gateway.post("/v2/systemsharedmemory/unregister").status == 200
        assert gateway.status() == [ENTRY]
        assert gateway.region("cuda", "native", "unregister").status == 200
        assert gateway.status() == [ENTRY]

    def test_are_their_owners_at_the_unix_socket(self, gateway, native):
        """All is what came through this door, but one is one."""
        assert gateway.post("/v2/systemsharedmemory/unregister", unix=True).status == 200
        assert gateway.status() == [ENTRY]
        assert gateway.region("system", "native", "unregister", unix=True).status == 200
        assert gateway.status() == []

    @pytest.mark.skipif(not ROOT, reason="needs root, for several uids")
    def test_of_others(self):
        """Are their owners' alone, and an administrator's."""
        with running(f"[access]\ndelegate = {os.geteuid()}\n") as gateway:
            one = Native(gateway, 20012)
            assert gateway.status() == [ENTRY]
            assert gateway.region("system", "native", "unregister").status == 403
            assert gateway.post("/v2/systemsharedmemory/unregister", unix=True).status == 200
            assert gateway.status() == [ENTRY]
            done = gateway.post("/v2/systemsharedmemory/unregister", unix=True, headers={"shmbroker-scope": "everything"})
            assert done.status == 200
            assert gateway.status() == []
            one.end()

    def test_everything_needs_an_administrator(self, gateway, native, tmp_path):
        for headers in ({"shmbroker-scope": "everything"}, {}):
            assert gateway.post("/v2/systemsharedmemory/unregister", headers=headers).status == 200
            assert gateway.status() == [ENTRY]
        (tmp_path / "t").write_text("an-ordinary-token-1\nadmin the-other-token-2\n")
        gateway.stop()
        gateway.options += ["--token-file", tmp_path / "t"]
        gateway.start()
        for token, scope, left in [("an-ordinary-token-1", "everything", 1), ("the-other-token-2", "", 1),
                                   ("the-other-token-2", "everything", 0)]:
            headers = {"Authorization": f"Bearer {token}", "shmbroker-scope": scope}
            assert gateway.post("/v2/systemsharedmemory/unregister", headers=headers).status == 200
            assert len(gateway.status(headers=headers)) == left


def refused(reply):
    """It is the answer without a broker."""
    assert reply.status == 503 and reply.error.startswith("the broker "), reply


class TestAway:
    """The broker ends, and comes back."""

    def check_away(self, gateway):
        assert gateway.get("/v2/health/live").status == 200
        assert gateway.get("/v2/health/ready").status == 400
        for kind in ("system", "cuda"):
            refused(gateway.get(f"/v2/{kind}sharedmemory/status"))
            refused(gateway.region(kind, "x", "status"))
            refused(gateway.region(kind, "x", "unregister"))
            refused(gateway.post(f"/v2/{kind}sharedmemory/unregister"))
        refused(gateway.register("x", "x", 1))
        assert gateway.get("/v2").json["extensions"] == []
        # what needs no broker is answered as ever
        assert gateway.region("system", "x", "register", {}).status == 400
        assert gateway.get("/v2/nothing").status == 404

    def test_killed_and_started(self, gateway, key):
        """It is found again without a word."""
        name = key("k", 64)
        assert gateway.register("a", name, 64).status == 200
        for _ in range(3):
            gateway.broker.kill()
            self.check_away(gateway)
            gateway.broker.start()
            until(gateway.ready, gateway.log)
            assert gateway.register("b", name, 64).status == 200
            assert "b" in [entry["name"] for entry in gateway.status()]
            assert gateway.region("system", "b", "unregister").status == 200

    def test_not_there_at_first(self, gateway, key):
        gateway.broker.kill()
        gateway.kill()
        gateway.start(connected=False)
        self.check_away(gateway)
        gateway.broker.start()
        until(gateway.ready, gateway.log)
        assert gateway.register("a", key("k", 64), 64).status == 200

    def test_stuck(self, gateway):
        """A broker that is there and does not answer is not waited for for long; live is said meanwhile."""
        gateway.broker.process.send_signal(signal.SIGSTOP)
        try:
            refused(gateway.get("/v2/systemsharedmemory/status"))
            self.check_away(gateway)
        finally:
            gateway.broker.process.send_signal(signal.SIGCONT)
        until(gateway.ready, gateway.log)
        assert gateway.status() == []

    def test_many_times_without_a_leak(self, gateway):
        """Neither fds nor timers."""
        counts = []
        for _ in range(6):
            gateway.broker.kill()
            until(lambda: not gateway.ready(), "it notices")
            gateway.broker.start()
            until(gateway.ready, gateway.log)
            counts.append(gateway.fds())
        until(lambda: gateway.fds() <= counts[0] + 1, lambda: f"{gateway.fds()}, {counts}")


class TestRestart:
    """The gateway ends, and comes back: it holds nothing."""

    def test_killed(self, gateway, key):
        """Regions stay, and are this door's as before."""
        name = key("k", 8192)
        for region, offset in [("a", 0), ("b", 100), ("c", 4096)]:
            assert gateway.register(region, name, 64, offset).status == 200
        before = gateway.status()
        gateway.kill()
        assert len(gateway.broker.regions()) == 3
        gateway.start()
        assert gateway.status() == before
        assert gateway.region("system", "a", "unregister").status == 200
        assert gateway.post("/v2/systemsharedmemory/unregister").status == 200
        assert gateway.status() == []

    def test_stopped(self, gateway, key):
        assert gateway.register("a", key("k", 64), 64).status == 200
        gateway.stop()
        assert len(gateway.broker.regions()) == 1
        gateway.start()
        assert len(gateway.status()) == 1
        assert gateway.post("/v2/systemsharedmemory/unregister").status == 200

    def test_the_connection_does_not_matter(self, gateway, key):
        """A region outlives the connection that registered it, and the unlinking of its name."""
        name = key("k", 64)
        assert gateway.register("a", name, 64).status == 200
        os.unlink(f"/dev/shm{name}")
        assert len(gateway.status()) == 1

    def test_drain(self, gateway):
        """What has begun to arrive when it is stopped is answered."""
        with gateway.connect() as connection:
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n")
            # another connection's answer means that the first one's bytes have been read, or are about to be
            assert gateway.get("/v2/health/live").status == 200
            gateway.process.send_signal(signal.SIGTERM)
            until(lambda: "stopping" in gateway.log(), gateway.log)
            connection.sendall(b"\r\n")
            assert b"HTTP/1.1 200 OK" in connection.recv(65536)
        assert gateway.process.wait(DEADLINE) == 0

    def test_a_client_that_hangs_does_not_stop_the_stop(self, gateway):
        with gateway.connect() as connection:
            connection.sendall(b"GET /v2/hea")
            assert gateway.get("/v2/health/live").status == 200
            gateway.process.send_signal(signal.SIGTERM)
            assert gateway.process.wait(DEADLINE) == 0
            assert connection.recv(10) == b""


def test_ports_file(gateway):
    """Says what is listened at, and whose it is."""
    ports = json.loads(gateway.ports_file.read_text())
    assert ports["pid"] == gateway.process.pid
    assert ports["http"] == {"address": "127.0.0.1", "port": gateway.http_port, "socket": str(gateway.directory / "http")}
    assert [path.name for path in gateway.directory.glob("ports*")] == ["ports"]
    log = gateway.log()
    assert f"http at 127.0.0.1, port {gateway.http_port}\n" in log and f"http at {gateway.directory / 'http'}\n" in log


@pytest.mark.parametrize("arguments, status", [
    (["--help"], 0), (["--version"], 0), (["--nothing"], 2), (["word"], 2), (["--http-port=65536"], 2), (["--http-port=x"], 2),
    (["--socket-mode=888"], 2), (["--http-max-input-size=0"], 2), (["--http-max-input-size=1X"], 2),
    (["--allow-client-shm=maybe"], 2), (["--max-connections=0"], 2), (["--allow-client-shm", "false", "--help"], 0),
    (["--allow-client-shm", "maybe"], 2), (["--http-address=nowhere.example"], 1), (["--key-owners=x"], 1),
])
def test_command_line(gateway, arguments, status):
    done = subprocess.run([gateway.place.path / "shmbroker-gateway", "--socket", gateway.broker.socket, "--http-port=0",
                           "--grpc-port=0", "--metrics-port=0", *arguments], check=False, text=True, capture_output=True,
                          env={**os.environ, "LD_LIBRARY_PATH": str(gateway.place.path)}, timeout=DEADLINE)
    assert done.returncode == status, done
    assert (done.stdout if status == 0 else done.stderr) and not (done.stderr if status == 0 else done.stdout)


def test_a_broker_that_never_answered(gateway):
    """Does not keep the gateway from starting and saying that it lives; it is found when it goes on."""
    gateway.stop()
    gateway.broker.process.send_signal(signal.SIGSTOP)
    try:
        gateway.start(connected=False)
        for _ in range(20):
            assert gateway.get("/v2/health/live").status == 200
            assert gateway.get("/v2/health/ready").status == 400
        reply = gateway.get("/v2/systemsharedmemory/status")
        assert reply.status == 503 and "timed out" in reply.error
    finally:
        gateway.broker.process.send_signal(signal.SIGCONT)
    until(gateway.ready, gateway.log)
    assert gateway.status() == []
