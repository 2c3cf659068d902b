"""One server of the pool: its state, its last receipt, the requests it has now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from areal_like.api.weights import CommitReceipt
from areal_like.client.control import ServerControl
from areal_like.client.dialect import EMBEDDED, Dialect
from areal_like.client.health import GIVE_UP_AFTER, Acknowledged
from areal_like.client.routing import ServerLoad


class ServerState(StrEnum):
    """``joining`` waits for its first version; only a receipt leads into the rotation."""

    JOINING = "joining"
    IN_ROTATION = "in_rotation"
    EJECTED = "ejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatistics:
    """A snapshot. ``version`` is the acknowledged one, -1 before the first receipt; ``reason`` the last ejection's."""

    name: str
    state: ServerState
    version: int
    in_flight: int
    dispatched: int
    ejections: int
    suspect: bool
    reason: str


class Link(Protocol):
    """The two ways to talk to one server."""

    @property
    def control(self) -> ServerControl: ...

    @property
    def dialect(self) -> Dialect: ...


Relink = Callable[[], Awaitable[Link]]


@dataclass(slots=True, kw_only=True)
class Server:
    """The pool's own record; nobody outside the pool changes it.

    ``suspect``: a connection broke; no new request until the health loop has looked. ``requests`` are the deadlines
    of the requests in flight: cutting them short is how an ejection reaches those who wait. ``taken_by`` is the
    incarnation of another run that has taken the server over; it never comes back to ours. ``refused`` counts
    readmissions in a row that failed while it answered. ``relink`` connects anew, to the server that answers there now.
    """

    name: str
    url: str
    control: ServerControl
    context_length: int
    dialect: Dialect = EMBEDDED
    state: ServerState = ServerState.JOINING
    acknowledged: Acknowledged | None = None
    suspect: bool = False
    failures: int = 0
    reason: str = ""
    taken_by: int | None = None
    refused: int = 0
    ejections: int = 0
    readmit_at: float = 0.0
    offered: bool = False
    dispatched: int = 0
    in_flight: int = 0
    relink: Relink | None = None
    requests: set[asyncio.Timeout] = field(default_factory=set)
    look_now: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def routable(self) -> bool:
        return self.state is ServerState.IN_ROTATION and not self.suspect

    @property
    def load(self) -> ServerLoad:
        return ServerLoad(name=self.name, in_flight=self.in_flight, dispatched=self.dispatched)

    def accept(self, receipt: CommitReceipt) -> None:
        """Into the rotation, whatever the state was."""
        self.acknowledged = Acknowledged(incarnation=receipt.incarnation, version=receipt.version)
        self.state = ServerState.IN_ROTATION
        self.suspect = False
        self.failures = self.refused = 0
        self.offered = False

    @property
    def may_return(self) -> bool:
        """Whether it is in rotation or can be hoped for."""
        return self.taken_by is None and self.refused < GIVE_UP_AFTER

    def leave(self, reason: str, now: float) -> None:
        """Out of the rotation; every request in flight ends now and is moved by its client."""
        self.refused += self.offered  # what it was offered for has failed
        self.state = ServerState.EJECTED
        self.reason = reason
        self.ejections += 1
        self.offered = False
        for scope in self.requests:
            if not scope.expired():
                scope.reschedule(now)

    def snapshot(self) -> ServerStatistics:
        return ServerStatistics(
            name=self.name,
            state=self.state,
            version=self.acknowledged.version if self.acknowledged else -1,
            in_flight=self.in_flight,
            dispatched=self.dispatched,
            ejections=self.ejections,
            suspect=self.suspect,
            reason=self.reason,
        )
