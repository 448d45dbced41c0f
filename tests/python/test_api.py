# SPDX-License-Identifier: Apache-2.0
"""Owners and consumers: regions, leases, handles, lists."""

import array
import ctypes
import gc
import inspect
import mmap
import os
import tempfile
from multiprocessing import shared_memory

import numpy
import pytest
from conftest import until

import shmbroker


def names(one):
    """Names that are taken; a region that was retired is there until the broker has looked for its leases."""
    return [entry.name for entry in one.status(states=[shmbroker.RegionState.ACTIVE])]


DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
          "float64", "complex64", "complex128"]


def test_a_region_is_shared(broker):
    with broker.create("frame", (2, 3), "float32") as region:
        assert (region.name, region.shape, region.dtype, region.nbytes) == ("frame", (2, 3), "float32", 24)
        assert region.address % 64 == 0 and not region.readonly and os.fstat(region.fd).st_size >= 24
        region.numpy()[...] = [[1, 2, 3], [4, 5, 6]]
        with broker.get_memory_info("frame") as lease:
            assert lease.nbytes == 24 and lease.shape == (24,) and lease.dtype == "uint8" and lease.readonly
            assert (lease.memory_type, lease.device, lease.generation) == ("cpu", -1, region.generation)
            assert lease.numpy((2, 3), "float32").tolist() == [[1, 2, 3], [4, 5, 6]]
            region.numpy()[0, 0] = 9
            assert lease.view((2, 3), "float32").numpy()[0, 0] == 9
    with pytest.raises(shmbroker.NotFound):
        broker.get_memory_info("frame")


def test_with_unregisters_when_its_body_raises(broker):
    with pytest.raises(KeyError):
        with broker.create("r", nbytes=1):
            raise KeyError
    assert not names(broker)


def test_the_last_reference_unregisters(broker):
    region = broker.create("r", nbytes=1)
    assert names(broker) == ["r"]
    del region
    assert not names(broker)


def test_a_view_keeps_the_memory_not_the_name(broker):
    region = broker.create("r", 4, "int32")
    region.numpy()[:] = 5
    view = region.numpy()
    region.close()
    assert not names(broker) and region.retired
    assert view.tolist() == [5, 5, 5, 5]
    with pytest.raises(ValueError, match="given back"):
        memoryview(region)
    del view
    assert region.name is None and region.fd == -1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(broker, dtype):
    values = numpy.arange(6).reshape(2, 3).astype(dtype)
    with broker.create("r", values.shape, dtype) as region:
        region.numpy()[...] = values
        for got in (region.numpy(), numpy.asarray(memoryview(region)), numpy.from_dlpack(region),
                    numpy.asarray(type("Only", (), {"__array_interface__": region.__array_interface__})())):
            assert got.dtype == dtype and got.ctypes.data == region.address
            assert (got == values).all()
        with broker.get_memory_info("r") as lease:
            assert (lease.numpy(values.shape, dtype) == values).all()
            assert (numpy.from_dlpack(lease.view(values.shape, dtype)) == values).all()


def test_dtypes_have_many_names(broker):
    with broker.create("r", nbytes=8) as region:
        for dtype in ("float32", "<f4", "f4", numpy.float32, numpy.dtype("float32")):
            assert region.view(dtype=dtype).shape == (2,) and region.view(dtype=dtype).dtype == "float32"
        assert region.view(dtype=float).shape == (1,)
        assert region.view(4, "bfloat16").dtype == "bfloat16"
        assert region.view().numpy(dtype=[("a", "<i4"), ("b", "<f4")]).dtype.names == ("a", "b")
        for wrong in ("float31", object(), "U4"):
            with pytest.raises(TypeError):
                region.view(dtype=wrong)
        with pytest.raises(AttributeError):
            region.view(4, "bfloat16").__array_interface__  # pylint: disable=expression-not-assigned


def test_views_are_within(broker):
    with broker.create("r", nbytes=100) as region:
        assert region.view(10, "int32", offset=60).nbytes == 40
        assert region.view((), "float64").shape == ()
        assert region.view((0, 5), "float64").nbytes == 0
        inner = region.view(90, offset=10).view(40, offset=50)
        assert inner.address == region.address + 60
        for shape, dtype, offset in ((101, None, 0), (100, None, 1), (26, "int32", 0), (None, "int64", 0),
                                     (2**62, "int64", 0), ((2**40, 2**40), None, 0), (-1, None, 0), (1, None, 101),
                                     ((1,) * 65, None, 0)):
            with pytest.raises(ValueError):
                region.view(shape, dtype, offset=offset)


def test_a_window(broker):
    with broker.create("r", nbytes=10000) as region:
        memoryview(region)[:] = bytes(i % 251 for i in range(10000))
        with broker.get_memory_info("r", 5001, 7) as lease:
            assert bytes(lease) == bytes(i % 251 for i in range(5001, 5008))
        with broker.get_memory_info("r", offset=9990) as lease:
            assert lease.nbytes == 10
        for offset, nbytes in ((10001, None), (9999, 2), (0, 10001)):
            with pytest.raises(shmbroker.OutOfBounds):
                broker.get_memory_info("r", offset, nbytes)


def test_writing_is_asked_for(broker):
    with broker.create("r", nbytes=16) as region, broker.create("fixed", nbytes=16, read_only=True):
        with broker.get_memory_info("r") as lease:
            with pytest.raises(TypeError):
                memoryview(lease)[0] = 1
            with pytest.raises(ValueError):
                lease.numpy()[0] = 1
            with pytest.raises(shmbroker.AccessRefused):
                lease.copy_in(b"x")
        with broker.get_memory_info("r", write=True) as lease:
            memoryview(lease)[0] = 7
            lease.copy_in(b"abc", 1)
            assert bytes(region)[:4] == b"\x07abc"
        with pytest.raises(shmbroker.AccessRefused):
            broker.get_memory_info("fixed", write=True)


def test_release_waits_for_what_looks(broker):
    region = broker.create("r", nbytes=16)
    lease = broker.get_memory_info("r")
    array_of, view = lease.numpy(), lease.view()
    assert lease.exports == 2 and lease.release() is False and not lease.released
    with pytest.raises(ValueError):
        memoryview(lease)
    with pytest.raises(shmbroker.TimedOut):
        region.retire(wait=True, timeout=0.02)
    assert array_of[0] == 0
    del array_of
    assert not lease.released
    del view
    assert lease.released and lease.release() is True
    region.close()


def test_the_array_interface_holds_the_object(broker):
    with broker.create("r", nbytes=16):
        lease = broker.get_memory_info("r")
        assert lease.__array_interface__["data"] == (lease.address, True)
        assert lease.release() is False and not lease.released
        (held,) = (entry.leases for entry in broker.status())
        assert held == 1
        del lease
        (held,) = (entry.leases for entry in broker.status())
        assert held == 0


def test_copies_without_a_pointer(broker):
    with broker.create("r", nbytes=10000) as region:
        memoryview(region)[:5] = b"hello"
        with broker.get_memory_info("r", copy=True, write=True) as lease:
            assert lease.address is None
            with pytest.raises(BufferError):
                memoryview(lease)
            assert lease.copy_out(nbytes=5) == b"hello"
            lease.copy_in(b"x" * 9000, 1000)
            assert lease.copy_out() == bytes(region)
            into = bytearray(6)
            assert lease.copy_out(999, into=into) == 6 and into == b"\0xxxxx"
            for arguments in ((9999, 2), (10001, 0), (0, 2**40)):
                with pytest.raises(shmbroker.OutOfBounds):
                    lease.copy_out(*arguments)
        with pytest.raises(ValueError):
            lease.copy_out()


def test_handles(broker):
    region = broker.create("r", nbytes=16)
    handle = broker.lookup("r")
    assert (handle.name, handle.nbytes, handle.generation) == ("r", 16, region.generation)
    with handle.get_memory_info(8) as lease:
        assert lease.address is not None and lease.nbytes == 8
    region.close()
    with broker.create("r", nbytes=16):
        with pytest.raises(shmbroker.Stale):
            handle.get_memory_info()
    with pytest.raises(shmbroker.NotFound):
        broker.lookup("no")


def test_modes_of_retirement(broker):
    for mode in ("strict", "lazy", "force", "discard"):
        region = broker.create("r", nbytes=4096)
        region.retire(mode, wait=True, timeout=30)
        assert not names(broker)
        if mode != "lazy":
            assert region.retired
            with pytest.raises(shmbroker.Stale):
                region.retire()
        region.close()
    region = broker.create("r", nbytes=4096)
    lease = broker.get_memory_info("r")
    region.retire("force")
    with pytest.raises(shmbroker.Revoked):
        lease.release()
    assert lease.released
    region.close()


def test_unregister_by_name(broker):
    regions = [broker.create(name, nbytes=1) for name in "abc"]
    broker.unregister("a")
    with pytest.raises(shmbroker.NotFound):
        broker.unregister("a")
    results = broker.unregister(["a", "b", "bad\n"])
    assert isinstance(results[0], shmbroker.NotFound) and results[1] is None
    assert isinstance(results[2], shmbroker.BadName)
    assert broker.unregister_all() == shmbroker.Retired(1, 0, 0)
    for region in regions:
        region.close()


def test_keys(broker, file):
    with broker.create("made", nbytes=1, key="/a key"), broker.adopt("given", file, key="ü"), broker.create("none", nbytes=1):
        assert {entry.name: entry.key for entry in broker.status()} == {"made": "/a key", "given": "ü", "none": ""}
    with pytest.raises(shmbroker.BadName):
        broker.create("bad", nbytes=1, key="k" * 256)


def test_lists(broker):
    with broker.create("a/1", nbytes=4096), broker.create("a/2", nbytes=1), broker.create("b", nbytes=1):
        lease = broker.get_memory_info("a/1")
        names = {entry.name: entry for entry in broker.status("a/", prefix=True, holders=True)}
        assert sorted(names) == ["a/1", "a/2"]
        assert names["a/1"].nbytes == 4096 and names["a/1"].state == shmbroker.RegionState.ACTIVE
        assert [(holder.pid, holder.leases) for holder in names["a/1"].holders] == [(os.getpid(), 1)]
        assert [entry.name for entry in broker.status("b")] == ["b"]
        assert not list(broker.status(states=[shmbroker.RegionState.RETIRING]))
        assert not list(broker.status(uid=12345))
        (client,) = broker.clients()
        assert client.pid == os.getpid() and client.session == broker.session == broker.info.session
        assert client.regions == 3
        assert {stat.name: stat.value for stat in broker.stats()}["regions"] == 3
        assert any(stat.uid == os.getuid() for stat in broker.stats(accounts=True))
        assert broker.broker_info()["version"] == shmbroker.__version__
        assert 0 < broker.ping() < 60
        lease.release()


def test_close_with_what_is_alive(broker, daemon):
    other = shmbroker.connect(daemon.socket)
    region, kept = other.create("r", nbytes=16), other.get_memory_info
    lease = other.get_memory_info("r")
    view = memoryview(lease)
    other.close()
    other.close()
    assert other.closed and region.retired
    with pytest.raises(ValueError, match="closed"):
        kept("r")
    with pytest.raises(ValueError):
        other.ping()
    # the lease is still one
    assert [entry.state for entry in broker.status("r")] == [shmbroker.RegionState.RETIRING] and view[0] == 0
    del view, lease
    until(lambda: not list(broker.status("r")), "the broker has heard of it")


def test_adopt_what_has_a_descriptor(broker, file):
    os.pwrite(file, b"hello", 50000)
    with broker.adopt("fd", file) as region:
        assert region.nbytes == 100000 and bytes(region)[50000:50005] == b"hello"
    with open(file, "r+b", closefd=False) as stream, broker.adopt("file", stream, offset=50000, nbytes=5) as region:
        assert bytes(region) == b"hello"
        with broker.get_memory_info("file") as lease:
            assert bytes(lease) == b"hello"
    with broker.adopt("shaped", file, (10, 10), "float32", offset=4) as region:
        assert region.shape == (10, 10) and region.nbytes == 400
        with broker.get_memory_info("shaped") as lease:
            assert lease.nbytes == 400
    with pytest.raises(shmbroker.OutOfBounds):
        broker.adopt("beyond", file, nbytes=100001)
    os.fstat(file)


def test_adopt_a_mapping(broker, file):
    with mmap.mmap(file, 100000) as mapping, broker.adopt("mmap", mapping) as region:
        mapping[3] = 77
        assert region.nbytes == 100000 and bytes(region)[3] == 77
    with mmap.mmap(file, 4096, offset=8192) as mapping:
        mapping[0] = 78
        with memoryview(mapping) as whole, whole[0:100] as part, broker.adopt("part", part) as region:
            assert region.nbytes == 100 and bytes(region)[0] == 78
    assert os.pread(file, 1, 8192) == b"N"


def test_adopt_what_is_no_shared_file(broker):
    with pytest.raises(ValueError):
        broker.adopt("r", bytearray(100))
    with pytest.raises(ValueError):
        broker.adopt("r", mmap.mmap(-1, 4096))
    with pytest.raises(TypeError):
        broker.adopt("r", object())
    with tempfile.TemporaryFile(dir=os.path.dirname(__file__)) as stream:
        stream.truncate(4096)
        with pytest.raises(shmbroker.BadFd):
            broker.adopt("r", stream)
    with pytest.raises(OSError):
        broker.adopt("r", 99999, nbytes=1)


def test_memory_that_can_be_truncated_is_refused(broker):
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 100)
    with pytest.raises(shmbroker.Unsealed):
        broker.adopt("r", fd)
    os.close(fd)


@pytest.mark.parametrize("config", ["unsealed = accept\n"])
def test_adopt_shared_memory_of_multiprocessing(broker):
    memory = shared_memory.SharedMemory(create=True, size=8192)
    try:
        region = broker.adopt("shm", memory)
        memory.buf[10] = 99
        with region, shmbroker.connect(accept_unsealed=True) as consumer, consumer.get_memory_info("shm") as lease:
            assert bytes(lease)[10] == 99 and shmbroker.RegionFlags(lease.flags) & shmbroker.RegionFlags.UNSEALED
    finally:
        memory.close()
        memory.unlink()


def test_arguments(broker):
    for call in (lambda: broker.create(), lambda: broker.create("r"), lambda: broker.create("r", 1, "uint8", 3),
                 lambda: broker.create("r", nbytes=1, wrong=2), lambda: broker.create(b"r", nbytes=1),
                 lambda: broker.create("r", "x"), lambda: broker.get_memory_info("r", name="r"),
                 lambda: broker.create("r", nbytes=1.5), lambda: broker.get_memory_info(),
                 lambda: broker.create("r", nbytes=1, allowed_uids=3), lambda: shmbroker.Lease(),
                 lambda: shmbroker.Memory()):
        with pytest.raises(TypeError):
            call()
    for call in (lambda: broker.create("r", 0), lambda: broker.create("r", (3, 0)), lambda: broker.create("r\0", 1),
                 lambda: broker.create("r", nbytes=-1), lambda: broker.create("r", 10, nbytes=9),
                 lambda: broker.unregister("r", "rudely"), lambda: broker.unregister("r", timeout=-1),
                 lambda: broker.create("r", nbytes=1, huge_pages="3M"), lambda: shmbroker.connect(roles="king"),
                 lambda: broker.create("r", nbytes=1, allowed_uids=range(65)), lambda: broker.unregister_all("all"),
                 lambda: broker.create("r", nbytes=2**65), lambda: broker.create("r", nbytes=2**63)):
        with pytest.raises(ValueError):
            call()
    assert not names(broker)
    with pytest.raises(FileNotFoundError):
        shmbroker.connect("/no/such/socket")


def test_options(broker):
    region = broker.create("r", nbytes=1, keep=True, populate=True, allowed_uids=[os.getuid()], allowed_gids=(0,))
    assert shmbroker.RegionFlags(region.flags) & shmbroker.RegionFlags.KEPT
    region.close()
    assert names(broker) == ["r"]
    again = broker.create("r", nbytes=2, replace=True)
    assert [entry.nbytes for entry in broker.status(states=[shmbroker.RegionState.ACTIVE])] == [2]
    again.retire()


def test_numpy_arrays_hold_the_lease(broker):
    region = broker.create("r", 8, "int16")
    found = broker.get_memory_info("r").numpy(dtype="int16")
    capsule = broker.get_memory_info("r").__dlpack__(max_version=(1, 0))
    part = found[2:4]
    del found
    gc.collect()
    (entry,) = broker.status()
    assert entry.leases == 2
    del part, capsule
    (entry,) = broker.status()
    assert entry.leases == 0
    region.close()


def test_buffers_are_taken_by_others(broker):
    with broker.create("r", 4, "int32") as region:
        memoryview(region)[:] = memoryview(array.array("i", [1, 2, 3, 4]))
        with memoryview(region) as view:
            assert (view.format, view.itemsize, view.shape, view.strides, view.tolist()) == ("i", 4, (4,), (4,), [1, 2, 3, 4])
        with broker.create("grid", (2, 3), "float64") as grid, memoryview(grid) as view:
            assert (view.ndim, view.strides, view.c_contiguous) == (2, (24, 8), True)


def test_dlpack(broker):
    with broker.create("r", (2, 3), "float32") as region, broker.get_memory_info("r") as lease:
        assert region.__dlpack_device__() == (1, 0)
        assert '"dltensor"' in repr(region.__dlpack__())
        assert '"dltensor_versioned"' in repr(region.__dlpack__(max_version=(1, 1), dl_device=(1, 0), copy=False))
        with pytest.raises(BufferError, match="read-only"):
            lease.__dlpack__()
        assert numpy.from_dlpack(region).flags.writeable and not numpy.from_dlpack(lease).flags.writeable
        for wrong in ({"copy": True}, {"dl_device": (2, 0)}, {"stream": 1}):
            with pytest.raises(BufferError):
                region.__dlpack__(**wrong)
        with pytest.raises(TypeError):
            region.__dlpack__(max_version=1)
        assert not region.exports


def test_the_order_of_fortran_is_refused(broker):
    get, flag, release = ctypes.pythonapi.PyObject_GetBuffer, 0x40 | 0x10 | 0x8, ctypes.pythonapi.PyBuffer_Release
    buffer = (ctypes.c_byte * 256)()
    with broker.create("r", (2, 3), "int16") as region:
        for shape, good in (((2, 3), False), ((6,), True), ((1, 6), True), ((6, 1, 1), True), ((2, 1, 3), False)):
            view = region.view(shape)
            if good:
                assert get(ctypes.py_object(view), buffer, flag) == 0 and view.exports == 1
                release(buffer)
            else:
                with pytest.raises(BufferError, match="Fortran"):
                    get(ctypes.py_object(view), buffer, flag)
            assert view.exports == 0


def test_all_of_it_is_described():
    """help() has something to say of each class and of all that it has."""
    missing = [name for name in shmbroker.__all__ if callable(getattr(shmbroker, name)) and not getattr(shmbroker, name).__doc__]
    for owner in (shmbroker.Broker, shmbroker.Region, shmbroker.Lease, shmbroker.View, shmbroker.Handle, shmbroker.Pool,
                  shmbroker.Block, shmbroker.Aio, shmbroker.Events):
        missing += [f"{owner.__name__}.{name}" for name, value in inspect.getmembers(owner)
                    if not name.startswith("_") and not getattr(value, "__doc__", None)]
    assert not missing


def test_it_needs_no_other_package(run):
    """Whoever has not NumPy looks at memory all the same; whoever has it does not pay for it before it is asked for."""
    assert run("""
import sys
others = ("numpy", "torch", "cupy", "tritonclient")
import shmbroker
with shmbroker.connect() as broker, broker.create("r", (2, 3), "int16") as region, broker.create_pool("p", 1, 64) as pool:
    with memoryview(region) as view:
        view[1, 2] = 7
    with broker.get_memory_info("r") as lease, pool.acquire() as block:
        print(memoryview(lease.view((2, 3), "int16")).tolist(), lease.__dlpack_device__(), bytes(memoryview(block)[:1]))
    assert region.__dlpack__(max_version=(1, 0)) and region.__array_interface__["shape"] == (2, 3)
    print([name for name in others if name in sys.modules])
    sys.modules["numpy"] = None
    try:
        region.numpy()
    except ImportError:
        print("no NumPy")
""").splitlines() == ["[[0, 0, 0], [0, 0, 7]] (1, 0) b'\\x00'", "[]", "no NumPy"]
