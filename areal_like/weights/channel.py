"""Publishing a version: export, stage on every server, commit, check the receipts, acknowledge. Torch-free.

The invariant, kept here: when ``publish`` returns or raises, every server in rotation has acknowledged the newest
version that any server was told to commit. A server that cannot leaves the rotation first, and comes back only through
``readmit``, under the same lock, with a receipt for the current version. Nothing waits longer than its deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from areal_like.api.weights import CommitReceipt, InterruptMode, Manifest
from areal_like.api.wire import StageAnswer
from areal_like.errors import ArealLikeError, ReachedNoServer, StaleCommand, WeightUpdateError
from areal_like.weights.losses import tell_lost
from areal_like.weights.manifest import check_manifest


class WeightExporter(Protocol):
    """The trainer's side: rank 0 lays a version out."""

    async def export_weights(self, version: int, incarnation: int) -> Manifest: ...


class WeightServer(Protocol):
    """What a publication asks of one server."""

    async def stage(self, manifest: Manifest, *, timeout: float) -> StageAnswer: ...

    async def commit(self, *, version: int, incarnation: int, mode: InterruptMode, timeout: float) -> CommitReceipt: ...


class ServerRotation(Protocol):
    """Who gets requests, and which version each has acknowledged."""

    def publication_targets(self) -> Mapping[str, WeightServer]:
        """Every server that is in rotation or waits for its first version."""
        ...

    def weight_server(self, server: str) -> WeightServer:
        """A server by name, in rotation or not. Raises ServerUnavailable for a name that it does not know."""
        ...

    def acknowledge(self, receipt: CommitReceipt) -> None:
        """The server serves the receipt's version; from here on it is in rotation."""
        ...

    def eject(self, server: str, reason: str) -> None:
        """The server gets no more requests."""
        ...

    async def next_recovered(self) -> str:
        """Wait for an ejected server that answers again and is due for another try."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatistics:
    """Totals since construction. Seconds of servers are sums over servers; ``seconds_published`` is wall time."""

    version: int = -1
    versions_published: int = 0
    failed_publications: int = 0
    bytes_total: int = 0
    seconds_exported: float = 0.0
    seconds_staged: float = 0.0
    seconds_paused: float = 0.0
    seconds_published: float = 0.0
    interrupted_requests: int = 0
    ejections: int = 0
    readmissions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCalls:
    """Seconds that the two calls of one server's update took, whole, as their caller saw them."""

    stage: float
    commit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationTimes:
    """Where a publication's seconds went: the trainer's export, then the calls to every server that acknowledged."""

    export: float
    servers: Mapping[str, ServerCalls]


class WeightChannel:
    """Moves versions from one trainer to all servers, one publication at a time."""

    def __init__(
        self,
        exporter: WeightExporter,
        rotation: ServerRotation,
        *,
        incarnation: int = 0,
        interrupt: InterruptMode = InterruptMode.KEEP,
        timeout: float = 300.0,
        tell_lost: Callable[[Manifest, str], Awaitable[None]] = tell_lost,
    ) -> None:
        """``timeout``: seconds the export, and then each server's whole update, may take.

        ``tell_lost``: called with a version and the name of a server whose update failed, once each time; it ends
        soon and never raises. The trainer may be waiting for that server.
        """
        self._tell_lost = tell_lost
        self._exporter = exporter
        self._rotation = rotation
        self._incarnation = incarnation
        self._interrupt = interrupt
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._manifest: Manifest | None = None
        self._statistics = ChannelStatistics()
        self._calls: dict[str, ServerCalls] = {}  # of the publication that is under way
        self._times: PublicationTimes | None = None

    @property
    def times(self) -> PublicationTimes | None:
        """Of the last publication that reached a server; None before."""
        return self._times

    @property
    def manifest(self) -> Manifest | None:
        """The current version's manifest; None before the first export."""
        return self._manifest

    def statistics(self) -> ChannelStatistics:
        """A snapshot of the totals."""
        return self._statistics

    async def publish(self, version: int) -> tuple[CommitReceipt, ...]:
        """Bring ``version`` to every server; return the receipts of those that now serve it, in order of name.

        Publishing the current version again is allowed (a publication that found no server may be repeated).

        Raises:
            StaleCommand: a newer version was published before.
            WeightUpdateError: the export overran its deadline or made a wrong manifest.
            ReachedNoServer: no server serves the version; the message has every server's reason. One that comes back
                gets it by :meth:`readmit`.
            RemoteError, RpcError: what the exporter raised. No server was touched.
        """
        async with self._lock:
            started = time.monotonic()
            self._refuse_older(version)
            self._calls = {}
            try:
                manifest = await self._export(version)
                exported = time.monotonic() - started
                receipts = await self._distribute(manifest)
            except ArealLikeError:
                self._count(failed_publications=1)
                raise
            self._times = PublicationTimes(export=exported, servers={r.server: self._calls[r.server] for r in receipts})
            self._statistics = replace(self._statistics, version=version)
            self._count(versions_published=1, seconds_published=time.monotonic() - started)
            return receipts

    async def readmit(self, server: str) -> CommitReceipt:
        """Give an ejected server the current version and, with its receipt, its place in the rotation.

        Raises:
            WeightUpdateError: nothing was published yet, or the server failed again (it stays out, with the reason).
            ServerUnavailable: no server of that name.
        """
        async with self._lock:
            manifest = self._manifest
            if manifest is None:
                raise WeightUpdateError(f"{server} cannot be readmitted: no version was published yet")
            outcome = await self._update(server, self._rotation.weight_server(server), manifest)
            if isinstance(outcome, str):
                self._rotation.eject(server, outcome)
                raise WeightUpdateError(f"{server} was not readmitted: {outcome}")
            self._accept(outcome)
            self._count(readmissions=1)
            return outcome

    async def readmit_recovered(self) -> None:
        """For ever: readmit servers as they recover. The composition root runs it as a task and cancels it."""
        while True:
            server = await self._rotation.next_recovered()
            try:
                await self.readmit(server)
            except ArealLikeError:
                continue  # still ejected with its reason; the rotation offers it again after a longer wait

    def _refuse_older(self, version: int) -> None:
        if self._manifest is not None and version < self._manifest.version:
            raise StaleCommand(
                f"publish({version}): version {self._manifest.version} is already out; a restored run needs a "
                "channel of a new incarnation"
            )

    async def _export(self, version: int) -> Manifest:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                manifest = await self._exporter.export_weights(version, self._incarnation)
        except TimeoutError:
            raise WeightUpdateError(f"export of version {version} took more than {self._timeout:g} s") from None
        check_manifest(manifest)
        if (manifest.version, manifest.incarnation) != (version, self._incarnation):
            raise WeightUpdateError(
                f"asked to export version {version} of incarnation {self._incarnation}, the trainer exported "
                f"{manifest.version} of {manifest.incarnation}"
            )
        self._manifest = manifest
        self._count(seconds_exported=time.monotonic() - started)
        return manifest

    async def _distribute(self, manifest: Manifest) -> tuple[CommitReceipt, ...]:
        """Update all targets side by side; whoever has not acknowledged at the end is out, whatever ended it."""
        targets = self._rotation.publication_targets()
        receipts: dict[str, CommitReceipt] = {}
        reasons: dict[str, str] = {}

        async def update(name: str, server: WeightServer) -> None:
            outcome = await self._update(name, server, manifest)
            if isinstance(outcome, str):
                self._eject(name, outcome, reasons)
            else:
                self._accept(outcome)
                receipts[name] = outcome

        try:
            async with asyncio.TaskGroup() as tasks:
                for name, server in targets.items():
                    tasks.create_task(update(name, server), name=f"publish-{manifest.version}-{name}")
        finally:
            for name in targets.keys() - receipts.keys() - reasons.keys():
                self._eject(name, f"publication of version {manifest.version} was broken off", reasons)
        if not receipts:
            detail = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items()))
            raise ReachedNoServer(
                f"version {manifest.version} reached no server ({detail or 'none was in rotation'}); "
                "see the servers' logs"
            )
        return tuple(receipts[name] for name in sorted(receipts))

    async def _update(self, name: str, server: WeightServer, manifest: Manifest) -> CommitReceipt | str:
        """The verified receipt, or the reason why there is none. Ends at the deadline, whatever the server does."""
        began = asyncio.get_running_loop().time()
        deadline, step = began + self._timeout, "stage"
        try:
            async with asyncio.timeout_at(deadline):
                await server.stage(manifest, timeout=self._timeout)
                step, staged = "commit", asyncio.get_running_loop().time()
                receipt = await server.commit(
                    version=manifest.version,
                    incarnation=manifest.incarnation,
                    mode=self._interrupt,
                    timeout=deadline - staged,
                )
        except TimeoutError:
            await self._tell_lost(manifest, name)
            return f"{step} of version {manifest.version} did not end within {self._timeout:g} s"
        except ArealLikeError as error:
            await self._tell_lost(manifest, name)
            return f"{step} of version {manifest.version} failed: {type(error).__name__}: {error}"
        self._calls[name] = ServerCalls(stage=staged - began, commit=asyncio.get_running_loop().time() - staged)
        return _fault(name, receipt, manifest) or receipt

    def _accept(self, receipt: CommitReceipt) -> None:
        self._rotation.acknowledge(receipt)
        self._count(
            bytes_total=receipt.bytes,
            seconds_staged=receipt.seconds_staged,
            seconds_paused=receipt.seconds_paused,
            interrupted_requests=receipt.interrupted_requests,
        )

    def _eject(self, name: str, reason: str, reasons: dict[str, str]) -> None:
        reasons[name] = reason
        self._rotation.eject(name, reason)
        self._count(ejections=1)

    def _count(self, **increments: float) -> None:
        now = self._statistics
        self._statistics = replace(now, **{key: getattr(now, key) + n for key, n in increments.items()})


def _fault(name: str, receipt: CommitReceipt, manifest: Manifest) -> str | None:
    """What is wrong with a receipt, or None: it proves that the server called ``name`` serves ``manifest``."""
    if receipt.server != name:
        return f"the receipt is signed by {receipt.server!r}, not {name!r}"
    if (receipt.incarnation, receipt.version) != (manifest.incarnation, manifest.version):
        return (
            f"the receipt is for version {receipt.version} of incarnation {receipt.incarnation}, not "
            f"{manifest.version} of {manifest.incarnation}"
        )
    if receipt.digest != manifest.digest:
        return (
            f"its live weights have digest {receipt.digest}, version {manifest.version} has {manifest.digest}: "
            "a tensor is missing, stale or half-applied"
        )
    return None
