# SPDX-License-Identifier: Apache-2.0
"""The connection that the drop-ins of a process share, and what was said about how they make regions.

A process that was forked has its own: what it inherited is its parent's, which it never retires, and may look at.
"""

import grp
import os
import pwd
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .. import Broker, Detached, connect

T = TypeVar("T")

BACKINGS = ("memfd", "posix")

lock = threading.RLock()
_broker: "Broker | None" = None
_socket: Any = None
_backing: "str | None" = None
_allowed: "tuple[Sequence[int] | None, Sequence[int] | None]" = (None, None)
_uid: "int | None" = None


def _after_fork() -> None:
    global lock, _broker, _uid  # pylint: disable=global-statement
    # another thread of the parent may have had the lock
    lock = threading.RLock()
    _broker = _uid = None


os.register_at_fork(after_in_child=_after_fork)


def configure(*, socket: Any = None, backing: "str | None" = None, allowed_uids: "Sequence[int] | None" = None,
              allowed_gids: "Sequence[int] | None" = None) -> None:
    """How the drop-ins of this process make regions from here on; what is not said is the default.

    socket: of the broker, by default $SHMBROKER_SOCKET or /run/shmbroker/shmbroker.sock.
    backing: "memfd" or "posix", by default $SHMBROKER_TRITON_BACKING or "memfd"; see the package.
    allowed_uids, allowed_gids: who else may use them, by default those of $SHMBROKER_TRITON_ALLOWED_UIDS and
    $SHMBROKER_TRITON_ALLOWED_GIDS, numbers or names with commas between them, or nobody but this user.

    Regions that exist stay as they are, with the connection that they have. Raises ValueError for an unknown backing.
    """
    global _broker, _socket, _backing, _allowed  # pylint: disable=global-statement
    if backing is not None and backing not in BACKINGS:
        raise ValueError(f"backing is one of {', '.join(BACKINGS)}, not {backing!r}")
    with lock:
        _socket, _backing, _allowed = socket, backing, (allowed_uids, allowed_gids)
        # who has regions or leases of it keeps it
        _broker = None


def backing() -> str:
    """What new regions are made of."""
    chosen = _backing or os.environ.get("SHMBROKER_TRITON_BACKING") or "memfd"
    if chosen not in BACKINGS:
        raise ValueError(f"SHMBROKER_TRITON_BACKING is one of {', '.join(BACKINGS)}, not {chosen!r}")
    return chosen


def _ids(variable: str, number: "Callable[[str], int]") -> list[int]:
    """What the environment has under this name; number(name) is the id of a name, or raises KeyError."""
    words = os.environ.get(variable, "").replace(",", " ").split()
    try:
        return [int(word) if word.isdecimal() else number(word) for word in words]
    except KeyError as error:
        raise ValueError(f"{variable}: {error.args[0]}") from None


def access() -> dict[str, Any]:
    """The access list of new regions; the lock is held, and call() runs this."""
    uids, gids = _allowed
    if uids is None:
        uids = _ids("SHMBROKER_TRITON_ALLOWED_UIDS", lambda name: pwd.getpwnam(name).pw_uid)
    if gids is None:
        gids = _ids("SHMBROKER_TRITON_ALLOWED_GIDS", lambda name: grp.getgrnam(name).gr_gid)
    return {"allowed_uids": sorted({_own_uid(), *uids}), "allowed_gids": list(gids)}


def _own_uid() -> int:
    # as the broker sees it, which in a user namespace is not what the process sees
    global _uid  # pylint: disable=global-statement
    if _uid is None:
        assert _broker is not None
        session = _broker.session
        _uid = next(client.uid for client in _broker.clients() if client.session == session)
    return _uid


def _connected() -> Broker:
    global _broker, _uid  # pylint: disable=global-statement
    if _broker is None:
        _broker, _uid = connect(_socket, accept_unsealed=backing() == "posix"), None
    return _broker


def call(function: "Callable[[Broker], T]") -> T:
    """What function(broker) returns; the lock is held. A broker that has ended for good is connected to anew."""
    global _broker  # pylint: disable=global-statement
    if _broker is not None:
        try:
            return function(_broker)
        except (Detached, ConnectionError):
            _broker = None
    return function(_connected())
