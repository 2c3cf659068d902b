"""Control of one vLLM server through its own RL interface, and our weight-transfer engine in its workers.

An update:

    stage --> workers fetch and verify in the background, generation goes on --> status: staged
    begin, beside it the metrics --> pause (by mode) --> finish (load, refresh tied heads) + label --> resume, status

Each arrow is a round trip: a busy server takes tens of milliseconds to come to a call, and the trainer waits for all of
them. So what need not be asked apart is not. Nothing touches the live weights before the pause, and nothing but pause,
finish and resume is asked for while it lasts: ``finish`` answers well only if every worker has loaded and verified what
``begin`` had named. If it fails, the workers say whether it had begun to load: if not, the server runs on as it was; if
so, it stays paused and leaves the rotation, and the next whole update mends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from areal_like.api.weights import CommitReceipt, InterruptMode, Manifest
from areal_like.api.wire import DigestAnswer, HealthAnswer, PauseAnswer, StageAnswer
from areal_like.client.memory import MemoryPart
from areal_like.errors import ArealLikeError, RequestError, ServerUnavailable, StaleCommand, WeightUpdateError
from areal_like.inference.backends.epoch import ServerEpoch
from areal_like.inference.backends.http_control import EngineHttp
from areal_like.inference.backends.labels import version_label
from areal_like.inference.backends.vllm_memory import VllmMemory
from areal_like.inference.backends.vllm_workers import VllmWorkers, WorkerStatus
from areal_like.inference.token_path import PATH, PROTOCOL

_First = TypeVar("_First")
_Second = TypeVar("_Second")

#: seconds between two looks at a staging: first, and at most
_FIRST_LOOK, _LONGEST_LOOK = 0.01, 0.2
#: seconds that a drained answer may take from the server to us
_COLLECTED = 1.0
#: the parts of a pause
_PARTS = ("pause", "load", "resume")
#: seconds for putting things right after a call that failed
_MEND_TIMEOUT = 10.0
#: pause calls by mode where the server reports spans...
_PAUSES = {
    InterruptMode.KEEP: "/pause?mode=keep&clear_cache=false",  # running requests go on on their old KV
    InterruptMode.RECOMPUTE: "/pause?mode=keep",  # it preempts them, and recomputes their KV under the new weights
    InterruptMode.DRAIN: "/pause?mode=wait",
}
#: ...and where it does not: what runs is cut, and resubmitted by the client
_CUTTING = {**_PAUSES, InterruptMode.RECOMPUTE: "/pause?mode=abort"}


class VllmControl:
    """:class:`areal_like.client.control.ServerControl` and :class:`areal_like.client.memory.ReleasesMemory`."""

    def __init__(self, name: str, url: str, epoch: ServerEpoch, *, token: str, spans: bool) -> None:
        self._name = name
        self._http = EngineHttp(name, url, token=token)
        self._memory = VllmMemory(name, self._http)
        self._workers = VllmWorkers(name, self._http, self._memory.meet)
        self._epoch = epoch
        self._spans = spans
        self._pauses = _PAUSES if spans else _CUTTING
        self._newest_incarnation = -1
        self._as_started = False
        self._has_route = False
        self._context_length = 0

    async def health(self, *, timeout: float) -> HealthAnswer:
        """Asks the workers, too: the API server alone answers 200 while its engine hangs."""
        deadline = time.monotonic() + timeout
        await self._http.text("GET", "/health", timeout=timeout)
        status = await self._workers.status(timeout=max(deadline - time.monotonic(), 0.1))
        self._check_flags(status)
        await self._check_route(status, timeout=max(deadline - time.monotonic(), 0.1))
        load = await self._load(timeout=max(deadline - time.monotonic(), 0.1))
        paused = await self._http.get("/is_paused", timeout=max(deadline - time.monotonic(), 0.1))
        first = self._as_started and status.version < 0
        return HealthAnswer(
            status="ok",
            version=0 if first else status.version,
            incarnation=0 if first else status.incarnation,
            paused=bool(paused and paused.get("is_paused")),
            in_flight=load[0],
            queued=load[1],
            context_length=await self._ask_context_length(timeout=max(deadline - time.monotonic(), 0.1)),
        )

    async def digest(self, *, timeout: float) -> DigestAnswer:
        """What the workers loaded last. Before any update they hold what they were started with, and have no digest.

        Those weights count as version 0 from here on, and are labelled so: an evaluation asks for it.
        """
        status = await self._workers.status(timeout=timeout)
        if status.version < 0:
            if self._spans:
                label = {"new_version": version_label(0, 0)}
                await self._http.post("/update_weight_version", label, timeout=timeout)
            self._as_started = True
        self._epoch.end(max(status.incarnation, 0), max(status.version, 0))
        return DigestAnswer(version=max(status.version, 0), digest="" if self._memory.lent.lost else status.digest)

    async def pause(self, *, incarnation: int, mode: InterruptMode, timeout: float) -> PauseAnswer:
        self._refuse_older(incarnation)
        await self._http.post(self._pauses[mode], timeout=timeout)
        return await self._pause_answer(paused=True)

    async def resume(self, *, incarnation: int, timeout: float) -> PauseAnswer:
        """Raises WeightUpdateError where the live weights are half of one version: resuming would end the server."""
        self._refuse_older(incarnation)
        self._memory.lent.check_resume()
        if (await self._workers.status(timeout=timeout)).damaged:
            raise WeightUpdateError(f"{self._name}: its weights are half-loaded; only a whole update can mend it")
        await self._http.post("/resume", timeout=timeout)
        return await self._pause_answer(paused=False)

    async def stage(self, manifest: Manifest, *, timeout: float) -> StageAnswer:
        """Workers fetch and verify ``manifest`` beside the live weights.

        Raises:
            WeightUpdateError: a tensor is missing, unknown, misshapen or damaged (it is named), or memory is lent.
            StaleCommand: the workers have a newer version.
            ServerUnavailable: no answer in time.
        """
        started = time.monotonic()
        self._refuse_older(manifest.incarnation)
        self._memory.lent.check_update()  # they would lay it out in the memory that was lent
        try:
            async with asyncio.timeout(timeout):
                status = await self._workers.stage(manifest, timeout=timeout)
                if status.refused:
                    self._refuse_manifest(manifest, status)
                status = await self._until_staged(manifest, status, timeout=timeout)
        except TimeoutError:
            raise ServerUnavailable(f"{self._name}: version {manifest.version} not staged in {timeout:g} s") from None
        self._newest_incarnation = max(self._newest_incarnation, manifest.incarnation)
        return StageAnswer(version=manifest.version, bytes=status.bytes, seconds=time.monotonic() - started)

    async def commit(self, *, version: int, incarnation: int, mode: InterruptMode, timeout: float) -> CommitReceipt:
        """Swap the staged version in.

        Raises:
            WeightUpdateError: it is not staged, or loading failed.
            StaleCommand: a newer version was committed.
            ServerUnavailable: no answer in time; a drain that overruns is withdrawn.
        """
        self._refuse_older(incarnation)
        if (incarnation, version) < self._epoch.known:
            raise StaleCommand(f"{self._name}: commit of {version} after {self._epoch.version}")
        self._memory.lent.check_update()
        begun, in_hand = await self._begin(incarnation, version, mode, timeout=timeout)
        loaded = begun.state == "applied" and not self._memory.lent.lost
        if loaded and begun.loaded == (incarnation, version) and not begun.refused:
            self._epoch.end(incarnation, version)
            return self._receipt(begun, parts={}, interrupted=0)
        if begun.refused or begun.state != "staged" or begun.staged != (incarnation, version):
            raise WeightUpdateError(f"{self._name}: commit of version {version}: {begun.told()}; stage it first")
        self._epoch.begin()
        parts, status = await self._swap(incarnation, version, mode, timeout=timeout)
        if status.state != "applied" or status.loaded != (incarnation, version):
            await self._stop_unlike(version, status)
        self._epoch.end(incarnation, version)
        return self._receipt(status, parts=parts, interrupted=in_hand)

    async def abort(self, rids: Sequence[str], *, timeout: float) -> int:
        """vLLM counts the ids that it was given; those that had ended are among them."""
        answer = await self._http.post("/abort_requests", {"request_ids": list(rids)}, timeout=timeout)
        return int((answer or {}).get("aborted", 0))

    async def release_memory(self, *, incarnation: int, keep_weights: bool, timeout: float) -> None:
        self._refuse_older(incarnation)
        possible = (await self._workers.status(timeout=timeout)).sleeps
        in_hand = sum(await self._load(timeout=timeout))
        await self._memory.release(possible=possible, in_hand=in_hand, keep_weights=keep_weights, timeout=timeout)

    async def reclaim_memory(self, part: MemoryPart, *, incarnation: int, timeout: float) -> None:
        """Weights whose update failed half-way keep their KV cache out: vLLM would run with the last part."""
        self._refuse_older(incarnation)
        if part is MemoryPart.KV_CACHE and (await self._workers.status(timeout=timeout)).damaged:
            raise WeightUpdateError(f"{self._name}: its weights are half-loaded; only a whole update can mend it")
        if await self._memory.reclaim(part, timeout=timeout):
            self._memory.reclaimed(part, await self._workers.status(timeout=timeout))
            await self._run(timeout=timeout)

    async def aclose(self) -> None:
        await self._http.aclose()

    # -- one update --

    async def _until_staged(self, manifest: Manifest, status: WorkerStatus, *, timeout: float) -> WorkerStatus:
        """A call that waits would hold up generation inside the engine: short questions do not."""
        pause = _FIRST_LOOK
        while True:
            if status.state == "failed":
                raise WeightUpdateError(f"{self._name}: {status.error}")
            if status.state not in ("staging", "staged") or status.staged != (manifest.incarnation, manifest.version):
                raise WeightUpdateError(f"{self._name}: version {manifest.version} is not staged: {status.told()}")
            if status.state == "staged":
                return status
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK)
            status = await self._workers.status(timeout=timeout)

    def _refuse_manifest(self, manifest: Manifest, status: WorkerStatus) -> NoReturn:
        """Raises StaleCommand or WeightUpdateError: a worker refused it."""
        old = (manifest.incarnation, manifest.version) < status.loaded
        raise (StaleCommand if old else WeightUpdateError)(f"{self._name}: {status.refused}")

    async def _begin(
        self, incarnation: int, version: int, mode: InterruptMode, *, timeout: float
    ) -> tuple[WorkerStatus, int]:
        """The workers' answer, and how many requests the commit will interrupt. Changes nothing that is served."""
        begun = self._workers.begin(incarnation, version, timeout=timeout)
        if mode is InterruptMode.DRAIN:
            return await begun, 0
        status, load = await _both(begun, self._load(timeout=timeout))
        return status, sum(load)

    async def _swap(
        self, incarnation: int, version: int, mode: InterruptMode, *, timeout: float
    ) -> tuple[dict[str, float], WorkerStatus]:
        """Pause, load and label, resume: seconds of each, and what the workers hold then.

        Whatever fails before loading began is undone.
        """
        deadline = time.monotonic() + timeout
        times = [time.monotonic()]
        try:
            if self._memory.lent.serves:
                await self._http.post(self._pauses[mode], timeout=timeout)
            if mode is InterruptMode.DRAIN:
                await self._collect()
            times.append(time.monotonic())
            label = {"weight_version": version_label(incarnation, version)}
            await self._http.post("/finish_weight_update", label, timeout=max(deadline - time.monotonic(), 0.1))
            times.append(time.monotonic())
        except (ArealLikeError, asyncio.CancelledError) as error:
            told = await self._undo()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise WeightUpdateError(f"{self._name}: commit of version {version}: {error}; {told}") from error
        self._memory.lent.updated()
        self._epoch.load()
        left = max(deadline - time.monotonic(), _MEND_TIMEOUT)
        resumed, status = await _both(self._run(timeout=left), self._workers.status(timeout=left))
        times.append(resumed)
        return {part: end - begin for part, (begin, end) in zip(_PARTS, pairwise(times), strict=True)}, status

    async def _collect(self) -> None:
        """Answers that a drain has waited for may still be on their way; later, nobody could tell their version.

        What has no answer by then failed, or waits for the new weights.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_COLLECTED):
                while self._epoch.posted:  # noqa: ASYNC110  # many may be on their way; one event each costs more
                    await asyncio.sleep(_FIRST_LOOK)
        self._epoch.posted.clear()

    async def _stop_unlike(self, version: int, status: WorkerStatus) -> NoReturn:
        """Stop a server that holds another version than it was told to, whatever its label says.

        Raises:
            WeightUpdateError: always.
        """
        with suppress(ArealLikeError):
            await self._http.post(self._pauses[InterruptMode.KEEP], timeout=_MEND_TIMEOUT)
        raise WeightUpdateError(
            f"{self._name}: commit of version {version}: it was not loaded: {status.told()}; the server stays paused"
        )

    async def _undo(self) -> str:
        """Resume a server whose update failed, if its weights are whole; what was done, in words."""
        with suppress(ArealLikeError):
            status = await self._workers.status(timeout=_MEND_TIMEOUT)
            if status.damaged or status.state == "applied":
                return "it stays paused, since it is not at the published version"
            await self._run(timeout=_MEND_TIMEOUT)
            self._epoch.withdraw()
            return "it runs on with the weights it had"
        return "and it does not answer any more"

    async def _run(self, *, timeout: float) -> float:
        """When it ran again (monotonic). A server whose memory is out stands on."""
        if self._memory.lent.serves:
            await self._http.post("/resume", timeout=timeout)
        return time.monotonic()

    # -- small questions --

    async def _load(self, *, timeout: float) -> tuple[int, int]:
        """Requests that run and that wait, from the server's metrics."""
        text = await self._http.text("GET", "/metrics", timeout=timeout)
        return _gauge(text, "vllm:num_requests_running"), _gauge(text, "vllm:num_requests_waiting")

    async def _ask_context_length(self, *, timeout: float) -> int:
        if not self._context_length:
            models = await self._http.get("/v1/models", timeout=timeout)
            try:
                self._context_length = int(models["data"][0]["max_model_len"])
            except (LookupError, TypeError, ValueError) as error:
                raise ServerUnavailable(f"{self._name}: /v1/models tells no max_model_len: {models}") from error
        return self._context_length

    async def _pause_answer(self, *, paused: bool) -> PauseAnswer:
        in_flight, _ = await self._load(timeout=_MEND_TIMEOUT)
        return PauseAnswer(paused=paused, in_flight=in_flight, version=max(self._epoch.version, 0))

    def _receipt(self, status: WorkerStatus, *, parts: Mapping[str, float], interrupted: int) -> CommitReceipt:
        """``parts``: seconds of the pause, one after the other."""
        inside = {f"load.{part}": seconds for part, seconds in status.parts.items()} if parts else {}
        return CommitReceipt(
            server=self._name,
            incarnation=status.incarnation,
            version=status.version,
            digest=status.digest,
            bytes=status.bytes,
            seconds_staged=status.seconds,
            seconds_paused=sum(parts.values()),
            interrupted_requests=interrupted,
            seconds_by_part={**parts, **inside},
        )

    def _check_flags(self, status: WorkerStatus) -> None:
        """Somebody else may have started it: without the right log-probs it is refused, without safe seeds unseeded."""
        if status.logprobs_mode != "processed_logprobs":
            raise ServerUnavailable(
                f"{self._name}: it was started with --logprobs-mode {status.logprobs_mode}, whose log-probs ignore "
                "temperature and top-p; start it with processed_logprobs"
            )
        self._epoch.seeds = status.seeds

    async def _check_route(self, status: WorkerStatus, *, timeout: float) -> None:
        """Requests go to a path that our middleware answers: asked once, and again of a server that begins anew."""
        if self._has_route and status.version >= 0:
            return
        advice = "start it with the --middleware that docs/engines.md names, of this version of areal_like"
        try:
            found = await self._http.get(PATH, timeout=timeout)
        except RequestError as error:
            raise ServerUnavailable(f"{error}; {advice}") from error
        if not isinstance(found, dict) or found.get("protocol") != PROTOCOL:
            raise ServerUnavailable(f"{self._name} {PATH}: wanted protocol {PROTOCOL}, got {found}; {advice}")
        self._has_route = True

    def _refuse_older(self, incarnation: int) -> None:
        if incarnation < self._newest_incarnation:
            raise StaleCommand(
                f"{self._name}: a call of incarnation {incarnation}, after one of {self._newest_incarnation}"
            )


async def _both(first: Coroutine[Any, Any, _First], second: Coroutine[Any, Any, _Second]) -> tuple[_First, _Second]:
    """Two calls on their way at once, ``first`` ahead. Failures are raised when both have ended, ``first``'s before."""
    tasks = asyncio.create_task(first), asyncio.create_task(second)
    await asyncio.gather(*tasks, return_exceptions=True)
    return tasks[0].result(), tasks[1].result()


def _gauge(metrics: str, name: str) -> int:
    """The sum of a gauge over its labels in Prometheus' text form; 0 where it is missing."""
    values = (line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return int(sum(map(float, values)))
