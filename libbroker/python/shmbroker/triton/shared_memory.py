# SPDX-License-Identifier: Apache-2.0
"""Drop-in for tritonclient.utils.shared_memory: system memory that lives in the broker.

    handle = create_shared_memory_region("input0", "/input0_key", 64)
    set_shared_memory_region(handle, [numpy.zeros(16, "float32")])
    array = get_contents_as_numpy(handle, "float32", [16])
    destroy_shared_memory_region(handle)

What keys are, what regions are made of, and who may use them is said in the package, shmbroker.triton.

What is not as in the original: no process removes memory at its end that another one has made, whatever Python's
resource_tracker does there; memory of a process that was killed is given back; arrays stay valid after
destroy_shared_memory_region(), where those of the original crash the process; destroying a handle twice does not take
another one's memory away; a process that was forked does not destroy its parent's regions; keys may have any letters; tensors
of objects are read as BYTES however the type is named. All functions may be called from many threads.

Beside it: as_numpy_view(), and SharedMemoryRegion has fileno(), region_name and nbytes.
"""

import atexit
import contextlib
import errno
import os
import secrets
import warnings
from typing import Any

import numpy as np

from .. import AlreadyExists, Broker, Detached, Lease, NotFound, Region, Retiring, Revoked, Sparse, View
from . import _session
from ._tensor import Array, is_bytes, numbers_at, strings_at, write

__all__ = [
    "SharedMemoryException", "SharedMemoryRegion", "as_numpy_view", "create_shared_memory_region",
    "destroy_shared_memory_region", "get_contents_as_numpy", "mapped_shared_memory_regions", "set_shared_memory_region",
]

DIRECTORY = "/dev/shm/"
NATIVE = "shmbroker."
# how often who attaches and who creates may overtake each other
TRIES = 16


class SharedMemoryException(Exception):
    """What went wrong with shared memory; what the broker or the kernel said is its __cause__."""


class SharedMemoryRegion:
    """A handle of system memory; create_shared_memory_region() makes it.

    fileno() makes it fit for os.fstat(), mmap.mmap() and socket.send_fds().
    """

    def __init__(self, triton_shm_name: str, shm_key: "str | None") -> None:
        self._triton_shm_name = triton_shm_name
        self._shm_key = shm_key
        # the name of the original's attribute, which some programs read
        self._mpsm_handle: Any = None

    @property
    def region_name(self) -> str:
        """The name of the region in the broker, which native consumers ask for."""
        return str(self._mpsm_handle.region_name)

    @property
    def nbytes(self) -> int:
        """Size of the region in bytes, which may differ from what was asked for."""
        return int(self._mpsm_handle.size)

    def fileno(self) -> int:
        """A file descriptor of the memory, valid until the handle is destroyed; ValueError then."""
        return int(self._mpsm_handle.fileno())


class _Memory:
    """The bytes of a handle, with the attributes that programs use of the original's."""

    def __init__(self, name: str, region_name: str, memory: "Region | Lease") -> None:
        self.name, self.region_name, self.size = name, region_name, memory.nbytes
        # an array or a memoryview made of it holds the view, and that the memory
        view: View = memory.view(memory.nbytes, "uint8")
        self.buf: "memoryview | None" = memoryview(view)
        self._memory: "Region | Lease | None" = memory
        self._pid = os.getpid()

    def fileno(self) -> int:
        """A descriptor that belongs to the handle."""
        if self._memory is None:
            raise ValueError("the handle was destroyed")
        return self._memory.fileno()

    def close(self) -> None:
        """Lets go of it; a region of this process stays, which is the key's."""
        memory, self._memory, self.buf = self._memory, None, None
        if isinstance(memory, Lease) and self._pid == os.getpid():
            try:
                memory.release()
            except (Detached, Revoked):
                pass


class _Made:
    """A region that this process has registered."""

    def __init__(self, region: Region, path: "str | None") -> None:
        self.region, self.path, self.pid = region, path, os.getpid()
        if path:
            status = os.fstat(region.fd)
            self.file = (status.st_dev, status.st_ino)

    def unlink(self) -> None:
        """Removes the name that it has in the file system, if it has one and nobody has put another thing there."""
        path, self.path = self.path, None
        if not path or self.pid != os.getpid():
            return
        try:
            status = os.stat(path, follow_symlinks=False)
            if (status.st_dev, status.st_ino) == self.file:
                os.unlink(path)
        except FileNotFoundError:
            pass

    def end(self) -> None:
        """Nobody finds it any more; who uses it goes on."""
        if self.pid != os.getpid():
            return
        try:
            self.unlink()
        finally:
            try:
                self.region.close()
            except (Detached, ConnectionError):
                # it ended with its session
                pass


class _Key:
    """What this process has of a key."""

    def __init__(self) -> None:
        self.n_handles = 0
        self.made: list[_Made] = []


_keys: dict[Any, _Key] = {}


def _file_name(shm_key: str) -> str:
    # a key is the name of a file, whatever the region is made of
    path = "/" + shm_key
    name = path.lstrip("/")
    if not name or "/" in name or name in (".", "..") or "\0" in name or len(os.fsencode(name)) > 255:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    return name


def _attach(broker: Broker, name: str, file_name: str, made: list[_Made]) -> "Region | Lease | None":
    """Memory that exists, or None. What others have made in the file system becomes a region of this process."""
    try:
        return broker.get_memory_info(name, write=True)
    except (NotFound, Retiring, Revoked):
        pass
    if _session.backing() != "posix":
        return None
    try:
        fd = os.open(DIRECTORY + file_name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        region = broker.adopt(name, fd, **_session.access())
    finally:
        os.close(fd)
    made.append(_Made(region, None))
    return region


def _create(broker: Broker, name: str, file_name: str, nbytes: int, made: list[_Made]) -> Region:
    path = None
    if _session.backing() == "posix":
        path = DIRECTORY + file_name
        region = _create_file(broker, name, path, nbytes)
    else:
        try:
            region = broker.create(name, nbytes=nbytes, **_session.access())
        except Sparse:
            region = broker.create(name, nbytes=nbytes, populate=True, **_session.access())
    made.append(_Made(region, path))
    return region


def _create_file(broker: Broker, name: str, path: str, nbytes: int) -> Region:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # all of it: what is short of memory is told, where the original ends in SIGBUS
        os.posix_fallocate(fd, 0, nbytes)
        return broker.adopt(name, fd, **_session.access())
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def create_shared_memory_region(triton_shm_name: str, shm_key: "str | None", byte_size: int,
                                create_only: bool = False) -> SharedMemoryRegion:
    """A handle of the memory with a key, which is created where it does not exist.

    triton_shm_name: what the program calls it to the server. shm_key: see the package.
    byte_size: in bytes, 1 or more, of memory that is created.
    create_only: memory that exists is refused; otherwise what exists is attached to, whatever its size, with a warning
    when it is smaller.

    Raises SharedMemoryException when it cannot be created, with the reason as its __cause__: AlreadyExists, QuotaExceeded,
    Unsealed (the broker does not accept what can be truncated), ... or FileNotFoundError where no broker is. Raises OSError
    for a key that can be none, PermissionDenied (a PermissionError) for memory of somebody else.
    """
    handle = SharedMemoryRegion(triton_shm_name, shm_key)
    made: list[_Made] = []
    with _session.lock:
        memory: "Region | Lease | None" = None
        key = shm_key
        if not create_only:
            if key is None:
                raise ValueError("'name' can only be None if create=True")
            _file_name(key)
        try:
            if key is None:
                key = "psm_" + secrets.token_hex(8)
            file_name = _file_name(key)
            name = file_name.removeprefix(NATIVE) if file_name.startswith(NATIVE) else f"shm:{file_name}"
        except Exception as error:
            raise SharedMemoryException("unable to create the shared memory region") from error
        for left in reversed(range(TRIES)):
            if not create_only:
                try:
                    memory = _session.call(lambda broker: _attach(broker, name, file_name, made))
                except (FileNotFoundError, ConnectionError) as error:
                    raise SharedMemoryException("unable to create the shared memory region") from error
            if memory is not None:
                break
            try:
                if byte_size <= 0:
                    raise ValueError("'size' must be a positive number different from zero")
                memory = _session.call(lambda broker: _create(broker, name, file_name, byte_size, made))
                break
            except (AlreadyExists, FileExistsError) as error:
                # somebody has been faster
                if create_only or not left:
                    raise SharedMemoryException("unable to create the shared memory region") from error
            except Exception as error:
                raise SharedMemoryException("unable to create the shared memory region") from error
        assert memory is not None
        handle._mpsm_handle = _Memory(key, name, memory)
        try:
            is_smaller = byte_size > handle._mpsm_handle.size
        except TypeError:
            handle._mpsm_handle.close()
            for one in made:
                one.end()
            raise
        known = _keys.setdefault(shm_key, _Key())
        known.n_handles += 1
        known.made += made
    if is_smaller:
        warnings.warn(f"reusing shared memory region with key '{shm_key}', region size is "
                      f"{handle._mpsm_handle.size} instead of requested {byte_size}", stacklevel=2)
    return handle


def set_shared_memory_region(shm_handle: SharedMemoryRegion, input_values: "list[Array] | tuple[Array, ...]",
                             offset: int = 0) -> None:
    """Copies arrays into the memory, one behind the other, from an offset in bytes on.

    An array of objects is one that tritonclient.utils.serialize_byte_tensor() has made: a single bytes object.
    Without a copy: write into what as_numpy_view() returns.

    Raises SharedMemoryException, also when they do not fit; those before the one that does not have been written.
    """
    if not isinstance(input_values, (list, tuple)):
        raise SharedMemoryException("input_values must be specified as a list/tuple of numpy arrays")
    if not all(isinstance(value, np.ndarray) for value in input_values):
        raise SharedMemoryException("each element of input_values must be a numpy array")
    try:
        for value in input_values:
            offset = write(shm_handle._mpsm_handle.buf, value, offset)
    except Exception as error:
        raise SharedMemoryException("unable to set the shared memory region") from error


def get_contents_as_numpy(shm_handle: SharedMemoryRegion, datatype: Any, shape: Any, offset: int = 0) -> Array:
    """What is in the memory from an offset in bytes on, as an array.

    datatype: what numpy.dtype() takes; numpy.object_ or numpy.bytes_ for BYTES. shape: in elements.

    Numbers are not copied: the array is the memory, and holds it. BYTES are copied into an array of bytes objects.

    Raises TypeError when the memory ends before the array does, struct.error when it ends within BYTES.
    """
    buffer = shm_handle._mpsm_handle.buf
    if is_bytes(datatype):
        return strings_at(buffer, shape, offset)
    return numbers_at(buffer, datatype, shape, offset)


def as_numpy_view(shm_handle: SharedMemoryRegion, datatype: Any, shape: Any, offset: int = 0) -> Array:
    """An array that is the memory, from an offset in bytes on; it is never a copy, and holds the memory.

    Raises TypeError for BYTES, of which there is no view, and when the memory ends before the array does; ValueError when
    the handle was destroyed.
    """
    buffer = shm_handle._mpsm_handle.buf
    if buffer is None:
        raise ValueError("the handle was destroyed")
    return numbers_at(buffer, datatype, shape, offset)


def mapped_shared_memory_regions() -> list[str]:
    """The keys of which this process has handles."""
    with _session.lock:
        return list(_keys)


def destroy_shared_memory_region(shm_handle: SharedMemoryRegion) -> None:
    """Lets go of a handle; with the last one of its key the memory that this process has made is unregistered.

    Arrays that were made from it stay valid, as do other processes' handles: the memory goes with the last of them. Its
    key may be used for other memory at once.

    Raises KeyError when this process has no handle of the key; OSError when the broker cannot be asked.
    """
    with _session.lock:
        memory, key = shm_handle._mpsm_handle, shm_handle._shm_key
        is_over = memory.buf is None
        memory.close()
        known = _keys[key]
        if is_over:
            return
        known.n_handles -= 1
        if known.n_handles:
            return
        del _keys[key]
        with contextlib.ExitStack() as ends:
            for made in known.made:
                ends.callback(made.end)


def _at_exit() -> None:
    # the broker unregisters what this process has; names in the file system it does not know
    for known in _keys.values():
        for made in known.made:
            made.unlink()


atexit.register(_at_exit)
