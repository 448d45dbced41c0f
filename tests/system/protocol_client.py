# SPDX-License-Identifier: Apache-2.0
"""A client of the broker in pure Python, written from shmbroker-protocol(7) and shmbroker-protocol-messages(7) alone.

Struct layouts, opcodes, numbers, limits and error codes are read from the tables of the pages, not from the code: when
a page is wrong, the tests that use this client fail.
"""

import fcntl
import mmap
import os
import pathlib
import re
import socket
import struct
import threading
import time

WIRE = pathlib.Path(__file__).resolve().parents[2] / "libbroker/wire"
PAGES = WIRE / "shmbroker-protocol.7", WIRE / "shmbroker-protocol-messages.7"
DEADLINE = 60
CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}


class Struct:
    """One struct of the pages; fields are packed from keywords (0 when not given) and unpacked to a dict."""

    def __init__(self, name, size):
        self.name, self.size, self.fields = name, size, []

    def add(self, offset, size, kind, name):
        code = CODES.get(kind) or f"{int(kind[1:])}s"
        assert struct.calcsize("<" + code) == size, (self.name, name)
        self.fields.append((name, offset, code))

    def pack(self, **values):
        data = bytearray(self.size)
        for name, offset, code in self.fields:
            value = values.pop(name, b"" if code.endswith("s") else 0)
            struct.pack_into("<" + code, data, offset, value)
        assert not values, f"{self.name} has no {values}"
        return bytes(data)

    def unpack(self, data, at=0):
        return {name: struct.unpack_from("<" + code, data, at + offset)[0] for name, offset, code in self.fields}

    def offset(self, field):
        return next(offset for name, offset, _ in self.fields if name == field)


def read_pages():
    """The pages' tables: structs, opcodes, numbers by group, limits, errors."""
    structs, opcodes, numbers, limits, errors = {}, {}, {}, {}, {}
    section, current = "", None
    for line in "".join(page.read_text(encoding="utf-8") for page in PAGES).splitlines():
        if line.startswith(".Sh "):
            section, current = line[4:], None
        elif line.startswith(".Ss "):
            current = line[4:]
        elif section.endswith("STRUCTS") and (match := re.match(r"(\d+) bytes: ", line)):
            structs[current] = Struct(current, int(match[1]))
        elif line.startswith(".It ") and not line.startswith(".It Sy "):
            cells = [cell.strip() for cell in line[4:].split(" Ta ")]
            if section.endswith("STRUCTS"):
                structs[current].add(int(cells[0]), int(cells[1]), cells[2], cells[3])
            elif section == "OPCODES":
                opcodes[cells[0]] = int(cells[1])
            elif section == "NUMBERS":
                numbers.setdefault(cells[0], {})[cells[1]] = int(cells[2])
            elif section == "LIMITS":
                limits[cells[0]] = int(cells[1])
            elif section == "ERRORS":
                errors[cells[0]] = int(cells[1])
    assert structs and opcodes and numbers and limits and errors, PAGES
    return structs, opcodes, numbers, limits, errors


STRUCTS, OP, NUMBERS, LIMIT, E = read_pages()
ERROR_NAMES = {value: name for name, value in E.items()}
HEADER = STRUCTS["Header"]
FLAG, STATE, MODE, SCOPE, EVENT = (NUMBERS[group] for group in ("FLAG", "STATE", "MODE", "SCOPE", "EVENT"))
ACCESS, REGION, ROLE = (NUMBERS[group] for group in ("ACCESS", "REGION", "ROLE"))
NO_FD, ANY_UID, REST, FOREVER = (LIMIT[name] for name in ("NO_FD", "ANY_UID", "REST", "FOREVER"))
OPEN = 1  # state of a registry under which leases are granted
FENCE = threading.Lock()
READ, READ_WRITE = ACCESS["READ"], ACCESS["READ"] | ACCESS["WRITE"]


class Refused(Exception):
    """A request that was answered with a code; .name is the code's name."""

    def __init__(self, code, text=""):
        super().__init__(f"{ERROR_NAMES.get(code, code)}: {text}")
        self.code, self.name, self.text = code, ERROR_NAMES.get(code, str(code)), text

    def __reduce__(self):
        return Refused, (self.code, self.text)


class Disconnected(Exception):
    """The broker has ended the connection."""


class Unanswered(Exception):
    """The answer was not to be waited for."""


def padded(data):
    return data + bytes(-len(data) % 8)


def name_bytes(name):
    return name if isinstance(name, bytes) else name.encode()


def message(opcode, body=b"", serial=1, flags=0, length=None):
    """A message; what is wrong with it is the caller's choice."""
    opcode = OP.get(opcode, opcode)
    length = HEADER.size + len(body) if length is None else length
    return HEADER.pack(opcode=opcode, flags=flags, length=length, serial=serial) + body


def entries(data, at, count, name, *parts):
    """@count entries of the struct @name, each followed by variable parts: field names that give their lengths."""
    for _ in range(count):
        entry = STRUCTS[name].unpack(data, at)
        at += STRUCTS[name].size
        for part in parts:
            length = entry[part + "_length"]
            entry[part] = data[at : at + length]
            at += length + -length % 8
        yield entry, at


def register_entry(name, size, offset=0, access=READ_WRITE, flags=0, acl=(), fd=0, read_only_fd=NO_FD, handle=b"", **fields):
    """A RegisterEntry with what follows it; @acl has pairs (kind, id)."""
    name, key = name_bytes(name), name_bytes(fields.pop("key", b""))
    kind = fields.pop("kind", NUMBERS["KIND"]["MEMORY"])
    body = STRUCTS["RegisterEntry"].pack(
        kind=kind, access=access, flags=flags, fd_index=fd, read_only_fd_index=read_only_fd, offset=offset, size=size,
        name_length=len(name), acl_count=len(acl), handle_length=len(handle), key_length=len(key),
        **{"principal": ANY_UID, **fields})
    acl = b"".join(STRUCTS["AclEntry"].pack(kind=k, id=i) for k, i in acl)
    return body + padded(name) + acl + padded(handle) + padded(key)


def cuda_entry(name, size, handle=b"", device=b"\x47" * 16, kind=None, **fields):
    """A RegisterEntry of GPU memory: of CUDA IPC with a handle, of an fd without."""
    kind = NUMBERS["KIND"][kind or ("CUDA_IPC" if handle else "CUDA_VMM")]
    fd = NO_FD if handle else 0
    return register_entry(name, size, **{"fd": fd, "kind": kind, "device": device, "handle": handle, **fields})


def batch(*items):
    return STRUCTS["CountHead"].pack(count=len(items)) + b"".join(items)


def memory(size=8192, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL, fill=b""):
    """A memfd of @size bytes."""
    fd = os.memfd_create("memory", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    if fill:
        os.pwrite(fd, fill, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def reopen(fd, flags=os.O_RDONLY):
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


class Client:
    """A connection. Requests are answered in order of call(); events that come between are kept in .events."""

    def __init__(self, path, deadline=DEADLINE):
        self.path, self.deadline, self.serial, self.events, self.late = path, deadline, 0, [], {}
        self.repeats, self.only_sends = None, False
        self.connect()

    def connect(self):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # a full backlog makes a connect wait only when it blocks
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", self.deadline, 0))
        self.socket.connect(str(self.path))
        self.socket.settimeout(self.deadline)

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def send_raw(self, data, fds=()):
        """Bytes as they are; Disconnected when the broker has gone."""
        try:
            if fds:
                socket.send_fds(self.socket, [data], list(fds))
            else:
                self.socket.send(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Disconnected from error

    def receive(self, deadline=None):
        """The next message: (header, body, fds). Disconnected at the end, TimeoutError after the deadline."""
        self.socket.settimeout(self.deadline if deadline is None else deadline)
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, LIMIT["MESSAGE_MAX"], LIMIT["FDS_MAX"])
        except ConnectionResetError as error:
            raise Disconnected from error
        if not data:
            raise Disconnected
        header = HEADER.unpack(data)
        assert header["length"] == len(data) and len(data) % 8 == 0
        return header, data[HEADER.size :], fds

    def _event(self, body):
        event, _ = next(entries(body, 0, 1, "Event", "name"))
        self.events.append(event)

    def send(self, opcode, body=b"", fds=()):
        """Sends a request and returns its serial."""
        if self.repeats:
            serial, flags, self.repeats = self.repeats, FLAG["RETRY"], None
        else:
            self.serial += 1
            serial, flags = self.serial, 0
        self.send_raw(message(opcode, body, serial, flags), fds)
        return serial

    def wait(self, serial, deadline=None):
        """The reply to @serial: (header, body, fds); Refused when it is an error."""
        if self.only_sends:
            raise Unanswered
        while serial not in self.late:
            header, body, fds = self.receive(deadline)
            if header["flags"] & FLAG["EVENT"]:
                self._event(body)
            elif header["flags"] & FLAG["ERROR"] and header["serial"] in (0, serial):
                error = STRUCTS["ErrorReply"].unpack(body)
                at = STRUCTS["ErrorReply"].size
                raise Refused(error["code"], body[at : at + error["text_length"]].decode())
            else:
                assert header["flags"] & FLAG["REPLY"]
                self.late[header["serial"]] = header, body, fds
        return self.late.pop(serial)

    def call(self, opcode, body=b"", fds=()):
        return self.wait(self.send(opcode, body, fds))

    def wait_event(self, kind, name=None):
        """Takes the next event of this type (and name) and returns it; earlier ones of other types are kept."""
        end = time.monotonic() + self.deadline
        while True:
            for i, event in enumerate(self.events):
                if event["type"] == EVENT[kind] and (name is None or event["name"] == name_bytes(name)):
                    return self.events.pop(i)
            if time.monotonic() > end:
                raise TimeoutError(kind)
            header, body, _ = self.receive()
            assert header["flags"] & FLAG["EVENT"], header
            self._event(body)

    def ended(self):
        """Reads up to the end of the connection; True when it ends before the deadline. The last error is kept."""
        self.last_error = None
        try:
            while True:
                header, body, fds = self.receive()
                for fd in fds:
                    os.close(fd)
                if header["flags"] & FLAG["ERROR"]:
                    error = STRUCTS["ErrorReply"].unpack(body)
                    self.last_error = ERROR_NAMES[error["code"]]
        except Disconnected:
            return True
        except TimeoutError:
            return False

    # one method a request

    def hello(self, roles=0, accept_unsealed=False, version=None, **fields):
        flags = NUMBERS["HELLO"]["ACCEPT_UNSEALED"] if accept_unsealed else 0
        request = STRUCTS["HelloRequest"].pack(version=LIMIT["VERSION"] if version is None else version, roles=roles,
                                               flags=flags, **fields)
        _, body, _ = self.call("HELLO", request)
        self.session = STRUCTS["HelloReply"].unpack(body)
        return self.session

    def resume(self, **fields):
        """Goes on with the session on a new connection, as soon as a broker takes it."""
        old, end = self.session, time.monotonic() + self.deadline
        asked = {"roles": old["roles"], "session": old["session"], "token": old["token"], "epoch": old["epoch"], **fields}
        while True:
            self.socket.close()
            try:
                self.connect()
                reply = self.hello(**asked)
                break
            except (ConnectionError, Disconnected, FileNotFoundError):
                assert time.monotonic() < end, "no broker"
            except Refused as refused:
                if refused.name not in ("AGAIN", "BUSY") or time.monotonic() > end:
                    raise
            time.sleep(0.005)
        assert reply["flags"] == NUMBERS["HELLO_REPLY"]["RESUMED"], reply
        return reply

    def ping(self, payload=1):
        _, body, _ = self.call("PING", STRUCTS["Ping"].pack(payload=payload))
        assert STRUCTS["Ping"].unpack(body)["payload"] == payload

    def info(self):
        _, body, _ = self.call("INFO")
        count = STRUCTS["CountHead"].unpack(body)["count"]
        found = entries(body, STRUCTS["CountHead"].size, count, "InfoEntry", "key", "value")
        return {entry["key"].decode(): entry["value"].decode() for entry, _ in found}

    def register_many(self, items, fds):
        """Registers packed RegisterEntries; a list of RegisterResults."""
        _, body, _ = self.call("REGISTER", batch(*items), fds)
        head = STRUCTS["CountHead"]
        return [entry for entry, _ in entries(body, head.size, head.unpack(body)["count"], "RegisterResult", "text")]

    def register(self, name, fd, size=8192, read_only_fd=None, **fields):
        fds = [fd] if read_only_fd is None else [fd, read_only_fd]
        item = register_entry(name, size, read_only_fd=NO_FD if read_only_fd is None else 1, **fields)
        (result,) = self.register_many([item], fds)
        if result["code"]:
            raise Refused(result["code"], result["text"].decode())
        return result

    def send_unregister(self, names=(), mode="STRICT", scope="NAMES", wait=False, timeout_ms=FOREVER, generation=0,
                        principal=ANY_UID):
        body = STRUCTS["UnregisterRequest"].pack(
            scope=SCOPE[scope], mode=MODE[mode], flags=NUMBERS["UNREGISTER"]["WAIT"] if wait else 0,
            timeout_ms=timeout_ms, count=len(names), principal=principal)
        for name in names:
            name = name_bytes(name)
            body += STRUCTS["NameEntry"].pack(generation=generation, name_length=len(name)) + padded(name)
        return self.send("UNREGISTER", body)

    def unregister_wait(self, serial):
        """(UnregisterReply, [UnregisterResult])"""
        _, body, _ = self.wait(serial)
        reply = STRUCTS["UnregisterReply"].unpack(body)
        found = entries(body, STRUCTS["UnregisterReply"].size, reply["count"], "UnregisterResult", "text")
        return reply, [entry for entry, _ in found]

    def unregister_many(self, names=(), **how):
        return self.unregister_wait(self.send_unregister(names, **how))

    def unregister(self, name, **how):
        _, (result,) = self.unregister_many([name], **how)
        if result["code"]:
            raise Refused(result["code"], result["text"].decode())
        return result

    def lookup(self, name, offset=0, size=REST, access=READ, want_fd=False, no_lease=False):
        """A LookupResult with .fd, which is the caller's to close, or None."""
        name = name_bytes(name)
        flags = (NUMBERS["LOOKUP"]["WANT_FD"] if want_fd else 0) | (NUMBERS["LOOKUP"]["NO_LEASE"] if no_lease else 0)
        item = STRUCTS["LookupEntry"].pack(offset=offset, size=size, access=access, flags=flags, name_length=len(name))
        _, body, fds = self.call("LOOKUP", batch(item + padded(name)))
        result, _ = next(entries(body, STRUCTS["CountHead"].size, 1, "LookupResult", "text", "handle"))
        if result["code"]:
            assert not fds
            raise Refused(result["code"], result["text"].decode())
        result["fd"] = None if result["fd_index"] == NO_FD else fds[result["fd_index"]]
        return result

    def release(self, lease):
        _, body, _ = self.call("RELEASE", batch(STRUCTS["ReleaseEntry"].pack(lease=lease)))
        result, _ = next(entries(body, STRUCTS["CountHead"].size, 1, "ReleaseResult"))
        if result["code"]:
            raise Refused(result["code"])

    def attach(self, mode="RMW", lanes=0):
        """Maps the registry and a lease page: a LeasePage."""
        _, body, fds = self.call("ATTACH", STRUCTS["AttachRequest"].pack(mode=NUMBERS["ATTACH"][mode], lanes=lanes))
        return LeasePage(self, STRUCTS["AttachReply"].unpack(body), fds)

    def map(self, slot, generation, access=READ, have_object=0):
        """A MapReply with .fd, which is the caller's to close, or None."""
        _, body, fds = self.call("MAP", STRUCTS["MapRequest"].pack(slot=slot, access=access, generation=generation,
                                                                   have_object=have_object))
        reply, _ = next(entries(body, 0, 1, "MapReply", "handle"))
        reply["fd"] = fds[0] if fds else None
        return reply

    def unmap(self, slot, generation):
        self.call("UNMAP", STRUCTS["UnmapRequest"].pack(slot=slot, generation=generation))

    def notify(self, slot, generation, scan):
        self.send("NOTIFY", STRUCTS["Notify"].pack(slot=slot, generation=generation, scan=scan))

    def subscribe(self, *kinds):
        self.call("SUBSCRIBE", STRUCTS["SubscribeRequest"].pack(mask=sum(1 << EVENT[kind] for kind in kinds)))

    def _pages(self, opcode, pack):
        cursor = 0
        while True:
            _, body, _ = self.call(opcode, pack(cursor))
            head = STRUCTS["PageHead"].unpack(body)
            yield body, head["count"]
            cursor = head["next"]
            if not cursor:
                return

    def status(self, name="", match="ANY", holders=True, **asked):
        """All regions that match, by name and generation: a list of StatusEntries with .holders."""
        name = name_bytes(name)
        found = []

        def pack(cursor):
            return STRUCTS["StatusRequest"].pack(
                cursor=cursor, flags=NUMBERS["STATUS"]["HOLDERS"] if holders else 0, match=NUMBERS["MATCH"][match],
                name_length=len(name), **{"uid": ANY_UID, **asked}) + padded(name)

        for body, count in self._pages("STATUS", pack):
            at = STRUCTS["PageHead"].size
            for _ in range(count):
                entry, after = next(entries(body, at, 1, "StatusEntry", "name", "container", "key"))
                entry["holders"] = [holder for holder, _ in entries(body, after, entry["holder_count"], "StatusHolder")]
                at += entry["length"]
                found.append(entry)
        return found

    def clients(self, uid=ANY_UID):
        found = []
        for body, count in self._pages("CLIENTS", lambda cursor: STRUCTS["ClientsRequest"].pack(cursor=cursor, uid=uid)):
            found += [e for e, _ in entries(body, STRUCTS["PageHead"].size, count, "ClientEntry", "container")]
        return found

    def stats(self, accounts=False):
        """{name: value} of the broker, or {(name, uid): value} of it and of the accounts."""
        flags = NUMBERS["STATS"]["ACCOUNTS"] if accounts else 0
        found = {}
        for body, count in self._pages("STATS", lambda cursor: STRUCTS["StatsRequest"].pack(cursor=cursor, flags=flags)):
            for entry, _ in entries(body, STRUCTS["PageHead"].size, count, "StatsEntry", "name", "help"):
                found[entry["name"].decode(), entry["uid"]] = entry["value"]
        return found if accounts else {name: value for (name, uid), value in found.items() if uid == ANY_UID}


def fold(a, b):
    product = a * b
    return (product ^ product >> 64) & 0xFFFFFFFFFFFFFFFF


def name_hash(seed, name):
    """The name hash of the page."""
    def number(at, size=8):
        return int.from_bytes(name[at : at + size], "little")

    state, key = seed[0] ^ 0x6A09E667F3BCC909, seed[1] ^ 0xBB67AE8584CAA73B
    last_state, last_key = seed[0] ^ 0x3C6EF372FE94F82B, seed[1] ^ 0xA54FF53A5F1D36F1
    size, at = len(name), 0
    while size - at > 16:
        state = fold(number(at) ^ key, number(at + 8) ^ state)
        at += 16
    if size > 16:
        low, high = number(size - 16), number(size - 8)
    elif size >= 8:
        low, high = number(0), number(size - 8)
    elif size >= 4:
        low, high = number(0, 4), number(size - 4, 4)
    else:
        low, high = name[0] << 16 | name[size // 2] << 8 | name[-1], 0
    state ^= fold(low ^ last_key, high ^ last_state)
    return fold(state, size ^ key)


def fence():
    """A full memory barrier: taking a lock is an atomic read-modify-write."""
    with FENCE:
        pass


class LeasePage:
    """The two shared memories of a session. One thread uses it; all counts are in lane 0."""

    def __init__(self, client, reply, fds):
        self.client, self.reply, (registry, self.page_fd) = client, reply, fds
        self.registry_fd = registry
        self.registry = mmap.mmap(registry, reply["registry_size"], mmap.MAP_SHARED, mmap.PROT_READ)
        self.page = mmap.mmap(self.page_fd, reply["page_size"], mmap.MAP_SHARED)
        self.header = STRUCTS["RegistryHeader"].unpack(self.registry)
        self.shape = STRUCTS["LeasePageHeader"].unpack(self.page)
        self.seed = struct.unpack("<QQ", self.header["hash_seed"])

    def close(self):
        self.registry.close()
        self.page.close()
        os.close(self.registry_fd)
        os.close(self.page_fd)

    def find(self, name):
        """The slot that the index has for @name, or None (which says nothing)."""
        name = name_bytes(name)
        value = name_hash(self.seed, name)
        for i in range(64):
            at = self.header["index_offset"] + (value + i) % self.header["index_size"] * 8
            (word,) = struct.unpack_from("<Q", self.registry, at)
            if not word:
                return None
            slot = (word & 0xFFFFFFFF) - 1
            if word >> 32 == value >> 32 and slot < self.header["capacity"]:
                found = self.slot(slot)
                if found["name"] == name and found["word"]:
                    return slot
        return None

    def slot_at(self, slot):
        return self.header["slots_offset"] + slot * self.header["slot_size"]

    def slot(self, slot):
        """The fields of both halves, the name in one piece."""
        found = STRUCTS["RegistrySlot"].unpack(self.registry, self.slot_at(slot))
        detail = STRUCTS["RegistryDetail"].unpack(
            self.registry, self.header["details_offset"] + slot * self.header["detail_size"])
        name = (found["name"] + detail["name_rest"])[: found["name_length"]]
        return {**found, **detail, "name": name}

    def word(self, slot):
        """(generation, state)"""
        word = self.slot(slot)["word"]
        return word >> 2, word & 3

    def is_open(self):
        return STRUCTS["RegistryHeader"].unpack(self.registry)["state"] == OPEN

    def attached(self):
        at = self.header["sessions_offset"] + self.reply["session_index"] * 8
        return struct.unpack_from("<Q", self.registry, at)[0] == self.shape["session"]

    def count(self, slot, field, by=1, lane=0):
        """Adds to acquired or released, with a full barrier behind it."""
        struct.pack_into("<Q", self.page, STRUCTS["LeasePageHeader"].offset("lanes_used"), self.lanes_used() | 1 << lane)
        counter = STRUCTS["LaneCounter"]
        at = self.shape["lanes_offset"] + (lane * self.shape["capacity"] + slot) * counter.size + counter.offset(field)
        (value,) = struct.unpack_from("<I", self.page, at)
        struct.pack_into("<I", self.page, at, value + by & 0xFFFFFFFF)
        fence()

    def lanes_used(self):
        return struct.unpack_from("<Q", self.page, STRUCTS["LeasePageHeader"].offset("lanes_used"))[0]

    def acquire(self, slot, generation):
        """True when a lease on that generation (which must be mapped) is held."""
        self.count(slot, "acquired")
        granted = self.word(slot) in ((generation, STATE["ACTIVE"]), (generation, STATE["LAZY"]))
        if granted and self.attached() and self.is_open():
            return True
        self.release(slot)
        return False

    def release(self, slot):
        """Gives a lease back, and rings when the slot retires."""
        self.count(slot, "released")
        generation, state = self.word(slot)
        scan = self.slot(slot)["scan"]
        rung = self.shape["rung_offset"] + slot * 4
        next_scan = scan + 1 & 0xFFFFFFFF
        if generation and state != STATE["ACTIVE"] and struct.unpack_from("<I", self.page, rung)[0] != next_scan:
            self.client.notify(slot, generation, scan)
            struct.pack_into("<I", self.page, rung, next_scan)
