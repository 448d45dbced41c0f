# SPDX-License-Identifier: Apache-2.0
"""Pools among real processes: refusals, waiting, and a crowd whose members are killed at random."""

import os
import random
import select
import signal
import subprocess

import pytest
from broker import BUILD, CONSUMER, DEADLINE, OWNER, become, until
from programs import program
from protocol_client import E as CODE
from test_supervise import supervise  # noqa: F401  pylint: disable=unused-import

BLOCKS, BLOCK_SIZE, WORKERS, KILLS, BROKER_KILLS = 5, 1000, 4, 60, 3


class Member:
    """pool-stress under a uid of its own."""

    def __init__(self, place, uid, *arguments):
        self.process = subprocess.Popen([program("pool-stress"), place.socket, *arguments], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, preexec_fn=lambda: become(uid),
                                        env={**os.environ, "LD_LIBRARY_PATH": str(BUILD / ".libs")})

    def start(self, *words):
        self.process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self.process.stdin.flush()

    def has_answer(self):
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def finish(self):
        """The answer to the command that was started last."""
        until(self.has_answer, "an answer", 2 * DEADLINE)
        line = self.process.stdout.readline().decode()
        assert line and "failed" not in line, line
        return tuple(map(int, line.split()))

    def do(self, *words):
        self.start(*words)
        return self.finish()

    def get(self, timeout=0):
        """A block."""
        result, *block = self.do("acquire", timeout)
        assert result == 0
        return block

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def members():
    """Starts members, and ends what is left of them."""
    started = []

    def start(*arguments):
        started.append(Member(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def three(broker, members):
    """The owner of a pool and two that have opened it."""
    owner, *others = members(broker, OWNER), members(broker, CONSUMER), members(broker, CONSUMER)
    assert owner.do("create", BLOCKS, BLOCK_SIZE) == (0,)
    for other in others:
        assert other.do("open") == (0,)
    return owner, *others


def test_blocks_are_shared(three):
    owner, one, two = three
    held = [member.get() for member in (owner, one, two, one, two)]
    assert sorted(block[0] for block in held) == list(range(BLOCKS))
    for member in three:
        assert member.do("count") == (0, 0)
        assert member.do("acquire", 0) == (CODE["TIMED_OUT"],)
        assert member.do("acquire", 20) == (CODE["TIMED_OUT"],)
    assert one.do("release", *held[1]) == (0,)
    assert two.do("count") == (0, 1)
    assert owner.get()[0] == held[1][0]


def test_foreign_and_second_releases_are_refused(three):
    owner, one, two = three
    block = one.get()
    for member in (owner, two):
        assert member.do("release", *block) == (CODE["PERMISSION"],)
        assert member.do("give", *block) == (CODE["PERMISSION"],)
    assert one.do("release", *block) == (0,)
    assert one.do("release", *block) == (CODE["STALE"],)
    assert two.do("find", block[1], 1) == (CODE["STALE"],)


def test_a_block_is_handed_over(three):
    owner, one, two = three
    index, offset, generation, internal = owner.get()
    assert one.do("take", offset, generation) == (CODE["PERMISSION"],)
    assert owner.do("give", index, offset, generation, internal) == (0,)
    assert one.do("find", offset + 10, 20)[:4] == (0, index, offset, generation)
    result, *taken = one.do("take", offset, generation)
    assert result == 0 and taken[:2] == [index, offset]
    assert two.do("take", offset, generation) == (CODE["STALE"],)
    assert owner.do("release", index, offset, generation, internal) == (CODE["STALE"],)
    # it is the taker's, also when the giver has ended
    assert two.do("release", *taken) == (CODE["PERMISSION"],)
    assert one.do("release", *taken) == (0,)


def test_what_a_dead_process_held_or_gave_comes_back(three):
    owner, one, two = three
    for _ in range(BLOCKS - 1):
        one.get()
    assert one.do("give", *one.get()) == (0,)
    two.start("acquire", -1)
    assert owner.do("acquire", 20) == (CODE["TIMED_OUT"],)
    assert not two.has_answer()
    one.kill()
    assert two.finish()[0] == 0
    until(lambda: owner.do("count") == (0, BLOCKS - 1), "the others come back")


def test_a_member_that_closes_leaves_nothing(three):
    owner, one, two = three
    one.get()
    assert one.do("give", *one.get()) == (0,)
    held = two.get()
    assert one.do("close") == (0,)
    assert owner.do("count") == (0, BLOCKS - 1)
    assert two.do("release", *held) == (0,)
    assert one.do("open") == (0,)
    one.get()


def test_a_waiter_is_woken(three):
    owner, one, two = three
    held = [owner.get() for _ in range(BLOCKS)]
    for _ in range(20):
        one.start("acquire", -1)
        two.start("acquire", -1)
        assert not one.has_answer() and not two.has_answer()
        for block in held[:2]:
            assert owner.do("release", *block) == (0,)
        for member in (one, two):
            result, *block = member.finish()
            assert result == 0
            assert member.do("release", *block) == (0,)
        held = [owner.get(), owner.get(), *held[2:]]


def test_the_owner_ends(three):
    owner, one, two = three
    block = one.get()
    for _ in range(BLOCKS - 1):
        owner.get()
    two.start("acquire", -1)
    owner.kill()
    # either it gets one of the owner's, or it is told; from then on nothing is acquired
    assert two.finish()[0] in (0, CODE["RETIRING"])
    until(lambda: two.do("acquire", 0) == (CODE["RETIRING"],), "the region retires")
    index, offset, generation, internal = block
    assert one.do("give", *block) == (0,)
    assert two.do("take", offset, generation)[:3] == (0, index, offset)
    assert one.do("close") == (0,)


def drive(place, members, worker_kills, between=lambda i: None):
    """Workers that are killed at random, and others in their stead; then every block must be there."""
    random.seed(5)
    owner = members(place, OWNER)
    assert owner.do("create", BLOCKS, BLOCK_SIZE) == (0,)
    seeds = iter(range(1, 10000))

    def worker():
        return members(place, CONSUMER, "worker", str(next(seeds)))

    def read(some, lines):
        """Until as many lines have come from them; who killed itself is replaced."""
        while lines > 0:
            ready, _, _ = select.select([one.process.stdout for one in some], [], [], 2 * DEADLINE)
            assert ready, "nobody gets on"
            for index, one in enumerate(some):
                if one.process.stdout not in ready:
                    continue
                line = one.process.stdout.readline().decode()
                assert "failed" not in line, line
                lines -= 1
                if not line:
                    assert one.process.wait(DEADLINE) == -signal.SIGKILL
                    some[index] = worker()

    crowd = [worker() for _ in range(WORKERS)]
    for i in range(worker_kills):
        read(crowd, random.randrange(60))
        index = random.randrange(WORKERS)
        crowd[index].process.kill()
        rest = crowd[index].process.communicate()[0].decode()
        assert "failed" not in rest, rest
        crowd[index] = worker()
        between(i)
    read(crowd, 100)
    assert owner.do("stop") == (0,)
    for one in crowd:
        rest = one.process.communicate(timeout=2 * DEADLINE)[0].decode()
        assert "failed" not in rest and one.process.returncode in (0, -signal.SIGKILL), rest
    got = [owner.get(int(DEADLINE * 1000)) for _ in range(BLOCKS)]
    assert sorted(block[0] for block in got) == list(range(BLOCKS))
    assert owner.do("acquire", 0) == (CODE["TIMED_OUT"],)
    return got


def test_nothing_is_held_twice_or_lost(broker, members):
    got = drive(broker, members, KILLS)
    assert max(block[2] for block in got) > 100


def test_nothing_is_held_twice_or_lost_while_the_broker_dies_too(supervise, members):  # noqa: F811  pylint: disable=redefined-outer-name
    it = supervise()
    it.serves()

    def between(i):
        if i % (KILLS // BROKER_KILLS) == 1:
            os.kill(it.child(), signal.SIGKILL)

    drive(it, members, KILLS, between)
    assert it.log().count("signal 9") >= BROKER_KILLS
