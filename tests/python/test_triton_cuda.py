# SPDX-License-Identifier: Apache-2.0
"""The drop-in for tritonclient.utils.cuda_shared_memory: beside the original where there is no driver, and on the fake one."""

import inspect
import json
import os
import pathlib
import subprocess
import sys

import numpy
import pytest
import tritonclient.utils.cuda_shared_memory as original
from conftest import BUILD

import shmbroker.triton.cuda_shared_memory as ours

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/fakecuda"))

import fakecuda  # noqa: E402  pylint: disable=wrong-import-position

NAMES = ["create_shared_memory_region", "get_raw_handle", "set_shared_memory_region", "get_contents_as_numpy",
         "set_shared_memory_region_from_dlpack", "as_shared_memory_tensor", "allocated_shared_memory_regions",
         "destroy_shared_memory_region", "CudaSharedMemoryRegion", "CudaSharedMemoryException"]


def run(text, **environment):
    """The output of a program that says nothing on stderr."""
    paths = [os.environ["PYTHONPATH"], str(TOP / "tests/fakecuda")]
    done = subprocess.run([sys.executable, "-X", "dev", "-c", text], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment})
    assert done.returncode == 0 and not done.stderr, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name):
    theirs, mine = (inspect.signature(getattr(module, name)) for module in (original, ours))
    assert [(one.name, one.kind, one.default) for one in theirs.parameters.values()] == \
        [(one.name, one.kind, one.default) for one in mine.parameters.values()]


def outcome(function, *args):
    try:
        return repr(function(*args))
    except Exception as error:  # pylint: disable=broad-except
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name, args", [
    ("set_shared_memory_region", (None, numpy.zeros(1))),
    ("set_shared_memory_region", (None, iter([]))),
    ("set_shared_memory_region", (None, [1])),
    ("set_shared_memory_region", (None, [[1]])),
    ("set_shared_memory_region", (None, (numpy.zeros(1), None))),
    ("set_shared_memory_region", (None, [numpy.zeros(1)])),
    ("get_contents_as_numpy", (None, numpy.int32, [1])),
    ("get_contents_as_numpy", (None, numpy.object_, [1])),
    ("get_raw_handle", (None,)),
    ("as_shared_memory_tensor", (None, "FP32", [1])),
    ("destroy_shared_memory_region", (None,)),
    ("allocated_shared_memory_regions", ()),
    ("set_shared_memory_region_from_dlpack", (None, [])),
])
def test_no_handle(name, args):
    theirs, mine = (outcome(getattr(module, name), *args) for module in (original, ours))
    # which attribute is missed first is nobody's business
    if theirs.startswith("AttributeError"):
        theirs, mine = theirs.split(" '_")[0], mine.split(" '_")[0]
    assert theirs == mine


def test_the_exception():
    for module in (original, ours):
        assert str(module.CudaSharedMemoryException("what it was")) == "what it was"
        assert module.CudaSharedMemoryException.__bases__ == (Exception,)


CREATE = """
import json, {module} as shm
try:
    shm.create_shared_memory_region("name", 64, 0)
except shm.CudaSharedMemoryException as error:
    print(json.dumps([str(error), str(error.__cause__), len(shm.allocated_shared_memory_regions())]))
"""


@pytest.mark.parametrize("module", [original, ours])
def test_without_a_driver(tmp_path, module):
    (tmp_path / "libcuda.so.1").write_bytes(b"")
    text, cause, count = json.loads(run(CREATE.format(module=module.__name__), LD_LIBRARY_PATH=str(tmp_path)))
    assert (text, count) == ("unable to create cuda shared memory handle", 0)
    assert module is original or "there is no driver for NVIDIA GPUs" in cause


def test_it_is_imported_without_the_packages_of_cuda():
    assert run("""
import sys
import shmbroker.triton.cuda_shared_memory
print([name for name in sys.modules if name.split(".")[0] in ("cuda", "tritonclient", "cupy", "torch")])
""") == "[]\n"


# ---- on the fake driver ----

@pytest.fixture
def machine():
    """With two GPUs; what was opened is given back by the processes of the test."""
    one = fakecuda.Fake()
    yield one
    assert {kind: count for kind, count in one.balance().items() if kind != "context"} == {}
    one.close()


@pytest.fixture
def config():
    """Of a broker that believes what it is told about GPU memory; fds of the fake driver are those of memfds."""
    return "[cuda]\nmode = relay\ncheck_fd = no\n"


@pytest.fixture
def gpu(machine, daemon):
    """Runs a program that has the drop-in as shm."""
    if not (BUILD / "shmbroker-cuda-helper").exists():
        pytest.skip("built without GPU memory")

    def run_one(text):
        return run("import base64, sys, numpy, shmbroker\nimport shmbroker.triton.cuda_shared_memory as shm\n" + text,
                   LD_LIBRARY_PATH=str(machine.library.parent), SHMBROKER_SOCKET=daemon.socket, **machine.environment())

    return run_one


def test_a_life(gpu, machine):
    assert gpu("""
handle = shm.create_shared_memory_region("name", 64, 0)
assert isinstance(handle, shm.CudaSharedMemoryRegion)
assert (handle._triton_shm_name, handle._byte_size, handle._device_id) == ("name", 64, 0)
assert shm.allocated_shared_memory_regions() == [handle]
assert len(base64.b64decode(shm.get_raw_handle(handle))) == 64
values = numpy.arange(16, dtype="float32").reshape(4, 4)
assert shm.set_shared_memory_region(handle, [values]) is None
array = shm.get_contents_as_numpy(handle, numpy.float32, [4, 4])
assert array.tolist() == values.tolist() and array.flags.writeable
# a copy
array[:] = 0
assert shm.get_contents_as_numpy(handle, "float32", [16])[5] == 5
shm.set_shared_memory_region(handle, (values.T[:2], numpy.array([[7]], "int8")))
assert shm.get_contents_as_numpy(handle, "float32", [2, 4]).tolist() == values.T[:2].tolist()
assert shm.get_contents_as_numpy(handle, "int8", [33])[32] == 7
assert shm.get_contents_as_numpy(handle, "int8", [0, 3]).shape == (0, 3)
shm.destroy_shared_memory_region(handle)
assert shm.allocated_shared_memory_regions() == []
try:
    shm.destroy_shared_memory_region(handle)
except ValueError:
    print("twice")
""") == "twice\n"
    allocated, freed = machine.log("cuMemAlloc_v2"), machine.log("cuMemFree_v2")
    assert len(allocated) == 1 and [call.result for call in freed] in ([], [0])


def test_tensors_of_strings(gpu):
    assert gpu("""
from tritonclient.utils import serialize_byte_tensor
tensor = numpy.array([str(i).encode() for i in range(16)], object).reshape(2, 8)
data = serialize_byte_tensor(tensor)
handle = shm.create_shared_memory_region("name", len(data.item()), 0)
shm.set_shared_memory_region(handle, [data])
for datatype in (numpy.object_, numpy.bytes_, object, numpy.dtype("O")):
    assert shm.get_contents_as_numpy(handle, datatype, [2, 8]).tolist() == tensor.tolist()
import struct
try:
    shm.get_contents_as_numpy(handle, numpy.object_, [17])
except struct.error:
    print("at the end")
""") == "at the end\n"


def test_what_does_not_fit(gpu):
    assert gpu("""
handle = shm.create_shared_memory_region("name", 64, 0)
after = numpy.zeros(65, "uint8")
for values in ([after], [numpy.ones(8), numpy.ones(1)], [numpy.array(b"x" * 65, object)], [numpy.array([1, 2], object)]):
    try:
        shm.set_shared_memory_region(handle, values)
    except shm.CudaSharedMemoryException as error:
        assert str(error) == "unable to set values in cuda shared memory", error
        print(type(error.__cause__).__name__)
try:
    shm.get_contents_as_numpy(handle, "float64", [9])
except shm.CudaSharedMemoryException as error:
    print(error)
for size, device in ((0, 0), (-1, 0), (1 << 60, 0), (64, 99), (64, -1), ("64", 0), (64, "0")):
    try:
        shm.create_shared_memory_region("name", size, device)
    except shm.CudaSharedMemoryException as error:
        assert str(error) == "unable to create cuda shared memory handle", error
        assert error.__cause__ is not None and str(error.__cause__)
        print("refused")
assert len(shm.allocated_shared_memory_regions()) == 1
""").split("\n") == ["CudaError", "CudaError", "CudaError", "ValueError",
                     "The size of the shared memory region is insufficient to provide numpy array with requested size",
                     *["refused"] * 7, ""]


def test_another_process_opens_the_handle(gpu):
    assert gpu("""
import subprocess
handle = shm.create_shared_memory_region("name", 8, 0)
other = shm.create_shared_memory_region("other", 8, 0)
shm.set_shared_memory_region(handle, [numpy.frombuffer(b"to a GPU", "uint8")])
shm.set_shared_memory_region(other, [numpy.zeros(8, "uint8")])
peer = '''
import base64, sys
from fakecuda import Gpu
gpu = Gpu()
gpu.start()
pointer = gpu.open(base64.b64decode(sys.argv[1]))
print(gpu.read(pointer, 8))
# of other regions it sees nothing
assert gpu.range(pointer)[1] == 2 << 20
assert gpu.read(pointer + 8, (2 << 20) - 8) == bytes((2 << 20) - 8)
gpu.write(pointer, b"from it!")
gpu.close(pointer)
'''
sys.stdout.write(subprocess.run([sys.executable, "-c", peer, shm.get_raw_handle(handle).decode()], check=True,
                                capture_output=True, text=True).stdout)
print(shm.get_contents_as_numpy(handle, "uint8", [8]).tobytes())
""") == "b'to a GPU'\nb'from it!'\n"


def test_dlpack(gpu, machine):
    assert gpu("""
import gc
source = shm.create_shared_memory_region("source", 64, 0)
handle = shm.create_shared_memory_region("name", 200, 0)
shm.set_shared_memory_region(source, [numpy.arange(8.0)])
tensor = shm.as_shared_memory_tensor(source, "FP64", [2, 4])
assert isinstance(tensor, shm.SharedMemoryTensor) and tensor.__dlpack_device__() == (2, 0)
# from this GPU, and from the CPU
shm.set_shared_memory_region_from_dlpack(handle, [tensor, numpy.arange(4, dtype="int16"), tensor.__dlpack__()])
assert shm.get_contents_as_numpy(handle, "float64", [8]).tolist() == list(range(8))
assert shm.get_contents_as_numpy(handle, "int16", [36])[32:].tolist() == [0, 1, 2, 3]
assert shm.get_contents_as_numpy(handle, "float64", [17])[9:].tolist() == list(range(8))
interface = tensor.__cuda_array_interface__
assert interface == {"version": 3, "shape": (2, 4), "typestr": "<f8", "data": (source._base_addr, False), "strides": None,
                     "stream": None}
inspect = shmbroker._shmbroker.dlpack_inspect
for capsule in (tensor.__dlpack__(), tensor.__dlpack__(1), tensor.__dlpack__(stream=-1, max_version=(1, 0)),
                tensor.__dlpack__(dl_device=(2, 0))):
    assert inspect(capsule) == (2, 0, source._base_addr, 64, True)
for how in ({"dl_device": (1, 0)}, {"dl_device": (2, 1)}, {"copy": True}):
    try:
        tensor.__dlpack__(**how)
    except BufferError:
        print("another device")
for datatype, shape in (("BYTES", [1]), ("X", [1]), ("FP64", [9]), ("INT8", [65])):
    try:
        shm.as_shared_memory_tensor(source, datatype, shape).__dlpack__()
    except (TypeError, ValueError) as error:
        print(type(error).__name__)
for values in ([numpy.arange(16).reshape(4, 4).T], [numpy.zeros(26)], [tensor] * 4):
    try:
        shm.set_shared_memory_region_from_dlpack(handle, values)
    except shm.CudaSharedMemoryException as error:
        print(error)
class Other:
    def __dlpack_device__(self):
        return (10, 0)
    def __dlpack__(self):
        raise AssertionError("not asked")
for value in (Other(), 1):
    try:
        shm.set_shared_memory_region_from_dlpack(handle, [value])
    except (shm.CudaSharedMemoryException, TypeError) as error:
        print(error)
# the tensor holds the memory, a capsule too
capsule = tensor.__dlpack__()
shm.destroy_shared_memory_region(source)
del source, tensor
gc.collect()
shm.set_shared_memory_region_from_dlpack(handle, [capsule])
assert shm.get_contents_as_numpy(handle, "float64", [8]).tolist() == list(range(8))
shm.destroy_shared_memory_region(handle)
del handle, capsule, values
gc.collect()
""").split("\n") == ["another device"] * 3 + ["TypeError", "TypeError", "ValueError", "ValueError"] + [
        "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported.",
        "unable to set values in cuda shared memory", "unable to set values in cuda shared memory",
        "DLPack device type 10 is not supported", "int is no tensor of DLPack", ""]
    assert len(machine.log("cuMemAlloc_v2")) == len(machine.log("cuMemFree_v2")) == 2


def test_nothing_leaks(gpu, machine):
    assert gpu("""
def resident():
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("Rss:"))
handle = shm.create_shared_memory_region("name", 64, 0)
tensor = shm.as_shared_memory_tensor(handle, "FP32", [4, 4])
inspect = shmbroker._shmbroker.dlpack_inspect
def cycle():
    for _ in range(100):
        inspect(tensor.__dlpack__())
        tensor.__cuda_array_interface__
for _ in range(100):
    cycle()
references, before = sys.getrefcount(handle._allocation), resident()
for _ in range(1000):
    cycle()
assert sys.getrefcount(handle._allocation) == references
assert resident() - before < 4 << 20, resident() - before
for _ in range(200):
    other = shm.create_shared_memory_region("other", 64, 1)
    shm.set_shared_memory_region(other, [numpy.ones(8)])
    shm.destroy_shared_memory_region(other)
del other
""") == ""
    assert len(machine.log("cuMemAlloc_v2")) - len(machine.log("cuMemFree_v2")) <= 1


CONSUMER = """
import ctypes, sys, shmbroker
broker = shmbroker.connect(cuda_context=True)
lease = broker.get_memory_info("cuda:name", write=True)
assert (lease.memory_type, lease.device, lease.nbytes) == ("cuda", 1, 64)
assert lease.__dlpack_device__() == (2, 1)
assert shmbroker._shmbroker.dlpack_inspect(lease.view(8, "int64").__dlpack__(stream=1)) == (2, 1, lease.address, 64, True)
interface = lease.view((2, 4), "int64").__cuda_array_interface__
assert interface == {"version": 3, "shape": (2, 4), "typestr": "<i8", "data": (lease.address, False), "strides": None,
                     "stream": None}, interface
for make in (memoryview, lambda one: one.numpy(), lambda one: one.__array_interface__, bytes):
    try:
        make(lease)
    except (BufferError, AttributeError, TypeError):
        continue
    raise AssertionError(make)
# the fake driver's pointers may be read by the CPU
assert (ctypes.c_int64 * 8).from_address(lease.address)[7] == 7
print("have it", flush=True)
sys.stdin.readline()
assert (ctypes.c_int64 * 8).from_address(lease.address)[7] == 7
lease.release()
print("gave it back", flush=True)
sys.stdin.readline()
"""


def test_the_brokers_consumers_have_it(gpu):
    assert gpu(f"consumer = {CONSUMER!r}" + """
import gc, subprocess
handles = [shm.create_shared_memory_region("name", 64, 1) for _ in range(2)]
print([one.region_name for one in handles])
shm.set_shared_memory_region(handles[0], [numpy.arange(8)])
peer = subprocess.Popen([sys.executable, "-c", consumer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(peer.stdout.readline(), end="")
for one in handles:
    shm.destroy_shared_memory_region(one)
assert [one.region_name for one in handles] == [None, None]
del handles, one
gc.collect()
# it is not freed while somebody has it
assert len(shm._draining) == 1
peer.stdin.write(chr(10))
peer.stdin.flush()
print(peer.stdout.readline(), end="")
while shm._draining:
    # with the next region that is made, what is over is freed
    shm.destroy_shared_memory_region(shm.create_shared_memory_region("other", 8, 0))
peer.stdin.close()
assert peer.wait() == 0
peer.stdout.close()
""") == "['cuda:name', 'cuda:name#2']\nhave it\ngave it back\n"


def test_allocated_by_the_library(gpu):
    assert gpu("""
import ctypes
with shmbroker.connect(cuda_context=True) as broker:
    with broker.cuda_alloc("kv", (4, 4), "float32", device=1, unpublished=True) as region:
        assert region.__dlpack_device__() == (2, 1) and region.nbytes == 64 and not region.readonly
        (ctypes.c_float * 16).from_address(region.address)[3] = 3.0
        try:
            broker.get_memory_info("kv")
        except shmbroker.NotFound:
            print("not yet")
        region.publish()
        with broker.get_memory_info("kv") as lease:
            assert lease.memory_type == "cuda" and lease.device == 1
            assert (ctypes.c_float * 16).from_address(lease.address)[3] == 3.0
        # another name for it, by DLPack
        for source in (region, region.view(16, "float32")):
            with broker.cuda_export("window", source) as window:
                assert (window.address, window.nbytes) == (region.address, 64)
                assert window.__dlpack_device__() == (2, 1)
        for source, error in ((region.address, TypeError), (numpy.zeros(4), ValueError)):
            try:
                broker.cuda_export("window", source, nbytes=4)
            except error:
                print("no")
    with broker.create("cpu", 4) as region:
        try:
            region.publish()
        except shmbroker.Invalid:
            print("of the CPU")
""") == "not yet\nno\nno\nof the CPU\n"


def test_leases_and_streams(gpu):
    assert gpu("""
import fakecuda, pathlib, os, threading, time
driver = fakecuda.Gpu("libcuda.so.1")
driver.start()
held = pathlib.Path(os.environ["FAKECUDA_DIR"]) / "hold"

def leases(broker, name):
    return sum(region.leases for region in broker.status(name))

with shmbroker.connect() as owner, owner.cuda_alloc("kv", 64), owner.create("cpu", 64):
    for name, uuid in (("kv", driver.uuid(0)), ("cpu", None)):
        consumer = shmbroker.connect()
        lease = consumer.get_memory_info(name, write=True)
        assert lease.device_uuid == uuid
        view = lease.view(64, "uint8")
        try:
            lease.release_after()
        except BufferError:
            print("a view")
        del view
        held.touch()
        stream = driver.stream()
        driver.note_later(stream)
        lease.release_after(stream)
        assert lease.released and lease.address is None and leases(owner, name) == 1
        try:
            lease.release_after(stream)
        except ValueError:
            print("once")
        # the connection does not end under a stream
        closer = threading.Thread(target=consumer.close)
        closer.start()
        assert leases(owner, name) == 1
        held.unlink()
        closer.join()
        end = time.monotonic() + 30
        while leases(owner, name) and time.monotonic() < end:
            time.sleep(0.01)
        assert not leases(owner, name)
""") == "a view\nonce\n" * 2


def test_page_locked_memory_of_the_cpu(gpu, machine):
    assert gpu("""
import fakecuda
driver = fakecuda.Gpu("libcuda.so.1")
with shmbroker.connect() as broker, broker.create("cpu", 8192, populate=True):
    with broker.get_memory_info("cpu", write=True) as lease:
        try:
            lease.pin(0)
        except shmbroker.BadState:
            print("no context")
        driver.start()
        with broker.get_memory_info("cpu", offset=4096, write=True) as window:
            assert window.pin() == lease.pin(0) + 4096
    try:
        lease.pin()
    except ValueError:
        print("given back")
""") == "no context\ngiven back\n"
    assert not machine.balance().get("pin")


NO_GPUS = """
try:
    shm.create_shared_memory_region("name", 64, 0)
except shm.CudaSharedMemoryException as error:
    print(type(error.__cause__).__name__)
"""


@pytest.mark.parametrize("config", ["[cuda]\nmode = off\n"])
def test_a_broker_that_takes_no_gpu_memory(gpu):
    assert gpu(NO_GPUS) in ("Unsupported\n", "NoDevice\n")


def test_threads_keep_their_context(gpu):
    assert gpu("""
import ctypes, threading
driver = ctypes.CDLL("libcuda.so.1")
handles = [shm.create_shared_memory_region("name", 64, device) for device in (0, 1)]
errors = []
def work(number):
    try:
        current = ctypes.c_void_p()
        for i in range(100):
            handle = handles[(number + i) % 2]
            own = shm.create_shared_memory_region("own", 64, (number + i) % 2)
            shm.set_shared_memory_region(own, [numpy.full(8, number)])
            assert shm.get_contents_as_numpy(own, int, [8]).tolist() == [number] * 8
            shm.destroy_shared_memory_region(own)
            driver.cuCtxGetCurrent(ctypes.byref(current))
            assert not current.value
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
""") == ""
