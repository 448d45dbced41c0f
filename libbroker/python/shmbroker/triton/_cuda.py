# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU for the drop-in: what it needs of the driver, which is loaded when the first memory is allocated.

The devices' primary contexts are used, as CUDA's runtime and PyTorch do, and made current only within a call.
"""

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

# no allocation shares its block with another one, because whoever opens one handle has all of the block
BLOCK = 2 << 20
HANDLE_SIZE = 64


class CudaError(Exception):
    """What the driver said, or why there is none."""


class _Driver:
    """The functions of libcuda.so.1, which raise CudaError."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.library: "ctypes.CDLL | None" = None
        self.contexts: dict[int, ctypes.c_void_p] = {}

    def call(self, function: str, *arguments: Any) -> None:
        assert self.library is not None
        code = getattr(self.library, function)(*arguments)
        if not code:
            return
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(name))
        self.library.cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{function}: {(name.value or str(code).encode()).decode()}: "
                        f"{(text.value or b'unknown to this driver').decode()}")

    def _context(self, device: int) -> ctypes.c_void_p:
        with self.lock:
            if self.library is None:
                try:
                    self.library = ctypes.CDLL("libcuda.so.1")
                except OSError as error:
                    raise CudaError(f"there is no driver for NVIDIA GPUs: {error}") from error
            if device not in self.contexts:
                self.call("cuInit", 0)
                ordinal, context = ctypes.c_int(), ctypes.c_void_p()
                self.call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device))
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
                self.contexts[device] = context
            return self.contexts[device]

    @contextlib.contextmanager
    def on(self, device: int) -> "Iterator[_Driver]":
        """The device's primary context is the thread's within the block."""
        self.call("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield self
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


_driver = _Driver()


def _after_fork() -> None:
    # nothing of CUDA is inherited; a child that asks is told so by the driver
    global _driver  # pylint: disable=global-statement
    _driver = _Driver()


os.register_at_fork(after_in_child=_after_fork)


def _free(device: int, pointer: int, pid: int) -> None:
    # CUDA does not work in a child that was forked, and what it inherited is its parent's
    if pid == os.getpid():
        with contextlib.suppress(CudaError), _driver.on(device):
            _driver.call("cuMemFree_v2", ctypes.c_uint64(pointer))


class Allocation:
    """Memory of a device, freed with the last reference to it.

    pointer: on the device. nbytes: as asked for. handle: the 64 bytes of CUDA IPC by which another process opens it.
    """

    def __init__(self, device: int, nbytes: int) -> None:
        if nbytes <= 0:
            raise CudaError("an allocation has 1 byte or more")
        pointer, handle = ctypes.c_uint64(), ctypes.create_string_buffer(HANDLE_SIZE)
        with _driver.on(device):
            _driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(-(-nbytes // BLOCK) * BLOCK))
            try:
                _driver.call("cuIpcGetMemHandle", handle, pointer)
            except CudaError:
                _driver.call("cuMemFree_v2", pointer)
                raise
        self.device, self.nbytes, self.pointer = device, nbytes, int(pointer.value)
        self.handle = handle.raw
        # not at the interpreter's exit: the driver frees what a process leaves, and may be gone by then
        weakref.finalize(self, _free, device, self.pointer, os.getpid()).atexit = False

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes > self.nbytes - offset:
            raise CudaError(f"{nbytes} bytes at {offset} are not within the {self.nbytes} of the region")

    def write(self, offset: int, address: int, nbytes: int) -> None:
        """Copies bytes from an address of the CPU or of any device, and waits until others see them."""
        self._check(offset, nbytes)
        if not nbytes:
            return
        with _driver.on(self.device):
            _driver.call("cuMemcpy", ctypes.c_uint64(self.pointer + offset), ctypes.c_uint64(address),
                         ctypes.c_size_t(nbytes))
            # small copies, and those between devices, may be under way when the call returns
            _driver.call("cuStreamSynchronize", None)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Copies bytes to an address of the CPU."""
        self._check(offset, nbytes)
        if nbytes:
            with _driver.on(self.device):
                _driver.call("cuMemcpyDtoH_v2", ctypes.c_void_p(address), ctypes.c_uint64(self.pointer + offset),
                             ctypes.c_size_t(nbytes))
