"""A rank's side of the trajectory store: fetch rows by key."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from areal_like.api.trajectory import Trajectory
from areal_like.api.trajectory_wire import from_wire
from areal_like.rpc.security import RunKeys
from areal_like.rpc.sync_client import SyncRpcClient

#: rows per call: bounds one message, and how long the store's loop is busy with it
ROWS_PER_CALL = 128


class StoreClient:
    """Fetches trajectories. Use as ``with StoreClient(address) as store``."""

    def __init__(self, address: str, *, keys: RunKeys | None = None, timeout: float = 60.0) -> None:
        """``timeout``: seconds one call of at most ``ROWS_PER_CALL`` rows may take."""
        self._client = SyncRpcClient(address, keys=keys)
        self._timeout = timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def fetch(self, keys: Sequence[str]) -> list[Trajectory]:
        """The trajectories of ``keys``, in that order. Arrays are read-only.

        Raises:
            RemoteError: the store does not hold a key.
            RpcError: the store does not answer.
        """
        rows: list[Trajectory] = []
        for start in range(0, len(keys), ROWS_PER_CALL):
            part = list(keys[start : start + ROWS_PER_CALL])
            rows.extend(map(from_wire, self._client.call("get", timeout=self._timeout, keys=part)))
        return rows
