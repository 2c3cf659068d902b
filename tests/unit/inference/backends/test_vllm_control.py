"""Updates of a vLLM server that fail at each step, against a small server that answers as vLLM and our plugin do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from areal_like.api.weights import InterruptMode, Manifest, TensorEntry, TransportKind
from areal_like.errors import ServerUnavailable, StaleCommand, WeightUpdateError
from areal_like.inference.backends.epoch import ServerEpoch
from areal_like.inference.backends.vllm_control import VllmControl
from areal_like.inference.backends.vllm_dialect import CutDialect, VllmDialect
from areal_like.inference.token_path import PATH, PROTOCOL
from areal_like.weights.manifest import make_manifest

KEEP, DRAIN = InterruptMode.KEEP, InterruptMode.DRAIN
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
"""


def manifest(version: int, incarnation: int = 0) -> Manifest:
    entry = TensorEntry(name="w", dtype="float32", shape=(2,), nbytes=8, digest=f"{version:032x}")
    return make_manifest(version, incarnation, TransportKind.SHM, "areal-like-x+weights-0", [entry])


@dataclass(slots=True, kw_only=True)
class FakeVllm:
    """What one worker would say, every call that was made, and faults to be had.

    ``route``: what our path answers to GET; None where vLLM was started without our middleware.
    ``looks``: answers until staging is over, the stage call's own among them. ``fail``: path, or method of the workers
    -> what happens to the worker before a 500. ``heard`` has every call, ``calls`` those that change something.
    """

    status: dict[str, Any] = field(
        default_factory=lambda: {
            "state": "idle", "error": "", "incarnation": -1, "version": -1, "digest": "", "staged_incarnation": -1,
            "staged_version": -1, "bytes": 0, "seconds": 0.0, "damaged": False,
            "logprobs_mode": "processed_logprobs", "seeds": True,
        }
    )  # fmt: skip
    calls: list[str] = field(default_factory=list)
    fail: dict[str, dict[str, Any]] = field(default_factory=dict)
    becomes: str = "staged"
    looks: int = 2
    paused: bool = False
    session: bool = False
    meanwhile: Manifest | None = None
    while_loading: Callable[[], None] = lambda: None
    drains: bool = True
    manifest: Manifest | None = None
    aborted: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    unheard_after: str = ""
    route: dict[str, Any] | None = field(default_factory=lambda: {"protocol": PROTOCOL})

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        path = body["method"] if request.path == "/collective_rpc" else request.path_qs
        if self.unheard_after and self.unheard_after in self.heard:
            return web.Response(status=500)
        self.heard.append(path)
        if request.method != "GET" and path != "areal_like_status":
            self.calls.append(path)
        if path in self.fail:
            self.status.update(self.fail[path])
            return web.json_response({"error": {"message": f"no {path}", "type": "InternalServerError"}}, status=500)
        if request.path == "/collective_rpc":
            return web.json_response({"results": [self._rpc(path, **body.get("kwargs", {}))]})
        if request.method == "GET":
            return self._get(path)
        await self._do(path, body)
        return web.json_response({})

    def _rpc(self, method: str, **named: str) -> dict[str, Any]:
        """One worker, as ours answers (tests/unit/inference/vllm_plugin/test_worker.py)."""
        status, refused = self.status, ""
        if method == "areal_like_stage":
            refused = self._stage(Manifest.model_validate_json(named["manifest"]))
        elif method == "areal_like_begin":
            name = int(named["incarnation"]), int(named["version"])
            if status["state"] == "staged" and (status["staged_incarnation"], status["staged_version"]) == name:
                self.session = True
            elif status["state"] != "applied" or (status["incarnation"], status["version"]) != name:
                refused = "not staged"
        if status["state"] == "staging" and not refused:
            self.looks -= 1
            if self.looks <= 0:
                status["state"] = self.becomes
        return {**status, "refused": refused}

    def _stage(self, wanted: Manifest) -> str:
        if (wanted.incarnation, wanted.version) < (self.status["incarnation"], self.status["version"]):
            return "newer weights are loaded"
        self.manifest, self.session = wanted, False
        staged = {"staged_version": wanted.version, "staged_incarnation": wanted.incarnation}
        self.status.update(staged, state="staging")
        return ""

    def _get(self, path: str) -> web.Response:
        answers: dict[str, Any] = {
            "/is_paused": {"is_paused": self.paused},
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 77}]},
            "/health": {},
            PATH: self.route,
        }
        if path == "/metrics":
            return web.Response(text=METRICS)
        if path == PATH and self.route is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(answers[path])

    async def _do(self, path: str, body: dict[str, Any]) -> None:
        if path.startswith("/pause"):
            if "wait" in path and not self.drains:
                await asyncio.Event().wait()
            self.paused = True
            if self.meanwhile is not None:
                self._stage(self.meanwhile)
                self.status["state"] = "staged"
        elif path == "/resume":
            self.paused = False
        elif path == "/abort_requests":
            self.aborted += body["request_ids"]
        elif path == "/finish_weight_update":
            if not self.session:
                raise web.HTTPInternalServerError(text="called without a matching start_weight_update")
            self.session = False
            if self.manifest is not None:
                self._finish(self.manifest)

    def _finish(self, loaded: Manifest) -> None:
        assert self.paused
        self.while_loading()
        self.status.update(
            state="applied", version=loaded.version, incarnation=loaded.incarnation, digest=loaded.digest,
            damaged=False, staged_version=-1, staged_incarnation=-1,
        )  # fmt: skip


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm()
    yield fake


@asynccontextmanager
async def connected(vllm: FakeVllm, *, spans: bool = True) -> AsyncIterator[VllmControl]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", vllm.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    made = VllmControl("s0", f"http://127.0.0.1:{port}", ServerEpoch(), token="t", spans=spans)
    try:
        yield made
    finally:
        await made.aclose()
        await runner.cleanup()


@pytest.fixture
async def control(vllm: FakeVllm) -> AsyncIterator[VllmControl]:
    async with connected(vllm) as made:
        yield made


async def test_an_update_goes_its_way_and_is_receipted(vllm: FakeVllm, control: VllmControl) -> None:
    staged = await control.stage(manifest(4), timeout=5)
    receipt = await control.commit(version=4, incarnation=0, mode=KEEP, timeout=5)
    assert staged.version == receipt.version == 4
    assert receipt.digest == manifest(4).digest
    assert receipt.interrupted_requests == 5
    assert vllm.heard[0] == "areal_like_stage"


BEGIN = ["/metrics", "areal_like_begin"]
END = ["/resume", "areal_like_status"]


@pytest.mark.parametrize(
    ("spans", "mode", "begin", "pause"),
    [
        (True, KEEP, BEGIN, "/pause?mode=keep&clear_cache=false"),
        (True, InterruptMode.RECOMPUTE, BEGIN, "/pause?mode=keep"),
        (True, DRAIN, ["areal_like_begin"], "/pause?mode=wait"),
        (False, InterruptMode.RECOMPUTE, BEGIN, "/pause?mode=abort"),
        (False, DRAIN, ["areal_like_begin"], "/pause?mode=wait"),
    ],
)
@pytest.mark.parametrize("looks", [1, 3])
async def test_a_publication_makes_these_calls_and_no_others(
    vllm: FakeVllm, spans: bool, mode: InterruptMode, begin: list[str], pause: str, looks: int
) -> None:
    """One to stage, and one more for each time that staging has not ended yet; then four round trips."""
    vllm.looks = looks
    async with connected(vllm, spans=spans) as control:
        await control.stage(manifest(1), timeout=5)
        assert vllm.heard == ["areal_like_stage", *["areal_like_status"] * (looks - 1)]
        vllm.heard.clear()
        await control.commit(version=1, incarnation=0, mode=mode, timeout=5)
    together = len(begin)
    assert sorted(vllm.heard[:together]) == begin
    assert vllm.heard[together:-2] == [pause, "/finish_weight_update"]
    assert sorted(vllm.heard[-2:]) == END


@pytest.mark.parametrize("call", ["areal_like_stage", "areal_like_status"])
async def test_a_call_of_a_staging_that_fails_is_an_error_and_staging_again_mends_it(
    vllm: FakeVllm, control: VllmControl, call: str
) -> None:
    vllm.fail[call] = {}
    with pytest.raises(ServerUnavailable, match=f"500: no {call}"):
        await control.stage(manifest(1), timeout=5)
    vllm.fail.clear()
    await control.stage(manifest(1), timeout=5)
    assert (await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)).version == 1


@pytest.mark.parametrize("call", ["areal_like_begin", "/metrics", "/pause?mode=keep&clear_cache=false"])
async def test_a_call_of_a_commit_that_fails_before_loading_leaves_the_server_running(
    vllm: FakeVllm, control: VllmControl, call: str
) -> None:
    await control.stage(manifest(1), timeout=5)
    vllm.fail[call] = {}
    with pytest.raises((ServerUnavailable, WeightUpdateError), match=f"500: no {call.replace('?', '.')}"):
        await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    assert not vllm.paused
    assert vllm.status["version"] == -1
    assert not control._epoch.updating
    vllm.fail.clear()
    assert (await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)).version == 1


async def test_a_resume_that_fails_is_an_error_after_every_call_has_ended(vllm: FakeVllm, control: VllmControl) -> None:
    await control.stage(manifest(1), timeout=5)
    vllm.fail["/resume"] = {}
    with pytest.raises(ServerUnavailable, match="500: no /resume"):
        await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    assert sorted(vllm.heard[-2:]) == END
    assert control._epoch.updating


async def test_what_another_controller_stages_after_the_commit_began_is_never_loaded(
    vllm: FakeVllm, control: VllmControl
) -> None:
    """vLLM's finish names no version."""
    await control.stage(manifest(1), timeout=5)
    vllm.meanwhile = manifest(7, incarnation=3)
    with pytest.raises(WeightUpdateError, match=r"without a matching start.*it runs on with the weights it had"):
        await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    assert vllm.status["version"] == -1
    assert not vllm.paused


async def test_what_another_controller_stages_before_the_commit_is_not_committed(
    vllm: FakeVllm, control: VllmControl
) -> None:
    await control.stage(manifest(1), timeout=5)
    async with connected(vllm) as other:
        await other.stage(manifest(2), timeout=5)
    with pytest.raises(WeightUpdateError, match=r"staged 2, loaded -1; stage it first"):
        await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    assert not any("pause" in call for call in vllm.calls)


async def test_another_controllers_staging_is_not_taken_for_ours(vllm: FakeVllm, control: VllmControl) -> None:
    """Not even where it has our version's number."""
    vllm.looks = 10_000
    staging = asyncio.create_task(control.stage(manifest(4), timeout=5))
    while vllm.heard.count("areal_like_status") < 1:  # noqa: ASYNC110  # the server's side
        await asyncio.sleep(0.01)
    vllm._stage(manifest(4, incarnation=1))
    with pytest.raises(WeightUpdateError, match="version 4 is not staged"):
        await staging


async def test_without_spans_a_drain_collects_its_answers_before_it_loads(vllm: FakeVllm) -> None:
    """They come on connections of their own, perhaps after the pause has said that all is drained."""
    async with connected(vllm, spans=False) as control:
        await control.stage(manifest(1), timeout=5)
        control._epoch.posted["r.1"] = (control._epoch.commits, 0)
        committed = asyncio.create_task(control.commit(version=1, incarnation=0, mode=DRAIN, timeout=5))
        while "/pause?mode=wait" not in vllm.calls:  # noqa: ASYNC110  # the server's side
            await asyncio.sleep(0.01)
        commits, _ = control._epoch.posted.pop("r.1")
        assert control._epoch.unchanged_since(commits, cut=False)
        assert "/finish_weight_update" not in vllm.calls
        assert (await committed).version == 1


async def test_without_spans_a_drain_waits_for_no_answer_that_never_comes(vllm: FakeVllm) -> None:
    async with connected(vllm, spans=False) as control:
        await control.stage(manifest(1), timeout=5)
        control._epoch.posted["failed.1"] = (control._epoch.commits, 0)
        assert (await control.commit(version=1, incarnation=0, mode=DRAIN, timeout=5)).version == 1
        assert control._epoch.posted == {}


@pytest.mark.parametrize(("spans", "dialect"), [(True, VllmDialect), (False, CutDialect)])
async def test_control_and_dialect_abort_by_the_same_id(vllm: FakeVllm, spans: bool, dialect: Any) -> None:
    """An unknown id is answered 200, and ends nothing."""
    async with connected(vllm, spans=spans) as control:
        await control.abort(["r.1"], timeout=5)
    assert vllm.aborted == json.loads(dialect(ServerEpoch()).abort("r.1").content)["request_ids"]


async def test_committing_again_does_nothing(vllm: FakeVllm, control: VllmControl) -> None:
    await control.stage(manifest(1), timeout=5)
    first = await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    vllm.heard.clear()
    assert (await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)).digest == first.digest
    assert sorted(vllm.heard) == BEGIN


async def test_a_staging_that_fails_is_told_with_its_reason(vllm: FakeVllm, control: VllmControl) -> None:
    vllm.becomes = "failed"
    vllm.status["error"] = "tensor 'w' was damaged"
    with pytest.raises(WeightUpdateError, match="tensor 'w' was damaged"):
        await control.stage(manifest(1), timeout=5)
    assert not any("pause" in call for call in vllm.calls)


async def test_a_staging_that_hangs_ends_at_its_deadline(vllm: FakeVllm, control: VllmControl) -> None:
    vllm.looks = 10_000
    with pytest.raises(ServerUnavailable, match=r"not staged in 0\.2 s"):
        await control.stage(manifest(1), timeout=0.2)


async def test_what_fails_before_loading_began_is_undone(vllm: FakeVllm, control: VllmControl) -> None:
    await control.stage(manifest(1), timeout=5)
    vllm.fail["/finish_weight_update"] = {"state": "idle"}
    with pytest.raises(WeightUpdateError, match="it runs on with the weights it had"):
        await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    assert not vllm.paused


async def test_what_fails_half_way_stays_paused_and_a_whole_update_mends_it(
    vllm: FakeVllm, control: VllmControl
) -> None:
    await control.stage(manifest(1), timeout=5)
    vllm.fail["/finish_weight_update"] = {"state": "idle", "damaged": True}
    with pytest.raises(WeightUpdateError, match="it stays paused"):
        await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    assert vllm.paused
    with pytest.raises(WeightUpdateError, match="only a whole update can mend it"):
        await control.resume(incarnation=0, timeout=5)
    vllm.fail.clear()
    await control.stage(manifest(2), timeout=5)
    assert (await control.commit(version=2, incarnation=0, mode=KEEP, timeout=5)).version == 2
    assert not vllm.paused


async def test_a_drain_that_overruns_is_withdrawn(vllm: FakeVllm, control: VllmControl) -> None:
    vllm.drains = False
    await control.stage(manifest(1), timeout=5)
    with pytest.raises(WeightUpdateError, match="it runs on with the weights it had"):
        await control.commit(version=1, incarnation=0, mode=DRAIN, timeout=0.3)
    assert vllm.calls[-1] == "/resume"


async def test_calls_of_the_past_are_refused(control: VllmControl) -> None:
    await control.stage(manifest(4, incarnation=2), timeout=5)
    await control.commit(version=4, incarnation=2, mode=KEEP, timeout=5)
    with pytest.raises(StaleCommand):
        await control.stage(manifest(9, incarnation=1), timeout=5)
    with pytest.raises(StaleCommand):
        await control.stage(manifest(3, incarnation=2), timeout=5)
    with pytest.raises(StaleCommand):
        await control.pause(incarnation=1, mode=KEEP, timeout=5)


async def test_weights_that_a_server_was_started_with_are_version_0(vllm: FakeVllm, control: VllmControl) -> None:
    assert (await control.health(timeout=5)).version == -1
    assert (await control.digest(timeout=5)).version == 0
    assert vllm.calls == ["/update_weight_version"]
    assert (await control.health(timeout=5)).version == 0


async def test_health_tells_what_the_workers_hold(control: VllmControl) -> None:
    await control.stage(manifest(3), timeout=5)
    await control.commit(version=3, incarnation=0, mode=KEEP, timeout=5)
    health = await control.health(timeout=5)
    assert (health.version, health.incarnation, health.in_flight, health.queued) == (3, 0, 3, 2)
    assert (health.context_length, health.paused) == (77, False)


async def test_a_server_whose_logprobs_ignore_the_temperature_is_refused(vllm: FakeVllm, control: VllmControl) -> None:
    vllm.status["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(ServerUnavailable, match="start it with processed_logprobs"):
        await control.health(timeout=5)


@pytest.mark.parametrize(
    ("route", "said"),
    [
        (None, "404.*start it with the --middleware"),
        ({"protocol": 0}, "wanted protocol 1.*start it with"),
        ({}, "got {}"),
    ],
)
async def test_a_server_without_our_path_is_refused(
    vllm: FakeVllm, control: VllmControl, route: dict[str, Any] | None, said: str
) -> None:
    vllm.route = route
    with pytest.raises(ServerUnavailable, match=said):
        await control.health(timeout=5)
    vllm.route = {"protocol": PROTOCOL}
    assert (await control.health(timeout=5)).status == "ok"


async def test_our_path_is_looked_for_once_and_again_when_a_server_begins_anew(
    vllm: FakeVllm, control: VllmControl
) -> None:
    await control.stage(manifest(1), timeout=5)
    await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    for _ in range(3):
        await control.health(timeout=5)
    assert vllm.heard.count(PATH) == 1
    vllm.route = None
    vllm.status.update(version=-1, incarnation=-1)  # as one that was started at the same address
    with pytest.raises(ServerUnavailable, match="404"):
        await control.health(timeout=5)


async def test_a_label_alone_is_no_receipt(vllm: FakeVllm, control: VllmControl) -> None:
    """vLLM sets the label even if nothing was loaded."""
    await control.stage(manifest(1), timeout=5)
    vllm.manifest = None
    with pytest.raises(WeightUpdateError, match=r"version 1: it was not loaded.*stays paused"):
        await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    assert vllm.paused


async def test_while_it_is_paused_nothing_is_asked_that_could_be_asked_before_or_after(
    vllm: FakeVllm, control: VllmControl
) -> None:
    """Each call costs milliseconds, and more where the engine has hundreds of answers in hand."""
    await control.stage(manifest(1), timeout=5)
    await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    begin = next(place for place, call in enumerate(vllm.heard) if call.startswith("/pause"))
    assert vllm.heard[begin + 1 :] == ["/finish_weight_update", "/resume", "areal_like_status"]


async def test_an_answer_that_comes_while_it_is_paused_is_of_the_old_weights(vllm: FakeVllm) -> None:
    """It was written before, and took its time; only what comes after the resume could be of either version."""
    async with connected(vllm, spans=False) as control:
        await control.stage(manifest(1), timeout=5)
        posted, told = control._epoch.commits, []
        vllm.while_loading = lambda: told.append(control._epoch.unchanged_since(posted, cut=False))
        await control.commit(version=1, incarnation=0, mode=InterruptMode.RECOMPUTE, timeout=5)
        assert told == [True]
        assert not control._epoch.unchanged_since(posted, cut=False)


async def test_a_receipt_tells_what_the_pause_was_for(vllm: FakeVllm, control: VllmControl) -> None:
    vllm.status["parts"] = {"await": 0.25, "verify": 0.5}
    await control.stage(manifest(1), timeout=5)
    receipt = await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    parts = receipt.seconds_by_part
    assert receipt.seconds_paused == pytest.approx(parts["pause"] + parts["load"] + parts["resume"])
    assert (parts["load.await"], parts["load.verify"]) == (0.25, 0.5)


async def test_a_server_that_is_lost_after_it_resumed_is_receipted_once_it_answers(
    vllm: FakeVllm, control: VllmControl
) -> None:
    """It runs, with the new weights; committing again finds that out, and ends the update on our side."""
    await control.stage(manifest(1), timeout=5)
    vllm.unheard_after = "/resume"
    with pytest.raises(ServerUnavailable):
        await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)
    vllm.unheard_after = ""
    assert (await control.commit(version=1, incarnation=0, mode=KEEP, timeout=5)).version == 1
    assert not control._epoch.updating
    assert control._epoch.known == (0, 1)
