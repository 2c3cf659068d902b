"""Control of one SGLang server through its own RL interface.

An update:

    stage: check the manifest against the model, verify every byte, lay the version out as SGLang reads it
    commit: pause_generation (by mode) --> load and label --> compare checksums --> continue_generation

Nothing touches the live weights before the pause. A load that fails leaves weights that nobody can vouch for: the
server stays paused, leaves the rotation, and the next whole update mends it.

| mode      | pause    | prefix cache                                                                      |
| --------- | -------- | --------------------------------------------------------------------------------- |
| keep      | in_place | cannot be flushed while requests stand: new requests carry another salt           |
| recompute | retract  | flushed with the load; retracted requests recompute their KV under the new weights |
| drain     | none run | flushed while waiting for the last request                                        |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal_like.api.weights import CommitReceipt, InterruptMode, Manifest
from areal_like.api.wire import DigestAnswer, HealthAnswer, PauseAnswer, StageAnswer
from areal_like.client.memory import MemoryPart
from areal_like.errors import ArealLikeError, RequestError, ServerUnavailable, StaleCommand, WeightUpdateError
from areal_like.inference.backends.http_control import EngineHttp
from areal_like.inference.backends.labels import parse_label, version_label
from areal_like.inference.backends.sglang_load import Load, Refused
from areal_like.inference.backends.sglang_memory import SglangMemory
from areal_like.inference.backends.sglang_server import ServerFacts, ServerState, read_facts
from areal_like.weights.manifest import check_manifest

#: seconds for putting things right after a call that failed
_MEND_TIMEOUT = 10.0
_PAUSES = {InterruptMode.KEEP: "in_place", InterruptMode.RECOMPUTE: "retract", InterruptMode.DRAIN: "in_place"}


class SglangControl:
    """:class:`areal_like.client.control.ServerControl` and :class:`areal_like.client.memory.ReleasesMemory`."""

    def __init__(self, name: str, url: str, state: ServerState, load: Load, *, token: str) -> None:
        """``load``: how a version gets into the server."""
        self._name = name
        self._http = EngineHttp(name, url, token=token)
        self._state = state
        self._load = load
        self._memory = SglangMemory(name, self._http, state)
        self._newest_incarnation = -1
        self._paused = False
        self._damaged = False
        self._staged: Manifest | None = None
        self._seconds_staged = 0.0
        self._applied: Manifest | None = None
        self._checksums: Mapping[str, str] = {}

    async def health(self, *, timeout: float) -> HealthAnswer:
        """Asks the scheduler, too (``/server_info`` goes through it): the HTTP server alone answers while it hangs."""
        deadline = time.monotonic() + timeout
        info = await self._http.get("/server_info", timeout=timeout)
        facts = self._state.facts
        if facts is None:
            facts = self._state.facts = await asyncio.to_thread(read_facts, self._name, info or {})
        label = await self._label(timeout=_left(deadline))
        running, waiting = await self._counts(timeout=_left(deadline))
        return HealthAnswer(
            status="ok",
            incarnation=label[0],
            version=label[1],
            paused=self._paused,
            in_flight=running,
            queued=waiting,
            context_length=facts.context_length,
        )

    async def digest(self, *, timeout: float) -> DigestAnswer:
        """What was loaded last through us. Before any update it serves what it was started with, under no label."""
        incarnation, version = await self._label(timeout=timeout)
        self._state.epoch.end(max(incarnation, 0), max(version, 0))
        self._state.as_loaded = version < 0
        known = self._applied is not None and (self._applied.incarnation, self._applied.version) == (
            incarnation,
            version,
        )
        return DigestAnswer(version=max(version, 0), digest=self._applied.digest if known and self._applied else "")

    async def pause(self, *, incarnation: int, mode: InterruptMode, timeout: float) -> PauseAnswer:
        """Acknowledged by the scheduler: SGLang answers before it has heard of a pause, and hears calls in order."""
        self._refuse_older(incarnation)
        await self._pause(mode, timeout=timeout)
        await self._http.get("/server_info", timeout=timeout)
        return await self._pause_answer()

    async def resume(self, *, incarnation: int, timeout: float) -> PauseAnswer:
        """Raises WeightUpdateError where a load failed: nobody can vouch for the live weights."""
        self._refuse_older(incarnation)
        self._memory.lent.check_resume()
        if self._damaged:
            raise WeightUpdateError(f"{self._name}: its weights are half-loaded; only a whole update can mend it")
        await self._continue(timeout=timeout)
        return await self._pause_answer()

    async def stage(self, manifest: Manifest, *, timeout: float) -> StageAnswer:
        """Check ``manifest`` against the model and verify its bytes, beside the live weights.

        Raises:
            WeightUpdateError: a tensor is missing, unknown, misshapen or damaged (it is named).
            StaleCommand: a newer version was committed.
            ServerUnavailable: not in time.
        """
        started = time.monotonic()
        self._refuse_older(manifest.incarnation)
        if (manifest.incarnation, manifest.version) < self._state.epoch.known:
            raise StaleCommand(f"{self._name}: stage of {manifest.version}, and it serves {self._state.epoch.version}")
        self._staged = None
        try:
            async with asyncio.timeout(timeout):
                facts = await self._ask_facts(timeout=timeout)
                check_manifest(manifest)
                facts.expected.check(manifest)
                await self._load.stage(manifest, facts, self._http)
        except TimeoutError:
            raise ServerUnavailable(f"{self._name}: version {manifest.version} not staged in {timeout:g} s") from None
        self._newest_incarnation = max(self._newest_incarnation, manifest.incarnation)
        self._staged, self._seconds_staged = manifest, time.monotonic() - started
        return StageAnswer(version=manifest.version, bytes=manifest.total_bytes, seconds=self._seconds_staged)

    async def commit(self, *, version: int, incarnation: int, mode: InterruptMode, timeout: float) -> CommitReceipt:
        """Swap the staged version in.

        Raises:
            WeightUpdateError: it is not staged, loading failed, or the server cannot do ``mode``.
            StaleCommand: a newer version was committed.
            ServerUnavailable: no answer in time; a drain that overruns is withdrawn.
        """
        self._refuse_older(incarnation)
        if (incarnation, version) < self._state.epoch.known:
            raise StaleCommand(f"{self._name}: commit of {version} after {self._state.epoch.version}")
        wanted, applied = (incarnation, version), self._applied
        if applied is not None and (applied.incarnation, applied.version) == wanted and not self._damaged:
            if self._paused:  # the call that was to resume it failed
                await self._continue(timeout=timeout)
            return self._receipt(applied, seconds_paused=0.0, interrupted=0)
        staged = self._staged
        if staged is None or (staged.incarnation, staged.version) != wanted:
            raise WeightUpdateError(f"{self._name}: commit of version {version}: it is not staged; stage it first")
        facts = await self._ask_facts(timeout=timeout)
        if mode is InterruptMode.KEEP and facts.overlapped:
            raise WeightUpdateError(
                f"{self._name}: rollout.interrupt=keep needs sglang.disable_overlap_schedule: true; otherwise the "
                "token that is being computed at a pause is labelled with the weights that come after it"
            )
        self._memory.lent.check_update()
        in_flight, queued = await self._counts(timeout=timeout)
        seconds = await self._swap(staged, facts, mode, timeout=timeout)
        interrupted = 0 if mode is InterruptMode.DRAIN else in_flight + queued
        return self._receipt(staged, seconds_paused=seconds, interrupted=interrupted)

    async def abort(self, rids: Sequence[str], *, timeout: float) -> int:
        """SGLang does not tell how many it cut; those asked for are counted, or all that were in hand."""
        if rids:
            for rid in rids:
                await self._http.text("POST", "/abort_request", {"rid": rid}, timeout=timeout)
            return len(rids)
        counts = await self._counts(timeout=timeout)
        await self._http.text("POST", "/abort_request", {"abort_all": True}, timeout=timeout)
        return sum(counts)

    async def release_memory(self, *, incarnation: int, keep_weights: bool, timeout: float) -> None:
        """See the protocol. What was applied counts no more once weights are given up."""
        self._refuse_older(incarnation)
        facts = await self._ask_facts(timeout=timeout)
        released = self._memory.release(facts, keep_weights=keep_weights, paused=self._paused, timeout=timeout)
        try:
            await released
        finally:
            self._paused = self._paused or not self._memory.lent.serves
            if self._memory.lent.lost:
                self._applied, self._checksums, self._state.as_loaded = None, {}, False

    async def reclaim_memory(self, part: MemoryPart, *, incarnation: int, timeout: float) -> None:
        self._refuse_older(incarnation)
        if await self._memory.reclaim(part, timeout=timeout):
            await self._continue(timeout=timeout)

    async def aclose(self) -> None:
        await self._load.aclose()
        await self._http.aclose()

    # -- one update --

    async def _swap(self, staged: Manifest, facts: ServerFacts, mode: InterruptMode, *, timeout: float) -> float:
        """Pause, load, check, resume; the seconds between. Whatever fails before loading began is undone."""
        deadline = time.monotonic() + timeout
        epoch = self._state.epoch
        epoch.begin()
        loading = False
        try:
            await self._pause(mode, timeout=timeout)
            started = time.monotonic()
            label = version_label(staged.incarnation, staged.version)
            loading = True
            await self._load.apply(self._http, label, flush=mode is InterruptMode.RECOMPUTE, timeout=_left(deadline))
            await self._check_loaded(staged, facts, label, timeout=_left(deadline))
        except (ArealLikeError, asyncio.CancelledError) as error:
            untouched = isinstance(error, Refused) or not loading
            self._damaged = self._damaged or not untouched
            told = await self._undo()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise WeightUpdateError(f"{self._name}: commit of version {staged.version}: {error}; {told}") from error
        self._applied, self._staged, self._damaged = staged, None, False
        self._state.as_loaded = False
        self._memory.lent.updated()
        self._newest_incarnation = max(self._newest_incarnation, staged.incarnation)
        epoch.end(staged.incarnation, staged.version)
        await self._continue(timeout=max(_left(deadline), _MEND_TIMEOUT))
        return time.monotonic() - started

    async def _undo(self) -> str:
        """Resume a server whose live weights were not touched; what was done, in words."""
        if self._damaged:
            return "it stays paused, since nobody can vouch for its weights"
        self._state.epoch.withdraw()
        try:
            await self._continue(timeout=_MEND_TIMEOUT)
        except ArealLikeError:
            return "and it does not answer any more"
        return "it runs on with the weights it had"

    async def _check_loaded(self, staged: Manifest, facts: ServerFacts, label: str, *, timeout: float) -> None:
        """The label is ours, and the live tensors are those that were verified, as far as that can be told.

        On a CPU SGLang's checksums are SHA-256 of a tensor's bytes, which we know of every tensor whose live form is
        that of the checkpoint or a fusion of its parts; elsewhere they must at least have changed with the content.
        """
        deadline = time.monotonic() + timeout
        if await self._label(timeout=timeout) != (staged.incarnation, staged.version):
            raise WeightUpdateError(f"it does not say that it serves {label}")
        answer = await self._http.post("/weights_checker", {"action": "checksum"}, timeout=_left(deadline))
        found = _checksums(self._name, answer)
        expected = self._load.checksums if facts.device == "cpu" and facts.ranks == 1 else {}
        wrong = sorted(name for name, value in expected.items() if found.get(f"0/{name}", value) != value)
        if wrong:
            raise WeightUpdateError(f"live tensors {wrong[:4]} differ from what was published")
        before, self._checksums = self._checksums, found
        if before == found and self._applied is not None and self._applied.digest != staged.digest:
            raise WeightUpdateError("its live weights are those of the version before")

    # -- small calls --

    async def _pause(self, mode: InterruptMode, *, timeout: float) -> None:
        """Generation stands afterwards. A drain that overruns is withdrawn."""
        deadline = time.monotonic() + timeout
        if mode is InterruptMode.DRAIN and not self._paused:
            self._state.closed = True
            try:
                # answered once the last request ended; leave the reply a moment
                wait = max(timeout - 1.0, 0.1)
                await self._http.text("POST", f"/flush_cache?timeout={wait:.2f}", timeout=timeout)
            except (ArealLikeError, asyncio.CancelledError) as error:
                self._state.closed = False
                if isinstance(error, RequestError):
                    raise ServerUnavailable(f"{self._name}: not drained in {timeout:g} s; it runs on") from error
                raise
        await self._http.post("/pause_generation", {"mode": _PAUSES[mode]}, timeout=_left(deadline))
        self._paused = True

    async def _continue(self, *, timeout: float) -> None:
        """What must not run stands on: whose memory is out, or whose weights nobody can vouch for."""
        if self._damaged or not self._memory.lent.serves:
            return
        await self._http.post("/continue_generation", {}, timeout=timeout)
        self._paused = self._state.closed = False

    async def _label(self, *, timeout: float) -> tuple[int, int]:
        """(incarnation, version) that it says it serves; (-1, -1) for a label that is none of ours."""
        info = await self._http.get("/model_info", timeout=timeout)
        return parse_label(str((info or {}).get("weight_version"))) or (-1, -1)

    async def _counts(self, *, timeout: float) -> tuple[int, int]:
        """Requests that run and that wait, as the scheduler last said."""
        answer = await self._http.get("/v1/loads?include=core", timeout=timeout)
        loads = (answer or {}).get("loads") or ()
        return sum(load["num_running_reqs"] for load in loads), sum(load["num_waiting_reqs"] for load in loads)

    async def _ask_facts(self, *, timeout: float) -> ServerFacts:
        if self._state.facts is None:
            await self.health(timeout=timeout)
        if self._state.facts is None:
            raise ServerUnavailable(f"{self._name}: it does not say what it is")
        return self._state.facts

    async def _pause_answer(self) -> PauseAnswer:
        running, _ = await self._counts(timeout=_MEND_TIMEOUT)
        return PauseAnswer(paused=self._paused, in_flight=running, version=max(self._state.epoch.version, 0))

    def _receipt(self, manifest: Manifest, *, seconds_paused: float, interrupted: int) -> CommitReceipt:
        return CommitReceipt(
            server=self._name,
            incarnation=manifest.incarnation,
            version=manifest.version,
            digest=manifest.digest,
            bytes=manifest.total_bytes,
            seconds_staged=self._seconds_staged,
            seconds_paused=seconds_paused,
            interrupted_requests=interrupted,
        )

    def _refuse_older(self, incarnation: int) -> None:
        if incarnation < self._newest_incarnation:
            raise StaleCommand(
                f"{self._name}: a call of incarnation {incarnation}, after one of {self._newest_incarnation}"
            )


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.1)


def _checksums(name: str, answer: Any) -> dict[str, str]:
    """Of every live tensor, as ``rank/name``."""
    try:
        return {
            f"{rank}/{tensor}": value
            for rank, part in enumerate(answer["ranks"])
            for tensor, value in part["checksums"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerUnavailable(f"{name}: /weights_checker answered without checksums: {error!r}") from error
