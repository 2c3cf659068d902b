"""The servers of a run: who is in rotation, which version each has acknowledged, and who answers.

A server joins with a health answer, enters the rotation with a receipt (``weights.channel``), and leaves it when it
stops answering, reports failure, serves older weights than it acknowledged, fails an update, or obeys another run. The
health loop goes on asking ejected servers and offers those that answer again to the channel for readmission, but none
that another run has. Everything runs in one loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from areal_like.api.weights import CommitReceipt
from areal_like.api.wire import HealthAnswer
from areal_like.client.affinity import AffinityTable
from areal_like.client.control import ServerControl
from areal_like.client.dialect import EMBEDDED, Dialect
from areal_like.client.health import HealthPolicy, fault_of, taken_by
from areal_like.client.routing import RoutingView, choose_server
from areal_like.client.server import Relink, Server, ServerState, ServerStatistics
from areal_like.client.task_scope import leave
from areal_like.errors import ArealLikeError, ServersTaken, ServerUnavailable

_LOG = logging.getLogger(__name__)

#: ``lowest_version`` before the first receipt
NEVER_ACKNOWLEDGED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """A snapshot. ``ejections`` counts every time a server left the rotation."""

    servers: tuple[ServerStatistics, ...]
    in_rotation: int
    in_flight: int
    lowest_version: int
    ejections: int


class ServerPool:
    """An async context manager; ``add`` servers inside it."""

    def __init__(self, policy: HealthPolicy | None = None) -> None:
        self._policy = policy or HealthPolicy()
        self._servers: dict[str, Server] = {}
        self._affinity = AffinityTable()
        self._changed = asyncio.Event()
        self._recovered: asyncio.Queue[str] = asyncio.Queue()
        self._watchers = asyncio.TaskGroup()
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._floor = NEVER_ACKNOWLEDGED
        self._incarnation = 0
        self._commanded: int | None = None

    async def __aenter__(self) -> Self:
        await self._watchers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._watching.values():
            task.cancel()
        try:
            await leave(self._watchers, kind, error, trace)
        finally:
            for server in self._servers.values():
                await server.control.aclose()

    async def add(
        self, name: str, url: str, control: ServerControl, dialect: Dialect = EMBEDDED, relink: Relink | None = None
    ) -> HealthAnswer:
        """Register a server that answers; it gets requests after its first receipt. ``control`` is the pool's now.

        ``dialect`` is how the server's engine is asked for answers. ``relink`` makes both anew for a server that was
        started again at ``url``: what they remember is of the one before. Returns what it told of itself.

        Raises:
            ServerUnavailable: it does not answer, or reports failure.
            ValueError: the name is taken.
        """
        async with AsyncExitStack() as refused:
            refused.push_async_callback(control.aclose)
            if name in self._servers:
                raise ValueError(f"a server named {name!r} is in the pool already; remove it first")
            answer = await control.health(timeout=self._policy.timeout)
            fault = fault_of(answer, None)
            if fault:
                raise ServerUnavailable(f"{name} cannot join: {fault}")
            refused.pop_all()
        length = answer.context_length
        server = Server(name=name, url=url, control=control, context_length=length, dialect=dialect, relink=relink)
        self._servers[name] = server
        self._watching[name] = self._watchers.create_task(self._watch(server), name=f"health-{name}")
        self._notify()
        return answer

    def command(self, incarnation: int) -> None:
        """Control calls carry ``incarnation`` from now on: a server that tells a newer one obeys another run."""
        self._commanded = incarnation

    async def remove(self, name: str, reason: str) -> None:
        """Forget a server for good (its process is gone); its requests move."""
        server = self._servers.pop(name, None)
        if server is None:
            return
        server.leave(reason, asyncio.get_running_loop().time())
        self._watching.pop(name).cancel()
        self._notify()
        await server.control.aclose()

    # -- what requests need --

    def dialect(self, name: str) -> Dialect:
        """How a server is spoken to; of one that is gone, what every server speaks."""
        server = self._servers.get(name)
        return EMBEDDED if server is None else server.dialect

    @property
    def incarnation(self) -> int:
        """The newest incarnation of which a receipt came in."""
        return self._incarnation

    @property
    def context_length(self) -> int | None:
        """The longest sequence that every server takes, in tokens; None without servers."""
        return min((s.context_length for s in self._servers.values()), default=None)

    @property
    def lowest_version(self) -> int:
        """The lowest version acknowledged by a server in rotation; it falls only when a new incarnation begins."""
        return self._floor

    def route(self, *, session_id: str | None, group_id: str | None, avoid: frozenset[str] = frozenset()) -> str | None:
        """Choose a server for a request and remember the choice; None when no server may get one now."""
        view = RoutingView(servers=tuple(s.load for s in self._servers.values() if s.routable), affinity=self._affinity)
        name = choose_server(view, session_id=session_id, group_id=group_id, avoid=avoid)
        if name is not None:
            self._affinity.remember(name, session_id=session_id, group_id=group_id)
        return name

    @asynccontextmanager
    async def lease(self, name: str, deadline: float) -> AsyncIterator[str]:
        """The server's URL, for one request that ends at ``deadline`` (the loop's time).

        Raises:
            ServerUnavailable: the server left the rotation meanwhile.
            TimeoutError: the deadline passed.
        """
        server = self._servers.get(name)
        if server is None or server.state is not ServerState.IN_ROTATION:
            raise ServerUnavailable(f"{name} is not in rotation")
        server.in_flight += 1
        server.dispatched += 1
        scope = asyncio.timeout_at(deadline)
        try:
            async with scope:
                server.requests.add(scope)
                yield server.url
        except TimeoutError:
            if scope.when() != deadline:  # only an ejection moves it
                raise ServerUnavailable(f"{name} left the rotation: {server.reason}") from None
            raise
        finally:
            server.requests.discard(scope)
            server.in_flight -= 1

    def suspect(self, name: str) -> None:
        """A connection to the server broke: no new requests until the health loop has looked, which it does now."""
        server = self._servers.get(name)
        if server is not None and server.state is ServerState.IN_ROTATION:
            server.suspect = True
            server.look_now.set()
            self._notify()

    # -- what a publication needs (weights.channel.ServerRotation) --

    def publication_targets(self) -> Mapping[str, ServerControl]:
        """Servers in rotation or joining, by name."""
        return {s.name: s.control for s in self._servers.values() if s.state is not ServerState.EJECTED}

    def weight_server(self, server: str) -> ServerControl:
        """A server's control by name.

        Raises:
            ServerUnavailable: unknown name.
        """
        if server not in self._servers:
            raise ServerUnavailable(f"no server named {server!r}; known are {', '.join(self._servers) or 'none'}")
        return self._servers[server].control

    def acknowledge(self, receipt: CommitReceipt) -> None:
        """Take a verified receipt: its server is in rotation, at the receipt's version.

        A receipt of a newer incarnation rewinds ``lowest_version``; servers that have none yet leave the rotation
        until theirs comes. Receipts of older incarnations, or of servers that are gone, are ignored.
        """
        server = self._servers.get(receipt.server)
        if server is None or receipt.incarnation < self._incarnation:
            return
        if receipt.incarnation > self._incarnation:
            self._rewind(receipt.incarnation)
        if self._commanded is not None:
            self._commanded = max(self._commanded, receipt.incarnation)
        if server.state is ServerState.EJECTED:
            _LOG.warning("%s is back in rotation, at version %d", receipt.server, receipt.version)
        server.accept(receipt)
        server.look_now.set()
        self._notify()

    def eject(self, server: str, reason: str) -> None:
        """Take a server out of the rotation; its requests move to others."""
        record = self._servers.get(server)
        if record is None:
            return
        now = asyncio.get_running_loop().time()
        record.leave(reason, now)
        record.readmit_at = now + self._policy.readmission_pause(record.ejections)
        left = sum(s.state is ServerState.IN_ROTATION for s in self._servers.values())
        _LOG.warning("%s left the rotation: %s; servers left: %d", server, reason, left)
        self._notify()

    async def next_recovered(self) -> str:
        """Wait for an ejected server that answers again and has waited long enough."""
        while True:
            name = await self._recovered.get()
            server = self._servers.get(name)
            if server is not None and server.state is ServerState.EJECTED:
                return name

    def served_version(self, name: str) -> int:
        """What a server has acknowledged: nothing that it writes from now on is older. -1 before its first receipt."""
        server = self._servers.get(name)
        return server.acknowledged.version if server is not None and server.acknowledged is not None else -1

    async def look_at_all(self) -> None:
        """Ask every server for its health now, rather than when its turn comes; takes one question's time at most."""
        async with asyncio.TaskGroup() as tasks:
            for server in tuple(self._servers.values()):
                tasks.create_task(self._look(server), name=f"look-{server.name}")

    def check_taken(self) -> None:
        """Raises ServersTaken if another run has every server by now; while one is left, the run goes on with that."""
        taken = {s.url: s.taken_by for s in self._servers.values() if s.taken_by is not None}
        if taken and len(taken) == len(self._servers):
            listed = ", ".join(f"{url} (by incarnation {number})" for url, number in taken.items())
            raise ServersTaken(
                f"rollout.servers: another run has taken over {listed}; this run is incarnation {self._commanded}. A "
                "server serves one run at a time, the one that joined last: let that run end, or give each run servers "
                "of its own, then start this one again"
            )

    async def regained(self, version: int, seconds: float) -> bool:
        """Wait until a server serves ``version`` or a later one; False if none will, or none did within ``seconds``.

        A server at whose address nothing answers may be started again; one that answers gets some tries.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._serves(version):
                    if not any(s.may_return for s in self._servers.values()):
                        await self.look_at_all()  # one that has died since may be started again, too
                        if not any(s.may_return for s in self._servers.values()):
                            break
                    else:
                        await self.changed()
        return self._serves(version)

    def _serves(self, version: int) -> bool:
        known = [s.acknowledged for s in self._servers.values() if s.state is ServerState.IN_ROTATION]
        return any(a is not None and (a.incarnation, a.version) >= (self._incarnation, version) for a in known)

    # -- observing --

    async def changed(self) -> None:
        """Return at the next change of a state or a version. Check what you wait for, then call this, without await."""
        await self._changed.wait()

    def statistics(self) -> PoolStatistics:
        """A snapshot."""
        servers = tuple(s.snapshot() for s in self._servers.values())
        return PoolStatistics(
            servers=servers,
            in_rotation=sum(s.state is ServerState.IN_ROTATION for s in servers),
            in_flight=sum(s.in_flight for s in servers),
            lowest_version=self._floor,
            ejections=sum(s.ejections for s in servers),
        )

    def whereabouts(self) -> str:
        """Where each server is and why, for an error."""
        told = [f"{s.name} is {s.state}{f' ({s.reason})' if s.reason else ''}" for s in self._servers.values()]
        return "; ".join(told) or "none joined"

    def _rewind(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._floor = NEVER_ACKNOWLEDGED
        for server in self._servers.values():
            if server.state is ServerState.IN_ROTATION:
                server.state = ServerState.JOINING
                server.acknowledged = None

    def _notify(self) -> None:
        versions = [
            s.acknowledged.version
            for s in self._servers.values()
            if s.state is ServerState.IN_ROTATION and s.acknowledged is not None
        ]
        self._floor = max(self._floor, min(versions, default=self._floor))
        self._changed.set()
        self._changed = asyncio.Event()

    # -- the health loop --

    async def _watch(self, server: Server) -> None:
        """Ask one server for ever: at intervals, sooner after a failure, at once when a connection broke."""
        while True:
            await self._wait_to_look(server)
            await self._look(server)

    async def _wait_to_look(self, server: Server) -> None:
        try:
            async with asyncio.timeout(self._policy.pause(server.failures)):
                await server.look_now.wait()
        except TimeoutError:
            pass
        server.look_now.clear()

    async def _look(self, server: Server) -> None:
        before = server.acknowledged
        try:
            answer = await server.control.health(timeout=self._policy.timeout)
        except ArealLikeError as error:
            server.failures += 1
            server.refused = 0
            if server.state is not ServerState.EJECTED and server.failures >= self._policy.failures:
                self.eject(server.name, f"{server.failures} health questions in a row failed; the last: {error}")
            return
        server.failures = 0
        server.taken_by = taken_by(answer, self._commanded) or server.taken_by
        if server.taken_by is not None:
            if server.state is not ServerState.EJECTED:
                self.eject(server.name, f"another run (incarnation {server.taken_by}) has taken it over")
            self._notify()
            return
        fault = fault_of(answer, before)
        if server.state is ServerState.EJECTED:
            await self._offer(server, answer, restarted=before is None or fault is not None)
        elif fault:
            self.eject(server.name, fault)
        elif server.suspect:
            server.suspect = False
            self._notify()

    async def _offer(self, server: Server, answer: HealthAnswer, *, restarted: bool) -> None:
        """Offer a recovered server for readmission, once per ejection and not before its pause is over."""
        due = asyncio.get_running_loop().time() >= server.readmit_at
        if answer.status != "ok" or server.offered or not due:
            return
        server.offered = True
        if restarted and server.relink is not None:
            try:
                link = await server.relink()
            except ArealLikeError as error:
                self.eject(server.name, f"it was started again, and cannot join: {error}")
                return
            before, server.control, server.dialect = server.control, link.control, link.dialect
            await before.aclose()
        server.context_length = answer.context_length
        self._recovered.put_nowait(server.name)
