# SPDX-License-Identifier: Apache-2.0
"""Processes that acquire, hand over and release blocks and are killed, against a small model of them."""

import os
import tempfile

from conftest import Daemon, until
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from members import Member

import shmbroker

BLOCKS = 4
SIZE = 300
MEMBERS = st.integers(0, 2)
NOBODY = None


class Held:
    """A block that is not free: by whom, with which bytes. Of a killed one it is there until somebody acquires it."""

    def __init__(self, member, offset, generation, fill):
        self.member, self.offset, self.generation, self.fill = member, offset, generation, fill
        self.given = self.forgotten = False


class Model(RuleBasedStateMachine):
    """held: of each index; messages: (offset, generation) of what was ever given; over: what each member has released."""

    def __init__(self):
        super().__init__()
        self.held, self.messages, self.fill = {}, [], 0
        self.over = [set() for _ in range(3)]

    @initialize()
    def begin(self):
        self.place = tempfile.TemporaryDirectory(prefix="shmb")
        self.daemon = Daemon(self.place.name)
        self.broker = shmbroker.connect(self.daemon.socket)
        self.pool = self.broker.create_pool("p", BLOCKS, SIZE)
        os.environ["SHMBROKER_SOCKET"] = self.daemon.socket
        self.members = [Member() for _ in range(3)]

    def free(self):
        """How many could be acquired."""
        return BLOCKS - sum(held.member is not NOBODY for held in self.held.values())

    def of(self, member, given=None):
        """Indices of what a member holds."""
        return sorted(index for index, held in self.held.items()
                      if held.member == member and (given is None or held.given == given))

    def holders(self, given=None):
        """Those who hold something."""
        return sorted({held.member for held in self.held.values()
                       if held.member is not NOBODY and (given is None or held.given == given)})

    def draw(self, data, given=None):
        """A member that holds something, and what."""
        member = data.draw(st.sampled_from(self.holders(given)))
        return member, data.draw(st.sampled_from(self.of(member, given)))

    @rule(member=MEMBERS)
    def acquire(self, member):
        self.fill = self.fill % 255 + 1
        got = self.members[member].do("acquire", 0, self.fill)
        if not self.free():
            assert got == "TIMED_OUT"
            return
        index, offset, generation = got
        before = self.held.get(index)
        assert before is None or before.member is NOBODY
        # those of the dead are the last to be given out
        assert before is None or len(self.held) == BLOCKS
        assert before is None or generation == before.generation + 1
        self.held[index] = Held(member, offset, generation, self.fill)
        self.over[member].discard(index)

    @precondition(lambda self: self.holders(given=False))
    @rule(data=st.data(), behind_a_view=st.booleans())
    def release(self, data, behind_a_view):
        member, index = self.draw(data, given=False)
        free = self.free()
        del self.held[index]
        self.over[member].add(index)
        if behind_a_view:
            assert self.members[member].do("release_behind_a_view", index) == (False, free, free + 1)
        else:
            assert self.members[member].do("release", index) == (True, free + 1)

    @precondition(lambda self: self.holders(given=False))
    @rule(data=st.data(), forget=st.booleans())
    def give(self, data, forget):
        member, index = self.draw(data, given=False)
        held = self.held[index]
        verb = "give_and_forget" if forget else "give"
        assert self.members[member].do(verb, index) == (held.offset, held.generation)
        held.given, held.forgotten = True, forget
        self.messages.append((held.offset, held.generation))
        self.over[member].discard(index)

    @precondition(lambda self: self.holders(given=True))
    @rule(data=st.data())
    def take_back(self, data):
        member, index = self.draw(data, given=True)
        if self.held[index].forgotten:
            return
        del self.held[index]
        self.over[member].add(index)
        assert self.members[member].do("release_again", index) == (True,)

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), member=MEMBERS)
    def take(self, data, member):
        """What was given: once, also by its giver, and also of a killed one, as long as nobody else has acquired it."""
        message = data.draw(st.sampled_from(self.messages))
        got = self.members[member].do("take", *message)
        for index, held in self.held.items():
            if held.given and (held.offset, held.generation) == message:
                assert got == (index, held.generation + 1, held.fill)
                if held.member is not NOBODY and not held.forgotten:
                    self.over[held.member].add(index)
                self.over[member].discard(index)
                held.member, held.given, held.generation = member, False, held.generation + 1
                return
        assert got == "STALE"

    @precondition(lambda self: any(self.over))
    @rule(data=st.data())
    def release_again(self, data):
        member, index = data.draw(st.sampled_from([(member, index) for member, indices in enumerate(self.over)
                                                   for index in sorted(indices)]))
        assert self.members[member].do("release_again", index) == "STALE"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), member=MEMBERS)
    def find(self, data, member):
        """Whose it is does not matter: what was found is not the finder's to release."""
        index = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[index]
        assert self.members[member].do("find", held.offset) == (index, held.generation, held.fill)

    @rule(member=MEMBERS)
    def reopen(self, member):
        for index in self.of(member):
            del self.held[index]
        self.over[member].clear()
        assert self.members[member].do("reopen") == (self.free(),)

    @rule(member=MEMBERS)
    def crash(self, member):
        self.members[member].kill()
        for index in self.of(member):
            self.held[index].member = NOBODY
        self.over[member].clear()
        until(lambda: self.pool.free_count == self.free(), "the blocks of the dead process")
        self.members[member] = Member()

    @invariant()
    def the_pool_agrees(self):
        if not hasattr(self, "members"):
            return
        assert self.pool.free_count == self.free()
        for index, held in self.held.items():
            block = self.pool.find(held.offset, SIZE)
            assert (block.index, block.generation) == (index, held.generation)
            assert bytes(block) == bytes([held.fill]) * SIZE

    def teardown(self):
        if not hasattr(self, "members"):
            return
        try:
            for member in self.members:
                member.kill()
            until(lambda: self.pool.free_count == BLOCKS, "the blocks of all")
            self.broker.close()
            self.daemon.finish()
        finally:
            self.daemon.process.kill()
            self.daemon.process.wait()
            self.place.cleanup()


def test_pool_model(monkeypatch):
    monkeypatch.setenv("SHMBROKER_SOCKET", "")
    run_state_machine_as_test(Model, settings=settings(
        max_examples=15, stateful_step_count=30, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck)))
