# SPDX-License-Identifier: Apache-2.0
"""Arrays of NumPy over memory; imported when Memory.numpy() is called, and not before."""

from typing import Any

import numpy

from ._shmbroker import Memory


def array_of(memory: Memory, shape: Any, dtype: Any) -> "numpy.ndarray[Any, Any]":
    """An array that holds @memory."""
    if dtype is None:
        dtype = memory.dtype
        if shape is None:
            shape = memory.shape
    if isinstance(dtype, str) and dtype == "bfloat16":
        import ml_dtypes  # pylint: disable=import-outside-toplevel

        dtype = ml_dtypes.bfloat16
    kind = numpy.dtype(dtype)
    if shape is None:
        count = memory.nbytes // kind.itemsize
        if count * kind.itemsize != memory.nbytes:
            raise ValueError(f"{memory.nbytes} bytes are no whole number of {kind}")
        shape = (count,)
    elif not isinstance(shape, int):
        shape = tuple(shape)
    # the view of bytes is what the array holds
    return numpy.ndarray(shape, kind, memoryview(memory.view(memory.nbytes, "uint8")))
