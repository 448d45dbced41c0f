# SPDX-License-Identifier: Apache-2.0
"""The fd store of a real systemd holds what the broker has: restarts, reloads and re-executions lose nothing."""

import ctypes
import os
import pathlib
import socket

import pytest
from broker import DEADLINE, LIBC, Peer, receive_object, result_of
from protocol_client import Disconnected, Refused
from restart import is_as_before, quiet, settled
from test_parked import FEW, GIB, PER_SEGMENT, room_for, shmem
from test_systemd import machine, stopped, until  # noqa: F401  pylint: disable=unused-import

SOCKET = "/run/shmbroker/shmbroker.sock"
DROP_IN = "/etc/systemd/system/shmbroker.service.d/more.conf"


class GuestPeer(Peer):
    """A process of root in the guest's namespaces, where no file of the tests need be."""

    def __init__(self, place):  # pylint: disable=super-init-not-called
        self.uid = 0
        self.channel, other = socket.socketpair()
        self.channel.settimeout(4 * DEADLINE)
        self.pid = os.fork()
        if not self.pid:
            try:
                self._enter(pathlib.Path(place.directory, "pid1").read_text().strip())
                inside = os.fork()
                if inside:
                    # its other end alone tells when it is over
                    os.closerange(3, 4096)
                    os.waitpid(inside, 0)
                else:
                    self._serve(SOCKET, 0, other)
            finally:
                os._exit(0)
        other.close()
        result_of(receive_object(self.channel))
        self.session = self.hello()["session"]

    @staticmethod
    def _enter(pid):
        spaces = [os.open(f"/proc/{pid}/ns/{space}", os.O_RDONLY) for space in ("pid", "ipc", "net", "mnt")]
        for fd in spaces:
            if LIBC.setns(fd, 0):
                raise OSError(ctypes.get_errno(), "setns")

    def end(self):
        self.channel.close()
        os.waitpid(self.pid, 0)


class Scene:
    """An owner and a consumer that holds, in a guest whose broker is active."""

    def __init__(self, place):
        self.machine = place
        place.systemctl("start", "shmbroker.service")
        self.peers = self.owner, self.consumer, self.admin = [GuestPeer(place) for _ in range(3)]
        self.given = self.owner.give("r", fill=b"content")
        self.consumer.page_attach()
        self.consumer.page_map(self.given["slot"], self.given["generation"])
        assert self.acquires()
        self.consumer.lookup("r")
        self.state = settled(self.admin)

    def acquires(self):
        return self.consumer.page_do("acquire", self.given["slot"], self.given["generation"])

    def resume(self):
        for peer in self.peers:
            peer.resume()

    def is_as_it_was(self):
        self.resume()
        is_as_before(self.admin, self.state)
        assert self.consumer.read_lookup("r", no_lease=True)["bytes"][:7] == b"content"

    def stored(self):
        return int(self.machine.show("NFileDescriptorStore"))


@pytest.fixture
def scene(machine):  # noqa: F811  pylint: disable=redefined-outer-name
    scenes = [Scene(machine)]
    yield scenes[0]
    for peer in scenes[0].peers:
        peer.end()


def drop_in(place, text):
    place.run("bash", "-c", f"printf '[Service]\\n%s\\n' '{text}' >{DROP_IN}")
    place.systemctl("daemon-reload")


@pytest.fixture
def without_drop_in(machine):  # noqa: F811  pylint: disable=redefined-outer-name
    yield
    machine.run("rm", "-f", DROP_IN)
    machine.systemctl("daemon-reload")


def test_restarts_lose_nothing(scene):
    place = scene.machine
    for _ in range(2):
        place.systemctl("restart", "shmbroker.service")
        scene.is_as_it_was()
    pid = place.show("MainPID")
    place.systemctl("kill", "-s", "KILL", "shmbroker.service")
    until(lambda: place.show("MainPID") not in (pid, "0"), "it is started again")
    scene.is_as_it_was()
    # an upgrade of the package restarts both
    place.systemctl("restart", "shmbroker.socket", "shmbroker.service")
    scene.is_as_it_was()
    until(lambda: scene.stored() <= FEW, "few are stored")


def test_reloads_of_the_manager_lose_nothing(scene):
    place = scene.machine
    for verb in ("daemon-reload", "daemon-reexec"):
        # what was compacted or stored last may be on its way
        stored = quiet(scene.stored, 10)
        place.systemctl(verb)
        until(lambda: place.systemctl("is-system-running", check=False).stdout.strip() in ("running", "degraded"), verb)
        until(lambda: scene.stored() == stored, f"{stored} stored")  # pylint: disable=cell-var-from-loop
        is_as_before(scene.admin, scene.state)
        place.systemctl("restart", "shmbroker.service")
        scene.is_as_it_was()


def test_stop_is_the_end(scene):
    """The manager drops what it keeps: the next broker knows nobody."""
    place = scene.machine
    place.systemctl("stop", "shmbroker.service")
    place.systemctl("start", "shmbroker.service")
    for peer in scene.peers:
        with pytest.raises(Refused) as error:
            peer.resume()
        assert error.value.name == "STALE"
    late = GuestPeer(place)
    assert late.status() == []
    late.end()


def test_a_crash_loop_of_the_service(scene):
    """The watchdog, an abort, and kills in quick succession are restarts like any other."""
    place = scene.machine
    for _ in range(4):
        pid = place.show("MainPID")
        place.run("kill", "-KILL", pid)
        until(lambda: place.show("MainPID") not in (pid, "0"), "it is started again")  # pylint: disable=cell-var-from-loop
    scene.is_as_it_was()


def test_registrations_in_turn_do_not_fill_the_store(scene):
    for _ in range(2):
        assert scene.owner.give_singly("x", 2 * PER_SEGMENT)[0] == 2 * PER_SEGMENT
        scene.owner.unregister_singly("x", 2 * PER_SEGMENT)
        until(lambda: scene.stored() <= FEW, lambda: f"{scene.stored()} stored")
    is_as_before(scene.admin, scene.state)


def test_a_gib_comes_back(scene):
    size = GIB if room_for(GIB) else GIB // 8
    before = shmem()
    scene.owner.give_full("large", size)
    assert shmem() > before + size * 0.9
    scene.owner.unregister("large")
    until(lambda: shmem() < before + size * 0.1, lambda: f"{shmem()} bytes, {before} before")


def test_a_store_that_is_full(machine, without_drop_in):  # noqa: F811  pylint: disable=redefined-outer-name,unused-argument
    """Registry, ledger, two segments; what they do not hold is refused, and all that was accepted survives."""
    drop_in(machine, "FileDescriptorStoreMax=4")
    scene = Scene(machine)
    taken, code, text = scene.owner.give_singly("x", 3 * PER_SEGMENT)
    assert code == "NO_FDS" and "keeps no more fds" in text and taken >= PER_SEGMENT
    state = settled(scene.admin)
    for verb in ("restart", "restart"):
        machine.systemctl(verb, "shmbroker.service")
        scene.resume()
        is_as_before(scene.admin, state)
    for peer in scene.peers:
        peer.end()


def test_without_a_store(machine, without_drop_in):  # noqa: F811  pylint: disable=redefined-outer-name,unused-argument
    """FileDescriptorStoreMax=0 is found out at the start, and nobody is promised to be resumed."""
    drop_in(machine, "FileDescriptorStoreMax=0")
    scene = Scene(machine)
    assert "nothing will survive this process" in machine.journal_text()
    machine.systemctl("restart", "shmbroker.service")
    with pytest.raises((Refused, Disconnected)):
        scene.owner.resume()
    # consumers of the old registry are told
    assert not scene.acquires()
    for peer in scene.peers:
        peer.end()


