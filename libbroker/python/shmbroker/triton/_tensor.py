# SPDX-License-Identifier: Apache-2.0
"""Tensors in bytes of a region, for both drop-ins."""

import struct
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def is_bytes(datatype: Any) -> bool:
    """Whether elements are Triton's BYTES: each a length of 4 bytes, little endian, and so many bytes."""
    return bool(datatype == np.object_ or datatype == np.bytes_) or np.dtype(datatype) == np.dtype(object)


def numbers_at(buffer: memoryview, datatype: Any, shape: Any, offset: int) -> Array:
    """An array over the buffer, which it holds; TypeError when it is too small."""
    kind = np.dtype(datatype)
    if kind.hasobject:
        raise TypeError(f"{kind} has pointers in it, which mean nothing in shared memory")
    return np.ndarray(shape, kind, buffer=buffer[offset:])


def strings_at(buffer: memoryview, shape: Any, offset: int) -> Array:
    """An array of bytes objects, which are copies; struct.error when the buffer ends before they do."""
    strings = []
    # one that is not known, and none at all, count as one
    for _ in range(abs(int(np.prod(shape))) or 1):
        (length,) = struct.unpack_from("<I", buffer, offset)
        offset += 4
        strings.append(struct.unpack_from(f"<{length}s", buffer, offset)[0])
        offset += length
    array = np.empty(len(strings), object)
    array[:] = strings
    return array.reshape(shape)


def write(buffer: memoryview, value: Array, offset: int) -> int:
    """Copies an array to an offset, one of objects as the one bytes object that it has; returns where it ends."""
    if value.dtype == np.object_:
        data = value.item()
        buffer[offset:offset + len(data)] = data
        return offset + len(data)
    numbers_at(buffer, value.dtype, value.shape, offset)[:] = value
    return offset + value.nbytes
