# SPDX-License-Identifier: Apache-2.0
"""The drop-in for tritonclient.utils.shared_memory beside the original: one program, the same results."""

import gc
import importlib.metadata
import inspect
import secrets
import struct
import subprocess
import sys
import warnings

import numpy
import pytest
import tritonclient.utils
import tritonclient.utils.shared_memory as original
from tritonclient.utils import serialize_byte_tensor

import shmbroker.triton
import shmbroker.triton.shared_memory as ours

NAMES = ["create_shared_memory_region", "set_shared_memory_region", "get_contents_as_numpy",
         "mapped_shared_memory_regions", "destroy_shared_memory_region"]
CREATE = "unable to create the shared memory region"
SET = "unable to set the shared memory region"


@pytest.fixture(autouse=True)
def connection(daemon):
    """To the broker of the test, and none when it ends; nothing is left in either module."""
    shmbroker.triton.configure()
    yield
    left = original.mapped_shared_memory_regions(), ours.mapped_shared_memory_regions()
    shmbroker.triton.configure()
    # exceptions that a test has looked at hold the connection
    gc.collect()
    assert left == ([], [])


@pytest.fixture(params=[original, ours], ids=["original", "ours"])
def shm(request):
    """Each of the modules in turn."""
    return request.param


@pytest.fixture
def key():
    """A key that nobody else has."""
    return f"shmb-test-{secrets.token_hex(8)}"


@pytest.fixture
def region(shm, key):
    """64 bytes, all 0xee."""
    handle = shm.create_shared_memory_region("name", key, 64)
    handle._mpsm_handle.buf[:] = b"\xee" * 64
    yield handle
    shm.destroy_shared_memory_region(handle)


def contents(shm, handle):
    return shm.get_contents_as_numpy(handle, numpy.uint8, [64]).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name):
    theirs, mine = (inspect.signature(getattr(module, name)) for module in (original, ours))
    assert [(one.name, one.kind, one.default) for one in theirs.parameters.values()] == \
        [(one.name, one.kind, one.default) for one in mine.parameters.values()]


def test_the_original_is_the_one_that_is_documented():
    assert f" {'.'.join(importlib.metadata.version('tritonclient').split('.')[:2])};" in shmbroker.triton.__doc__


def test_classes(shm):
    assert shm.SharedMemoryException.__bases__ == (Exception,)
    handle = shm.SharedMemoryRegion("name", "key")
    assert (handle._triton_shm_name, handle._shm_key, handle._mpsm_handle) == ("name", "key", None)


def test_a_life(shm, key):
    handle = shm.create_shared_memory_region("name", key, 64)
    assert isinstance(handle, shm.SharedMemoryRegion)
    assert (handle._triton_shm_name, handle._shm_key) == ("name", key)
    assert (handle._mpsm_handle.name, handle._mpsm_handle.size, len(handle._mpsm_handle.buf)) == (key, 64, 64)
    assert shm.mapped_shared_memory_regions() == [key]
    assert contents(shm, handle) == bytes(64)
    values = numpy.arange(16, dtype=numpy.float32).reshape(4, 4)
    assert shm.set_shared_memory_region(handle, [values]) is None
    array = shm.get_contents_as_numpy(handle, numpy.float32, [4, 4])
    assert array.dtype == numpy.float32 and array.flags.writeable and not array.flags.owndata
    assert numpy.array_equal(array, values)
    # it is the memory
    array[0, 0] = 99
    assert shm.get_contents_as_numpy(handle, numpy.float32, [1])[0] == 99
    del array
    assert shm.destroy_shared_memory_region(handle) is None
    assert shm.mapped_shared_memory_regions() == []
    assert handle._mpsm_handle.buf is None


def test_keys_are_listed_in_order(shm, key):
    keys = [f"{key}-{i}" for i in (2, 0, 1)]
    handles = [shm.create_shared_memory_region("name", one, 8) for one in keys]
    assert shm.mapped_shared_memory_regions() == keys
    shm.destroy_shared_memory_region(handles[1])
    assert shm.mapped_shared_memory_regions() == [keys[0], keys[2]]
    for handle in (handles[0], handles[2]):
        shm.destroy_shared_memory_region(handle)


def test_no_key_is_one_of_its_own(shm):
    handle = shm.create_shared_memory_region("name", None, 8, create_only=True)
    assert handle._mpsm_handle.name.startswith("psm_")
    assert shm.mapped_shared_memory_regions() == [None]
    shm.destroy_shared_memory_region(handle)
    with pytest.raises(ValueError, match="'name' can only be None if create=True"):
        shm.create_shared_memory_region("name", None, 8)


# ---- keys, sizes ----

@pytest.mark.parametrize("create_only", [False, True])
@pytest.mark.parametrize("bad", ["", "/", "a/b", "/a/", ".", "..", "x" * 300, 5, b"a"])
def test_keys_that_can_be_none(shm, bad, create_only):
    kind = TypeError if not isinstance(bad, str) else OSError
    with pytest.raises(shm.SharedMemoryException if create_only else kind) as caught:
        shm.create_shared_memory_region("name", bad, 8, create_only=create_only)
    if create_only:
        assert str(caught.value) == CREATE and isinstance(caught.value.__cause__, kind)
    else:
        assert kind is TypeError or caught.value.errno == 22


@pytest.mark.parametrize("size", [0, -1, "8", None])
def test_sizes_that_can_be_none(shm, key, size):
    for create_only in (False, True):
        with pytest.raises(shm.SharedMemoryException, match=CREATE) as caught:
            shm.create_shared_memory_region("name", key, size, create_only)
        assert isinstance(caught.value.__cause__, ValueError if isinstance(size, int) else TypeError)


@pytest.mark.parametrize("size", [1, 63, 4096, 100001])
def test_sizes_are_exact(shm, key, size):
    handle = shm.create_shared_memory_region("name", key, size)
    assert handle._mpsm_handle.size == len(handle._mpsm_handle.buf) == size
    assert shm.get_contents_as_numpy(handle, numpy.uint8, [-1]).size in (1, size)
    with pytest.raises(TypeError, match="buffer is too small for requested array"):
        shm.get_contents_as_numpy(handle, numpy.uint8, [size + 1])
    shm.destroy_shared_memory_region(handle)


# ---- one key, several handles ----

def test_handles_of_a_key_share_its_memory(shm, key):
    first = shm.create_shared_memory_region("a", key, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others = [shm.create_shared_memory_region("b", key, size) for size in (64, 8)]
    assert shm.mapped_shared_memory_regions() == [key]
    assert [other._mpsm_handle.size for other in others] == [64, 64]
    shm.set_shared_memory_region(others[0], [numpy.arange(4)])
    assert shm.get_contents_as_numpy(first, int, [4]).tolist() == [0, 1, 2, 3]
    shm.destroy_shared_memory_region(first)
    assert shm.mapped_shared_memory_regions() == [key]
    assert shm.get_contents_as_numpy(others[1], int, [4]).tolist() == [0, 1, 2, 3]
    # the name is still that of the same memory
    again = shm.create_shared_memory_region("c", key, 64)
    assert shm.get_contents_as_numpy(again, int, [4]).tolist() == [0, 1, 2, 3]
    for handle in (again, *others):
        shm.destroy_shared_memory_region(handle)
    assert shm.mapped_shared_memory_regions() == []
    fresh = shm.create_shared_memory_region("d", key, 64, create_only=True)
    assert contents(shm, fresh) == bytes(64)
    shm.destroy_shared_memory_region(fresh)


def test_a_slash_in_front_is_the_same_memory_and_another_key(shm, key):
    first = shm.create_shared_memory_region("a", key, 64)
    other = shm.create_shared_memory_region("b", "/" + key, 64)
    assert shm.mapped_shared_memory_regions() == [key, "/" + key]
    shm.set_shared_memory_region(first, [numpy.arange(4)])
    assert shm.get_contents_as_numpy(other, int, [4]).tolist() == [0, 1, 2, 3]
    shm.destroy_shared_memory_region(other)
    assert shm.mapped_shared_memory_regions() == [key]
    shm.destroy_shared_memory_region(first)


def test_less_than_was_asked_for_is_a_warning(shm, key, region):
    with pytest.warns(UserWarning) as caught:
        other = shm.create_shared_memory_region("b", key, 100)
    assert [str(one.message) for one in caught] == [
        f"reusing shared memory region with key '{key}', region size is 64 instead of requested 100"]
    with pytest.raises(shm.SharedMemoryException, match=SET):
        shm.set_shared_memory_region(other, [numpy.zeros(100, "uint8")])
    shm.destroy_shared_memory_region(other)


def test_create_only_refuses_what_exists(shm, key, region):
    with pytest.raises(shm.SharedMemoryException) as caught:
        shm.create_shared_memory_region("b", key, 64, create_only=True)
    assert str(caught.value) == CREATE and caught.value.__cause__ is not None
    assert shm.mapped_shared_memory_regions() == [key]


def test_destroyed_handles(shm, key):
    handle = shm.create_shared_memory_region("a", key, 64)
    shm.destroy_shared_memory_region(handle)
    with pytest.raises(KeyError) as caught:
        shm.destroy_shared_memory_region(handle)
    assert caught.value.args == (key,)
    with pytest.raises(TypeError):
        shm.get_contents_as_numpy(handle, numpy.int32, [4])
    with pytest.raises(TypeError):
        shm.get_contents_as_numpy(handle, numpy.object_, [4])
    with pytest.raises(shm.SharedMemoryException, match=SET):
        shm.set_shared_memory_region(handle, [numpy.zeros(1)])


def test_no_handle(shm):
    with pytest.raises(AttributeError):
        shm.destroy_shared_memory_region(None)
    with pytest.raises(AttributeError):
        shm.get_contents_as_numpy(None, numpy.int32, [1])
    with pytest.raises(shm.SharedMemoryException, match=SET):
        shm.set_shared_memory_region(None, [numpy.zeros(1)])


# ---- what is written ----

def objects(data):
    return numpy.array(data, dtype=object)


WRITES = {
    "whole": ([numpy.arange(8.0)], 0),
    "at the end": ([numpy.arange(2.0)], 48),
    "one after the other": ([numpy.arange(3, dtype="u1"), numpy.arange(2, dtype="i2"), numpy.ones(3, bool)], 1),
    "a tuple": ((numpy.zeros(3, "f2"), numpy.ones((2, 2), "c8")), 8),
    "nothing": ([], 5),
    "empty": ([numpy.zeros(0), numpy.zeros((3, 0, 2))], 64),
    "empty beyond": ([numpy.zeros(0)], 70),
    "big endian": ([numpy.arange(4, dtype=">i4")], 3),
    "transposed": ([numpy.arange(6, dtype="u1").reshape(2, 3).T], 0),
    "strided": ([numpy.arange(9)[::2], numpy.arange(6, dtype="i2")[::-1]], 0),
    "text": ([numpy.array(["a", "bcd"])], 4),
    "fixed bytes": ([numpy.array([b"ab", b"c"])], 3),
    "dates": ([numpy.array(["2020-01-01"], dtype="M8[D]")], 8),
    "structured": ([numpy.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])], 0),
    "masked": ([numpy.ma.masked_array([1.0, 2.0], [True, False])], 0),
    "subclass": ([numpy.arange(4).view(numpy.recarray)], 0),
    "from the end": ([numpy.arange(1.0)], -8),
    "of numpy": ([numpy.arange(2.0)], numpy.int64(8)),
    "bytes": ([objects(b"abc")], 60),
    "bytes in a list": ([objects([b"abc"])], 0),
    "bytearray": ([objects([bytearray(b"abc")])], 7),
    "no bytes": ([objects(b"")], 0),
    "bytes and numbers": ([objects(b"abc"), numpy.arange(2, dtype="u1"), objects(b"de")], 1),
    "serialized": ([serialize_byte_tensor(objects([b"a", "b\u00fc", 5]))], 2),
    # refused
    "too much": ([numpy.zeros(9)], 0),
    "too far": ([numpy.zeros(8)], 8),
    "the second is too much": ([numpy.arange(2.0), numpy.zeros(20)], 8),
    "bytes too much": ([objects(b"abc")], 62),
    "a scalar": ([numpy.array(5)], 0),
    "several objects": ([objects([b"a", b"b"])], 0),
    "no object": ([objects([])], 0),
    "str": ([objects("abc")], 0),
    "a number": ([objects(5)], 0),
    "offset of text": ([numpy.zeros(1)], "0"),
    "offset of nothing": ([numpy.zeros(1)], None),
    "offset of float": ([numpy.zeros(1)], 1.0),
}


def outcome(function, *args):
    """What a call did, to be compared: the exception's class by name, and what it said and came from."""
    try:
        return function(*args)
    except Exception as error:  # pylint: disable=broad-except
        return type(error).__name__, str(error), type(error.__cause__).__name__


@pytest.mark.parametrize("case", WRITES)
def test_writes(key, case):
    values, offset = WRITES[case]
    results = []
    for module in (original, ours):
        handle = module.create_shared_memory_region("name", key, 64)
        handle._mpsm_handle.buf[:] = b"\xee" * 64
        results.append((outcome(module.set_shared_memory_region, handle, values, offset), contents(module, handle)))
        module.destroy_shared_memory_region(handle)
    assert results[0] == results[1]


@pytest.mark.parametrize("values, text", [
    (numpy.zeros(4), "input_values must be specified as a list/tuple of numpy arrays"),
    (None, "input_values must be specified as a list/tuple of numpy arrays"),
    (iter([numpy.zeros(4)]), "input_values must be specified as a list/tuple of numpy arrays"),
    ([1.0], "each element of input_values must be a numpy array"),
    ([numpy.zeros(1), numpy.float64(1)], "each element of input_values must be a numpy array"),
    ([[1, 2]], "each element of input_values must be a numpy array"),
])
def test_values_that_are_no_arrays(shm, region, values, text):
    with pytest.raises(shm.SharedMemoryException) as caught:
        shm.set_shared_memory_region(region, values)
    assert str(caught.value) == text and caught.value.__cause__ is None
    assert contents(shm, region) == b"\xee" * 64


# ---- what is read ----

READS = [
    (numpy.int32, [4], 0), (numpy.int32, [16], 0), (numpy.int32, [17], 0), (numpy.int32, [4], 64),
    (numpy.int32, [1], -4), (numpy.int32, [0], 100), (numpy.int32, [1], 3), ("int32", [-1], 0), (numpy.int32, 4, 0),
    (numpy.int32, (), 8), (numpy.float16, (2, 3, 4), 2), ("U4", [1], 0), ("S4", [2, 2], 0), (None, [1], 0), (bool, [64], 0),
    (numpy.dtype(">i8"), (2,), 8), (numpy.int32, [4], "x"), (numpy.int32, [4], 1.5), (numpy.int32, ["x"], 0),
    ("no such type", [1], 0), (numpy.dtype([("a", "i4"), ("b", "f8")]), [2], 0), (numpy.int32, [2**40], 0),
]


@pytest.mark.parametrize("datatype, shape, offset", READS)
def test_reads(key, datatype, shape, offset):
    results = []
    for module in (original, ours):
        handle = module.create_shared_memory_region("name", key, 64)
        handle._mpsm_handle.buf[:] = bytes(range(1, 65)) if datatype != "U4" else b"a\0\0\0" * 16
        result = outcome(module.get_contents_as_numpy, handle, datatype, shape, offset)
        if isinstance(result, numpy.ndarray):
            result = (result.dtype, result.shape, result.strides, result.tobytes(), result.flags.writeable)
        results.append(result)
        module.destroy_shared_memory_region(handle)
    assert results[0] == results[1]


STRINGS = [b"", b"a", "\u00fcber".encode(), bytes(3), b"x" * 20]
BYTES_READS = [
    (numpy.object_, [5], 0), (numpy.bytes_, [5], 0), (numpy.dtype(object), [5, 1], 0), (numpy.object_, (1, 4), 0),
    (numpy.object_, 3, 0), (numpy.object_, [], 4), (numpy.object_, [-1], 0), (numpy.object_, [2, -1], 0),
    (numpy.object_, [0], 0), (numpy.object_, [7], 0), (numpy.object_, [1], 200), (numpy.object_, [1], -4),
    (numpy.object_, [1], "x"),
]


@pytest.mark.parametrize("datatype, shape, offset", BYTES_READS)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_reads_of_bytes(key, datatype, shape, offset):
    results = []
    for module in (original, ours):
        handle = module.create_shared_memory_region("name", key, 64)
        module.set_shared_memory_region(handle, [serialize_byte_tensor(objects(STRINGS))])
        result = outcome(module.get_contents_as_numpy, handle, datatype, shape, offset)
        if isinstance(result, numpy.ndarray):
            result = (result.dtype, result.shape, result.tolist())
        results.append(result)
        module.destroy_shared_memory_region(handle)
    assert results[0] == results[1]


def test_strings_end_with_the_memory(shm, region):
    for length, offset in ((4, 60), (2**32 - 1, 0), (57, 4)):
        region._mpsm_handle.buf[offset:offset + 4] = struct.pack("<I", length)
        with pytest.raises(struct.error, match="unpack_from requires a buffer of at least"):
            shm.get_contents_as_numpy(region, numpy.object_, [1], offset)


def test_a_tensor_of_strings_comes_back(shm, key):
    tensor = objects([str(i).encode() for i in range(16)]).reshape(2, 8)
    data = serialize_byte_tensor(tensor)
    handle = shm.create_shared_memory_region("name", key, tritonclient.utils.serialized_byte_size(data) + 3)
    shm.set_shared_memory_region(handle, [data], offset=3)
    array = shm.get_contents_as_numpy(handle, numpy.object_, [2, 8], offset=3)
    assert array.dtype == object and numpy.array_equal(array, tensor)
    shm.destroy_shared_memory_region(handle)
    assert numpy.array_equal(array, tensor)


# ---- with another process ----

PEER = """
import sys, numpy
import {module} as shm
handle = shm.create_shared_memory_region("peer", sys.argv[1], 64)
array = shm.get_contents_as_numpy(handle, numpy.int64, [8])
assert array.tolist() == list(range(8)), array
shm.set_shared_memory_region(handle, [numpy.arange(8)[::-1].copy()])
assert shm.mapped_shared_memory_regions() == [sys.argv[1]]
del array
# the end of a process that knows the original takes the memory away
print("done", flush=True)
sys.stdin.read()
shm.destroy_shared_memory_region(handle)
"""


def test_another_process_shares_it(shm, key):
    handle = shm.create_shared_memory_region("name", key, 64)
    shm.set_shared_memory_region(handle, [numpy.arange(8)])
    with subprocess.Popen([sys.executable, "-c", PEER.format(module=shm.__name__), key], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as peer:
        assert peer.stdout.readline() == b"done\n"
        assert shm.get_contents_as_numpy(handle, numpy.int64, [8]).tolist() == list(range(8))[::-1]
        shm.destroy_shared_memory_region(handle)
        # its name is free at once, whoever still has it
        other = shm.create_shared_memory_region("name", key, 64, create_only=True)
        shm.destroy_shared_memory_region(other)
        peer.stdin.close()
        assert peer.wait() == 0
