# SPDX-License-Identifier: Apache-2.0
"""The fake driver from a test's side: its directory, processes that use it, and the driver's functions.

A Fake is a directory that several processes share; Gpu is the driver of the process that it is made in, the fake one or
a real one; a GpuProcess is a process that serves calls of Gpu's methods, and more if its class says so. The test itself
never loads the driver: it forks.
"""

import collections
import ctypes
import mmap
import os
import pathlib
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import traceback

DEADLINE = 60
HERE = pathlib.Path(__file__).resolve().parent
LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, CLONE_NEWPID, PR_SET_PDEATHSIG = 0x10000000, 0x20000000, 1
MIB2 = 2 << 20
READ, READ_WRITE = 1, 3
POINTER_CONTEXT, POINTER_ORDINAL, POINTER_LEGACY, POINTER_START, POINTER_SIZE, POINTER_TYPES = 1, 9, 10, 11, 12, 14
ATTRIBUTE_INTEGRATED, ATTRIBUTE_IPC_EVENT = 18, 125
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
built = []

Call = collections.namedtuple("Call", "pid comm function result detail")


def library(name="libcuda.so.1", kind=""):
    """The path of the fake driver; @kind "driver-11.2" for one that lacks what is newer. Built here where it is not yet."""
    path = pathlib.Path(os.environ.get("SHMBROKER_BUILDDIR", ".")).resolve() / "tests/fakecuda" / kind / ".libs" / name
    if path.exists():
        return path
    if not built:
        built.append(tempfile.TemporaryDirectory(prefix="shmb"))
    place = pathlib.Path(built[0].name) / (kind or "driver")
    if not place.exists():
        place.parent.chmod(0o755)
        place.mkdir()
        subprocess.run(["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-Wl,-z,nodelete",
                        "-Wl,-soname,libcuda.so.1", f"-Wl,--version-script={HERE / (kind or 'driver')}.sym",
                        "-o", place / "libcuda.so.1", *(HERE / f"{c}.c" for c in ("device", "memory", "state", "stream", "vmm"))],
                       check=True)
    return place / "libcuda.so.1"


class Fake:
    """A machine with fake GPUs: a directory that all its processes name in FAKECUDA_DIR.

    What is not known of a real driver has the answers of SHMBROKER_FAKECUDA_ANSWERS (`U1=allow U3=block`), where the
    tests are to run with others than the fake driver's own; @answers has those that a test is about.
    """

    def __init__(self, kind="", answers=None, **settings):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="shmb"))
        self.path.chmod(0o777)
        (self.path / "lib").mkdir()
        # where users reach it who do not reach the build directory
        self.library = self.path / "lib/libcuda.so.1"
        shutil.copy(library(kind=kind), self.library)
        (self.path / "log").touch()
        (self.path / "log").chmod(0o666)
        self.settings = dict(pair.split("=") for pair in os.environ.get("SHMBROKER_FAKECUDA_ANSWERS", "").split())
        self.set(**(answers or {}), **settings)

    def environment(self, **more):
        """For processes that are to see it."""
        return {"FAKECUDA_DIR": str(self.path), **more}

    def set(self, **settings):
        """Changes settings, for processes that run too; None removes one."""
        self.settings.update(settings)
        lines = [f"{key}={value}\n" for key, value in self.settings.items() if value is not None]
        self._write("settings", "".join(lines))

    def inject(self, *lines):
        """FUNCTION ACTION [nth=N] [comm=NAME]: what goes wrong from here on, and nothing else does."""
        self._write("inject", "".join(f"{line}\n" for line in lines))

    def hold(self, is_held=True):
        """What is in streams goes on, or does not."""
        if is_held:
            self._write("hold", "")
        else:
            (self.path / "hold").unlink(missing_ok=True)

    def _write(self, name, text):
        # in one step, because processes read at any moment
        new = self.path / f"{name}.new"
        new.write_text(text)
        new.chmod(0o644)
        new.rename(self.path / name)

    def log(self, function=None, pid=None, comm=None):
        """The calls so far, oldest first."""
        calls = []
        # what is behind the last newline is being written
        for line in (self.path / "log").read_text().rpartition("\n")[0].splitlines():
            number, name, called, result, detail = line.split(" ", 4)
            call = Call(int(number), name, called, int(result), detail)
            if function in (None, called) and pid in (None, call.pid) and comm in (None, name):
                calls.append(call)
        return calls

    def balance(self, **which):
        """What was opened and not given back, by kind: calls that succeeded, minus those that undo them."""
        pairs = {"ipc": ("cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"), "map": ("cuMemMap", "cuMemUnmap"),
                 "reserve": ("cuMemAddressReserve", "cuMemAddressFree"),
                 "context": ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
                 "pin": ("cuMemHostRegister_v2", "cuMemHostUnregister")}
        good = collections.Counter(call.function for call in self.log(**which) if not call.result)
        left = {kind: good[opens] - good[closes] for kind, (opens, closes) in pairs.items()}
        left["handle"] = (good["cuMemCreate"] + good["cuMemImportFromShareableHandle"] + good["cuMemRetainAllocationHandle"]
                          - good["cuMemRelease"])
        return {kind: count for kind, count in left.items() if count}

    def used(self, device=0):
        """Bytes of a GPU that living processes have allocated or imported, contexts included; see state.h."""
        helper = GpuProcess(self)
        try:
            helper.start(device)
            total = self.settings.get("TOTAL_BYTES", 8 << 30)
            return int(total) - helper.free_bytes() - int(self.settings.get("CTX_BYTES", 300 << 20))
        finally:
            helper.kill()

    def close(self):
        shutil.rmtree(self.path, ignore_errors=True)


class CudaError(Exception):
    """A driver's function has failed."""

    def __init__(self, function, code):
        super().__init__(function, code)
        self.function, self.code = function, code

    def __str__(self):
        return f"{self.function}: {self.code}"


class Location(ctypes.Structure):
    """CUmemLocation"""
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp"""
    _fields_ = [("type", ctypes.c_uint), ("handle_types", ctypes.c_uint), ("location", Location),
                ("metadata", ctypes.c_void_p), ("flags", ctypes.c_uint8 * 8)]


class Access(ctypes.Structure):
    """CUmemAccessDesc"""
    _fields_ = [("location", Location), ("flags", ctypes.c_uint)]


class Handle(ctypes.Structure):
    """CUipcMemHandle"""
    _fields_ = [("bytes", ctypes.c_char * 64)]


class Gpu:
    """The driver in this process. Pointers and handles are integers, handles of CUDA IPC are 64 bytes."""

    def __init__(self, path="libcuda.so.1"):
        self.path, self.driver, self.fds, self.kept, self.noted = str(path), None, [], [], []

    def result(self, function, *arguments):
        """The code that a function returns."""
        if self.driver is None:
            self.driver = ctypes.CDLL(self.path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        return getattr(self.driver, function)(*arguments)

    def call(self, function, *arguments):
        code = self.result(function, *arguments)
        if code:
            raise CudaError(function, code)

    def get(self, kind, function, *arguments, last=0):
        """What a function puts into its first parameter, or into that at @last."""
        value = kind()
        self.call(function, *arguments[:last], ctypes.byref(value), *arguments[last:])
        return value.value

    def init(self):
        self.call("cuInit", 0)

    def start(self, ordinal=0):
        """cuInit(), and the primary context of a device made current."""
        self.init()
        self.call("cuCtxSetCurrent", ctypes.c_void_p(self.get(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", ordinal)))

    def leave(self, ordinal=0):
        self.call("cuDevicePrimaryCtxRelease_v2", ordinal)

    def create_context(self, ordinal=0):
        return self.get(ctypes.c_void_p, "cuCtxCreate_v2", 0, ordinal)

    def count(self):
        return self.get(ctypes.c_int, "cuDeviceGetCount")

    def attribute(self, number, ordinal=0):
        return self.get(ctypes.c_int, "cuDeviceGetAttribute", number, ordinal)

    def uuid(self, ordinal=0, function="cuDeviceGetUuid_v2"):
        value = ctypes.create_string_buffer(16)
        self.call(function, value, ordinal)
        return value.raw

    def free_bytes(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def alloc(self, size, function="cuMemAlloc_v2", *more):  # pylint: disable=keyword-arg-before-vararg
        return self.get(ctypes.c_uint64, function, ctypes.c_size_t(size), *more)

    def free(self, pointer):
        self.call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def range(self, pointer):
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
        return base.value, size.value

    def pointer(self, attribute, pointer):
        return self.get(ctypes.c_uint64, "cuPointerGetAttribute", attribute, ctypes.c_uint64(pointer))

    def write(self, pointer, data):
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), data, ctypes.c_size_t(len(data)))
        self.call("cuCtxSynchronize")

    def read(self, pointer, size):
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(pointer), ctypes.c_size_t(size))
        return data.raw

    def get_handle(self, pointer):
        handle = ctypes.create_string_buffer(64)
        self.call("cuIpcGetMemHandle", handle, ctypes.c_uint64(pointer))
        return handle.raw

    def open(self, handle, flags=1):
        value = Handle.from_buffer_copy(handle)
        return self.get(ctypes.c_uint64, "cuIpcOpenMemHandle_v2", value, flags)

    def close(self, pointer):
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def create(self, size, ordinal=0, types=1):
        """The handle of memory by cuMemCreate()."""
        properties = Properties(1, types, Location(1, ordinal))
        return self.get(ctypes.c_uint64, "cuMemCreate", ctypes.c_size_t(size), ctypes.byref(properties), ctypes.c_uint64(0))

    def granularity(self, ordinal=0):
        properties = Properties(1, 1, Location(1, ordinal))
        return self.get(ctypes.c_size_t, "cuMemGetAllocationGranularity", ctypes.byref(properties), 0)

    def export(self, handle):
        """A fd of this process."""
        return self.get(ctypes.c_int, "cuMemExportToShareableHandle", ctypes.c_uint64(handle), 1, ctypes.c_uint64(0))

    def import_fd(self, fd):
        return self.get(ctypes.c_uint64, "cuMemImportFromShareableHandle", ctypes.c_void_p(fd), 1)

    def properties(self, handle):
        properties = Properties()
        self.call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), ctypes.c_uint64(handle))
        return properties.location.type, properties.location.id, properties.handle_types

    def release(self, handle):
        self.call("cuMemRelease", ctypes.c_uint64(handle))

    def retain(self, pointer):
        return self.get(ctypes.c_uint64, "cuMemRetainAllocationHandle", ctypes.c_void_p(pointer))

    def reserve(self, size):
        return self.get(ctypes.c_uint64, "cuMemAddressReserve", ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(0),
                        ctypes.c_uint64(0))

    def unreserve(self, pointer, size):
        self.call("cuMemAddressFree", ctypes.c_uint64(pointer), ctypes.c_size_t(size))

    def map_at(self, pointer, size, handle, offset=0):
        self.call("cuMemMap", ctypes.c_uint64(pointer), ctypes.c_size_t(size), ctypes.c_size_t(offset), ctypes.c_uint64(handle),
                  ctypes.c_uint64(0))

    def access(self, pointer, size, flags=READ_WRITE, ordinal=0):
        description = Access(Location(1, ordinal), flags)
        self.call("cuMemSetAccess", ctypes.c_uint64(pointer), ctypes.c_size_t(size), ctypes.byref(description),
                  ctypes.c_size_t(1))

    def map(self, handle, size, flags=READ_WRITE, ordinal=0):
        """Reserves, maps and gives access. Returns the pointer."""
        pointer = self.reserve(size)
        self.map_at(pointer, size, handle)
        self.access(pointer, size, flags, ordinal)
        return pointer

    def unmap(self, pointer, size):
        self.call("cuMemUnmap", ctypes.c_uint64(pointer), ctypes.c_size_t(size))
        self.unreserve(pointer, size)

    def vmm(self, size, data=b"", ordinal=0):
        """Memory that is mapped and exported: (pointer, fd)."""
        handle = self.create(size, ordinal)
        pointer, fd = self.map(handle, size, ordinal=ordinal), self.export(handle)
        self.release(handle)
        if data:
            self.write(pointer, data)
        self.fds.append(fd)
        return pointer, fd

    def pin(self, address, size, flags=0):
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), flags)

    def unpin(self, address):
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def close_handle(self, pointer):
        self.close(pointer)

    @staticmethod
    def peek(pointer, size):
        """Bytes by the processor: the fake's device pointers are mappings."""
        return ctypes.string_at(pointer, size)

    @staticmethod
    def poke(pointer, data):
        ctypes.memmove(pointer, data, len(data))

    def has(self, function):
        """Is there such a symbol?"""
        try:
            return bool(self.driver[function])
        except AttributeError:
            return False

    def address_of(self, function):
        return ctypes.cast(self.driver[function], ctypes.c_void_p).value

    def function_named(self, name, version):
        """The address by cuGetProcAddress(), or None."""
        return self.get(ctypes.c_void_p, "cuGetProcAddress_v2", name.encode(), version, ctypes.c_uint64(0), None, last=1)

    def text_of(self, code):
        """What cuGetErrorName() returns, and the text."""
        text = ctypes.c_char_p()
        return self.result("cuGetErrorName", code, ctypes.byref(text)), text.value

    def host_page(self):
        """The address of pages of ordinary memory, which are kept."""
        self.kept.append(mmap.mmap(-1, 8 * mmap.PAGESIZE))
        return ctypes.addressof(ctypes.c_char.from_buffer(self.kept[-1]))

    def stream(self):
        return self.get(ctypes.c_void_p, "cuStreamCreate", 0)

    def record(self, stream):
        """An event after what is in a stream."""
        event = self.get(ctypes.c_void_p, "cuEventCreate", 0)
        self.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))
        return event

    def fill_later(self, pointer, byte, size, stream):
        self.call("cuMemsetD8Async", ctypes.c_uint64(pointer), ctypes.c_uint8(byte[0]), ctypes.c_size_t(size),
                  ctypes.c_void_p(stream))

    def note_later(self, stream):
        """Counts what notes() tells, when the stream comes to it."""
        note = HOST_FUNCTION(lambda userdata: self.noted.append(1))
        self.kept.append(note)
        self.call("cuLaunchHostFunc", ctypes.c_void_p(stream), note, None)

    def notes(self):
        return len(self.noted)

    def in_child(self, method, *arguments):
        """The code of the CudaError that a method has in a forked child, 0 for none; minus the signal that kills it."""
        pid = os.fork()
        if not pid:
            code = 0
            try:
                getattr(self, method)(*arguments)
            except CudaError as error:
                code = error.code % 256
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _send(channel, value, fds=()):
    data = pickle.dumps(value)
    socket.send_fds(channel, [struct.pack("<I", len(data))], fds)
    channel.sendall(data)


def _receive(channel):
    head, fds, _, _ = socket.recv_fds(channel, 4, 16)
    if len(head) < 4:
        raise EOFError("the process has gone")
    (size,), data = struct.unpack("<I", head), b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        if not more:
            raise EOFError("the process has gone")
        data += more
    return pickle.loads(data), fds


class GpuProcess:
    """A process of its own with a Gpu, until it is closed or killed. Calls of other methods are done there.

    @environment is added to its own; with @new_pids it is the first process of a pid namespace. Fds go along by
    send_fd() and take_fd().
    """

    def __init__(self, fake=None, uid=None, new_pids=False, environment=None, kind=Gpu, **how):
        self.channel, other = socket.socketpair()
        self.channel.settimeout(4 * DEADLINE)
        if fake:
            environment = {**fake.environment(), **(environment or {})}
            how.setdefault("path", fake.library)
        self.pid = os.fork()
        if not self.pid:
            try:
                self._start(other, uid, new_pids, environment or {}, kind, how)
            finally:
                os._exit(0)
        other.close()

    @classmethod
    def _start(cls, channel, uid, new_pids, environment, kind, how):
        os.environ.update(environment)
        keep = channel.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, 4096)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if new_pids:
            if LIBC.unshare(CLONE_NEWPID | (CLONE_NEWUSER if os.geteuid() else 0)):
                raise OSError(ctypes.get_errno(), "unshare")
            # the child of this process is the first one of the namespace
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                return
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        cls._serve(channel, kind(**how))

    @staticmethod
    def _serve(channel, gpu):
        held = []
        while True:
            try:
                (method, arguments, how), fds = _receive(channel)
            except (EOFError, ConnectionError):
                return
            held += fds
            give = ()
            try:
                if method == "getpid":
                    answer = True, os.getpid()
                elif method == "send_fd":
                    answer = True, fds[0]
                elif method == "take_fd":
                    answer, give = (True, None), arguments
                else:
                    answer = True, getattr(gpu, method)(*arguments, **how)
            except BaseException as error:  # pylint: disable=broad-except
                error.add_text = traceback.format_exc()
                answer = False, error
            _send(channel, answer, give)

    def begin(self, method, *arguments, **how):
        """Begins a call; finish() waits for it."""
        _send(self.channel, (method, arguments, how))

    def finish(self, quiet=False):
        (good, value), _ = _receive(self.channel)
        if good:
            return value
        if not quiet:
            print(getattr(value, "add_text", ""))
        raise value

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments, **how):
            self.begin(method, *arguments, **how)
            return self.finish()

        return call

    def code(self, method, *arguments, **how):
        """The code that a call fails with, 0 when it does not."""
        self.begin(method, *arguments, **how)
        try:
            self.finish(quiet=True)
        except CudaError as error:
            return error.code
        return 0

    def send_fd(self, fd):
        """Gives a fd to the process. Returns its number there."""
        _send(self.channel, ("send_fd", (), {}), [fd])
        return self.finish()

    def take_fd(self, fd):
        """A copy of a fd of the process."""
        _send(self.channel, ("take_fd", (fd,), {}))
        (good, value), fds = _receive(self.channel)
        assert good, value
        return fds[0]

    def kill(self, number=signal.SIGKILL):
        """Ends the process at whatever it does."""
        if self.pid:
            os.kill(self.pid, number)
            os.waitpid(self.pid, 0)
            self.pid = 0
            self.channel.close()

    def close(self):
        """Ends the process in order."""
        if self.pid:
            self.channel.close()
            os.waitpid(self.pid, 0)
            self.pid = 0
