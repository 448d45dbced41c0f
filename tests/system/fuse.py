# SPDX-License-Identifier: Apache-2.0
"""A FUSE file system of one file, "f", whose server never answers what it is told not to; spoken on /dev/fuse itself."""

import ctypes
import errno
import os
import select
import signal
import stat
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
LOOKUP, FORGET, GETATTR, OPEN, RELEASE, FLUSH, INIT, BATCH_FORGET = 1, 2, 3, 14, 18, 25, 26, 42
NO_REPLY = (FORGET, BATCH_FORGET)
IN = struct.Struct("<IIQQIIII")
OUT = struct.Struct("<IiQ")
ROOT_NODE, FILE_NODE = 1, 2
MNT_DETACH = 2


def attributes(node):
    """A struct fuse_attr: a directory, or a file of 4096 bytes."""
    mode = stat.S_IFDIR | 0o755 if node == ROOT_NODE else stat.S_IFREG | 0o666
    return struct.pack("<QQQQQQIIIIIIIIII", node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def reply_to(opcode, node, body):
    """(error, data) for a request."""
    if opcode == INIT:
        major, _, readahead, _ = struct.unpack_from("<IIII", body)
        return 0, struct.pack("<IIIIHHIIHHI", major, 31, readahead, 0, 0, 0, 4096, 1, 0, 0, 0) + bytes(28)
    if opcode == LOOKUP:
        if body.rstrip(b"\0") != b"f":
            return errno.ENOENT, b""
        # nothing is cached: every stat asks the server
        return 0, struct.pack("<QQQQII", FILE_NODE, 0, 0, 0, 0, 0) + attributes(FILE_NODE)
    if opcode == GETATTR:
        return 0, struct.pack("<QII", 0, 0, 0) + attributes(node)
    if opcode == OPEN:
        return 0, struct.pack("<QII", 1, 0, 0)
    if opcode == RELEASE:
        return 0, b""
    return errno.ENOSYS, b""


class Mount:
    """The mount and its server, a process; after silence() it answers nothing to the opcodes given at the start."""

    def __init__(self, directory, silent=(FLUSH,)):
        self.directory, self.pid = str(directory), 0
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
        if LIBC.mount(b"silent", self.directory.encode(), b"fuse", 0, options.encode()):
            number = ctypes.get_errno()
            os.close(device)
            raise OSError(number, os.strerror(number), self.directory)
        other, self.silence = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(self.silence)
                self._serve(device, other, silent)
            finally:
                os._exit(0)
        os.close(device)
        os.close(other)

    @staticmethod
    def _serve(device, told, silent):
        is_silent = False
        while True:
            ready, _, _ = select.select([device] + ([] if is_silent else [told]), [], [])
            if told in ready:
                is_silent = True
            if device not in ready:
                continue
            request = os.read(device, 1 << 17)
            _, opcode, unique, node = IN.unpack_from(request)[:4]
            if opcode in NO_REPLY or opcode in silent or (is_silent and opcode == GETATTR):
                continue
            error, data = reply_to(opcode, node, request[IN.size :])
            os.write(device, OUT.pack(OUT.size + len(data), -error, unique) + data)

    def be_silent(self):
        """From here on stat is not answered either."""
        os.close(self.silence)
        self.silence = None

    def end(self):
        """Ends the server, which aborts the connection: whatever hangs goes on with an error."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        if self.silence is not None:
            os.close(self.silence)
            self.silence = None
        LIBC.umount2(self.directory.encode(), MNT_DETACH)
