# SPDX-License-Identifier: Apache-2.0
"""A broker of its own for a test, and peers under other uids.

With root every party has a uid of its own and no capabilities; without root all have the uid of the test, and the
broker is told that this is intended. Broker.finish() is the check that every test ends with: no leaked fd, no leaked
region, accounts at zero, an orderly exit and nothing from the sanitizers.
"""

import atexit
import ctypes
import fcntl
import gc
import mmap
import os
import pathlib
import pickle
import resource
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import traceback

from protocol_client import ANY_UID, DEADLINE, ERROR_NAMES, READ, Client, Refused, Unanswered, cuda_entry, memory, register_entry, reopen
from sandbox import deny

ROOT = os.geteuid() == 0
BROKER, OWNER, CONSUMER, OTHER, KEEPER, ADMIN = 20001, 20002, 20003, 20004, 20008, 20009
CONNECTION_FDS = 2
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def build_directory():
    """The build directory, or, where other uids cannot reach it, a copy of its programs that they can."""
    build = pathlib.Path(os.environ.get("SHMBROKER_BUILDDIR", ".")).resolve()
    if not ROOT or all(place.stat().st_mode & 0o001 for place in (build, *build.parents)):
        return build
    copy = pathlib.Path(tempfile.mkdtemp(prefix="shmb"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    copy.chmod(0o755)
    for name in (".libs", "shmbrokerd", "shmbrokerctl", "shmbroker-cuda-helper", "tests/fakecuda"):
        if (build / name).is_dir():
            shutil.copytree(build / name, copy / name, symlinks=True)
        elif (build / name).exists():
            shutil.copy(build / name, copy / name)
    for path in (build / "tests/system").glob("*"):
        if path.is_file() and os.access(path, os.X_OK):
            (copy / "tests/system").mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy / "tests/system")
    return copy


BUILD = build_directory()


def uid_of(uid):
    """The uid that a party has: its own with root, else that of the test."""
    return uid if ROOT else os.geteuid()


def become(uid):
    """Leaves root for good: uid and gid, no groups; capabilities go with it."""
    if ROOT:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # after the change of uid, which clears it
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def until(condition, what, deadline=DEADLINE):
    """Polls until @condition gives something true, and returns that."""
    end = time.monotonic() + deadline
    while True:
        got = condition()
        if got:
            return got
        assert time.monotonic() < end, f"not within {deadline} s: {what() if callable(what) else what}"
        time.sleep(0.01)


def check_sanitizers(output):
    """The sanitizers have found nothing in a program whose output that is."""
    for sign in ("AddressSanitizer", "LeakSanitizer", "runtime error:"):
        assert sign not in output, output[-8000:]


def send_object(channel, value):
    data = pickle.dumps(value)
    channel.sendall(struct.pack("<I", len(data)) + data)


def receive_exactly(channel, size):
    data = b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        if not more:
            raise EOFError("the peer has gone")
        data += more
    return data


def receive_object(channel):
    (size,) = struct.unpack("<I", receive_exactly(channel, 4))
    return pickle.loads(receive_exactly(channel, size))


def answer(channel, function):
    """Sends what @function returns, or raises."""
    try:
        result = True, function()
    except BaseException as error:  # pylint: disable=broad-except
        error.add_text = traceback.format_exc()
        result = False, error
    try:
        send_object(channel, result)
    except Exception:  # pylint: disable=broad-except
        send_object(channel, (False, RuntimeError(f"not to be sent: {result!r}\n{traceback.format_exc()}")))


def result_of(answered):
    good, value = answered
    if good:
        return value
    print(getattr(value, "add_text", ""))
    raise value


class PeerClient(Client):
    """What a peer process offers to the test: the client, its memory by name, and its lease page."""

    def __init__(self, path, deadline=DEADLINE):
        super().__init__(path, deadline)
        self.memories, self.page, self.kept = {}, None, []

    def give(self, name, size=8192, read_only=True, fill=b"", memory_args=None, **fields):
        """Makes memory and registers all of it (or what the fields say)."""
        fd = self.memories[name] if self.repeats else memory(size, fill=fill, **(memory_args or {}))
        self.memories[name] = fd
        read_only_fd = reopen(fd) if read_only else None
        try:
            return self.register(name, fd, read_only_fd=read_only_fd, **{"size": size, **fields})
        finally:
            if read_only_fd is not None:
                os.close(read_only_fd)

    def again(self, name, of, **fields):
        """Registers the memory that was given under another name."""
        return self.register(name, self.memories[of], **fields)

    def give_read_only(self, name, size=8192, same=False):
        """Registers memory by a read-only fd, and sends that, or another one, as its read-only fd too."""
        self.memories[name] = memory(size)
        fds = [reopen(self.memories[name]) for _ in range(1 if same else 2)]
        try:
            item = register_entry(name, size, access=READ, read_only_fd=len(fds) - 1)
            (result,) = self.register_many([item], fds)
            return result
        finally:
            for fd in fds:
                os.close(fd)

    def give_cuda(self, name, size=8192, handle=b"", file="/dev/null", seals=0, **fields):
        """Registers what is said to be GPU memory: a handle, or an fd of @file, "memfd" for memory."""
        fds = []
        if not handle:
            fds = [memory(1 << 21, seals=seals) if file == "memfd" else os.open(file, os.O_RDWR)]
            fields = {"object_size": 1 << 21, **fields}
            self.memories[name] = fds[0]
        (result,) = self.register_many([cuda_entry(name, size, handle, **fields)], fds)
        if result["code"]:
            raise Refused(result["code"], result["text"].decode())
        return result

    def peek(self, name, size=8, offset=0):
        """Bytes of memory of this peer's own."""
        return os.pread(self.memories[name], size, offset)

    def open(self, name, path, flags=os.O_RDWR):
        """Keeps a file under a name, as if it were memory."""
        self.memories[name] = os.open(path, flags | os.O_CLOEXEC)

    def keep_mapped(self, name):
        self.kept.append(mmap.mmap(self.memories[name], 0))

    def crowd(self, count):
        """Opens connections that say nothing, and keeps them."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.kept += [Client(self.path) for _ in range(count)]
        return len(self.kept)

    def fly(self, count):
        """Has so many fds in flight: sent, and received by nobody."""
        self.kept += socket.socketpair()
        for _ in range(count // 100):
            socket.send_fds(self.kept[-1], [b"x"], [0] * 100)

    def poke(self, name, data, offset=0):
        os.pwrite(self.memories[name], data, offset)

    def truncate(self, name, size):
        os.ftruncate(self.memories[name], size)

    def give_full(self, name, size):
        """Memory that has all its pages, of which this process keeps nothing."""
        self.give(name, size=size)
        os.posix_fallocate(self.memories[name], 0, size)
        os.close(self.memories.pop(name))

    def give_singly(self, prefix, count):
        """One message for each. Returns how many were taken, and why the next one was not."""
        for i in range(count):
            try:
                self.give(f"{prefix}{i}", size=4096)
            except Refused as refused:
                os.close(self.memories.pop(f"{prefix}{i}"))
                if refused.name != "AGAIN":
                    return i, refused.name, refused.text
        return count, None, None

    def unregister_singly(self, prefix, count):
        for i in range(count):
            self.unregister(f"{prefix}{i}")
            os.close(self.memories.pop(f"{prefix}{i}"))

    def events_seen(self):
        return self.events

    def read_lookup(self, name, size=8, **how):
        """A LookupResult with the bytes that were found through its fd."""
        result = self.lookup(name, want_fd=True, **how)
        result["bytes"] = os.pread(result["fd"], size, result["offset"])
        os.close(result.pop("fd"))
        return result

    def page_attach(self, **how):
        self.page = self.attach(**how)
        return self.page.reply

    def page_map(self, slot, generation, **how):
        """MAP without keeping the fd."""
        reply = self.map(slot, generation, **how)
        fd = reply.pop("fd")
        if fd is not None:
            os.close(fd)
        return reply

    def page_seal(self, seals):
        """Seals the lease page; F_SEAL_WRITE only goes where it is not mapped."""
        if seals & fcntl.F_SEAL_WRITE:
            self.page.page.close()
        fcntl.fcntl(self.page.page_fd, fcntl.F_ADD_SEALS, seals)

    def only_send(self, method, *args, **how):
        """Makes a request without waiting for the answer."""
        self.only_sends = True
        try:
            getattr(self, method)(*args, **how)
        except Unanswered:
            pass
        finally:
            self.only_sends = False
        return self.serial

    def repeat(self, serial, method, *args, **how):
        """Makes a request once more, under its old serial, on a later connection of the session."""
        self.repeats = serial
        return getattr(self, method)(*args, **how)

    def last_serial(self):
        return self.serial

    def resume_fields(self):
        """What HELLO says to resume this session."""
        return {field: self.session[field] for field in ("roles", "session", "token", "epoch")}

    def hello_beside(self, **fields):
        """Another connection of this process; it is kept."""
        beside = Client(self.path)
        self.kept.append(beside)
        return beside.hello(**fields)

    def hello_of_child(self, **fields):
        """The name of what a child of this process is refused with; None when it is not."""
        pid = os.fork()
        if not pid:
            code = 0
            try:
                Client(self.path).hello(**fields)
            except Refused as refused:
                code = refused.code
            finally:
                os._exit(code)
        return ERROR_NAMES.get(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def page_do(self, method, *args, **how):
        """Calls a method of the lease page."""
        return getattr(self.page, method)(*args, **how)


class Peer:
    """A process under a uid that serves calls of PeerClient's methods until it is closed or killed."""

    def __init__(self, broker, uid, hello=True, **how):
        self.uid = uid_of(uid)
        self.channel, other = socket.socketpair()
        self.channel.settimeout(4 * DEADLINE)
        self.pid = os.fork()
        if not self.pid:
            try:
                self._serve(broker.socket, uid, other)
            finally:
                os._exit(0)
        other.close()
        broker.peers.append(self)
        result_of(receive_object(self.channel))
        if hello:
            self.session = self.hello(**how)["session"]

    client = PeerClient

    def prepare(self, uid):
        """Makes the process what it is to be, before it has a client."""
        become(uid)

    def _serve(self, path, uid, channel):
        keep = channel.fileno()
        # garbage of the tests' process is never collected here: it would close these numbers once more, as ours
        gc.freeze()
        os.closerange(3, keep)
        os.closerange(keep + 1, 4096)
        self.prepare(uid)
        client = []
        answer(channel, lambda: client.append(self.client(path)))
        while True:
            try:
                method, args, how = receive_object(channel)
            except (EOFError, ConnectionError):
                return
            answer(channel, lambda: getattr(client[0], method)(*args, **how))

    def start(self, method, *args, **how):
        """Begins a call; finish() waits for it."""
        send_object(self.channel, (method, args, how))

    def finish(self):
        return result_of(receive_object(self.channel))

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args, **how):
            self.start(method, *args, **how)
            return self.finish()

        return call

    def kill(self, number=signal.SIGKILL):
        """Ends the process at whatever it does."""
        if self.pid:
            os.kill(self.pid, number)
            os.waitpid(self.pid, 0)
            self.pid = 0
            self.channel.close()


class Broker:
    """shmbrokerd under its own uid, with a socket that everybody reaches."""

    def __init__(self, directory, loop, config="", nofile=None, access=True, denied=(), environment=None):
        self.loop, self.peers, self.finished = loop, [], False
        self.environment = {**os.environ, **(environment or {})}
        directory.chmod(0o755)
        if ROOT:
            os.chown(directory, BROKER, BROKER)
        self.socket, self.log_path = directory / "s", directory / "log"
        text = "[broker]\nsocket_mode = 0666\n" + ("" if ROOT else "shared_uid = yes\n")
        text += config if config.lstrip().startswith("[") or not config else config + "\n"
        if access and ROOT:
            text += f"\n[access]\nadmin = {ADMIN}\nkeep = {KEEPER}\n"
        (directory / "conf").write_text(text)
        (directory / "conf").chmod(0o644)

        def prepare():
            if nofile:
                resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, nofile))
            become(BROKER)
            if denied:
                deny(*denied)

        self.arguments = [f"--loop={loop}", f"--socket={self.socket}", f"--config={directory / 'conf'}"]
        self.launch(prepare)
        until(lambda: self.process.poll() is not None or self.socket.exists(), "the socket")
        assert self.process.poll() is None, self.log()
        until(self._listens, self.log)
        # what is open while one client is served, less what that client costs
        first = self.peer(ADMIN)
        self.info = first.info()
        until(lambda: (lambda stats: stats["sessions"] == 1 and not stats["fds_closing"])(first.stats()), "only one session")
        self.fds_at_start = self.fds() - 1 - sum("pidfd" in name for name in self.fd_names()) if ROOT else 0
        first.kill()
        until(lambda: self.fds() == self.fds_at_start, lambda: f"{self.fds()} fds, {self.fds_at_start} at the start")

    def launch(self, prepare):
        """Starts the program; @prepare runs in its process before."""
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([BUILD / "shmbrokerd", *self.arguments], stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, preexec_fn=prepare, cwd="/", env=self.environment)

    @property
    def pid(self):
        """Of the broker itself."""
        return self.process.pid

    def _listens(self):
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.connect(str(self.socket))
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False

    def log(self):
        return self.log_path.read_text(errors="replace")

    def fd_names(self):
        names = []
        for entry in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                names.append(os.readlink(f"/proc/{self.pid}/fd/{entry}"))
            except FileNotFoundError:
                pass
        return names

    def fds(self):
        """How many fds the broker has. It is not dumpable: only root can see that, for others STATS has to do."""
        return len(os.listdir(f"/proc/{self.pid}/fd")) if ROOT else 0

    def peer(self, uid=CONSUMER, **how):
        return Peer(self, uid, **how)

    def run(self, uid, function, *args):
        """Runs @function in a forked process under @uid, and returns what it returns or raises what it raises."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            try:
                ours.close()
                become(uid)
                answer(theirs, lambda: function(*args))
            finally:
                os._exit(0)
        theirs.close()
        ours.settimeout(6 * DEADLINE)
        try:
            return result_of(receive_object(ours))
        finally:
            ours.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def region(self, admin, name):
        """The newest STATUS entry of a name, or None."""
        found = admin.status(name=name, match="EXACT")
        return max(found, key=lambda entry: entry["generation"]) if found else None

    def lives(self):
        """It still serves: a new peer gets an answer."""
        peer = self.peer(OTHER)
        peer.ping()
        peer.kill()

    def finish(self):
        """Ends all peers and checks that nothing of them is left."""
        for peer in self.peers:
            peer.kill()
        if self.finished:
            return
        self.finished = True
        try:
            assert self.process.poll() is None, "the broker has gone"
            self._check_empty()
        except BaseException:
            self.process.kill()
            self.process.wait()
            print(self.log()[-8000:])
            raise
        self.stop()

    def stop(self):
        """SIGTERM, whatever its peers hold: it ends in order."""
        self.finished = True
        try:
            self.process.terminate()
            assert self.process.wait(DEADLINE) == 0
            assert not self.socket.exists()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            log = self.log()
            print(log[-8000:])
        check_sanitizers(log)

    def _check_empty(self):
        admin = self.peer(ADMIN)

        def held():
            stats = admin.stats(accounts=True)
            wrong = {key: value for key, value in stats.items() if value and key[0].startswith("held_")}
            wrong.update({key: value for key, value in stats.items() if value and key[0] in ("regions", "objects", "fds_closing")})
            # what this very session costs
            for uid in (ANY_UID, admin.uid):
                for name, cost in (("held_sessions", 1), ("held_fds", CONNECTION_FDS)):
                    if wrong.get((name, uid)) == cost:
                        del wrong[name, uid]
            return wrong

        until(lambda: not held(), lambda: f"held at the end: {held()} {admin.status()}")
        assert admin.stats()["regions"] == 0 and admin.status() == []
        admin.kill()
        until(lambda: self.fds() == self.fds_at_start,
              lambda: f"{self.fds()} fds, {self.fds_at_start} at the start: {self.fd_names() if ROOT else '?'}")
