# SPDX-License-Identifier: Apache-2.0
"""Where memory comes from that is adopted: whatever it is, the file descriptor behind it."""

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import _shmbroker


class Source(NamedTuple):
    """A descriptor, and the bytes of it that are meant."""

    fd: int
    offset: int
    nbytes: int


def _of_fd(fd: int) -> Source:
    status = os.fstat(fd)
    return Source(fd, 0, status.st_size if stat.S_ISREG(status.st_mode) else 0)


def _mapping(address: int, nbytes: int) -> tuple[int, int, int]:
    """(device, inode, offset) of the file that is mapped at an address."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            place, mode, offset, device, inode = line.split(None, 5)[:5]
            begin, end = (int(text, 16) for text in place.split("-"))
            if begin <= address < end:
                if mode[3] != "s" or inode == "0" or address + nbytes > end:
                    break
                major, minor = (int(text, 16) for text in device.split(":"))
                return os.makedev(major, minor), int(inode), int(offset, 16) + address - begin
    raise ValueError("the buffer does not lie in a shared mapping of a file")


def _descriptor(device: int, inode: int) -> int:
    """A descriptor of this process for a file, one for writing if there is any; a new one, of the caller."""
    best = None
    for entry in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(int(entry))
            if (status.st_dev, status.st_ino) != (device, inode):
                continue
            with open(f"/proc/self/fdinfo/{entry}", encoding="ascii") as info:
                flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags:"))
        except (OSError, StopIteration):
            continue
        if best is None or flags & os.O_ACCMODE == os.O_RDWR:
            best = int(entry)
            if flags & os.O_ACCMODE == os.O_RDWR:
                break
    if best is None:
        raise ValueError("the mapping's file is not open any more: give its file descriptor")
    return os.dup(best)


@contextlib.contextmanager
def open_memory(source: Any) -> Iterator[Source]:
    """The descriptor of a source, valid within the block."""
    if hasattr(source, "__index__"):
        yield _of_fd(source.__index__())
        return
    if hasattr(source, "fileno"):
        yield _of_fd(source.fileno())
        return
    # multiprocessing.shared_memory
    buffer = source.buf if hasattr(source, "buf") else source
    address, nbytes = _shmbroker.buffer_range(buffer)
    device, inode, offset = _mapping(address, nbytes)
    fd = _descriptor(device, inode)
    try:
        yield Source(fd, offset, nbytes)
    finally:
        os.close(fd)


def of_device(source: Any, device: "int | None") -> "tuple[int, int, int | None]":
    """Address, ordinal and size of memory of a GPU; the size of what is only an address is not known."""
    if hasattr(source, "__index__") and not hasattr(source, "__dlpack__"):
        if device is None:
            raise TypeError("an address needs the ordinal of its device")
        return source.__index__(), device, None
    kind, ordinal = source.__dlpack_device__()
    if kind != 2:
        raise ValueError("the tensor is not of a GPU")
    # -1: it is not used now, and nothing has to be waited for
    _, _, address, nbytes, is_contiguous = _shmbroker.dlpack_inspect(source.__dlpack__(stream=-1))
    if not is_contiguous:
        raise ValueError("the tensor is not contiguous in C order")
    if device not in (None, ordinal):
        raise ValueError(f"the tensor is of device {ordinal}, not of {device}")
    return address, int(ordinal), nbytes
