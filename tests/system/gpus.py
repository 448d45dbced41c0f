# SPDX-License-Identifier: Apache-2.0
"""Brokers and peers on a machine with fake GPUs, or with real ones, and the helper without a broker."""

import ctypes
import functools
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import tempfile

import pytest
from broker import BROKER, BUILD, LIBC, Peer, PeerClient, ROOT, become, check_sanitizers, until
from fakecuda import CLONE_NEWPID, MIB2, Fake, Gpu
from protocol_client import READ_WRITE, Refused, cuda_entry
from sandbox import deny

REAL = os.environ.get("SHMBROKER_TEST_GPU")
HELPER = BUILD / "shmbroker-cuda-helper"
SYS_CLONE3 = 435
RELOADED = "the configuration was read again"


def text_uuid(uuid):
    """GPU-… of 16 bytes."""
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


@functools.cache
def is_built():
    """Built with GPU memory?"""
    return HELPER.exists()


def section(**keys):
    """
    The configuration of a broker: helpers that end soon and are waited for however long they take, and fds that are not a
    real driver's where that is not one.
    """
    values = {"helper": HELPER, "check_fd": "yes" if REAL else "no", "helper_idle": "300ms", "start_timeout": "5min",
              "operation_timeout": "5min", **keys}
    return "[cuda]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())


class GpuClient(PeerClient):
    """A peer that uses the GPU too."""

    library = None

    def __init__(self, path, **how):
        super().__init__(path, **how)
        self.gpu_driver, self.pointers, self.sizes = Gpu(self.library), {}, {}

    def pid_here(self):
        return os.getpid()

    def gpu(self, method, *arguments, **how):
        """Calls a method of Gpu."""
        return getattr(self.gpu_driver, method)(*arguments, **how)

    def own_hints(self):
        return {"owner_pid": os.getpid(), "owner_pid_namespace": os.stat("/proc/self/ns/pid").st_ino}

    def register_cuda(self, name, size, handle=b"", fds=(), **fields):
        (result,) = self.register_many([cuda_entry(name, size, handle, **fields)], list(fds))
        if result["code"]:
            raise Refused(result["code"], result["text"].decode())
        return result

    def offer_ipc(self, name, alloc=MIB2, data=b"", ordinal=0, **fields):
        """Allocates, exports and registers memory by a handle."""
        pointer = self.pointers[name] = self.gpu_driver.alloc(alloc)
        if data:
            self.gpu_driver.write(pointer, data)
        handle = self.gpu_driver.get_handle(pointer)
        base, size = self.gpu_driver.range(pointer)
        given = {"size": alloc, "offset": pointer - base, "object_size": size, "device": self.gpu_driver.uuid(ordinal),
                 **self.own_hints(), **fields}
        return self.register_cuda(name, handle=given.pop("handle", handle), **given)

    def offer_vmm(self, name, alloc=MIB2, data=b"", ordinal=0, **fields):
        """Allocates, exports and registers memory by an fd."""
        self.pointers[name], fd = self.gpu_driver.vmm(alloc, data, ordinal)
        given = {"size": alloc, "object_size": alloc, "device": self.gpu_driver.uuid(ordinal), **fields}
        return self.register_cuda(name, fds=[fd], **given)

    def open_found(self, name, access=READ_WRITE, flags=3):
        """LOOKUP, and what a consumer does with it. Returns (lease, pointer)."""
        found = self.lookup(name, want_fd=True, access=access)
        if found["fd"] is None:
            pointer = self.gpu_driver.open(found["handle"])
        else:
            handle = self.gpu_driver.import_fd(found["fd"])
            os.close(found["fd"])
            pointer = self.gpu_driver.map(handle, MIB2, flags)
            self.gpu_driver.release(handle)
        return found["lease"], pointer + found["offset"]

    def read_found(self, name, size, **how):
        """Bytes of a region through the GPU; the lease and the mapping are given back."""
        lease, pointer = self.open_found(name, **how)
        data = self.gpu_driver.read(pointer, size)
        try:
            self.gpu_driver.close(self.gpu_driver.range(pointer)[0])
        except Exception:  # pylint: disable=broad-except
            self.gpu_driver.unmap(pointer, MIB2)
        self.release(lease)
        return data


class GpuPeer(Peer):
    """A peer on a machine with GPUs; with @new_pids in a pid namespace of its own, and there with the pid @as_pid."""

    client = GpuClient

    def __init__(self, broker, uid, fake=None, environment=None, new_pids=False, as_pid=0, ordinal=0, start=True, **how):
        self.library = fake.library if fake else "libcuda.so.1"
        self.environment = {**(fake.environment() if fake else {}), **(environment or {})}
        self.new_pids, self.as_pid = new_pids or as_pid, as_pid
        super().__init__(broker, uid, **how)
        if start:
            self.gpu("start", ordinal)

    def prepare(self, uid):
        os.environ.update(self.environment)
        GpuClient.library = self.library
        if self.new_pids:
            self._enter_namespace()
        become(uid)

    def _enter_namespace(self):
        if LIBC.unshare(ctypes.c_int(CLONE_NEWPID)):
            raise OSError(ctypes.get_errno(), "unshare")
        # the namespace ends with its first process, which waits
        if os.fork():
            os.wait()
            os._exit(0)
        LIBC.prctl(1, 9)
        if self.as_pid > 1:
            child = fork_as(self.as_pid)
            if child:
                os.wait()
                os._exit(0)


def fork_as(pid):
    """fork() of a child with that pid in this pid namespace."""
    wanted = ctypes.c_int(pid)
    # flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size
    arguments = ctypes.create_string_buffer(struct.pack("<10Q", 0, 0, 0, 0, 17, 0, 0, 0, ctypes.addressof(wanted), 1), 80)
    result = LIBC.syscall(SYS_CLONE3, arguments, ctypes.c_size_t(80))
    if result < 0:
        raise OSError(ctypes.get_errno(), "clone3")
    return result


class Brokers:
    """Brokers and peers on a machine."""

    start_broker = None

    def broker(self, mode="auto", environment=None, more="", kind=None, **keys):
        how = {"kind": kind} if kind else {}
        return self.start_broker(config=section(**{"mode": mode, "library": self.library, **keys}) + more,
                                 environment=self.environment(**(environment or {})), **how)

    def peer(self, broker, uid, **how):
        return GpuPeer(broker, uid, self, **how)

    @staticmethod
    def reload(broker, **keys):
        """Changes keys of [cuda], and returns when they are in force."""
        path = broker.socket.parent / "conf"
        text = path.read_text()
        for key, value in keys.items():
            text, count = re.subn(f"(?m)^{key} = .*$", f"{key} = {value}", text)
            assert count == 1, key
        path.write_text(text)
        times = broker.log().count(RELOADED)
        os.kill(broker.pid, signal.SIGHUP)
        until(lambda: broker.log().count(RELOADED) > times, broker.log)


class Machine(Brokers, Fake):
    """A machine with fake GPUs."""

    def needs_fake(self):
        """Said by tests of what a real driver cannot be made to do."""


class Anything:
    """What a real driver does not tell: equal to whatever is expected."""

    def __eq__(self, other):
        return True

    def get(self, _):
        return self


class RealMachine(Brokers):
    """This machine with its real GPUs; tests that need a fake one are skipped."""

    library = REAL

    def __init__(self, answers=None, **settings):
        """A real driver has its own @answers to what is not known."""
        if settings:
            self.needs_fake()

    def needs_fake(self):
        pytest.skip("needs the fake driver")

    def environment(self, **more):
        return more

    def balance(self, **_):
        return Anything()

    def set(self, **_):
        self.needs_fake()

    def inject(self, *_):
        self.needs_fake()

    def log(self, *_, **__):
        self.needs_fake()

    def used(self):
        self.needs_fake()

    def close(self):
        pass


def make_machine(start, **settings):
    """A machine with fake GPUs, or this one where tests/gpu/check runs."""
    machine = RealMachine(**settings) if REAL else Machine(**settings)
    machine.start_broker = start
    return machine


REQUEST = struct.Struct("<IIQ64sQQQIIII")
REPLY = struct.Struct("<IIQIIQIIII512s400s")
MAGIC, CHECK_IPC, CHECK_VMM, DROP = 0x31435348, 1, 2, 3


class Helper:
    """shmbroker-cuda-helper with a test in the broker's place."""

    def __init__(self, fake=None, uuid=None, environment=None, arguments=(), library=None, denied=()):
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(60)
        self.errors = tempfile.TemporaryFile()
        environment = {**os.environ, **(fake.environment() if fake else {}), **(environment or {})}
        library = library or (fake.library if fake else "libcuda.so.1")
        number = theirs.fileno()

        def prepare():
            os.dup2(number, 3)
            if ROOT:
                become(BROKER)
            if denied:
                deny(*denied)

        self.process = subprocess.Popen([HELPER, f"--device={text_uuid(uuid)}", f"--library={library}", *arguments],
                                        stdin=subprocess.DEVNULL, stdout=self.errors, stderr=self.errors, env=environment,
                                        preexec_fn=prepare, pass_fds=(3,), cwd="/")
        theirs.close()
        self.serial = 0

    def reply(self):
        """The next reply as a dict; None at the end."""
        data = self.channel.recv(4096)
        if not data:
            return None
        names = "magic kind serial cause is_last object_size is_held driver_version n_devices padding devices text".split()
        reply = dict(zip(names, REPLY.unpack(data)))
        reply["text"] = reply["text"].split(b"\0")[0].decode()
        return reply

    def ask(self, operation, handle=b"", object_size=0, offset=0, size=1, owner_pid=0, owner_uid=None, keep=0, fd=None):
        """A request, and its reply."""
        self.serial += 1
        owner_uid = (BROKER if ROOT else os.geteuid()) if owner_uid is None else owner_uid
        data = REQUEST.pack(MAGIC, operation, self.serial, handle, object_size, offset, size, owner_pid, owner_uid, keep, 0)
        socket.send_fds(self.channel, [data], [] if fd is None else [fd])
        return None if operation == DROP else self.reply()

    def drop(self, serial):
        self.channel.sendall(REQUEST.pack(MAGIC, DROP, serial, b"", 0, 0, 0, 0, 0, 0, 0))

    def end(self):
        """Hangs up. Returns the exit status, and checks what the sanitizers say."""
        self.channel.close()
        try:
            status = self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
        self.errors.seek(0)
        errors = self.errors.read().decode(errors="replace")
        self.errors.close()
        check_sanitizers(errors)
        return status


def parent_of(pid):
    """The parent of a process that runs, or None; one that nobody has waited for does not run any more."""
    try:
        # names of programs are any bytes
        state, parent = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(parent)


def helpers_of(broker):
    """The pids of the helpers that a broker has."""
    pids = [int(entry.name) for entry in pathlib.Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if parent_of(pid) == broker.pid]


def the_helper(broker):
    """The pid of the one helper that a broker has, when those that were replaced have gone."""
    def the_one():
        found = helpers_of(broker)
        return found if len(found) == 1 else None

    (pid,) = until(the_one, "one helper")
    return pid


def end_helpers(broker):
    """Kills what helpers a broker has, and waits until it has noticed."""
    for pid in helpers_of(broker):
        os.kill(pid, signal.SIGTERM)
    until(lambda: not helpers_of(broker), "no helper")


def because(name, text=""):
    """Expects a refusal for that cause, with all that the list has for it, and @text in what is filled in."""
    code, cause, remedy = causes()[name]
    cause = re.sub(r"%s", ".*", re.sub(r"%(ll)?u", "[0-9]+", re.escape(cause).replace("\\%", "%")))
    return pytest.raises(Refused, match=f"(?s)^{code}: (?=.*{text}){cause}( \\(.*\\))?: {re.escape(remedy)}$")


@functools.cache
def causes():
    """What the helper's list says: {name: (code, cause, remedy)}."""
    lines = subprocess.run([HELPER, "--causes"], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: tuple(rest) for name, *rest in (line.split("\t") for line in lines)}
