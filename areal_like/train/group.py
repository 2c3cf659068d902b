"""The controller's view of the trainer: all ranks as one object. Imports no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from areal_like.api.trajectory import Batch, UpdateReport
from areal_like.api.weights import Manifest
from areal_like.errors import InfrastructureError, RpcError
from areal_like.rpc.client import RpcClient
from areal_like.rpc.security import RunKeys
from areal_like.train.methods import Collect, Coordinates, method_forms

#: seconds for questions that need no work
_QUICK = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth:
    """``method`` is what the rank is at (empty: idle) for ``seconds``. ``alive`` is False where nothing answered."""

    rank: int
    alive: bool
    method: str = ""
    seconds: float = 0.0
    version: int = -1
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatistics:
    ranks: int
    updates: int
    exports: int
    saves: int
    busy_seconds: float
    in_flight: str


class TrainerGroup:
    """All train ranks. Methods are those of :class:`~areal_like.train.methods.TrainMethods`, as coroutines.

    Every call goes to every rank at once, one call at a time; the first rank that fails ends the call for all, since
    the others may wait for it in a collective for ever. After that the ranks are not in step: start them anew.
    Use as ``async with TrainerGroup(addresses) as trainer``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        keys: RunKeys | None = None,
        step_timeout: float = 1800.0,
    ) -> None:
        """``addresses``: one per rank, in any order. ``step_timeout``: seconds one call may take."""
        self._addresses = tuple(addresses)
        self._keys = keys
        self._step_timeout = step_timeout
        self._stack = AsyncExitStack()
        self._clients: tuple[RpcClient, ...] = ()
        self._probes: tuple[RpcClient, ...] = ()
        self._coordinates: tuple[Coordinates, ...] = ()
        self._turn = asyncio.Lock()
        self._counts: dict[str, int] = {}
        self._busy_seconds = 0.0
        self._in_flight = ""

    async def __aenter__(self) -> Self:
        """Connect, and ask every rank for its coordinates.

        Raises:
            RpcError: a rank does not answer.
            InfrastructureError: the ranks do not make one complete group.
        """
        try:
            self._clients = tuple([await self._connect(address) for address in self._addresses])
            found: list[Coordinates] = await self._call("coordinates", timeout=_QUICK)
            self._order_by_rank(found)
            self._probes = tuple([await self._connect(c.health_address) for c in self._coordinates])
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _connect(self, address: str) -> RpcClient:
        return await self._stack.enter_async_context(RpcClient(address, keys=self._keys))

    def _order_by_rank(self, found: list[Coordinates]) -> None:
        paired = sorted(zip(found, self._clients, strict=True), key=lambda pair: pair[0].rank)
        self._coordinates = tuple(coordinates for coordinates, _ in paired)
        self._clients = tuple(client for _, client in paired)
        ranks = [c.rank for c in self._coordinates]
        if ranks != list(range(len(ranks))) or any(c.world_size != len(ranks) for c in self._coordinates):
            raise InfrastructureError(
                f"trainer: {len(ranks)} addresses answer as ranks {ranks} of "
                f"{sorted({c.world_size for c in self._coordinates})}; give the address of every rank exactly once"
            )

    async def coordinates(self) -> tuple[Coordinates, ...]:
        """Where the ranks are, in order of rank; asked once, when the group was entered."""
        return self._coordinates

    async def update(self, batch: Batch) -> UpdateReport:
        """Train on ``batch``; makes version ``batch.version`` + 1.

        Raises:
            RemoteError: a rank's update raised. RpcError: a rank did not answer in time.
        """
        report: UpdateReport = await self._call("update", batch=batch)
        return report

    async def export_weights(self, version: int, incarnation: int) -> Manifest:
        """Lay ``version`` out for the servers. Raises RemoteError or RpcError."""
        manifest: Manifest = await self._call("export_weights", version=version, incarnation=incarnation)
        return manifest

    async def save_hf(self, directory: str) -> str:
        """Write a Hugging Face checkpoint into ``directory``. Raises RemoteError or RpcError."""
        written: str = await self._call("save_hf", directory=directory)
        return written

    async def save_snapshot(self) -> str:
        """Write what training needs to go on, in the background. Returns where. Raises RemoteError or RpcError."""
        folder: str = await self._call("save_snapshot")
        return folder

    async def finish_snapshot(self) -> None:
        """Wait until the last snapshot is durable. Raises RemoteError or RpcError."""
        await self._call("finish_snapshot")

    async def load_snapshot(self, directory: str) -> int:
        """Go on from a snapshot; returns its version. Raises RemoteError or RpcError."""
        version: int = await self._call("load_snapshot", directory=directory)
        return version

    async def health(self, timeout: float = 5.0) -> tuple[RankHealth, ...]:
        """What every rank is at, from its health socket: it answers during a step, too. Never raises."""
        return tuple(await asyncio.gather(*(self._probe(rank, timeout) for rank in range(len(self._probes)))))

    def statistics(self) -> TrainerStatistics:
        return TrainerStatistics(
            ranks=len(self._addresses),
            updates=self._counts.get("update", 0),
            exports=self._counts.get("export_weights", 0),
            saves=self._counts.get("save_hf", 0),
            busy_seconds=self._busy_seconds,
            in_flight=self._in_flight,
        )

    async def _probe(self, rank: int, timeout: float) -> RankHealth:
        try:
            state = await self._probes[rank].call("health", timeout=timeout)
        except RpcError as error:
            return RankHealth(rank=rank, alive=False, reason=str(error))
        return RankHealth(
            rank=rank, alive=True, method=state["method"], seconds=state["seconds"], version=state["version"]
        )

    async def _call(self, method: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Call every rank at once and collect as the method declares."""
        form = method_forms()[method]
        plain = form.dump(arguments)
        limit = timeout if timeout is not None else self._step_timeout
        async with self._turn:
            self._in_flight, started = method, time.monotonic()
            try:
                async with asyncio.TaskGroup() as group:
                    calls = [
                        group.create_task(
                            client.call(method, timeout=limit, **plain), name=f"{method} {client.address}"
                        )
                        for client in self._clients
                    ]
            except ExceptionGroup as failures:
                (first, *_) = failures.exceptions
                if isinstance(first, RpcError) and timeout is None and time.monotonic() - started >= limit:
                    raise RpcError(f"{first}; raise actor.step_timeout if it needs longer") from None
                raise first from None
            finally:
                self._busy_seconds += time.monotonic() - started
                self._in_flight = ""
        self._counts[method] = self._counts.get(method, 0) + 1
        if form.dispatch.collect is Collect.FIRST:
            return form.result.validate_python(calls[0].result())
        return [form.result.validate_python(call.result()) for call in calls]
