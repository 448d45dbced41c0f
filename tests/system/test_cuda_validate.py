# SPDX-License-Identifier: Apache-2.0
"""shmbroker-cuda-helper by itself, on a fake driver: what it makes of every code of every function, and of any message."""

import os
import pathlib
import random
import socket
import subprocess

import pytest
from broker import BROKER, ROOT
from fakecuda import MIB2, Fake, GpuProcess
from gpus import CHECK_IPC, CHECK_VMM, HELPER, MAGIC, REQUEST, Helper, causes, is_built, text_uuid

pytestmark = pytest.mark.skipif(not is_built(), reason="built without GPU memory")

HERE = pathlib.Path(__file__).resolve().parent
COMM = "shmbroker-cuda-"
UID = BROKER if ROOT else os.geteuid()


class Place:
    """A machine with an exporter, and helpers that are asked about its memory."""

    def __init__(self, **settings):
        self.fake, self.helpers = Fake(**settings), []
        self.exporter = GpuProcess(self.fake)
        self.exporter.start()
        self.uuid = self.exporter.uuid()
        self.handle = self.exporter.get_handle(self.exporter.alloc(MIB2))
        self.fd = self.exporter.take_fd(self.exporter.vmm(MIB2)[1])
        self.names = list(causes())

    def helper(self, uuid=None, **how):
        self.helpers.append(Helper(self.fake, uuid or self.uuid, **how))
        return self.helpers[-1]

    def name(self, reply):
        """Of the cause in a reply, None when all was well."""
        return self.names[reply["cause"] - 1] if reply["cause"] else None

    def ipc(self, helper, **fields):
        return helper.ask(CHECK_IPC, **{"handle": self.handle, "object_size": MIB2, **fields})

    def vmm(self, helper, **fields):
        return helper.ask(CHECK_VMM, **{"fd": self.fd, "object_size": MIB2, **fields})

    def close(self):
        for helper in self.helpers:
            if helper.process.poll() is None:
                helper.end()
        self.exporter.kill()
        os.close(self.fd)
        self.fake.close()


@pytest.fixture
def place():
    places = []

    def make(**settings):
        places.append(Place(**settings))
        return places[-1]

    yield make
    for one in places:
        one.close()


def test_what_it_says_when_all_is_well(place):
    there = place()
    helper = there.helper()
    ready = helper.reply()
    assert (ready["cause"], ready["is_last"], ready["n_devices"], ready["driver_version"]) == (0, 0, 2, 13000)
    assert ready["devices"][:16] == there.uuid and ready["text"].startswith("CUDA 13.0")
    for reply in (there.vmm(helper), there.ipc(helper), there.ipc(helper, object_size=0)):
        assert (reply["cause"], reply["object_size"], reply["is_last"], reply["text"]) == (0, MIB2, 0, "")
    assert there.ipc(helper, keep=1)["is_held"] == 1
    serial = helper.serial
    assert there.fake.balance(comm=COMM) == {"context": 1, "ipc": 1}
    helper.drop(serial)
    there.vmm(helper)
    assert there.fake.balance(comm=COMM) == {"context": 1}
    there.ipc(helper, keep=1)
    assert helper.end() == 0
    assert there.fake.balance(comm=COMM) == {}


NVML = """
#include <string.h>
int nvmlInit_v2(void) { return FAILS; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned int size) { strncpy(version, "580.65.06", size); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = 0; return strncmp(uuid, "GPU-", 4); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, void *infos) { *count = 2; return 7; }
"""


@pytest.mark.parametrize("fails", [0, 9])
def test_words_of_nvml(place, fails):
    there = place()
    source, library = there.fake.path / "nvml.c", there.fake.path / "libnvidia-ml.so.1"
    source.write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", f"-DFAILS={fails}", "-o", library, source], check=True)
    library.chmod(0o755)
    more = "" if fails else ", driver 580.65.06, 2 processes compute on the GPU"
    assert there.helper(arguments=[f"--nvml={library}"]).reply()["text"] == f"CUDA 13.0{more}"
    assert there.helper(arguments=["--nvml=/nonexistent"]).reply()["text"] == "CUDA 13.0"


def test_5_its_own_pid(place):
    there = place()
    helper = there.helper()
    helper.reply()
    there.fake.inject(f"cuIpcOpenMemHandle_v2 201 comm={COMM}")
    reply = there.ipc(helper, owner_pid=helper.process.pid)
    assert there.name(reply) == "PID_CLASH" and f"PID {helper.process.pid}" in reply["text"] and "hostPID" in reply["text"]
    assert there.name(there.ipc(helper, owner_pid=1)) == "HANDLE"


# which functions the helper calls, and after them which request; those of the start refuse the start
START = {"cuInit": None, "cuDeviceGetCount": "NOT_VISIBLE", "cuDeviceGet": "NOT_VISIBLE", "cuDeviceGetUuid_v2": "NOT_VISIBLE"}
IPC = ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2",
       "cuPointerGetAttribute", "cuIpcCloseMemHandle")
VMM = ("cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle", "cuMemGetAllocationGranularity",
       "cuMemAddressReserve", "cuMemMap", "cuMemUnmap", "cuMemRelease")
HARMLESS = ("cuDriverGetVersion", "cuDeviceGetAttribute", "cuDevicePrimaryCtxSetFlags_v2", "cuDeviceGetUuid", "cuCtxPopCurrent_v2",
            "cuMemAddressFree", "cuDevicePrimaryCtxRelease_v2")
CODES = (1, 2, 3, 34, 46, 100, 101, 201, 205, 208, 217, 304, 400, 711, 801, 802, 803, 804, 805, 999)
INIT = {34: "STUB", 46: "EXCLUSIVE", 100: "NO_GPU", 304: "SANDBOX", 803: "MISMATCH", 804: "MISMATCH", 805: "MPS_START"}
OPEN = {2: "NO_MEMORY", 400: "WSL", 801: "INTEGRATED"}
# what is open when an undoing call is refused is the driver's fault
UNDOING = {"cuIpcCloseMemHandle": "ipc", "cuMemUnmap": "map", "cuMemRelease": "handle"}


def expected(function, code):
    """The cause that a code of a function is, None for any."""
    if function == "cuInit":
        return INIT.get(code, "INIT")
    if function == "cuIpcOpenMemHandle_v2":
        return OPEN.get(code, "HANDLE")
    if function == "cuDevicePrimaryCtxRetain":
        return {46: "EXCLUSIVE", 2: "NO_MEMORY"}.get(code, "DRIVER")
    if function == "cuMemImportFromShareableHandle":
        return {101: "OTHER_GPU", 801: "INTEGRATED"}.get(code, "BAD_FD")
    if function == "cuMemAddressReserve":
        return {2: "NO_MEMORY"}.get(code, "DRIVER")
    if function == "cuMemMap":
        return {1: "SIZE"}.get(code, "DRIVER")
    return "DRIVER"


@pytest.mark.parametrize("function", [*START, *IPC, *VMM])
def test_9_every_code_of_every_function(place, function):
    there = place()
    for code in CODES:
        there.fake.inject(f"{function} {code} comm={COMM}")
        helper = there.helper()
        reply = helper.reply()
        if not reply["cause"]:
            # 201 of a call that was made without a context is tried again with one
            reply = there.ipc(helper) if function in IPC else there.vmm(helper)
        there.fake.inject()
        assert there.name(reply) == (START.get(function) or expected(function, code)), (code, reply["text"])
        if START.get(function):
            # 101 is also what a driver says that has no such GPU
            assert f"({code})" in reply["text"] or code == 101, reply["text"]
        else:
            assert f"{function}: " in reply["text"] and f"({code})" in reply["text"]
        if not reply["is_last"]:
            # what it still can do it does
            assert not there.ipc(helper)["cause"] and not there.vmm(helper)["cause"]
        helper.end()
        left = there.fake.balance(pid=helper.process.pid)
        kind = UNDOING.get(function)
        # a mapping that cannot be undone keeps its address range
        allowed = {kind: left.get(kind)} if kind else {}
        if function == "cuMemUnmap":
            allowed["reserve"] = left.get("reserve")
        assert {key: value for key, value in left.items() if key not in allowed} == {}, (code, left)


@pytest.mark.parametrize("function", HARMLESS)
def test_9_codes_that_change_nothing(place, function):
    there = place()
    for code in (1, 101, 801, 999):
        there.fake.inject(f"{function} {code} comm={COMM}")
        helper = there.helper()
        assert not helper.reply()["cause"]
        assert not there.vmm(helper)["cause"]
        there.fake.inject()
        assert helper.end() == 0


@pytest.mark.parametrize("function", ["cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2", "cuIpcCloseMemHandle", "cuMemMap",
                                      "cuMemImportFromShareableHandle"])
@pytest.mark.parametrize("code", [700, 702, 714, 719, 721, 911, 226])
def test_12_it_ends_after_a_sticky_code(place, function, code):
    there = place()
    there.fake.inject(f"{function} sticky={code} comm={COMM}")
    helper = there.helper()
    helper.reply()
    reply = there.ipc(helper) if "Ipc" in function or "Range" in function else there.vmm(helper)
    assert there.name(reply) == "STICKY" and reply["is_last"] == 1 and f"({code})" in reply["text"]
    assert helper.reply() is None and helper.end() == 0


def test_causes_are_in_the_manual(place):
    table = causes()
    page = (HERE.parents[1] / "daemon/cuda/shmbroker-cuda-helper.8").read_text()
    for name, (code, cause, remedy) in table.items():
        assert f'.It Li "{name} {code}"\n{cause}.\n.br\n{remedy}.\n' in page, name
    listed = [line.split('"')[1].split()[0] for line in page.splitlines() if line.startswith('.It Li "')]
    assert listed == list(table)
    for name, (code, _, remedy) in table.items():
        # where nothing but system memory works, the remedy says so
        assert code != "UNSUPPORTED" or "system memory" in remedy or name == "DRIVER", name


def test_every_cause_has_its_test():
    sources = "".join((HERE / f"test_cuda_{name}.py").read_text() for name in ("helper", "validate"))
    assert not [name for name in causes() if f'"{name}"' not in sources]


def test_19_a_sandbox_that_forbids_sockets(place):
    there = place()
    helper = there.helper(denied=[("bind", 1)])
    assert there.name(helper.reply()) == "SANDBOX"


def test_usage():
    def run(*arguments):
        return subprocess.run([HELPER, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    assert run().returncode == 2 and run("--device=GPU-12").returncode == 2 and run("--nonsense").returncode == 2
    assert run("--help").returncode == 0 and run("--version").stdout.startswith("shmbroker-cuda-helper ")
    by_hand = run(f"--device={text_uuid(bytes(range(16)))}")
    assert by_hand.returncode == 2 and "shmbrokerd starts this program" in by_hand.stderr


def test_20_any_message(place):
    there = place()
    # always the same ones
    chance = random.Random(20)
    good = REQUEST.pack(MAGIC, CHECK_IPC, 1, there.handle, MIB2, 0, 1, 0, UID, 0, 0)
    for number in range(120):
        helper = there.helper()
        assert not helper.reply()["cause"]
        for _ in range(chance.randrange(1, 4)):
            data = bytearray(good)
            for _ in range(chance.randrange(0, 6)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            if number % 3 == 0:
                data = data[:chance.randrange(1, len(data))] if number % 2 else data + bytes(chance.randrange(1, 64))
            try:
                helper.channel.sendall(data)
                reply = None if len(data) > 4 and data[4] == 3 else helper.reply()
            except (BrokenPipeError, ConnectionResetError):
                break
            if reply is None:
                break
            assert reply["magic"] == MAGIC and reply["cause"] <= len(there.names)
        # it ends in order, or because it was told nonsense; never by a signal
        assert helper.end() in (0, 1)
    assert there.fake.balance(comm=COMM) == {}


def test_20_fds_that_were_not_asked_for(place):
    there = place()
    helper = there.helper()
    helper.reply()
    data = REQUEST.pack(MAGIC, CHECK_IPC, 1, there.handle, MIB2, 0, 1, 0, UID, 0, 0)
    socket.send_fds(helper.channel, [data], [there.fd] * 20)
    assert helper.reply() is None and helper.end() == 1
    helper = there.helper()
    helper.reply()
    helper.channel.sendall(REQUEST.pack(MAGIC, CHECK_VMM, 1, b"", MIB2, 0, 1, 0, UID, 0, 0))
    assert helper.reply() is None and helper.end() == 1
