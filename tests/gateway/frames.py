# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 and gRPC in bytes, for what no client of theirs sends."""

import struct

MAGIC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
INITIAL_WINDOW_SIZE = 4


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def number(value):
    """An HPACK length of seven bits, without Huffman."""
    if value < 127:
        return bytes([value])
    value -= 127
    data = b"\x7f"
    while value >= 128:
        data += bytes([value & 127 | 128])
        value >>= 7
    return data + bytes([value])


def field(name, value, index=False):
    name, value = name.encode(), value if isinstance(value, bytes) else value.encode()
    return (b"\x40" if index else b"\0") + number(len(name)) + name + number(len(value)) + value


def block(path, method="POST", content_type="application/grpc", more=(), index=False):
    """The headers of a call."""
    fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    fields += [("content-type", content_type), ("te", "trailers"), *more]
    return b"".join(field(name, value, index) for name, value in fields)


def message(data, flag=0):
    return struct.pack(">BI", flag, len(data)) + data


def headers(path, stream=1, flags=END_HEADERS, **fields):
    return frame(HEADERS, flags, stream, block(path, **fields))


def call(path, stream=1, data=b"", **fields):
    """A whole request."""
    return headers(path, stream, **fields) + frame(DATA, END_STREAM, stream, message(data))


def take_frames(data):
    """[(kind, flags, stream, payload)] of what is complete in @data, and the rest."""
    frames = []
    while len(data) >= 9:
        size = int.from_bytes(data[:3], "big")
        if len(data) < 9 + size:
            break
        kind, flags, stream = struct.unpack(">BBI", data[3:9])
        frames.append((kind, flags, stream, data[9:9 + size]))
        data = data[9 + size:]
    return frames, data
