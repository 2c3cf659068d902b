"""Publishing as the loop sees it: a version goes out, its receipts are counted, rollouts learn what is acknowledged."""

from __future__ import annotations

import logging
from typing import NoReturn, Protocol

from areal_like.api.weights import CommitReceipt
from areal_like.control.journal import RunJournal
from areal_like.errors import ReachedNoServer
from areal_like.weights.channel import PublicationTimes

_LOG = logging.getLogger(__name__)


class Channel(Protocol):
    @property
    def times(self) -> PublicationTimes | None:
        """Of the publication before."""
        ...

    async def publish(self, version: int) -> tuple[CommitReceipt, ...]: ...


class AcknowledgedVersions(Protocol):
    @property
    def lowest_version(self) -> int: ...

    async def changed(self) -> None: ...

    async def look_at_all(self) -> None: ...

    def check_taken(self) -> None: ...

    async def regained(self, version: int, seconds: float) -> bool: ...

    def whereabouts(self) -> str: ...


class AcknowledgementListener(Protocol):
    def acknowledged(self, version: int) -> None: ...


class WeightPublisher:
    """Publishes through the channel, and keeps the rollout controller's s equal to the pool's lowest version."""

    def __init__(
        self,
        *,
        channel: Channel,
        pool: AcknowledgedVersions,
        rollouts: AcknowledgementListener,
        journal: RunJournal,
        patience: float = 0.0,
    ) -> None:
        """``patience``: seconds to wait for a server when none is left; somebody else may start one again."""
        self._patience = patience
        self._channel = channel
        self._pool = pool
        self._rollouts = rollouts
        self._journal = journal

    async def publish(self, version: int) -> None:
        """Bring ``version`` to every server that can take it. Where none is left, wait for one that comes back.

        Raises:
            WeightUpdateError: it could not be exported.
            ReachedNoServer: no server serves it.
            ServersTaken: since all of them serve another run by now.
        """
        with self._journal.publication(version):
            try:
                receipts = await self._channel.publish(version)
            except ReachedNoServer as error:
                await self._until_regained(version, error)
                receipts = ()
        self._journal.published(receipts, self._channel.times)
        self._tell()

    async def _until_regained(self, version: int, error: ReachedNoServer) -> None:
        if not self._patience:  # servers of ours, which no other run can take and nobody starts again
            raise error
        await self._pool.look_at_all()
        self._pool.check_taken()
        _LOG.warning("%s; waiting up to %g s for one to come back", error, self._patience)
        if not await self._pool.regained(version, self._patience):
            self._pool.check_taken()
            raise ReachedNoServer(f"{error}; none came back ({self._pool.whereabouts()})") from error

    async def follow(self) -> NoReturn:
        """For ever: pass on what changes between publications, as when a server that was behind leaves the rotation.

        Raises:
            ServersTaken: another run has every server.
        """
        while True:
            self._pool.check_taken()
            self._tell()
            await self._pool.changed()

    def _tell(self) -> None:
        if self._pool.lowest_version >= 0:
            self._rollouts.acknowledged(self._pool.lowest_version)
