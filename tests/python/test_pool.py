# SPDX-License-Identifier: Apache-2.0
"""Pools and their blocks."""

import asyncio
import gc
import threading

import numpy
import pytest
from conftest import until
from members import Member

import shmbroker
from shmbroker import RegionState

BLOCK = 1000


@pytest.fixture
def pool(broker):
    """A pool of four blocks."""
    with broker.create_pool("p", 4, BLOCK) as one:
        yield one


@pytest.fixture
def member(pool):  # pylint: disable=unused-argument,redefined-outer-name
    """Another process that has it open."""
    one = Member()
    yield one
    one.kill()


# pylint: disable=redefined-outer-name


def test_what_a_pool_is(broker, pool):
    assert (pool.name, pool.n_blocks, pool.block_size, pool.free_count) == ("p", 4, BLOCK, 4)
    assert pool.generation > 0 and not pool.closed
    (entry,) = broker.status()
    assert entry.name == "p" and entry.generation == pool.generation and entry.nbytes >= 4 * BLOCK
    with broker.open_pool("p") as other:
        assert (other.n_blocks, other.generation) == (4, pool.generation)
    assert not pool.closed and pool.free_count == 4


def test_what_a_block_is(pool):
    blocks = [pool.acquire() for _ in range(4)]
    assert sorted(block.index for block in blocks) == [0, 1, 2, 3] and pool.free_count == 0
    for block in blocks:
        assert block.pool is pool and block.nbytes == BLOCK and block.address % 64 == 0 and block.held
        assert (block.shape, block.dtype, block.readonly) == ((BLOCK,), "uint8", False)
        assert block.offset - blocks[0].offset == block.address - blocks[0].address
        assert bytes(block) == bytes(BLOCK)
    for block in blocks:
        assert block.release() and not block.held and block.address is None


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_alignment(broker, alignment):
    with broker.create_pool("q", 3, 100, alignment, populate=True) as pool:
        blocks = [pool.acquire(0) for _ in range(3)]
        assert all(block.address % alignment == 0 for block in blocks)
        del blocks


def test_no_bytes_are_copied(pool):
    with pool.acquire() as block:
        for array in (block.numpy(), numpy.asarray(block), numpy.from_dlpack(block), block.view(offset=0).numpy(),
                      numpy.asarray(type("Only", (), {"__array_interface__": block.__array_interface__})())):
            assert array.ctypes.data == block.address and array.nbytes == BLOCK
        block.numpy((5, 10), "float32")[...] = 2.5
        assert bytes(block)[:200] == numpy.full(50, 2.5, "float32").tobytes()


def test_numbers_that_cannot_be(broker):
    for numbers in ((0, 1), (1 << 20 | 1, 1), (1, 1, 3), (1, 1, 8192)):
        with pytest.raises(shmbroker.Invalid):
            broker.create_pool("q", *numbers)
    for numbers in ((1, 0), (2, 1 << 63)):
        with pytest.raises(shmbroker.OutOfBounds):
            broker.create_pool("q", *numbers)
    for numbers in ((-1, 1), (1, -1), (1 << 32, 1)):
        with pytest.raises(ValueError):
            broker.create_pool("q", *numbers)
    with pytest.raises(TypeError):
        broker.create_pool("q", 1)
    with pytest.raises(shmbroker.NotFound):
        broker.open_pool("q")
    with broker.create("q", nbytes=4096), pytest.raises(shmbroker.Invalid):
        broker.open_pool("q")
    with broker.create_pool("q", 1, 1), pytest.raises(shmbroker.AlreadyExists):
        broker.create_pool("q", 1, 1)
    with shmbroker.connect(roles="owner") as owner, pytest.raises(shmbroker.NotAttached):
        owner.create_pool("q", 1, 1)


def test_a_second_release_is_refused(pool):
    block = pool.acquire()
    assert block.release()
    for refused in (block.release, block.give):
        with pytest.raises(shmbroker.Stale):
            refused()
    with pytest.raises(ValueError, match="given back"):
        memoryview(block)
    assert pool.free_count == 4


def test_who_looks_at_a_block_keeps_it(pool):
    block = pool.acquire()
    array, view = block.numpy(), memoryview(block)
    assert not block.release() and block.held
    with pytest.raises(shmbroker.Stale):
        block.release()
    with pytest.raises(ValueError, match="given back"):
        block.numpy()
    assert pool.free_count == 3
    del array
    assert pool.free_count == 3
    view.release()
    assert pool.free_count == 4 and not block.held


def test_the_last_reference_releases(pool):
    block = pool.acquire()
    array = block.numpy()
    del block
    assert pool.free_count == 3
    del array
    assert pool.free_count == 4


def test_with_releases_when_its_body_raises(pool):
    with pytest.raises(KeyError):
        with pool.acquire():
            raise KeyError
    assert pool.free_count == 4
    with pool.acquire() as block:
        block.release()
    with pool.acquire() as block:
        offset, generation = block.give()
    assert pool.free_count == 3
    with pool.take(offset, generation), pytest.raises(shmbroker.Stale):
        block.release()
    assert pool.free_count == 4


def test_foreign_releases_are_refused(pool, member):
    index, offset, generation = member.do("acquire", 0, 7)
    found = pool.find(offset + 10, 20)
    assert (found.offset, found.generation, found.held) == (offset, generation, False)
    assert found.numpy()[0] == 7
    for refused in (found.release, found.give):
        with pytest.raises(shmbroker.PermissionDenied):
            refused()
    with pytest.raises(shmbroker.PermissionDenied):
        pool.take(offset, generation)
    assert pool.free_count == 3
    # to let it go changes nothing
    with pool.find(offset, 1):
        pass
    del found
    assert member.do("release", index) == (True, 4)
    with pytest.raises(shmbroker.Stale):
        pool.find(offset, 1)


def test_find_is_within_one_block(pool):
    block = pool.acquire()
    assert pool.find(block.offset, BLOCK).index == block.index
    for offset, size in ((block.offset, BLOCK + 1), (0, 1), (1 << 40, 1), (block.offset + BLOCK, 1)):
        with pytest.raises(shmbroker.OutOfBounds):
            pool.find(offset, size)
    with pytest.raises(shmbroker.PermissionDenied):
        pool.find(block.offset, 1).release()
    assert block.held and block.release()


def test_a_reader_needs_no_pool(broker, daemon):
    """A request names a block by region, offset and size: whoever only reads has a lease on that."""
    with broker.create_pool("p", 4, BLOCK) as pool, shmbroker.connect(daemon.socket, roles="consumer") as reader:
        block = pool.acquire()
        block.numpy()[:] = 6
        with reader.get_memory_info(pool.name, block.offset, block.nbytes) as lease:
            assert lease.generation == pool.generation and lease.readonly and bytes(lease) == b"\6" * BLOCK
        block.release()


def test_a_block_is_handed_over(pool, member):
    block = pool.acquire()
    block.numpy()[:] = 5
    offset, generation = block.give()
    assert (offset, generation) == (block.offset, block.generation)
    assert not block.held and block.address is None
    with pytest.raises(ValueError, match="given back"):
        block.numpy()
    assert member.do("take", offset, generation) == (block.index, generation + 1, 5)
    assert member.do("take", offset, generation) == "STALE"
    with pytest.raises(shmbroker.Stale):
        block.release()
    with pytest.raises(shmbroker.Stale):
        block.release()
    assert member.do("release", block.index) == (True, 4)


def test_what_was_given_can_be_taken_back(pool, member):
    block = pool.acquire()
    message = block.give()
    assert block.give() == message
    assert block.release()
    assert member.do("take", *message) == "STALE" and pool.free_count == 4


def test_what_somebody_looks_at_is_not_given(pool):
    block = pool.acquire()
    array = block.numpy()
    with pytest.raises(BufferError):
        block.give()
    assert block.held
    del array
    block.give()
    block.release()


def test_a_block_of_a_killed_process_comes_back(pool, member):
    for i in range(4):
        member.do("acquire", 0, i)
    with pytest.raises(shmbroker.TimedOut):
        pool.acquire(0)
    # one waits, and is not told
    got = []
    waiter = threading.Thread(target=lambda: got.append(pool.acquire(60)))
    waiter.start()
    member.kill()
    waiter.join()
    assert got.pop().nbytes == BLOCK
    until(lambda: pool.free_count == 4, "the blocks of the dead process")


def test_timeouts(pool):
    blocks = [pool.acquire(0) for _ in range(4)]
    for timeout in (0, 0.01, 0.25):
        with pytest.raises(shmbroker.TimedOut):
            pool.acquire(timeout)
        with pytest.raises(TimeoutError):
            pool.acquire(timeout=timeout)
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError):
            pool.acquire(timeout)
    del blocks


def test_others_run_while_one_waits(pool):
    blocks = [pool.acquire(0) for _ in range(4)]
    got = []
    waiter = threading.Thread(target=lambda: got.append(pool.acquire()))
    waiter.start()
    blocks.pop().release()
    waiter.join()
    del blocks, got
    assert pool.free_count == 4


def test_a_wait_hears_signals(run):
    assert run("""
import signal, shmbroker
broker = shmbroker.connect()
pool = broker.create_pool("p", 1, 1)
block = pool.acquire()
signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    pool.acquire()
except KeyboardInterrupt:
    print("heard")
""").strip() == "heard"


def test_blocks_outlive_the_pool(broker):
    pool = broker.create_pool("p", 2, BLOCK)
    block, array = pool.acquire(), pool.acquire().numpy()
    pool.close()
    pool.close()
    assert pool.closed and pool.name == "p" and pool.n_blocks == 2
    assert not list(broker.status(states=[RegionState.ACTIVE]))
    for refused in (pool.acquire, lambda: pool.free_count, lambda: pool.find(0, 1), lambda: pool.take(0, 1)):
        with pytest.raises(ValueError, match="closed"):
            refused()
    array[:] = 4
    block.numpy()[:] = 5
    assert block.release()
    assert array.tolist() == [4] * BLOCK
    del array, block


def test_blocks_outlive_the_broker(daemon):
    broker = shmbroker.connect(daemon.socket)
    array = broker.create_pool("p", 2, BLOCK).acquire().numpy()
    broker.close()
    array[:] = 4
    del broker
    gc.collect()
    assert array.tolist() == [4] * BLOCK


def test_the_creator_ends(broker, daemon):
    creator = shmbroker.connect(daemon.socket)
    pool = creator.create_pool("p", 2, BLOCK)
    with broker.open_pool("p") as opened:
        block = opened.acquire()
        creator.close()
        assert pool.closed
        with pytest.raises(shmbroker.Retiring):
            opened.acquire(0)
        block.numpy()[:] = 3
        message = block.give()
        with opened.take(*message) as taken:
            assert bytes(taken) == b"\3" * BLOCK


def test_a_waiter_hears_of_the_end(broker, daemon):
    """Who waits for a block without end is told when the pool is retired, and when it is closed."""
    with shmbroker.connect(daemon.socket) as other:
        pool = broker.create_pool("p", 1, 1)
        opened = other.open_pool("p")
        block = pool.acquire()
        failures = []

        def wait(one):
            try:
                one.acquire()
            except (shmbroker.Retiring, ValueError) as error:
                failures.append(type(error))

        waiters = [threading.Thread(target=wait, args=(one,)) for one in (pool, opened)]
        for waiter in waiters:
            waiter.start()
        pool.close()
        for waiter in waiters:
            waiter.join()
        assert set(failures) <= {shmbroker.Retiring, ValueError} and len(failures) == 2
        opened.close()
        block.release()


def test_a_kept_pool_stays(daemon, broker):
    with shmbroker.connect(daemon.socket) as other:
        other.create_pool("p", 2, BLOCK, keep=True).close()
    with broker.open_pool("p") as pool:
        pool.acquire().release()
    broker.unregister("p")


def go(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_coroutines(broker):
    async def main():
        aio, rounds, served = broker.aio, 30, []
        pool = await aio.create_pool("p", 2, BLOCK)

        async def work(number):
            for _ in range(rounds):
                with await aio.acquire(pool) as block:
                    block.numpy()[:] = number
                    await asyncio.sleep(0)
                    assert bytes(block) == bytes([number]) * BLOCK
            served.append(number)

        await asyncio.gather(*(work(number) for number in range(20)))
        assert sorted(served) == list(range(20)) and pool.free_count == 2
        with await aio.open_pool("p") as other:
            assert other.n_blocks == 2
        pool.close()

    go(main())
    assert not broker._waiting  # pylint: disable=protected-access


def test_coroutines_that_are_cancelled(broker):
    async def main():
        aio = broker.aio
        pool = broker.create_pool("p", 1, BLOCK)
        block = pool.acquire()
        with pytest.raises(shmbroker.TimedOut):
            await aio.acquire(pool, 0)
        with pytest.raises(shmbroker.TimedOut):
            await aio.acquire(pool, 0.05)
        tasks = [asyncio.create_task(aio.acquire(pool)) for _ in range(5)]
        await asyncio.sleep(0)
        for task in tasks[:4]:
            task.cancel()
        # the loop goes on meanwhile, and the one that is left gets it
        await asyncio.gather(*tasks[:4], return_exceptions=True)
        assert not tasks[4].done()
        block.release()
        del block
        with await tasks[4]:
            waiting = asyncio.create_task(aio.acquire(pool))
            await asyncio.sleep(0)
            pool.close()
        with pytest.raises((ValueError, shmbroker.Retiring)):
            await waiting

    go(main())
    assert not broker._waiting  # pylint: disable=protected-access


def test_fork(run):
    assert run("""
import os, shmbroker
broker = shmbroker.connect()
pool = broker.create_pool("p", 4, 1000)
again = broker.open_pool("p")
block, looked_at = pool.acquire(), pool.acquire()
view = memoryview(looked_at)
view[:3] = b"abc"
pid = os.fork()
if not pid:
    failed = 0
    for call in (lambda: pool.acquire(0), pool.acquire, lambda: pool.find(block.offset, 1), lambda: pool.free_count,
                 lambda: pool.take(block.offset, 1), lambda: broker.create_pool("q", 1, 1),
                 lambda: broker.open_pool("p"), block.give, block.release):
        try:
            call()
        except shmbroker.ForkedError:
            failed += 1
    try:
        pool.close()
    except shmbroker.ForkedError:
        failed += 1
    del block, looked_at, pool, again
    assert bytes(view[:3]) == b"abc"
    view.release()
    with shmbroker.connect() as own, own.open_pool("p") as opened:
        assert opened.free_count == 2
        opened.acquire(0).release()
    os._exit(failed)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status), pool.free_count, bytes(view[:3]), block.release())
""").strip() == "10 2 b'abc' True"
