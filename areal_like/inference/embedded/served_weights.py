"""Which version this server serves, and the two steps by which a new one arrives.

Refuses what is older than what it has seen: control calls carry (incarnation, version), compared in that order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from areal_like.api.weights import CommitReceipt
from areal_like.api.wire import CommitBody, DigestAnswer, StageAnswer, StageBody
from areal_like.errors import StaleCommand
from areal_like.inference.embedded.engine import Committed, DecodeEngine
from areal_like.weights.staging import StagedWeights

_log = logging.getLogger(__name__)

#: waits for an order of the engine, or withdraws it if its caller has gone
Waiter = Callable[[Future[Committed]], Awaitable[Committed]]


class ServedWeights:
    """Staging beside the live weights, the swap between two tokens, and the receipt for it. One update at a time."""

    def __init__(self, staged: StagedWeights, engine: DecodeEngine, *, server: str) -> None:
        self._staged = staged
        self._engine = engine
        self._server = server
        self._lock = asyncio.Lock()
        self._incarnation = 0
        self._claimed_by = ""
        self._version_incarnation = 0
        self._receipt: CommitReceipt | None = None
        self._bytes_total = 0

    @property
    def incarnation(self) -> int:
        """The newest incarnation that any control call has carried."""
        return self._incarnation

    @property
    def bytes_total(self) -> int:
        """Bytes staged since the start."""
        return self._bytes_total

    def claim(self, incarnation: int, run_id: str) -> None:
        """Give ``incarnation`` to a run that joins. Compares and sets without a break: of two runs, one gets it.

        Raises:
            StaleCommand: (HTTP 409) another run has it, or a newer one.
        """
        again = (incarnation, run_id) == (self._incarnation, self._claimed_by)
        if incarnation <= self._incarnation and not again:
            raise StaleCommand(
                f"{self._server}: incarnation {incarnation} is another run's, the newest is {self._incarnation}"
            )
        self._incarnation, self._claimed_by = incarnation, run_id

    def check_incarnation(self, incarnation: int) -> None:
        """Remember ``incarnation``; refuse one older than remembered.

        Raises:
            StaleCommand: (HTTP 409) the caller belongs to a run that was restored since.
        """
        if incarnation < self._incarnation:
            raise StaleCommand(
                f"{self._server}: incarnation {incarnation} is over, the newest seen is {self._incarnation}"
            )
        self._incarnation = incarnation

    async def stage(self, body: StageBody) -> StageAnswer:
        """Copy a version beside the live one, off the event loop; generation goes on.

        Raises:
            StaleCommand: the manifest is older than what is served.
            WeightUpdateError: it does not fit the model, or its bytes are not what it says.
        """
        manifest = body.manifest
        self._refuse_older(manifest.incarnation, manifest.version)
        async with self._lock:
            report = await asyncio.to_thread(self._staged.stage, manifest)
            self._bytes_total += report.bytes
        return StageAnswer(version=report.version, bytes=report.bytes, seconds=report.seconds)

    async def commit(self, body: CommitBody, wait: Waiter) -> CommitReceipt:
        """Make the staged version live and say what is live now. Committing the live version again repeats its receipt.

        Raises:
            StaleCommand: the version is older than what is served.
            WeightUpdateError: it is not staged; nothing changed.
        """
        self._refuse_older(body.incarnation, body.version)
        async with self._lock:
            if self._staged.staged_version is None and self._is_last(body):
                return await self._repeated_receipt()
            committed = await wait(
                self._engine.commit(body.version, body.mode, lambda: self._staged.commit(body.version))
            )
            self._version_incarnation = body.incarnation
            report = self._staged.report
            # after the swap, so that generation does not wait for the hash; the lock keeps the weights as they are
            digest = await asyncio.to_thread(self._staged.digest)
            self._receipt = CommitReceipt(
                server=self._server,
                incarnation=body.incarnation,
                version=committed.version,
                digest=digest,
                bytes=report.bytes if report else 0,
                seconds_staged=report.seconds if report else 0.0,
                seconds_paused=committed.seconds_paused,
                interrupted_requests=committed.interrupted_requests,
            )
            _log.info("version %d is live: %s", body.version, self._receipt)
            return self._receipt

    async def digest(self) -> DigestAnswer:
        """Digest of what the live tensors hold."""
        async with self._lock:
            digest = await asyncio.to_thread(self._staged.digest)
            return DigestAnswer(version=self._engine.version, digest=digest)

    def _is_last(self, body: CommitBody) -> bool:
        last = self._receipt
        return last is not None and (last.incarnation, last.version) == (body.incarnation, body.version)

    async def _repeated_receipt(self) -> CommitReceipt:
        assert self._receipt is not None
        digest = await asyncio.to_thread(self._staged.digest)
        return self._receipt.model_copy(update={"digest": digest})

    def _refuse_older(self, incarnation: int, version: int) -> None:
        self.check_incarnation(incarnation)
        live = (self._version_incarnation, self._engine.version)
        if (incarnation, version) < live:
            raise StaleCommand(
                f"{self._server}: version {version} of incarnation {incarnation} is older than what is served, "
                f"version {live[1]} of incarnation {live[0]}"
            )
