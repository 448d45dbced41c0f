# SPDX-License-Identifier: Apache-2.0
"""asyncio: events that the loop reads from the connection's descriptor, and the calls that wait, on its executor."""

import asyncio
import collections
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ._acquire import acquire
from ._shmbroker import Block, Handle, Lease, Pool, Region
from ._types import ClientStatus, Event, EventType, Mode, RegionStatus, Stat

if TYPE_CHECKING:
    from . import Broker, Retired

P = ParamSpec("P")
T = TypeVar("T")


class Hub:
    """Reads the events of one broker in one event loop, as long as somebody iterates over them."""

    def __init__(self, broker: "Broker", loop: asyncio.AbstractEventLoop) -> None:
        self.broker, self.loop = broker, loop
        self.readers: list["Events"] = []
        self.mask = 0
        self.fd = broker.fileno()
        self.asking = asyncio.Lock()

    async def update(self) -> None:
        """Asks the broker for what the readers want together."""
        async with self.asking:
            mask = 0
            for reader in self.readers:
                mask |= reader.mask
            if mask != self.mask:
                await self.loop.run_in_executor(None, self.broker._subscribe, mask)
                self.mask = mask

    def start(self) -> None:
        self.loop.add_reader(self.fd, self.read)

    def stop(self) -> None:
        self.loop.remove_reader(self.fd)

    def read(self) -> None:
        try:
            self.broker.process()
            while self.readers:
                values = self.broker._next_event(0)
                if values is None:
                    return
                event = Event.of(values)
                for reader in self.readers:
                    if reader.mask >> event.type & 1 or event.type == EventType.OVERFLOW:
                        reader.put(event)
        except Exception as error:  # pylint: disable=broad-except
            self.stop()
            for reader in self.readers:
                reader.fail(error)


class Events:
    """Events of a broker, for `async for` and `async with`; Broker.events() makes it."""

    def __init__(self, broker: "Broker", types: Sequence[EventType]) -> None:
        self.broker = broker
        self.mask = sum(1 << kind for kind in set(types))
        self.queue: "collections.deque[Event]" = collections.deque()
        self.error: "Exception | None" = None
        self.changed = asyncio.Event()
        self.hub: "Hub | None" = None

    def put(self, event: Event) -> None:
        """An event of this reader's has come."""
        self.queue.append(event)
        self.changed.set()

    def fail(self, error: Exception) -> None:
        """There will be no more."""
        self.error = error
        self.changed.set()

    async def __aenter__(self) -> "Events":
        """Subscribes: what happens from here on is told."""
        if self.hub is None:
            loop = asyncio.get_running_loop()
            hub = self.broker._hub
            if hub is None or hub.loop is not loop:
                hub = self.broker._hub = Hub(self.broker, loop)
            self.hub = hub
            hub.readers.append(self)
            if len(hub.readers) == 1:
                hub.start()
            await hub.update()
        return self

    async def aclose(self) -> None:
        """Ends the subscription."""
        hub, self.hub = self.hub, None
        if hub is None:
            return
        hub.readers.remove(self)
        if not hub.readers:
            hub.stop()
        if not self.broker.closed and self.error is None:
            await hub.update()

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __aiter__(self) -> "Events":
        return self

    async def __anext__(self) -> Event:
        await self.__aenter__()
        while not self.queue:
            if self.error:
                raise self.error
            self.changed.clear()
            await self.changed.wait()
        return self.queue.popleft()


class Aio:
    """Broker's calls that may wait, as coroutines: they run on threads of the loop's executor."""

    def __init__(self, broker: "Broker") -> None:
        self.broker = broker

    async def _run(self, function: "Callable[P, T]", *args: "P.args", **how: "P.kwargs") -> T:
        return await asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *args, **how))

    async def create(self, *args: Any, **how: Any) -> Region:
        """Broker.create()."""
        return await self._run(self.broker.create, *args, **how)

    async def adopt(self, *args: Any, **how: Any) -> Region:
        """Broker.adopt()."""
        return await self._run(self.broker.adopt, *args, **how)

    async def create_pool(self, *args: Any, **how: Any) -> Pool:
        """Broker.create_pool()."""
        return await self._run(self.broker.create_pool, *args, **how)

    async def open_pool(self, name: str) -> Pool:
        """Broker.open_pool()."""
        return await self._run(self.broker.open_pool, name)

    async def acquire(self, pool: Pool, timeout: "float | None" = None) -> Block:
        """Pool.acquire(); those of this broker that wait for a pool are served in order.

        A block that comes when the wait was cancelled goes back to the pool. Needs no thread of the executor.
        """
        return await acquire(pool, self.broker._waiting, timeout)

    async def retire(self, region: Region, mode: Mode = "strict", *, wait: bool = True,
                     timeout: "float | None" = None) -> None:
        """Region.retire(), which waits unless told otherwise."""
        await self._run(region.retire, mode, wait=wait, timeout=timeout)

    async def get_memory_info(self, name: str, offset: int = 0, nbytes: "int | None" = None, *, write: bool = False,
                              copy: bool = False) -> Lease:
        """Broker.get_memory_info(), for the first use of a region, which waits; later ones do not."""
        return await self._run(self.broker.get_memory_info, name, offset, nbytes, write=write, copy=copy)

    async def lookup(self, name: str) -> Handle:
        """Broker.lookup()."""
        return await self._run(self.broker.lookup, name)

    async def unregister(self, names: Any, mode: Mode = "strict", *, wait: bool = False,
                         timeout: "float | None" = None) -> Any:
        """Broker.unregister()."""
        return await self._run(lambda: self.broker.unregister(names, mode, wait=wait, timeout=timeout))

    async def unregister_all(self, scope: str = "session", mode: Mode = "strict", *, wait: bool = False,
                             timeout: "float | None" = None) -> "Retired":
        """Broker.unregister_all()."""
        return await self._run(self.broker.unregister_all, scope, mode, wait=wait, timeout=timeout)

    async def status(self, *args: Any, **how: Any) -> list[RegionStatus]:
        """Broker.status(), all of it."""
        return await self._run(lambda: list(self.broker.status(*args, **how)))

    async def clients(self) -> list[ClientStatus]:
        """Broker.clients()."""
        return await self._run(self.broker.clients)

    async def stats(self, accounts: bool = False) -> list[Stat]:
        """Broker.stats()."""
        return await self._run(self.broker.stats, accounts)

    async def ping(self) -> float:
        """Broker.ping()."""
        return await self._run(self.broker.ping)

    async def close(self) -> None:
        """Broker.close()."""
        await self._run(self.broker.close)
