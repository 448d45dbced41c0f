# SPDX-License-Identifier: Apache-2.0
"""A broker whose fds the test holds, in the place of the supervisor, and may alter while no broker runs."""

import contextlib
import ctypes
import mmap
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import threading

from broker import BUILD, Broker, check_sanitizers, until
from protocol_client import DEADLINE

TOP = pathlib.Path(__file__).resolve().parents[2]
SO_PEEK_OFF = 42
TYPES = {"uint64_t": ctypes.c_uint64, "uint32_t": ctypes.c_uint32, "uint16_t": ctypes.c_uint16, "uint8_t": ctypes.c_uint8,
         "char": ctypes.c_char}
PARKED = struct.Struct("<II")  # magic, records
RECORD = struct.Struct("<HHIQ")  # kind, fds, reserved, id


def read_structs(*paths):
    """The structs of these headers, as ctypes has them."""
    text = "".join((TOP / path).read_text() for path in paths)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    numbers = dict(re.findall(r"#define (\w+) (\d+)\b", text))
    known = dict(TYPES)
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\n\} \1;", text, re.S):
        fields = []
        for kind, field, length in re.findall(r"(?:_Atomic )?(\w+) (\w+)(?:\[(\w+)\])?;", body):
            if kind not in known:
                break
            fields.append((field, known[kind] * int(numbers.get(length, length)) if length else known[kind]))
        else:
            known[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return known


STRUCTS = read_structs("libbroker/wire/protocol.h", "libbroker/wire/layout.h", "daemon/ledger.h")


class Books:
    """The registry and the ledger that the holder has, writable."""

    def __init__(self, store):
        self.registry_map, self.ledger_map = (mmap.mmap(store[name][0], 0) for name in ("shmb-registry", "shmb-ledger"))
        self.registry = STRUCTS["RegistryHeader"].from_buffer(self.registry_map)
        self.ledger = STRUCTS["LedgerHeader"].from_buffer(self.ledger_map)
        assert ctypes.sizeof(self.ledger) == self.ledger.header_size
        assert ctypes.sizeof(self.registry) == self.registry.header_size

    def _record(self, kind, offset, index):
        return STRUCTS[kind].from_buffer(self.ledger_map, offset + index * ctypes.sizeof(STRUCTS[kind]))

    def session(self, index):
        return self._record("LedgerSession", self.ledger.sessions_offset, index)

    def object(self, index):
        return self._record("LedgerObject", self.ledger.objects_offset, index)

    def region(self, slot):
        return self._record("LedgerRegion", self.ledger.regions_offset, slot)

    def map(self, index):
        return self._record("LedgerMap", self.ledger.maps_offset, index)

    def lease(self, index):
        return self._record("LedgerLease", self.ledger.leases_offset, index)

    def slot(self, slot):
        return STRUCTS["RegistrySlot"].from_buffer(self.registry_map, self.registry.slots_offset + slot * self.registry.slot_size)

    def index(self):
        return (ctypes.c_uint64 * self.registry.index_size).from_buffer(self.registry_map, self.registry.index_offset)

    def session_of(self, number):
        return next(self.session(i) for i in range(self.ledger.n_used_sessions) if self.session(i).id == number)

    def objects(self):
        return [self.object(i) for i in range(self.ledger.n_used_objects) if self.object(i).id]


def parked(fd):
    """The messages of a segment: (bytes, fds)."""
    with socket.socket(fileno=os.dup(fd)) as segment:
        segment.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 0)
        found = []
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(segment, 65536, 253, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            if not data:
                return found
            found.append((data, fds))


def records(data):
    """[(kind, fds, reserved, id)] of a message."""
    return [RECORD.unpack_from(data, PARKED.size + i * RECORD.size) for i in range(PARKED.unpack_from(data)[1])]


def park(messages):
    """A segment with these messages: the fd of its receiving end. Closes their fds."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for data, fds in messages:
        if fds:
            socket.send_fds(ours, [data], fds)
        else:
            ours.send(data)
        for fd in fds:
            os.close(fd)
    ours.close()
    return theirs.detach()


class HeldBroker(Broker):
    """.store has the fds by name, {name: [fd]}; the broker is killed, altered and started again by dead()."""

    def launch(self, prepare):
        self.prepare, self.store, self.limit = prepare, {}, 4096
        self.log_path.touch()
        self._start()

    def _start(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ, SHMBROKER_SUPERVISOR_FD=str(theirs.fileno()), SHMBROKER_SUPERVISOR_PID=str(os.getpid()))
        with theirs, open(self.log_path, "ab") as log:
            self.process = subprocess.Popen([BUILD / "shmbrokerd", *self.arguments], stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, preexec_fn=self.prepare, cwd="/", env=environment,
                                            pass_fds=[theirs.fileno()])
        self.thread = threading.Thread(target=self._hold, args=(ours,), daemon=True)
        self.thread.start()

    def _hold(self, channel):
        with channel:
            try:
                for name, fds in list(self.store.items()):
                    for fd in fds:
                        socket.send_fds(channel, [f"FDNAME={name}\n".encode()], [fd])
                channel.send(b"FDEND=1")
                while True:
                    data, fds, _, _ = socket.recv_fds(channel, 4096, 253)
                    if not data:
                        return
                    self._hear(data.decode().split("\n"), fds)
            except (BrokenPipeError, ConnectionResetError):
                pass

    def _hear(self, lines, fds):
        name = next((line[7:] for line in lines if line.startswith("FDNAME=")), "stored")
        if "FDSTORE=1" in lines and self.count() < self.limit:
            self.store.setdefault(name, []).extend(fds)
            fds = []
        if "FDSTOREREMOVE=1" in lines:
            fds = fds + self.store.pop(name, [])
        for fd in fds:
            os.close(fd)

    def count(self):
        # the thread that holds it may change it meanwhile
        return sum(map(len, list(self.store.values())))

    def segments(self):
        return [name for name in list(self.store) if re.fullmatch(r"shmb-s[1-9]\d*", name)]

    def replace(self, name, fd):
        for old in self.store.pop(name, []):
            os.close(old)
        if fd is not None:
            self.store[name] = [fd]

    def alter_parked(self, change):
        """@change gets each parked message, (data, fds), and returns the list of those to have in its place."""
        for name in self.segments():
            self.replace(name, park([new for data, fds in parked(self.store[name][0]) for new in change(data, fds)]))

    def end(self):
        """SIGKILL; what it had sent is held."""
        self.process.kill()
        self.process.wait()
        self.thread.join(DEADLINE)

    def start_again(self, tries=1):
        """Starts it, and again when it ends by itself before it serves; never because of a signal."""
        for _ in range(tries):
            ready = self.log().count(": ready")
            self._start()
            until(lambda: self.log().count(": ready") > ready or self.process.poll() is not None, self.log)
            if self.process.poll() is None:
                return
            assert self.process.returncode > 0, self.log()[-8000:]
            self.thread.join(DEADLINE)
        raise AssertionError(f"it does not start: {self.log()[-8000:]}")

    @contextlib.contextmanager
    def dead(self, tries=1):
        """Inside no broker runs, and the store may be changed."""
        self.end()
        yield
        self.start_again(tries)

    def stop(self):
        """Nothing that it left is wanted."""
        self.finished = True
        self.process.send_signal(signal.SIGINT)
        try:
            assert self.process.wait(DEADLINE) == 0, self.log()[-8000:]
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.thread.join(DEADLINE)
            for name in list(self.store):
                self.replace(name, None)
            print(self.log()[-8000:])
        check_sanitizers(self.log())
