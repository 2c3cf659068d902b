"""Finished trajectories, kept where episodes run; everyone else knows them by tag and fetches tensors by key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from areal_like.api.trajectory import Trajectory, TrajectoryTag
from areal_like.api.trajectory_wire import to_wire
from areal_like.errors import ArealLikeError, InfrastructureError
from areal_like.rpc.security import RunKeys
from areal_like.rpc.server import RpcServer

#: bytes beside the arrays: objects, ids, dictionary entry (measured at about 900)
_OVERHEAD = 1024
DEFAULT_MAX_BYTES = 4 * 2**30


class StoreFull(InfrastructureError):
    """The store may not grow beyond its limit in bytes."""


class UnknownTrajectory(ArealLikeError):
    """A key that was never stored, or was deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """``puts``, ``gets`` and ``deletes`` count trajectories; ``bytes`` is what is held now."""

    trajectories: int
    bytes: int
    peak_bytes: int
    max_bytes: int
    puts: int
    gets: int
    deletes: int


class TrajectoryStore:
    """Trajectories by key, bounded in bytes. One event loop owns it; :meth:`serve` lets other processes read it.

    Keys are unique along the store's life. The admission rule bounds how many groups are alive, so a full store means
    trajectories larger than planned, or a batch that was never released: it is an error, not a reason to wait.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rows: dict[str, Trajectory] = {}
        self._bytes = self._peak = 0
        self._puts = self._gets = self._deletes = 0

    def put(self, trajectory: Trajectory) -> TrajectoryTag:
        """Keep ``trajectory`` (as :func:`~areal_like.rollout.convert.to_trajectories` made it) until it is deleted.

        Raises:
            StoreFull: it does not fit beside what is held.
        """
        size = _nbytes(trajectory)
        if self._bytes + size > self._max_bytes:
            raise StoreFull(
                f"trajectory store: {size} bytes of episode {trajectory.episode_id} do not fit; {len(self._rows)} "
                f"trajectories already hold {self._bytes} of {self._max_bytes} bytes; make answers shorter, lower "
                f"max_head_offpolicyness or batch_size, or raise the store's max_bytes"
            )
        self._puts += 1
        key = f"t{self._puts:x}"
        self._rows[key] = trajectory
        self._bytes += size
        self._peak = max(self._peak, self._bytes)
        return _tag(key, trajectory)

    def get(self, keys: Iterable[str]) -> list[Trajectory]:
        """The trajectories of ``keys``, in that order.

        Raises:
            UnknownTrajectory: a key is not held (never stored, or deleted).
        """
        return [row for _, row in self._find(keys)]

    def delete(self, keys: Iterable[str]) -> int:
        """Forget ``keys`` and return how many were held; the others are ignored, so that repeating it does no harm."""
        gone = 0
        for key in keys:
            row = self._rows.pop(key, None)
            if row is not None:
                self._bytes -= _nbytes(row)
                gone += 1
        self._deletes += gone
        return gone

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(
            trajectories=len(self._rows),
            bytes=self._bytes,
            peak_bytes=self._peak,
            max_bytes=self._max_bytes,
            puts=self._puts,
            gets=self._gets,
            deletes=self._deletes,
        )

    @asynccontextmanager
    async def serve(self, bind: str, *, keys: RunKeys | None = None) -> AsyncIterator[RpcServer]:
        """Answer ``get(keys)`` (a list of wire dicts, see ``api/trajectory_wire.py``) and ``delete(keys)`` over RPC.

        ``async with store.serve("ipc://...") as server``: train ranks connect to ``server.address``.
        """
        async with RpcServer(bind, {"get": self._get_wire, "delete": self.delete}, keys=keys) as server:
            yield server

    def _find(self, keys: Iterable[str]) -> list[tuple[str, Trajectory]]:
        try:
            found = [(key, self._rows[key]) for key in keys]
        except KeyError as error:
            raise UnknownTrajectory(
                f"trajectory store: no trajectory {error.args[0]!r} (never stored, or already deleted); "
                f"{len(self._rows)} are held"
            ) from None
        self._gets += len(found)
        return found

    def _get_wire(self, keys: list[str]) -> list[dict[str, Any]]:
        return [to_wire(row, key=key) for key, row in self._find(keys)]


def _nbytes(row: Trajectory) -> int:
    arrays = (row.token_ids, row.loss_mask, row.logprobs, row.versions)
    returns = 0 if row.returns is None else row.returns.nbytes
    return _OVERHEAD + sum(array.nbytes for array in arrays) + returns


def _tag(key: str, row: Trajectory) -> TrajectoryTag:
    written = row.versions[row.loss_mask == 1]
    return TrajectoryTag(
        key=key,
        group_id=row.group_id,
        episode_id=row.episode_id,
        length=row.length,
        loss_tokens=int(written.shape[0]),
        reward=row.reward,
        oldest_version=int(written.min()),
        newest_version=int(written.max()),
    )
