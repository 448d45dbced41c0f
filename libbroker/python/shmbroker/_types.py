# SPDX-License-Identifier: Apache-2.0
"""What the broker tells, as types."""

import enum
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Mode = Literal["strict", "lazy", "force", "discard"]


class EventType(enum.IntEnum):
    """What an event is about. OVERFLOW: events were dropped, read the status again."""

    REGISTERED = 0
    RETIRING = 1
    GONE = 2
    REVOKED = 3
    OWNER_DIED = 4
    JOINED = 5
    LEFT = 6
    OVERFLOW = 7


class RegionState(enum.IntEnum):
    """What a region is in."""

    REVOKED = 0
    ACTIVE = 1
    LAZY = 2
    RETIRING = 3


class RegionFlags(enum.IntFlag):
    """What a region is like."""

    UNSEALED = 1
    SPARSE = 2
    READ_ONLY_ADVISORY = 4
    NO_READ_ONLY_FD = 8
    KEPT = 16
    HUGETLB = 32
    UNINDEXED = 64


class Event(NamedTuple):
    """An event; what its type has no use for is 0. dropped: how many events were, with OVERFLOW."""

    type: EventType
    slot: int
    generation: int
    session: int
    nbytes: int
    dropped: int
    pid: int
    uid: int
    name: str

    @classmethod
    def of(cls, values: Sequence[Any]) -> "Event":
        """From the tuple that the extension makes."""
        return cls(EventType(values[0]), *values[1:])


class Holder(NamedTuple):
    """Who holds leases on a region. flags: 1 through its lease page, 2 by message, 4 detached."""

    session: int
    pid: int
    uid: int
    leases: int
    flags: int
    comm: str


class RegionStatus(NamedTuple):
    """A region as the broker sees it. uid is ANY_UID, pid 0 and key empty where they are not shown to this user."""

    name: str
    container: str
    generation: int
    nbytes: int
    offset: int
    object: int
    object_nbytes: int
    age_ns: int
    session: int
    slot: int
    pid: int
    uid: int
    leases: int
    flags: RegionFlags
    state: RegionState
    kind: int
    access: int
    comm: str
    holders_total: int
    holders: list[Holder]
    key: str


class ClientStatus(NamedTuple):
    """A session as the broker sees it. flags: 1 attached, 2 detached, 4 away."""

    container: str
    session: int
    age_ns: int
    nbytes: int
    pid: int
    uid: int
    gid: int
    roles: int
    rights: int
    regions: int
    maps: int
    leases: int
    unread: int
    flags: int
    comm: str


class ClientInfo(NamedTuple):
    """What a connection is. rights: 1 keep, 2 delegate; lease_mode: 1 asymmetric, 2 read-modify-write, 0 by message."""

    session: int
    epoch: int
    roles: int
    rights: int
    lease_mode: int
    lanes: int
    capacity: int
    broker_version: str


class Stat(NamedTuple):
    """A number of the broker, or of one user's account; a counter only grows."""

    name: str
    help: str
    value: int
    uid: "int | None"
    is_counter: bool
