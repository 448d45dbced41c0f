# SPDX-License-Identifier: Apache-2.0
"""Blocks of a pool for coroutines: one thread for each pool waits, however many coroutines do."""

import asyncio
import collections
import contextlib
import threading
from typing import NamedTuple

from ._shmbroker import Block, Pool, TimedOut


class Waiter(NamedTuple):
    """Who wants a block."""

    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Block]"

    def answer(self, block: "Block | None", error: "Exception | None") -> None:
        """On the loop's thread; a block that nobody wants any more is released as it is dropped."""
        if self.future.done():
            return
        if error:
            self.future.set_exception(error)
        elif block:
            self.future.set_result(block)


class Acquirer:
    """Those who wait for a block of one pool, of any event loop, in the order in which they came."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.lock = threading.Lock()
        self.waiters: "collections.deque[Waiter]" = collections.deque()
        self.thread: "threading.Thread | None" = None

    def serves(self) -> bool:
        """Whether somebody waits and is to be served before others; nobody is in a child process."""
        with self.lock:
            return bool(self.waiters) and self.thread is not None and self.thread.is_alive()

    async def acquire(self) -> Block:
        """A block as soon as there is one."""
        loop = asyncio.get_running_loop()
        waiter = Waiter(loop, loop.create_future())
        with self.lock:
            self.waiters.append(waiter)
            if self.thread is None:
                # it ends when nobody waits, and does not keep an interpreter from ending
                self.thread = threading.Thread(target=self._serve, name="shmbroker-acquire", daemon=True)
                self.thread.start()
        try:
            return await waiter.future
        finally:
            with self.lock, contextlib.suppress(ValueError):
                self.waiters.remove(waiter)

    def _waits(self) -> bool:
        """Whether anybody is left; otherwise the thread ends, and the next one who waits starts another."""
        with self.lock:
            if not self.waiters:
                self.thread = None
            return bool(self.waiters)

    def _serve(self) -> None:
        while self._waits():
            block: "Block | None" = None
            failure: "Exception | None" = None
            try:
                block = self.pool.acquire(0.1)
            except TimedOut:
                continue
            except Exception as error:  # pylint: disable=broad-except
                failure = error
            with self.lock:
                first = self.waiters.popleft() if self.waiters else None
            # a loop that was closed meanwhile wants nothing
            if first:
                with contextlib.suppress(RuntimeError):
                    first.loop.call_soon_threadsafe(first.answer, block, failure)


async def acquire(pool: Pool, waiting: "dict[Pool, Acquirer]", timeout: "float | None") -> Block:
    """Pool.acquire(); waiting: who waits for which pool, where there is anybody."""
    acquirer = waiting.get(pool)
    if acquirer is None or not acquirer.serves():
        with contextlib.suppress(TimedOut):
            return pool.acquire(0)
        acquirer = waiting.setdefault(pool, Acquirer(pool))
    try:
        async with asyncio.timeout(timeout):
            return await acquirer.acquire()
    except TimeoutError as error:
        raise TimedOut("every block is held") from error
    finally:
        # what is left would keep the pool, and with it the broker, for ever
        if not acquirer.waiters and waiting.get(pool) is acquirer:
            del waiting[pool]
