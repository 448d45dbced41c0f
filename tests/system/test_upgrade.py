# SPDX-License-Identifier: Apache-2.0
"""New versions, orderly ends and crash loops of a broker under its supervisor."""

import os
import resource
import shutil
import signal

import pytest
from broker import ADMIN, CONSUMER, OWNER, until
from holder import HeldBroker
from protocol_client import DEADLINE, Refused
from restart import is_as_before, settled, starting_empty

RECOVER_TRIES = 5


class Scene:
    """An owner and a consumer that holds its region."""

    def __init__(self, lasting):
        self.lasting = lasting
        self.owner, self.consumer, self.admin = (lasting.peer(uid) for uid in (OWNER, CONSUMER, ADMIN))
        self.given = self.owner.give("r", fill=b"content")
        self.consumer.page_attach()
        self.consumer.page_map(self.given["slot"], self.given["generation"])
        assert self.acquires()
        self.state = settled(self.admin)

    def acquires(self):
        return self.consumer.page_do("acquire", self.given["slot"], self.given["generation"])

    def resume(self):
        for peer in (self.owner, self.consumer, self.admin):
            peer.resume()

    def is_as_it_was(self):
        self.resume()
        is_as_before(self.admin, self.state)
        assert self.consumer.read_lookup("r", no_lease=True)["bytes"][:7] == b"content"

    def is_over(self):
        """Every session is told so, and the old registry grants nothing."""
        assert not self.consumer.page_do("is_open") and not self.acquires()
        for peer in (self.owner, self.consumer, self.admin):
            with pytest.raises(Refused) as error:
                peer.resume()
            assert error.value.name == "STALE"


@pytest.fixture
def scene(lasting):
    return Scene(lasting)


def test_a_new_version(scene):
    """SIGUSR2 to the supervisor with another file in place of its program, twice; then the new broker dies."""
    lasting = scene.lasting
    for _ in range(2):
        new, ready = lasting.program.with_suffix(".new"), lasting.log().count(": ready")
        shutil.copy(lasting.program, new)
        os.rename(new, lasting.program)
        os.kill(lasting.process.pid, signal.SIGUSR2)
        lasting.said(": ready", ready + 1)
        scene.is_as_it_was()
    lasting.kill()
    scene.is_as_it_was()


def test_orderly_ends_of_the_broker(scene):
    """SIGTERM leaves all as it is, SIGHUP changes nothing, an abort is like a kill."""
    for number in (signal.SIGTERM, signal.SIGABRT, signal.SIGKILL):
        scene.lasting.kill(number)
        scene.is_as_it_was()
    os.kill(scene.lasting.process.pid, signal.SIGHUP)
    scene.lasting.said("the configuration was read again")
    is_as_before(scene.admin, scene.state)


def test_the_end_of_the_supervisor(scene):
    """SIGTERM to it ends all: consumers of the old registry acquire no more, and the next broker knows none of them."""
    lasting = scene.lasting
    lasting.process.send_signal(signal.SIGTERM)
    assert lasting.process.wait(DEADLINE) == 0 and not lasting.socket.exists()
    assert not scene.consumer.page_do("is_open") and not scene.acquires()
    lasting.launch(lasting.prepare)
    until(lambda: ": ready" in lasting.log(), lasting.log)
    scene.is_over()


def test_a_supervisor_that_is_killed(scene):
    """Nothing holds the memory any more. The broker goes with it, and the next one knows nobody."""
    lasting = scene.lasting
    lasting.process.kill()
    lasting.process.wait()
    lasting.launch(lasting.prepare)
    until(lambda: ": ready" in lasting.log(), lasting.log)
    with pytest.raises(Refused) as error:
        scene.owner.resume()
    assert error.value.name == "STALE"


def limited(prepare, soft, hard):
    """Another limit of fds, before what @prepare does."""
    def prepare_both():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        prepare()
    return prepare_both


def test_a_crash_loop(start):
    """Brokers that cannot take the state over end in an empty one, which says so, and the old state is kept aside."""
    broker = start(kind=HeldBroker)
    scene, prepare = Scene(broker), broker.prepare
    scene.owner.give_singly("more", 60)
    broker.end()
    # enough for what is handed over, not for what is parked in it
    broker.prepare = limited(prepare, 40, 40)
    for _ in range(RECOVER_TRIES):
        with pytest.raises(AssertionError):
            broker.start_again()
    assert broker.log().count("cannot start: Too many open files") == RECOVER_TRIES
    broker.prepare = prepare
    broker.start_again()
    starting_empty(broker, "did not last")
    scene.is_over()
    until(lambda: set(broker.store) >= {"shmb-aside-registry", "shmb-aside-ledger"}, lambda: f"{list(broker.store)}")
    admin, owner = broker.peer(ADMIN), broker.peer(OWNER)
    assert admin.status() == []
    given = owner.give("r")
    with broker.dead():
        pass
    owner.resume()
    admin.resume()
    assert [entry["generation"] for entry in admin.status()] == [given["generation"]]


def test_a_shortage_that_passes(start):
    """Fewer tries than that lose nothing; and a soft limit is none for what is recovered."""
    broker = start(kind=HeldBroker)
    scene, prepare = Scene(broker), broker.prepare
    assert scene.owner.give_singly("more", 60)[0] == 60
    state = settled(scene.admin)
    broker.end()
    broker.prepare = limited(prepare, 40, 40)
    for _ in range(RECOVER_TRIES - 1):
        with pytest.raises(AssertionError):
            broker.start_again()
    broker.prepare = limited(prepare, 40, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    broker.start_again()
    scene.resume()
    is_as_before(scene.admin, state)
