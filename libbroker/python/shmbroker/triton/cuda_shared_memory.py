# SPDX-License-Identifier: Apache-2.0
"""Drop-in for tritonclient.utils.cuda_shared_memory: memory of a GPU that lives in the broker.

    handle = create_shared_memory_region("input0", 64, 0)
    set_shared_memory_region(handle, [numpy.zeros(16, "float32")])
    client.register_cuda_shared_memory("input0", get_raw_handle(handle), 0, 64)
    array = get_contents_as_numpy(handle, "float32", [16])
    destroy_shared_memory_region(handle)

Servers open it by its CUDA IPC handle; to the broker's consumers it is the region "cuda:NAME", NAME being what the program
calls it, with a number where there are several of it. It is for this user alone, unless shmbroker.triton.configure() says who
else may use it. It needs a broker that knows GPU memory, and a driver when the first region is created, but no Python
package for CUDA.

What is not as in the original: what does not fit is refused before anything is written over what lies behind the region;
get_contents_as_numpy() copies what was asked for and not the whole region; a tensor of as_shared_memory_tensor() holds the
memory, and each use of it gives back what it took; no region shares its 2 MiB block with other memory, because a server that
opens the handle has all of the block; memory is not freed before the broker's consumers have given it back, nor by a process
that was forked; tensors of objects are read as BYTES however the type is named.
All functions may be called from many threads.
"""

import base64
import itertools
import os
from typing import Any

import numpy as np

from .. import AlreadyExists, Broker, Detached, Region, Stale, _shmbroker
from . import _session
from ._cuda import Allocation
from ._tensor import Array, is_bytes, numbers_at, strings_at

__all__ = [
    "CudaSharedMemoryException", "CudaSharedMemoryRegion", "SharedMemoryTensor", "allocated_shared_memory_regions",
    "as_shared_memory_tensor", "create_shared_memory_region", "destroy_shared_memory_region", "get_contents_as_numpy",
    "get_raw_handle", "set_shared_memory_region", "set_shared_memory_region_from_dlpack",
]

DLPACK_CPU, DLPACK_CUDA, DLPACK_CUDA_HOST = 1, 2, 3
# of regions with the same name, after which one that is free is not looked for any more
NAMESAKES = 1000
# the legacy default stream, as DLPack counts streams: copies are ordered behind it
DEFAULT_STREAM = 1

DATATYPES = {
    "BOOL": "bool", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "UINT8": "uint8",
    "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
    "BF16": "bfloat16",
}


class CudaSharedMemoryException(Exception):
    """What went wrong with a GPU's memory; what the driver said is its __cause__."""

    def __init__(self, msg: "str | None") -> None:
        super().__init__()
        self._msg = msg

    def __str__(self) -> str:
        return super().__str__() if self._msg is None else self._msg


class CudaSharedMemoryRegion:
    """A handle of a GPU's memory, which is freed with it; create_shared_memory_region() makes it."""

    def __init__(self, triton_shm_name: str, cuda_shm_handle: Any, base_addr: int, byte_size: int, device_id: int) -> None:
        self._triton_shm_name = triton_shm_name
        # 64 bytes
        self._cuda_shm_handle = cuda_shm_handle
        self._base_addr = base_addr
        self._byte_size = byte_size
        self._device_id = device_id
        self._allocation: "Allocation | None" = None
        self._region: "Region | None" = None
        self._pid = os.getpid()

    @property
    def region_name(self) -> "str | None":
        """The name of the region in the broker, which native consumers ask for; None once it was destroyed."""
        return self._region.name if self._region is not None else None


class SharedMemoryTensor:
    """A tensor that is a region, for torch.from_dlpack(), cupy.asarray() and others; it holds the region's memory.

    as_shared_memory_tensor() makes it.
    """

    def __init__(self, dtype: str, shape: Any, region: CudaSharedMemoryRegion) -> None:
        self._dtype, self._shape = dtype, shape
        self._owner, self._shm_addr = region._allocation, region._base_addr
        self._byte_size, self._device_id = region._byte_size, region._device_id

    def _view(self) -> _shmbroker.View:
        if self._dtype not in DATATYPES:
            raise TypeError(f"{self._dtype} is no type that DLPack has")
        memory = _shmbroker.device_memory(self._owner, self._shm_addr, self._byte_size, self._device_id)
        return memory.view(list(self._shape), DATATYPES[self._dtype])

    def __dlpack__(self, stream: "int | None" = None, **how: Any) -> Any:
        """A capsule with what is written by then; no stream has to wait for it.

        Raises TypeError for BYTES and unknown types, ValueError when the shape is more than the region.
        """
        return self._view().__dlpack__(stream=stream, **how)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(2, ordinal of the GPU)."""
        return DLPACK_CUDA, self._device_id

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; whoever reads it has to hold this object."""
        return self._view().__cuda_array_interface__


_allocated: list[CudaSharedMemoryRegion] = []
# what was destroyed while consumers had it: the region's name and generation, and the memory
_draining: list[tuple[str, int, Allocation]] = []


def _register(broker: Broker, triton_shm_name: str, allocation: Allocation) -> Region:
    for number in itertools.count(1):
        name = f"cuda:{triton_shm_name}" + (f"#{number}" if number > 1 else "")
        try:
            return broker.cuda_export(name, allocation.pointer, nbytes=allocation.nbytes, device=allocation.device,
                                      **_session.access())
        except AlreadyExists:
            if number == NAMESAKES:
                raise
    raise AssertionError


def _is_there(name: str, generation: int) -> bool:
    try:
        return any(one.generation == generation for one in _session.call(lambda broker: list(broker.status(name=name))))
    except OSError:
        # leases end with their broker
        return False


def _reap() -> None:
    """Forgets the memory that nobody has any more; the lock is held."""
    _draining[:] = [entry for entry in _draining if _is_there(entry[0], entry[1])]


def create_shared_memory_region(triton_shm_name: str, byte_size: int, device_id: int) -> CudaSharedMemoryRegion:
    """Memory of byte_size bytes, 1 or more, of the GPU with that ordinal in this process.

    triton_shm_name: what the program calls it to the server.

    Raises CudaSharedMemoryException, whose __cause__ has the reason: no driver, no such device, not enough memory, no broker, a
    broker that takes no GPU memory, ...
    """
    try:
        allocation = Allocation(device_id, byte_size)
        handle = CudaSharedMemoryRegion(triton_shm_name, allocation.handle, allocation.pointer, byte_size, device_id)
        handle._allocation = allocation
        with _session.lock:
            _reap()
            handle._region = _session.call(lambda broker: _register(broker, triton_shm_name, allocation))
            _allocated.append(handle)
    except Exception as error:
        raise CudaSharedMemoryException("unable to create cuda shared memory handle") from error
    return handle


def get_raw_handle(cuda_shm_handle: CudaSharedMemoryRegion) -> bytes:
    """The CUDA IPC handle in base64, as register_cuda_shared_memory() of a client takes it."""
    return base64.b64encode(bytes(cuda_shm_handle._cuda_shm_handle))


def _allocation(cuda_shm_handle: CudaSharedMemoryRegion) -> Allocation:
    allocation = cuda_shm_handle._allocation
    if allocation is None:
        raise ValueError("create_shared_memory_region() has not made this handle")
    return allocation


def set_shared_memory_region(cuda_shm_handle: CudaSharedMemoryRegion, input_values: "list[Array] | tuple[Array, ...]") -> None:
    """Copies arrays into the memory, one behind the other.

    An array of objects is one that tritonclient.utils.serialize_byte_tensor() has made: a single bytes object.

    Raises CudaSharedMemoryException, also when they do not fit; those before the one that does not have been written.
    """
    if not isinstance(input_values, (list, tuple)):
        raise CudaSharedMemoryException("input_values must be specified as a numpy array")
    if not all(isinstance(value, np.ndarray) for value in input_values):
        raise CudaSharedMemoryException("input_values must be specified as a list/tuple of numpy arrays")
    try:
        allocation, offset = _allocation(cuda_shm_handle), 0
        for value in input_values:
            data = np.frombuffer(value.item(), "uint8") if value.dtype == np.object_ else np.ascontiguousarray(value)
            if data.dtype.hasobject:
                raise TypeError(f"{data.dtype} has pointers in it, which mean nothing in shared memory")
            allocation.write(offset, data.ctypes.data, data.nbytes)
            offset += data.nbytes
    except Exception as error:
        raise CudaSharedMemoryException("unable to set values in cuda shared memory") from error


def _read(cuda_shm_handle: CudaSharedMemoryRegion, nbytes: int) -> Array:
    data = np.empty(nbytes, "uint8")
    try:
        _allocation(cuda_shm_handle).read(0, data.ctypes.data, nbytes)
    except Exception as error:
        raise CudaSharedMemoryException("failed to read cuda shared memory results") from error
    return data


def get_contents_as_numpy(cuda_shm_handle: CudaSharedMemoryRegion, datatype: Any, shape: Any) -> Array:
    """A copy of what the memory begins with, as an array.

    datatype: what numpy.dtype() takes; numpy.object_ or numpy.bytes_ for BYTES. shape: in elements.

    Raises CudaSharedMemoryException when the region is too small or cannot be read, struct.error when it ends within BYTES.
    """
    try:
        size = _allocation(cuda_shm_handle).nbytes
    except Exception as error:
        raise CudaSharedMemoryException("failed to read cuda shared memory results") from error
    if is_bytes(datatype):
        return strings_at(_read(cuda_shm_handle, size).data, shape, 0)
    nbytes = int(np.prod(shape)) * np.dtype(datatype).itemsize
    if nbytes > size:
        raise CudaSharedMemoryException("The size of the shared memory region is insufficient to provide numpy array with "
                                        "requested size")
    if not nbytes:
        return np.empty(shape, datatype)
    return numbers_at(_read(cuda_shm_handle, nbytes).data, datatype, shape, 0)


def set_shared_memory_region_from_dlpack(cuda_shm_handle: CudaSharedMemoryRegion, input_values: Any) -> None:
    """Copies tensors of any library that has DLPack into the memory, one behind the other.

    They are contiguous, and of the CPU, of a GPU, or page-locked. What was under way on a GPU's tensor is waited for.

    Raises CudaSharedMemoryException, also when they do not fit; TypeError for what is no tensor.
    """
    offset = 0
    for value in input_values:
        device = value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else None
        if device is not None and device[0] not in (DLPACK_CPU, DLPACK_CUDA, DLPACK_CUDA_HOST):
            raise CudaSharedMemoryException(f"DLPack device type {int(device[0])} is not supported")
        if not hasattr(value, "__dlpack__"):
            # a capsule
            capsule = value
        elif device is not None and device[0] == DLPACK_CUDA:
            capsule = value.__dlpack__(stream=DEFAULT_STREAM)
        else:
            capsule = value.__dlpack__()
        try:
            _, _, address, nbytes, is_contiguous = _shmbroker.dlpack_inspect(capsule)
        except ValueError as error:
            raise TypeError(f"{type(value).__name__} is no tensor of DLPack") from error
        if not is_contiguous:
            raise CudaSharedMemoryException("DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in "
                                            "C-Order are supported.")
        try:
            _allocation(cuda_shm_handle).write(offset, address, nbytes)
        except Exception as error:
            raise CudaSharedMemoryException("unable to set values in cuda shared memory") from error
        # the capsule holds the tensor until here
        del capsule
        offset += nbytes


def as_shared_memory_tensor(cuda_shm_handle: CudaSharedMemoryRegion, datatype: str, shape: Any) -> SharedMemoryTensor:
    """A tensor that is the memory, without a copy.

    datatype: a name of Triton's, such as "FP32"; BYTES has no tensor. shape: in elements.
    """
    return SharedMemoryTensor(datatype, shape, cuda_shm_handle)


def allocated_shared_memory_regions() -> list[CudaSharedMemoryRegion]:
    """The handles that were created and not destroyed."""
    with _session.lock:
        return list(_allocated)


def destroy_shared_memory_region(cuda_shm_handle: CudaSharedMemoryRegion) -> None:
    """Unregisters the memory, which is freed with the last reference to the handle, and with the last tensor and the last
    lease on it.

    Raises ValueError when it was destroyed before; OSError when the broker cannot be asked.
    """
    with _session.lock:
        _allocated.remove(cuda_shm_handle)
        region, cuda_shm_handle._region = cuda_shm_handle._region, None
        if region is None or region.name is None or cuda_shm_handle._pid != os.getpid():
            return
        _draining.append((region.name, region.generation, _allocation(cuda_shm_handle)))
        try:
            region.close()
        except (ConnectionError, Detached, Stale):
            # it ended with its session
            pass
        _reap()
