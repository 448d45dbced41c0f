# SPDX-License-Identifier: Apache-2.0
"""What is not known of the driver, asked of the driver that is here: numbers are those of the facts (cuda § 9.9).

Each experiment takes a Bench and returns its answer, a short text; it raises NotRun where something for it is missing.
All of it happens in processes of their own, which may break.
"""

import ctypes
import os
import pathlib
import shutil
import signal
import time

from fakecuda import LIBC, MIB2, READ, READ_WRITE, Gpu, GpuProcess, Handle

PATIENCE = 20
CLONE_NEWNS = 0x20000
experiments = []


class NotRun(Exception):
    """Something is missing for an experiment."""


def experiment(number, question):
    def add(function):
        experiments.append((number, question, function))
        return function
    return add


class ExperimentGpu(Gpu):
    """A Gpu with what experiments alone need."""

    def timed(self, method, *arguments, **how):
        """(milliseconds, what it returns)"""
        begin = time.monotonic()
        result = getattr(self, method)(*arguments, **how)
        return (time.monotonic() - begin) * 1000, result

    def fill(self, pointer, value, size):
        self.call("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_uint8(value), ctypes.c_size_t(size))
        self.call("cuCtxSynchronize")

    def fill_and_close(self, pointer, size, stream):
        """Closes a handle while the GPU may still write there. Returns the codes of close and synchronise."""
        self.fill_later(pointer, b"x", size, stream)
        return (self.result("cuIpcCloseMemHandle", ctypes.c_uint64(pointer)), self.result("cuCtxSynchronize"))

    def load(self):
        """Loads the driver and calls nothing."""
        if self.driver is None:
            self.driver = ctypes.CDLL(self.path, mode=os.RTLD_LOCAL | os.RTLD_NOW)

    def dma_buf(self, pointer, size):
        """The fd of an address range."""
        return self.get(ctypes.c_int, "cuMemGetHandleForAddressRange", ctypes.c_uint64(pointer), ctypes.c_size_t(size), 1,
                        ctypes.c_uint64(0))

    def event_handle(self):
        event = self.get(ctypes.c_void_p, "cuEventCreate", 2 | 4)
        handle = ctypes.create_string_buffer(64)
        self.call("cuIpcGetEventHandle", handle, ctypes.c_uint64(event))
        return handle.raw

    def open_event(self, handle):
        return bool(self.get(ctypes.c_void_p, "cuIpcOpenEventHandle", Handle.from_buffer_copy(handle)))

    def hide_shm(self):
        """An empty /dev/shm for this process."""
        if LIBC.unshare(CLONE_NEWNS) or LIBC.mount(b"none", b"/", None, 0x44000, None) \
                or LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None):
            raise OSError(ctypes.get_errno(), "no mount namespace")

    def open_many(self, handles):
        """How many can be opened, the last code, and milliseconds."""
        begin, opened = time.monotonic(), 0
        code = 0
        for handle in handles:
            code = self.code_of("open", handle)
            if code:
                break
            opened += 1
        return opened, code, (time.monotonic() - begin) * 1000

    def code_of(self, method, *arguments):
        try:
            getattr(self, method)(*arguments)
        except Exception as error:  # pylint: disable=broad-except
            return getattr(error, "code", -1)
        return 0

    def torch_pointer(self, settings):
        """(pointer, first bytes) of a tensor."""
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
        import torch  # pylint: disable=import-outside-toplevel,import-error
        tensor = torch.arange(4096, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        self.kept.append(tensor)
        return tensor.data_ptr(), bytes(tensor[:2].cpu().numpy())


class Bench:
    """The driver that is asked, and the processes that ask it."""

    def __init__(self, library, fake=None):
        self.library, self.fake, self.processes = library, fake, []

    def process(self, start=True, **how):
        process = GpuProcess(self.fake, kind=ExperimentGpu, path=self.library, **how)
        self.processes.append(process)
        # nothing here may hang for ever
        process.channel.settimeout(PATIENCE)
        if start:
            process.start()
        return process

    def pair(self):
        return self.process(), self.process()

    def has(self, function):
        one = self.process(start=False)
        one.load()
        if not one.has(function):
            raise NotRun(f"the driver has no {function}()")

    def close(self):
        for process in self.processes:
            process.kill()
        self.processes.clear()


def root():
    if os.geteuid():
        raise NotRun("needs root")


def code(number):
    return f"refused ({number})" if number else "opens"


@experiment(1, "owner killed: an importer reads; a third process opens (U1)")
def owner_killed(bench):
    owner, importer = bench.pair()
    third = bench.process()
    pointer = owner.alloc(4 * MIB2)
    owner.write(pointer, b"alive")
    handle = owner.get_handle(pointer)
    there = importer.open(handle)
    owner.kill()
    reads = importer.code("read", there, 5) or ("reads" if importer.read(there, 5) == b"alive" else "other bytes")
    return f"{reads}; {code(third.code('open', handle))}"


@experiment(2, "cuIpcGetMemHandle() of an imported pointer (U2)")
def handle_of_import(bench):
    owner, importer = bench.pair()
    there = importer.open(owner.get_handle(owner.alloc(4 * MIB2)))
    return f"attribute {importer.pointer(10, there) & 0xFF}, {code(importer.code('get_handle', there))}"


@experiment(3, "range of 1 KiB, 1 MiB, 3 MiB in exporter and importer (U3)")
def ranges(bench):
    owner, importer = bench.pair()
    texts = []
    for size in (1024, 1 << 20, 3 << 20):
        owner.alloc(size)
        pointer = owner.alloc(size)
        base, own = owner.range(pointer)
        there = importer.open(owner.get_handle(pointer))
        _, foreign = importer.range(there)
        texts.append(f"{size >> 10}K: {own >> 10}K+{(pointer - base) >> 10}K, {foreign >> 10}K")
    return "; ".join(texts)


@experiment(4, "codes of random bytes, a freed allocation, a dead owner (U4)")
def codes(bench):
    owner, importer = bench.pair()
    found = [importer.code("open", b"garbage!" * 8)]
    pointer = owner.alloc(4 * MIB2)
    handle = owner.get_handle(pointer)
    owner.free(pointer)
    found.append(importer.code("open", handle))
    handle = owner.get_handle(owner.alloc(4 * MIB2))
    owner.kill()
    found.append(importer.code("open", handle))
    return ", ".join(map(str, found))


@experiment(4.1, "code of a handle of a GPU that the importer does not see")
def other_gpu(bench):
    owner = bench.process()
    if owner.count() < 2:
        raise NotRun("one GPU")
    importer = bench.process(environment={"CUDA_VISIBLE_DEVICES": "1"})
    return code(importer.code("open", owner.get_handle(owner.alloc(4 * MIB2))))


@experiment(5, "an exporter under MPS, an importer without (U5)")
def mps(bench):
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if not bench.fake and not os.path.isdir(pipes):
        raise NotRun("no MPS server")
    owner = bench.process()
    importer = bench.process(environment={"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"})
    return code(importer.code("open", owner.get_handle(owner.alloc(4 * MIB2))))


@experiment(6, "PID namespaces: equal PID values; different ones")
def pid_namespaces(bench):
    root()
    owner, same = bench.process(new_pids=True), bench.process(new_pids=True)
    other = bench.process()
    handle = owner.get_handle(owner.alloc(4 * MIB2))
    return f"{code(same.code('open', handle))}; {code(other.code('open', handle))}"


@experiment(7, "uid 1000 to 0, 0 to 1000, 1000 to 1001 (U7)")
def users(bench):
    root()
    texts = []
    for one, other in ((1000, None), (None, 1000), (1000, 1001)):
        owner, importer = bench.process(uid=one), bench.process(uid=other)
        texts.append(code(importer.code("open", owner.get_handle(owner.alloc(4 * MIB2)))))
    return "; ".join(texts)


@experiment(8, "VMM without a context: import, properties, map, access; bytes used (U8)")
def without_context(bench):
    owner, importer = bench.process(), bench.process(start=False)
    fd = owner.take_fd(owner.vmm(2 * MIB2)[1])
    before = owner.free_bytes()
    importer.init()
    number = importer.send_fd(fd)
    os.close(fd)
    found = [importer.code("import_fd", number)]
    if not found[0]:
        handle = importer.import_fd(number)
        found.append(importer.code("properties", handle))
        there = importer.reserve(2 * MIB2)
        found.append(importer.code("map_at", there, 2 * MIB2, handle))
        if not found[-1]:
            found.append(importer.code("access", there, 2 * MIB2))
    return f"{', '.join(map(str, found))}; {(before - owner.free_bytes()) >> 20} MiB"


@experiment(9, "a dma-buf of device memory: made; imported (U9)")
def dma_buf(bench):
    bench.has("cuMemGetHandleForAddressRange")
    owner, importer = bench.pair()
    pointer = owner.alloc(2 * MIB2)
    made = owner.code("dma_buf", pointer, 2 * MIB2)
    if made:
        return f"refused ({made})"
    fd = owner.take_fd(owner.dma_buf(pointer, 2 * MIB2))
    number = importer.send_fd(fd)
    os.close(fd)
    return f"made; {code(importer.code('import_fd', number))}"


@experiment(10, "MiB of a context; ms of cuInit, context, open of 2 MiB and of what is free")
def costs(bench):
    owner, importer = bench.process(), bench.process(start=False)
    before = owner.free_bytes()
    init, _ = importer.timed("init")
    context, _ = importer.timed("start")
    texts = [f"{(before - owner.free_bytes()) >> 20} MiB", f"{init:.0f}", f"{context:.0f}"]
    for size in (2 << 20, owner.free_bytes() // 2 // MIB2 * MIB2):
        handle = owner.get_handle(owner.alloc(size))
        took, _ = importer.timed("open", handle)
        texts.append(f"{size >> 20} MiB: {took:.1f}")
    return ", ".join(texts)


@experiment(11, "the exporter is stopped: does an open hang?")
def stopped(bench):
    owner, importer = bench.pair()
    handle = owner.get_handle(owner.alloc(4 * MIB2))
    os.kill(owner.pid, signal.SIGSTOP)
    try:
        return code(importer.code("open", handle))
    except TimeoutError:
        return f"hangs ({PATIENCE} s)"
    finally:
        os.kill(owner.pid, signal.SIGCONT)


@experiment(12, "cuMemFree() while imported: the importer reads; after the next allocation")
def freed(bench):
    owner, importer = bench.pair()
    pointer = owner.alloc(4 * MIB2)
    owner.write(pointer, b"before")
    there = importer.open(owner.get_handle(pointer))
    owner.free(pointer)
    texts = []
    for _ in range(2):
        failed = importer.code("read", there, 6)
        texts.append(f"fails ({failed})" if failed else {b"before": "same bytes"}.get(importer.read(there, 6), "other bytes"))
        owner.fill(owner.alloc(4 * MIB2), 0x55, 4 * MIB2)
    return "; ".join(texts)


@experiment(13, "a write to a read-only mapping: the writer; others")
def read_only(bench):
    owner, importer = bench.pair()
    pointer, number = owner.vmm(2 * MIB2, b"safe")
    fd = owner.take_fd(number)
    there = importer.map(importer.import_fd(importer.send_fd(fd)), 2 * MIB2, READ)
    os.close(fd)
    try:
        writer = importer.code("fill", there, 1, 4) or "writes"
    except (EOFError, ConnectionError):
        writer = "dies"
    return f"{writer}; {'unharmed' if owner.read(pointer, 4) == b'safe' else 'harmed'}"


@experiment(14, "close while the GPU writes there: codes of close and synchronise")
def close_early(bench):
    owner, importer = bench.pair()
    size = 64 * MIB2
    there = importer.open(owner.get_handle(owner.alloc(size)))
    try:
        return ", ".join(map(str, importer.fill_and_close(there, size, importer.stream())))
    except (EOFError, ConnectionError):
        return "the process dies"


@experiment(15, "many handles open at a time: how many of 1,000, the last code")
def many(bench):
    owner, importer = bench.pair()
    count = min(1000, owner.free_bytes() // 2 // MIB2)
    handles = [owner.get_handle(owner.alloc(MIB2)) for _ in range(count)]
    opened, last, took = importer.open_many(handles)
    return f"{opened} of {count}, {last}, {took / max(opened, 1):.2f} ms each"


@experiment(16, "an event's handle: with and without a common /dev/shm")
def events(bench):
    bench.has("cuIpcGetEventHandle")
    owner, importer = bench.pair()
    handle = owner.event_handle()
    texts = [code(importer.code("open_event", handle))]
    root()
    apart = bench.process(start=False)
    apart.hide_shm()
    apart.start()
    texts.append(code(apart.code("open_event", handle)))
    return "; ".join(texts)


@experiment(17, "memory of torch: by a handle; with expandable segments")
def torch_memory(bench):
    if bench.fake:
        raise NotRun("not on the fake driver")
    texts = []
    for settings in ("", "expandable_segments:True"):
        owner, importer = bench.process(), bench.process()
        try:
            pointer, data = owner.torch_pointer(settings)
        except ImportError as error:
            raise NotRun("no torch") from error
        failed = owner.code("get_handle", pointer)
        if failed:
            texts.append(f"refused ({failed})")
            continue
        base, _ = owner.range(pointer)
        there = importer.open(owner.get_handle(pointer))
        texts.append("the same bytes" if importer.read(there + pointer - base, len(data)) == data else "other bytes")
    return "; ".join(texts)


@experiment(18, "a mapping for reading and one for writing of one fd")
def two_mappings(bench):
    owner, importer = bench.pair()
    _, number = owner.vmm(2 * MIB2, b"fd")
    fd = owner.take_fd(number)
    texts = []
    for flags in (READ, READ_WRITE):
        there = importer.map(importer.import_fd(importer.send_fd(fd)), 2 * MIB2, flags)
        texts.append(importer.read(there, 2).decode())
    os.close(fd)
    return ", ".join(texts)


def has_gpu(library):
    """None, or why there is no GPU to ask."""
    one = GpuProcess(kind=ExperimentGpu, path=library)
    one.begin("start")
    try:
        one.finish(quiet=True)
    except Exception as error:  # pylint: disable=broad-except
        return str(error)
    finally:
        one.kill()
    return None


def answers(bench):
    """[(number, question, answer or None, why there is none)]"""
    found = []
    for number, question, function in experiments:
        try:
            found.append((number, question, function(bench), None))
        except NotRun as missing:
            found.append((number, question, None, str(missing)))
        except Exception as error:  # pylint: disable=broad-except
            found.append((number, question, f"FAILED: {type(error).__name__} {error}", None))
        finally:
            bench.close()
    return found


def tools():
    """What the machine says about itself."""
    program = shutil.which("nvidia-smi")
    version = pathlib.Path("/proc/driver/nvidia/version")
    return program, version.read_text().splitlines()[0] if version.exists() else None
