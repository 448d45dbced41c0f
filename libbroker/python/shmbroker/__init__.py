# SPDX-License-Identifier: Apache-2.0
"""Shared memory of a host through one broker, shmbrokerd, without copies.

An owner creates or adopts memory and registers it under a name; a consumer gets it by that name under a lease, and it
cannot go away before the lease is given back:

    with shmbroker.connect() as broker, broker.create("frame", (1, 3, 2160, 3840), "float32") as region:
        region.numpy()[...] = 0

    with shmbroker.connect() as broker, broker.get_memory_info("frame") as lease:
        frame = lease.numpy((1, 3, 2160, 3840), "float32")

A pool is memory in blocks of one size, which many processes acquire and release among themselves; what a process held when
it was killed comes back by itself:

    with shmbroker.connect() as broker, broker.create_pool("frames", 8, 99532800) as pool:
        with pool.acquire() as block:
            block.numpy((1, 3, 2160, 3840), "float32")[...] = 0

Sizes and offsets are in bytes, shapes in elements, timeouts in seconds; None is no timeout. What the broker refuses is
an Error, with one class for each code; what the kernel refuses is an OSError. Objects may be used from many threads.
After os.fork() the child may use nothing that it inherited but memory that it already looks at: it gets ForkedError.
"""

import atexit
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

from . import _shmbroker, _source
from ._acquire import Acquirer
from ._aio import Aio, Events, Hub
from ._shmbroker import (
    AccessDiffers, AccessRefused, Again, AlreadyExists, BadFd, BadName, BadState, Block, Busy, Detached, Error,
    ForkedError, Handle, InUse, Invalid, Lease, Memory, NoDevice, NoFds, NoReadOnlyFd, NoSlots, NotAttached, NotFound,
    OutOfBounds, PermissionDenied, Pool, QuotaExceeded, Region, Reserved, Retiring, Revoked, Sparse, Stale, TimedOut,
    Truncated, UnknownOp, Unsealed, Unsupported, VersionMismatch, View, errors_by_code,
)
from ._shmbroker import version as __version__
from ._types import (
    ClientInfo, ClientStatus, Event, EventType, Holder, Mode, RegionFlags, RegionState, RegionStatus, Stat
)

ANY_UID = 0xFFFFFFFF

__all__ = [
    "ANY_UID", "AccessDiffers", "AccessRefused", "Again", "Aio", "AlreadyExists", "BadFd", "BadName", "BadState",
    "Block", "Broker", "Busy", "ClientInfo", "ClientStatus", "Detached", "Error", "Event", "EventType", "Events",
    "ForkedError", "Handle", "Holder", "InUse", "Invalid", "Lease", "Memory", "NoDevice", "NoFds", "NoReadOnlyFd",
    "NoSlots", "NotAttached", "NotFound", "OutOfBounds", "PermissionDenied", "Pool", "QuotaExceeded", "Region",
    "RegionFlags", "RegionState", "RegionStatus", "Reserved", "Retired", "Retiring", "Revoked", "Sparse", "Stale",
    "Stat", "TimedOut", "Truncated", "UnknownOp", "Unsealed", "Unsupported", "VersionMismatch", "View", "connect",
    "errors_by_code",
]


class Retired(NamedTuple):
    """What Broker.unregister_all() did."""

    gone: int
    draining: int
    discarded: int


class Broker(_shmbroker.Broker):
    """A connection to the broker, and what can be asked of it.

    socket: a path; by default $SHMBROKER_SOCKET or /run/shmbroker/shmbroker.sock.
    roles: "owner", "consumer", "admin" or several of them; by default all that this user may have.
    accept_unsealed: pointers to memory that its owner can truncate are fine; touching it can then end in SIGBUS.
    populate: the first use of a region faults in what was asked for, all at once.
    resume_timeout: how many seconds calls wait for a broker that has ended; None for ever.
    cuda_context: a GPU's primary context may be made where this process has none; otherwise leases on its memory are refused.
    lease_page, force_rmw: False and True are for tests and comparison.

    Raises FileNotFoundError, ConnectionRefusedError, PermissionError where no broker is; PermissionDenied for a role
    that is refused, QuotaExceeded, NoFds, VersionMismatch.
    """

    _hub: "Hub | None" = None
    _waiting: "dict[Pool, Acquirer]"

    def __new__(cls, socket: Any = None, *, roles: "str | int | Sequence[str] | None" = None,
                accept_unsealed: bool = False, populate: bool = True, resume_timeout: "float | None" = 30.0,
                lease_page: bool = True, force_rmw: bool = False, cuda_context: bool = False) -> "Broker":
        made = _shmbroker.connect(cls, socket, roles=roles, accept_unsealed=accept_unsealed, populate=populate,
                                  resume_timeout=resume_timeout, lease_page=lease_page, force_rmw=force_rmw,
                                  cuda_context=cuda_context)
        made._waiting = {}
        if resume_timeout is None:
            made.set_resume_timeout(None)
        return made

    def __repr__(self) -> str:
        return f"<shmbroker.Broker {'closed' if self.closed else self.session}>"

    @property
    def info(self) -> ClientInfo:
        """What this connection is."""
        return ClientInfo(*self._client_info())

    @property
    def aio(self) -> Aio:
        """The calls that wait, as coroutines."""
        return Aio(self)

    def adopt(self, name: str, source: Any, shape: "SupportsIndex | Sequence[SupportsIndex] | None" = None,
              dtype: Any = None, *, nbytes: "int | None" = None, offset: int = 0, keep: bool = False,
              replace: bool = False, read_only: bool = False, allowed_uids: "Sequence[int] | None" = None,
              allowed_gids: "Sequence[int] | None" = None, principal: "int | None" = None,
              key: "str | None" = None) -> Region:
        """Registers memory that exists, without copying it; it is not sealed, and stays its maker's.

        source: a file descriptor, an object with fileno(), a multiprocessing.shared_memory.SharedMemory, an mmap.mmap
        of a file, or anything else with a buffer in such a mapping. What has a descriptor is borrowed.
        offset: bytes into it, any alignment. nbytes: by default up to its end.
        shape, dtype and the rest: as create() has them.

        Raises BadFd for what is no shareable memory, Unsealed where the broker refuses memory that can be truncated,
        OutOfBounds, AccessDiffers, and what create() raises; ValueError for a buffer that is not in a mapping of a file.
        """
        with _source.open_memory(source) as memory:
            if nbytes is None and shape is None:
                nbytes = max(memory.nbytes - offset, 0)
            return self._adopt(name, memory.fd, shape, dtype, nbytes=nbytes, offset=memory.offset + offset, keep=keep,
                               replace=replace, read_only=read_only, allowed_uids=allowed_uids,
                               allowed_gids=allowed_gids, principal=principal, key=key)

    def cuda_alloc(self, name: str, shape: "SupportsIndex | Sequence[SupportsIndex] | None" = None, dtype: Any = None, *,
                   nbytes: "int | None" = None, device: int = 0, unpublished: bool = False, **how: Any) -> Region:
        """Allocates memory of a GPU that other processes may open, and registers it under a name.

        device: the GPU's ordinal in this process. unpublished: nobody finds it before Region.publish().
        shape, dtype, nbytes and the rest: as adopt() has them.

        DLPack and __cuda_array_interface__ give the memory to other libraries; the CPU does not see it.

        Raises Unsupported where there is no driver, NoDevice, BadState without a context (see cuda_context), MemoryError or
        OSError, and what create() raises.
        """
        return self._cuda_region(name, 0, shape, dtype, nbytes=nbytes, device=device, unpublished=unpublished, **how)

    def cuda_export(self, name: str, source: Any, shape: "SupportsIndex | Sequence[SupportsIndex] | None" = None,
                    dtype: Any = None, *, nbytes: "int | None" = None, device: "int | None" = None,
                    unpublished: bool = False, **how: Any) -> Region:
        """Registers memory of a GPU that this process has allocated, without copying it.

        source: a contiguous tensor of PyTorch, CuPy or whatever else has DLPack, which is not to be freed before the region
        is gone (Region.retire() with wait); or an address, with nbytes or a shape, and the device's ordinal.
        shape, dtype: by default bytes. The rest: as cuda_alloc() has them.

        Whoever may have the memory has all of the allocation around it, for cudaMalloc() a block of 2 MiB.

        Raises Unsupported for managed, pooled and imported memory, OutOfBounds for what spans allocations, ValueError for
        a tensor that is not contiguous or not of a GPU, and what cuda_alloc() raises.
        """
        address, device, size = _source.of_device(source, device)
        if nbytes is None and shape is None:
            nbytes = size
        return self._cuda_region(name, address, shape, dtype, nbytes=nbytes, device=device, unpublished=unpublished, **how)

    def status(self, name: "str | None" = None, *, prefix: bool = False, uid: "int | None" = None,
               states: Sequence[RegionState] = (), holders: bool = False) -> Iterator[RegionStatus]:
        """The broker's regions, page by page: each page is a consistent picture, the whole is not.

        name: only this one, or those that begin with it when prefix is said. uid: only those of this owner.
        states: only in one of these. holders: with who holds leases on them.
        """
        mask = sum(1 << state for state in set(states))
        for entry in self._status(name=name, prefix=prefix, uid=uid, states=mask, holders=holders):
            entry["state"] = RegionState(entry["state"])
            entry["flags"] = RegionFlags(entry["flags"])
            entry["holders"] = [Holder(**holder) for holder in entry["holders"]]
            yield RegionStatus(**entry)

    def clients(self) -> list[ClientStatus]:
        """Every session that this user may see."""
        return [ClientStatus(**entry) for entry in self._clients()]

    def stats(self, accounts: bool = False) -> list[Stat]:
        """The broker's numbers; with accounts also those of each user."""
        return [Stat(name, text, value, None if uid == ANY_UID else uid, kind == 1)
                for name, text, value, uid, kind in self._stats(accounts)]

    def broker_info(self) -> Mapping[str, str]:
        """What the broker is: version, loop, capacity, ..."""
        return dict(self._broker_info())

    def unregister_all(self, scope: str = "session", mode: Mode = "strict", *, wait: bool = False,
                       timeout: "float | None" = None) -> Retired:
        """Retires all regions of this session ("session"), of this user ("uid"), or of everybody ("everyone", for admins).

        mode, wait and timeout are those of Region.retire(). Raises PermissionDenied, TimedOut, Again.
        """
        return Retired(*self._unregister_all(scope, mode, wait=wait, timeout=timeout))

    def subscribe(self, *types: EventType) -> None:
        """Asks for events, of all types when none is named, which next_event() then gives. Replaces what was asked before."""
        self._subscribe(sum(1 << kind for kind in set(types or EventType)))

    def unsubscribe(self) -> None:
        """Asks for no more events."""
        self._subscribe(0)

    def next_event(self, timeout: "float | None" = None) -> "Event | None":
        """The next event that subscribe() asked for; None when none comes within the timeout."""
        event = self._next_event(timeout)
        return None if event is None else Event.of(event)

    def events(self, *types: EventType) -> Events:
        """The broker's events, for `async for`; of all types when none is named.

        Several loops over the events of one broker each get those of their types. They are read from the connection's
        descriptor by the running event loop. Not to be mixed with subscribe() and next_event().

        Raises Detached or ConnectionResetError out of the loop when the session or the broker has ended for good.
        """
        return Events(self, types or tuple(EventType))


def connect(socket: Any = None, *, roles: "str | int | Sequence[str] | None" = None, accept_unsealed: bool = False,
            populate: bool = True, resume_timeout: "float | None" = 30.0, cuda_context: bool = False) -> Broker:
    """A connection to the broker: see Broker, which takes the same."""
    return Broker(socket, roles=roles, accept_unsealed=accept_unsealed, populate=populate,
                  resume_timeout=resume_timeout, cuda_context=cuda_context)


atexit.register(_shmbroker.at_exit)
