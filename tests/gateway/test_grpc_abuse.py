# SPDX-License-Identifier: Apache-2.0
"""The gRPC door with peers that mean harm. Each ends, the gateway stays small, and a client beside them is served.

What that client waits for is printed (pytest -s), with and without the peer.
"""

import contextlib
import gzip
import select
import socket
import struct
import time

import pytest
from conftest import DEADLINE, until

import frames
from bystander import GRPC, beside
from frames import (ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, INITIAL_WINDOW_SIZE, PING, RST_STREAM,
                    SETTINGS, WINDOW_UPDATE)

SERVICE = "/inference.GRPCInferenceService/"
LIVE, STATUS = SERVICE + "ServerLive", SERVICE + "SystemSharedMemoryStatus"
PROTOCOL_ERROR, ENHANCE_YOUR_CALM = 1, 11

@pytest.fixture
def options():
    """What waits for a peer waits less, and the tests with it."""
    return ["--allow-client-shm", "--request-timeout=2", "--max-connections=64"]


@pytest.fixture
def bystander(gateway, request):
    """Another client, whose calls all succeed; and the gateway is small in the end."""
    with beside(request.node.name, GRPC, gateway.grpc):
        yield
    gateway.check_memory()
    assert gateway.process.poll() is None


class Peer:
    """A connection to the gRPC door."""

    def __init__(self, gateway, settings=b"", greet=True):
        self.socket = socket.create_connection(("127.0.0.1", gateway.ports["grpc"]["port"]), DEADLINE)
        self.rest, self.seen, self.closed = b"", [], False
        if greet:
            self.send(frames.MAGIC + frames.frame(SETTINGS, 0, 0, settings))

    def send(self, data):
        """False when the other side has closed."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
        return not self.closed

    def read(self, wait=0.0):
        """Takes what is there, or comes within @wait seconds."""
        while not self.closed and select.select([self.socket], [], [], wait)[0]:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            self.closed = not data
            got, self.rest = frames.take_frames(self.rest + data)
            self.seen += got
            wait = 0.0

    def until(self, condition, what):
        """Reads until @condition is true."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end and not self.closed, (what, self.seen[-5:])
            self.read(0.05)

    def until_closed(self):
        end = time.monotonic() + DEADLINE
        while not self.closed:
            assert time.monotonic() < end, self.seen[-5:]
            self.read(0.05)

    def flood(self, make, most, read=True):
        """Sends what @make(i) makes until the other side closes, which it must within @most of them."""
        for i in range(0, most, 100):
            if not self.send(b"".join(make(i + j) for j in range(100))):
                return
            if read:
                self.read()
            if self.closed:
                return
        self.until_closed()

    def of(self, kind, stream=None):
        """Payloads of the frames that were seen."""
        return [payload for k, _, s, payload in self.seen if k == kind and stream in (None, s)]

    def goaway(self):
        """The error of the last GOAWAY, None without one."""
        all_of = self.of(GOAWAY)
        return struct.unpack(">I", all_of[-1][4:8])[0] if all_of else None

    def streams_ended(self):
        return {s for k, flags, s, _ in self.seen if k == RST_STREAM or k in (HEADERS, DATA) and flags & END_STREAM}

    def close(self):
        self.socket.close()


@pytest.fixture
def peer(gateway):
    """Makes connections, and closes them."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **how: stack.enter_context(contextlib.closing(Peer(gateway, *arguments, **how)))


# --- floods

FLOODS = {
    "rapid_reset": (lambda i: frames.headers(LIVE, 2 * i + 1) + frames.frame(RST_STREAM, 0, 2 * i + 1, b"\0\0\0\x08"),
                    ENHANCE_YOUR_CALM),
    "rapid_reset_of_whole_calls": (
        lambda i: frames.call(STATUS, 2 * i + 1) + frames.frame(RST_STREAM, 0, 2 * i + 1, b"\0\0\0\x08"), ENHANCE_YOUR_CALM),
    "made_you_reset": (
        lambda i: frames.headers(LIVE, 2 * i + 1) + frames.frame(WINDOW_UPDATE, 0, 2 * i + 1, b"\x7f\xff\xff\xff"),
        ENHANCE_YOUR_CALM),
    "made_you_reset_by_0": (
        lambda i: frames.headers(LIVE, 2 * i + 1) + frames.frame(WINDOW_UPDATE, 0, 2 * i + 1, b"\0\0\0\0"), None),
    "too_many_streams": (lambda i: frames.headers(LIVE, 2 * i + 1), ENHANCE_YOUR_CALM),
    "ping": (lambda i: frames.frame(PING, 0, 0, b"12345678"), ENHANCE_YOUR_CALM),
    "settings": (lambda i: frames.frame(SETTINGS, 0, 0, struct.pack(">HI", 1, 4096 - i % 2)), ENHANCE_YOUR_CALM),
    "empty_data": (lambda i: frames.frame(DATA, 0, 1) if i else frames.headers(LIVE), ENHANCE_YOUR_CALM),
    "priority": (lambda i: frames.frame(2, 0, 2 * i + 1, b"\0\0\0\0\x10"), ENHANCE_YOUR_CALM),
    "continuation": (lambda i: frames.frame(CONTINUATION, 0, 1, frames.field("x", "y" * 1000)) if i else
                     frames.frame(HEADERS, 0, 1, frames.block(LIVE)), None),
}


@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
@pytest.mark.parametrize("name", FLOODS)
def test_flood(peer, bystander, name, read):
    """Frames that make work and bring nothing, whether or not the answers are read."""
    make, error = FLOODS[name]
    one = peer()
    one.flood(make, 200000, read)
    if read and error is not None and one.of(GOAWAY):
        assert one.goaway() in (error, PROTOCOL_ERROR)


def test_moderate_pings(peer, bystander):
    """As many as a client sends that keeps its connection alive, each of which is answered."""
    one = peer()
    for i in range(1, 500):
        one.send(frames.frame(PING, 0, 0, struct.pack(">Q", i)))
        one.until(lambda: len(one.of(PING)) >= i, "an answer")  # pylint: disable=cell-var-from-loop
    assert [flags for kind, flags, _, _ in one.seen if kind == PING] == [ACK] * 499


def test_unknown_frames(peer, bystander):
    """They are to be ignored, and cost no more than their bytes."""
    one = peer()
    for _ in range(100):
        one.send(frames.frame(99, 255, 1, b"x" * 16000) + frames.frame(98, 0, 0) * 100)
    one.send(frames.call(LIVE))
    one.until(lambda: 1 in one.streams_ended(), "an answer")


# --- readers that do not read


def many_regions(gateway, key, n=300):
    """So that a status is long; the names' length."""
    name = key("a", 64)
    for i in range(n):
        assert gateway.register(f"{i:03}" + "n" * 200, name, 64).status == 200
    return n * 400


@pytest.mark.parametrize("n", [1, 50])
def test_window_0(gateway, key, peer, bystander, n):
    """Replies that nobody takes are few, and are given up."""
    length = many_regions(gateway, key)
    some = [peer(struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)) for _ in range(n)]
    for one in some:
        one.send(b"".join(frames.call(STATUS, 2 * i + 1) for i in range(32)))
    for one in some:
        one.until(lambda: len(one.streams_ended()) == 32, "all calls end")  # pylint: disable=cell-var-from-loop
        assert sum(map(len, one.of(DATA))) == 0
    # nobody holds anything any more, and each is still of use
    for one in some:
        one.send(frames.frame(WINDOW_UPDATE, 0, 0, b"\0\x0f\xff\xff") + frames.frame(SETTINGS, 0, 0, struct.pack(
            ">HI", INITIAL_WINDOW_SIZE, 1 << 20)) + frames.call(STATUS, 65))
        one.until(lambda: 65 in one.streams_ended(), "a call")  # pylint: disable=cell-var-from-loop
        assert sum(map(len, one.of(DATA, 65))) > length
    gateway.post("/v2/systemsharedmemory/unregister")


def test_windows_of_one_byte(gateway, key, peer, bystander):
    """A reply that is taken byte by byte is given up, too."""
    many_regions(gateway, key)
    one = peer(struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
    one.send(frames.call(STATUS))
    end = time.monotonic() + DEADLINE
    while not one.closed and 1 not in one.streams_ended():
        assert time.monotonic() < end
        one.send(frames.frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"))
        one.read(0.01)
    gateway.post("/v2/systemsharedmemory/unregister")


def test_socket_that_is_not_read(gateway, key, peer, bystander):
    many_regions(gateway, key)
    one = peer(struct.pack(">HI", INITIAL_WINDOW_SIZE, (1 << 31) - 1))
    one.send(frames.frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\0\0"))
    stream = 1
    # a send that blocks for ever would say that the gateway waits for ever
    with contextlib.suppress(TimeoutError):
        while one.send(frames.call(STATUS, stream)):
            stream += 2
    assert one.closed
    gateway.post("/v2/systemsharedmemory/unregister")


# --- small things that are large


def test_gzip_bomb(peer, bystander):
    """68 MiB in 66 kB, and the same within what a message may have on the wire."""
    more = [("grpc-encoding", "gzip")]
    bomb = gzip.compress(bytes(68 << 20), mtime=0)
    assert len(bomb) > 65536
    one = peer()
    one.send(frames.headers(STATUS, more=more) + frames.frame(DATA, 0, 1, frames.message(bomb, 1)[:16000]))
    one.until(lambda: 1 in one.streams_ended(), "too long")
    bomb = gzip.compress(bytes(60 << 20), mtime=0)
    assert len(bomb) < 65536
    for i in range(1, 21):
        data = frames.message(bomb, 1)
        one.send(frames.headers(STATUS, 2 * i + 1, more=more))
        for at in range(0, len(data), 16000):
            part = data[at:at + 16000]
            one.send(frames.frame(DATA, END_STREAM if at + 16000 >= len(data) else 0, 2 * i + 1, part))
        one.until(lambda: 2 * i + 1 in one.streams_ended(), "too long")  # pylint: disable=cell-var-from-loop
    assert not one.closed


def test_hpack_bomb(peer, bystander):
    """A header of 4 kB in the table, named thousands of times by a byte each."""
    one = peer()
    # the table has 4,096 bytes, of which an entry costs 32
    first = frames.frame(HEADERS, END_HEADERS | END_STREAM, 1, frames.block(LIVE) + frames.field("x", "y" * 4000, index=True))
    one.send(first)
    for i in range(1, 21):
        one.send(frames.frame(HEADERS, END_HEADERS | END_STREAM, 2 * i + 1, frames.block(LIVE) + b"\xbe" * 12000))
        one.until(lambda: 2 * i + 1 in one.streams_ended(), "an answer")  # pylint: disable=cell-var-from-loop
    assert not one.closed


def test_half_messages_on_many_connections(peer, bystander):
    """What is held for messages that do not come is bounded for all together, and others have their share."""
    some = [peer() for _ in range(50)]
    for one in some:
        for i in range(32):
            one.send(frames.headers(STATUS, 2 * i + 1) + frames.frame(DATA, 0, 2 * i + 1, frames.message(bytes(16000))[:15000]))
    for one in some:
        one.until(lambda: len(one.streams_ended()) == 32, "all calls end")  # pylint: disable=cell-var-from-loop


# --- connections


def test_more_connections_than_there_may_be(gateway, peer, bystander):
    """One that is idle makes room."""
    some = [peer() for _ in range(200)]
    some[-1].send(frames.call(LIVE))
    some[-1].until(lambda: 1 in some[-1].streams_ended(), "an answer")
    assert gateway.fds() < 64 + 40


def test_no_preface(peer, bystander):
    """Neither silence nor a byte now and then keeps a connection."""
    silent, slow = peer(greet=False), peer(greet=False)
    end = time.monotonic() + DEADLINE
    sent = 0
    while not (silent.closed and slow.closed):
        assert time.monotonic() < end
        if sent < len(frames.MAGIC) - 1 and not slow.closed:
            slow.send(frames.MAGIC[sent:sent + 1])
            sent += 1
        silent.read(0.1)
        slow.read()


def test_request_that_drips(peer, bystander):
    """Its time is absolute."""
    one = peer()
    one.send(frames.headers(STATUS) + frames.frame(DATA, 0, 1, frames.message(bytes(1000))[:10]))
    end = time.monotonic() + DEADLINE
    while 1 not in one.streams_ended():
        assert time.monotonic() < end
        one.send(frames.frame(DATA, 0, 1, b"\0"))
        one.read(0.1)
    assert not one.closed


@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), bytes(100),
    frames.MAGIC + b"x" * 100, frames.MAGIC + frames.frame(PING, 0, 0, b"12345678")], ids=["http", "tls", "zeros", "x", "ping"])
def test_not_http2(peer, gateway, data):
    one = peer(greet=False)
    one.send(data)
    one.until_closed()
    assert gateway.ready()


@pytest.mark.parametrize("what", [
    frames.call(LIVE, 2), frames.frame(DATA, 0, 1, b"x"), frames.frame(DATA, 0, 0, b"x"),
    frames.frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\0"), frames.frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
    frames.frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), frames.frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1)),
    frames.frame(PING, 0, 0, b"1"), frames.frame(DATA, 0, 1, bytes(17000)), frames.frame(CONTINUATION, END_HEADERS, 1, b"")],
    ids=["even", "idle", "stream_0", "window_0", "window_overflow", "hpack", "settings", "ping", "too_long", "continuation"])
def test_protocol_errors(peer, gateway, what):
    """They are named in a GOAWAY, and end the connection."""
    one = peer()
    one.send(what)
    one.until_closed()
    assert one.goaway() not in (None, 0)
    assert gateway.ready()
