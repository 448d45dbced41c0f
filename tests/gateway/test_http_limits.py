# SPDX-License-Identifier: Apache-2.0
"""What a client may do over HTTP at most: framing, sizes, time, connections; others are served meanwhile."""

import contextlib
import fcntl
import gzip
import json
import os
import pathlib
import socket
import sys
import time

import pytest
import tritonclient.grpc

from bystander import HTTP, beside
from conftest import DEADLINE, until

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "system"))
from protocol_client import Client, register_entry  # noqa: E402  pylint: disable=wrong-import-position

MIB = 1 << 20
REGISTER = "/v2/systemsharedmemory/region/x/register"
INFER = b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: localhost\r\n"
NUMBERS = b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1,16],"data":[' + b",".join([b"1"] * 400000) + b"]}]}"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def read_all(connection):
    """Until the other side ends it."""
    said = b""
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return said
        if not part:
            return said
        said += part


def read_reply(connection, said=b""):
    """One reply with a length: its status, its body, and what came after it."""
    while b"\r\n\r\n" not in said:
        part = connection.recv(65536)
        assert part, said
        said += part
    head, _, rest = said.partition(b"\r\n\r\n")
    length = int(next(line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")))
    while len(rest) < length:
        part = connection.recv(65536)
        assert part, said
        rest += part
    return int(head.split()[1]), rest[:length], rest[length:]


def exchange(gateway, raw, end=False):
    """Everything that @raw gets until the connection ends."""
    with gateway.connect() as connection:
        connection.sendall(raw)
        if end:
            connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


def post(headers, body=b""):
    return f"POST {REGISTER} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode() + body


def infer(body):
    return INFER + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def wide(size):
    """An array of numbers in @size bytes."""
    return (b"[" + b"1," * size)[:size - 2] + b"1]"


SMUGGLED = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("raw", [
    post("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
    post("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", b"0\r\n\r\n"),
    post("Content-Length: 0\r\nContent-Length: 5\r\n"),
    post("Content-Length: 5\r\nContent-Length: 5\r\n"),
    post("Content-Length: 0, 5\r\n"),
    post("Content-Length: +2\r\n", b"{}"),
    post("Content-Length: -1\r\n"),
    post("Content-Length: 0x2\r\n"),
    post("Content-Length: 2 2\r\n"),
    post("Content-Length:\r\n"),
    post("Content-Length: 18446744073709551616\r\n"),
    post("Content-Length : 0\r\n"),
    post("Transfer-Encoding: xchunked\r\n"),
    post("Transfer-Encoding: chunked, chunked\r\n"),
    post("Transfer-Encoding: gzip, chunked\r\n"),
    post("Transfer-Encoding: identity\r\n"),
    post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
    post("Transfer-Encoding: \x0bchunked\r\n"),
    post("Transfer-Encoding: chunked\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"),
    post("Transfer-Encoding: chunked\r\n", b"x\r\n\r\n"),
    post("Transfer-Encoding: chunked\r\n", b"\r\n0\r\n\r\n"),
    post("Transfer-Encoding: chunked\r\n", b"0x2\r\n{}\r\n0\r\n\r\n"),
    post("Transfer-Encoding: chunked\r\n", b"2\n{}\r\n0\r\n\r\n"),
    post("Transfer-Encoding: chunked\r\n", b"2\r\n{}xx0\r\n\r\n"),
    post("Transfer-Encoding: chunked\r\n", b"ffffffffffffffff1\r\n"),
    post("Transfer-Encoding: chunked\r\n", b"-1\r\n"),
    post("Host: localhost\r\n"),
    post("Folded: a\r\n b\r\n"),
    post(": x\r\n"),
    post("No colon\r\n"),
    post("Bl ank: x\r\n"),
    post("Nul: \x00\r\n"),
    post("Lone: a\rb\r\n"),
    post("Lf: a\n\nb: c\r\n"),
    post("Content-Length: 0\n"),
    b"POST /v2 HTTP/1.1\r\n\r\n",
    b"GET /v2 HTTP/1.1\nHost: localhost\n\n",
    b"GET  /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v2  HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v2\tx HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET v2 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://localhost/v2 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v2 HTTP/2.0\r\nHost: localhost\r\n\r\n",
    b"GET /v2 HTTP/1.11\r\nHost: localhost\r\n\r\n",
    b"GET /v2\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"Expect me\r\n\r\n",
    post("Expect: the-unexpected\r\n"),
])
def test_ambiguous_framing(gateway, raw):
    """Is refused, and what follows is not taken for a request."""
    said = exchange(gateway, raw + SMUGGLED)
    assert said.count(b"HTTP/1.1 ") == 1, said
    status, body, rest = int(said.split()[1]), said.partition(b"\r\n\r\n")[2], b""
    assert status in (400, 417, 505) and not rest
    assert list(json.loads(body)) == ["error"]
    assert b"Connection: close" in said
    assert gateway.get("/v2/health/live").status == 200


@pytest.mark.parametrize("raw, status", [
    (post("Transfer-Encoding: chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n"), 400),
    (post("Transfer-Encoding: Chunked\r\n", b"1;a=b\r\n{\r\n001\r\n}\r\n0;x\r\nTrailer: t\r\n\r\n"), 400),
    (post("Content-Length: 2\r\n", b"{}"), 400),
    (post("content-LENGTH:\t 2 \t\r\n", b"{}"), 400),
    (b"\r\n\r\n" + post("Content-Length: 2\r\n", b"{}"), 400),
    (LIVE.replace(b"1.1\r\n", b"1.0\r\nConnection: keep-alive\r\n"), 200),
    (LIVE.replace(b"live", b"live?x=y"), 200),
])
def test_proper_framing(gateway, raw, status):
    """Is understood, byte by byte as at once, and the connection goes on."""
    for pieces in ([raw + LIVE], [bytes([byte]) for byte in raw] + [LIVE]):
        with gateway.connect() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                connection.sendall(piece)
            got, body, rest = read_reply(connection)
            assert got == status
            if status == 400:
                assert json.loads(body)["error"] == "Shared memory register request has no 'key' field"
            assert read_reply(connection, rest)[0] == 200


def test_pipelining(gateway):
    """Replies are in order."""
    count = 200
    with gateway.connect() as connection:
        for number in range(count):
            connection.sendall(f"GET /v2/systemsharedmemory/region/r{number}/status HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        rest = b""
        for number in range(count):
            status, body, rest = read_reply(connection, rest)
            assert status == 404 and f"'r{number}'" in json.loads(body)["error"]


def test_http_1_0_and_close(gateway):
    """End the connection after the reply."""
    for raw in (LIVE.replace(b"1.1", b"1.0"), LIVE.replace(b"\r\n\r\n", b"\r\nConnection: foo, close\r\n\r\n")):
        said = exchange(gateway, raw + LIVE)
        assert said.count(b"HTTP/1.1 200 OK") == 1 and b"Connection: close" in said


def test_half_closed(gateway):
    """A client that has said everything still gets its answer."""
    assert exchange(gateway, LIVE, end=True).startswith(b"HTTP/1.1 200 OK")


def test_continue(gateway):
    """Is said when the body may come, and not when it may not."""
    with gateway.connect() as connection:
        connection.sendall(post("Expect: 100-continue\r\nContent-Length: 2\r\n"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"{}")
        assert read_reply(connection)[0] == 400
    with gateway.connect() as connection:
        connection.sendall(post(f"Expect: 100-continue\r\nContent-Length: {1 << 40}\r\n"))
        status, body, _ = read_reply(connection)
        assert status == 400 and f"request JSON size of {1 << 40} bytes exceeds" in json.loads(body)["error"]


@pytest.mark.parametrize("raw", [
    b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 101 + b"\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 40000,
])
def test_heads(gateway, raw):
    """Of 16 KiB and 100 headers at most."""
    said = exchange(gateway, raw)
    assert said.startswith(b"HTTP/1.1 431 ") and b'{"error":' in said


EXCEEDS = ("request JSON size of {} bytes exceeds the maximum allowed input size of {} bytes. Use --http-max-input-size to "
           "increase the limit.")


def test_two_gibibytes_of_base64(gateway):
    """Are answered with a sentence, and not held."""
    size = 2048 * MIB
    block = b"QUJD" * (MIB // 4)
    with gateway.connect() as connection:
        connection.sendall(f"POST /v2/cudasharedmemory/region/x/register HTTP/1.1\r\nHost: localhost\r\n"
                           f"Content-Length: {size}\r\n\r\n".encode())
        sent = 0
        try:
            while sent < size:
                connection.sendall(block)
                sent += len(block)
        except OSError:
            pass  # it has read enough of it
        status, body, _ = read_reply(connection)
    assert (status, json.loads(body)["error"]) == (400, EXCEEDS.format(size, 64 * MIB))
    print("sent", sent, "of", size, "RSS", gateway.rss(), "KiB")
    gateway.check_memory()


class TestMaxInputSize:
    """--http-max-input-size."""

    @pytest.fixture
    def options(self):
        return ["--allow-client-shm", "--http-max-input-size=1000"]

    @pytest.mark.parametrize("chunked", [False, True])
    def test_bounds(self, gateway, key, chunked):
        body = json.dumps({"key": key("k", 64), "byte_size": 64}).encode()

        def send(size):
            padded = body + b" " * (size - len(body))
            return gateway.post(REGISTER, iter([padded]) if chunked else padded)

        reply = send(1001)
        assert (reply.status, reply.error) == (400, EXCEEDS.format(1001, 1000))
        assert send(1000).status == 200
        # what does not look at its body does not mind
        assert gateway.post("/v2/systemsharedmemory/region/x/unregister", b"x" * 100000).status == 200
        assert gateway.status() == []

    def test_the_order_of_checks(self, gateway):
        """A name is asked for first."""
        reply = gateway.post("/v2/systemsharedmemory/register", b"x" * 5000)
        assert (reply.status, reply.error) == (400, "'region name' is necessary to register system shared memory region")


def test_control_bodies(gateway):
    """A register request of more than 64 KiB is no register request."""
    reply = gateway.post(REGISTER, b" " * 65537)
    assert (reply.status, reply.error) == (
        400, "a body of 65537 bytes is more than the 65536 bytes of a request that is no inference")
    assert gateway.post(REGISTER, b" " * 65536).status == 500
    # many small values are as large
    assert gateway.post(REGISTER, wide(65536)).status == 429
    assert gateway.post(REGISTER, wide(2000)).status == 400


def test_too_many_chunks(gateway):
    raw = post("Transfer-Encoding: chunked\r\n", b"1\r\n \r\n" * 65537 + b"0\r\n\r\n")
    said = exchange(gateway, raw)
    assert said.startswith(b"HTTP/1.1 400 ") and b"chunks" in said


class TestBudget:
    """--max-buffered."""

    @pytest.fixture
    def options(self):
        return ["--allow-client-shm", "--models=all", "--max-buffered=1M", "--request-timeout=30"]

    def test_is_shared(self, gateway):
        """What one holds is not there for the other, and comes back; the last part is for those that hold little."""
        raw = infer(b" " * 1015000)
        with gateway.connect() as first:
            first.sendall(raw[:-1000])
            until(lambda: gateway.held() >= 1014000, gateway.held)
            assert gateway.post(REGISTER, b" " * 60000).status == 429
            assert gateway.post(REGISTER, b" " * 2000).status == 500
            assert gateway.get("/v2/health/live").status == 200
            assert gateway.get("/v2/systemsharedmemory/status").status == 200
            first.sendall(raw[-1000:])
            assert read_reply(first)[0] == 500
        assert gateway.post(REGISTER, b" " * 60000).status == 500


class TestTime:
    """--request-timeout and --idle-timeout are absolute."""

    @pytest.fixture
    def options(self):
        return ["--allow-client-shm", "--request-timeout=2", "--idle-timeout=3"]

    @pytest.mark.parametrize("raw", [
        b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10000,
        post("Content-Length: 60000\r\n", b" " * 59999),
        post("Transfer-Encoding: chunked\r\n", b"1\r\n \r\n" * 10000),
        b"",
    ])
    def test_slowloris(self, gateway, raw):
        """Bytes that trickle do not keep a connection, and others are served."""
        with gateway.connect() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(0.05)
            end = time.monotonic() + DEADLINE
            for byte in raw or [None] * 100000:
                assert time.monotonic() < end, "the connection goes on"
                try:
                    if byte is not None:
                        connection.sendall(bytes([byte]))
                    if connection.recv(100) == b"":
                        break
                except TimeoutError:
                    pass
                except OSError:
                    break
                assert gateway.get("/v2/health/live").status == 200

    def test_idle(self, gateway):
        """A connection without a request ends."""
        with gateway.connect() as connection:
            connection.sendall(LIVE)
            assert read_reply(connection)[0] == 200
            assert connection.recv(1) == b""

    def test_readers_that_do_not(self, gateway):
        """Replies that nobody takes do not stay. The page is some 20 kB, so that all buffers are soon full."""
        page = LIVE.replace(b"/v2/health/live", b"/")
        with gateway.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            sent = 0

            def ended():
                nonlocal sent
                try:
                    while True:
                        sent += connection.send(page * 100)
                except BlockingIOError:
                    return False
                except OSError:
                    return True

            until(ended, lambda: f"the connection goes on after {sent} bytes")
        gateway.check_memory()


class TestConnections:
    """--max-connections."""

    @pytest.fixture
    def options(self):
        return ["--allow-client-shm", "--max-connections=32", "--request-timeout=2"]

    def test_idle_ones_make_room(self, gateway):
        """However many hold a connection, who has a request gets through."""
        idle = [gateway.connect() for _ in range(100)]
        try:
            for _ in range(20):
                assert gateway.get("/v2/health/live").status == 200
            assert gateway.fds() < 32 + 40
        finally:
            for connection in idle:
                connection.close()

    def test_busy_ones_are_waited_for(self, gateway):
        """Their time is bounded."""
        busy = [gateway.connect() for _ in range(64)]
        try:
            for connection in busy:
                connection.sendall(b"GET /v2")
            assert gateway.get("/v2/health/live").status == 200
        finally:
            for connection in busy:
                connection.close()
        until(lambda: gateway.fds() < 32, gateway.fds)


class TestMemory:
    """Bodies that are as large as may be, and what they become."""

    @pytest.fixture
    def options(self):
        return ["--allow-client-shm", "--models=all", "--request-timeout=60"]

    def test_large_bodies_are_there_once(self, gateway, key):
        size = 30 * MIB
        assert gateway.register("x", key("k", size), size).status == 200
        head = json.dumps({
            "inputs": [{"name": "INPUT0", "datatype": "UINT8", "shape": [1, size], "parameters": {"binary_data_size": size}}],
            "outputs": [{"name": "OUTPUT0", "parameters": {"shared_memory_region": "x", "shared_memory_byte_size": size}}]}).encode()
        body = head + bytes(size)
        for coded, headers in [(body, {}), (gzip.compress(body), {"Content-Encoding": "gzip"})]:
            reply = gateway.post("/v2/models/identity_uint8/infer", coded,
                                 headers={"Inference-Header-Content-Length": str(len(head)), **headers})
            assert reply.status == 200, reply
        assert gateway.post("/v2/models/identity_uint8/infer", gzip.compress(bytes(2 * size)),
                            headers={"Content-Encoding": "gzip"}).status == 429
        print("RSS", gateway.rss(), "KiB")
        gateway.check_memory()

    def test_numbers_on_many_connections(self, gateway):
        """They become a hundred times as large one after the other, beside those that wait."""
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(gateway.connect()) for _ in range(32)]
            for connection in connections:
                connection.sendall(infer(NUMBERS)[:-1])
            for connection in connections:
                connection.sendall(NUMBERS[-1:])
            replies = {read_reply(connection)[0] for connection in connections}
        # 500: there are more than its shape says
        assert replies <= {429, 500} and 500 in replies
        print("RSS", gateway.rss(), "KiB")
        gateway.check_memory()


def test_many_regions_with_long_names(gateway):
    """As many as one user may have, whose list is far longer than a register request; however many, the gateway stays small."""
    fd = os.memfd_create("many", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    n = 0
    with contextlib.closing(os.fdopen(fd)), Client(gateway.broker.socket) as client:
        client.hello()
        while n < 30000:
            names = [f"{number:06}" + "n" * 249 for number in range(n, n + 50)]
            results = client.register_many([register_entry(name, 64) for name in names], [fd])
            assert not any(result["code"] for result in results), results
            n += len(names)
        assert len(gateway.status()) == n
        with tritonclient.grpc.InferenceServerClient(gateway.grpc) as triton:
            assert len(triton.get_system_shared_memory_status().regions) == n
        assert gateway.post("/v2/systemsharedmemory/unregister").status == 200
        assert gateway.region("system", names[0], "status").json[0]["name"] == names[0]
    gateway.check_memory()


def many(gateway, count, raw, read=False):
    """@count connections that say @raw and end, without reading a reply."""
    for _ in range(count):
        try:
            with gateway.connect() as connection:
                connection.sendall(raw)
                if read:
                    connection.recv(1)
        except OSError:
            pass


ABUSES = {
    "nothing": lambda gateway: time.sleep(1),
    "connections that end at once": lambda gateway: many(gateway, 2000, b""),
    "requests without a reader": lambda gateway: many(gateway, 2000, LIVE * 50),
    "heads without an end": lambda gateway: many(gateway, 500, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 16000),
    "bodies without an end": lambda gateway: many(gateway, 200, infer(b" " * MIB)[:500000]),
    "bodies that are too large": lambda gateway: many(gateway, 200, post(f"Content-Length: {MIB}\r\n", b" " * MIB)),
    "nested JSON": lambda gateway: many(gateway, 50, post("Content-Length: 65536\r\n", b"[" * 65536), True),
    "wide JSON": lambda gateway: many(gateway, 200, post("Content-Length: 65536\r\n", wide(65536)), True),
    "nested JSON of an inference": lambda gateway: many(gateway, 50, infer(b"[" * MIB), True),
    "wide JSON of an inference": lambda gateway: many(gateway, 20, infer(wide(MIB)), True),
    "chunks of a byte": lambda gateway: many(gateway, 20, post("Transfer-Encoding: chunked\r\n", b"1\r\n \r\n" * 65536 + b"0\r\n\r\n"), True),
    "nonsense": lambda gateway: many(gateway, 500, bytes(range(256)) * 200),
}


class TestAbuse:
    """A bystander is served, memory is bounded, and nothing is left of it."""

    @pytest.fixture
    def options(self):
        return ["--allow-client-shm", "--models=all"]

    @pytest.mark.parametrize("name", ABUSES)
    def test_abuse(self, gateway, name):
        before = gateway.fds()
        with beside(name, HTTP, gateway.http):
            ABUSES[name](gateway)
        print(f"{name}: RSS {gateway.rss()} KiB")
        gateway.check_memory()
        until(lambda: gateway.fds() <= before + 1, gateway.fds)
        assert gateway.get("/v2/health/ready").status == 200


def test_a_bad_peer_writes_no_lines_into_the_log(gateway):
    assert gateway.register("x", "a\x1b[31m\u2028b", 1).status in (400, 500)
    assert gateway.register("x", "a\u009bb", 1).status == 400
    assert all(" " <= char <= "~" or char == "\n" for char in gateway.log())
