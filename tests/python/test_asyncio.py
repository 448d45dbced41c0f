# SPDX-License-Identifier: Apache-2.0
"""Events that the loop reads from the connection, and calls that wait as coroutines."""

import asyncio
import signal
import subprocess
import sys

import pytest

import shmbroker
from shmbroker import EventType


def go(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def take(events, count):
    return [await anext(events) for _ in range(count)]


def test_events_of_others(broker, daemon):
    async def main():
        with shmbroker.connect(daemon.socket) as other:
            async with broker.events(EventType.REGISTERED, EventType.GONE) as events:
                with other.create("r", nbytes=5):
                    pass
                first, last = await take(events, 2)
                assert (first.type, first.name, first.nbytes) == (EventType.REGISTERED, "r", 5)
                assert (last.type, last.name, last.generation) == (EventType.GONE, "r", first.generation)

    go(main())


def test_events_of_ones_own(broker):
    """What this connection's own calls, on threads, have read from it is not lost either."""

    async def main():
        async with broker.events(EventType.REGISTERED) as events:
            for i in range(100):
                region = await broker.aio.create(f"r{i}", nbytes=1)
                assert (await anext(events)).name == f"r{i}"
                await broker.aio.retire(region)

    go(main())


def test_several_loops_over_events(broker):
    async def main():
        async def names(*types):
            found = []
            async with broker.events(*types) as events:
                ready.release()
                async for event in events:
                    if event.name == "end":
                        return found
                    found.append(event.type)

        ready = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(names(EventType.REGISTERED)),
                 asyncio.create_task(names(EventType.GONE, EventType.REGISTERED))]
        for _ in tasks:
            await ready.acquire()
        broker.create("r", nbytes=1).close()
        broker.create("end", nbytes=1).close()
        assert await asyncio.gather(*tasks) == [[EventType.REGISTERED], [EventType.REGISTERED, EventType.GONE]]

    go(main())
    # nobody reads any more
    assert broker._hub.readers == []  # pylint: disable=protected-access


def test_an_owner_dies(broker):
    async def main():
        async with broker.events(EventType.OWNER_DIED) as events:
            owner = subprocess.Popen([sys.executable, "-c", "import shmbroker\nb = shmbroker.connect()\n"
                                      "r = b.create('r', nbytes=1)\nprint(flush=True)\ninput()"],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            await asyncio.to_thread(owner.stdout.readline)
            owner.send_signal(signal.SIGKILL)
            event = await anext(events)
            assert event.type is EventType.OWNER_DIED and event.pid == owner.pid
            owner.communicate()

    go(main())


def test_the_broker_ends_for_good(broker, daemon):
    async def main():
        async with broker.events() as events:
            daemon.process.kill()
            daemon.process.wait()
            with pytest.raises(ConnectionResetError):
                while True:
                    await anext(events)

    go(main())


def test_calls_as_coroutines(broker, file):
    async def main():
        aio = broker.aio
        region = await aio.create("r", 4, "int32")
        lease = await aio.get_memory_info("r", write=True)
        assert (await aio.lookup("r")).nbytes == 16
        retired = asyncio.create_task(aio.retire(region, timeout=60))
        while not await aio.status(states=[shmbroker.RegionState.RETIRING]):
            assert not retired.done()
        lease.release()
        await retired
        assert await aio.ping() > 0 and len(await aio.clients()) == 1 and await aio.stats()
        adopted = await aio.adopt("a", file)
        await aio.unregister("a")
        with pytest.raises(shmbroker.NotFound):
            await aio.unregister("a")
        assert await aio.unregister_all() == (0, 0, 0)
        adopted.close()

    go(main())


def test_events_without_asyncio(broker):
    broker.subscribe(EventType.REGISTERED)
    assert broker.next_event(0) is None
    with broker.create("r", nbytes=1):
        event = broker.next_event(30)
        assert event.type is EventType.REGISTERED and event.name == "r"
    broker.unsubscribe()
    assert broker.next_event(0) is None


def test_a_wait_hears_signals(run):
    assert run("""
import signal, shmbroker
broker = shmbroker.connect()
broker.subscribe()
signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    broker.next_event()
except ZeroDivisionError:
    print("heard")
""").strip() == "heard"
