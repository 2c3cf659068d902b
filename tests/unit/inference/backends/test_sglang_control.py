"""Updates of an SGLang server, with a stand-in that answers as a real one does when things go wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from areal_like.api.weights import InterruptMode, Manifest, TransportKind
from areal_like.errors import ServerBusy, ServerUnavailable, StaleCommand, WeightUpdateError
from areal_like.inference.backends.base import LinkSettings
from areal_like.inference.backends.sglang import SglangBackend
from areal_like.inference.backends.sglang_control import SglangControl
from areal_like.inference.backends.sglang_dialect import SglangDialect
from areal_like.weights.checkpoint import read_headers
from areal_like.weights.transports.disk import DiskWriter
from tests.unit.inference.backends.test_sglang_dialect import body

LAYER = "model.layers.0.self_attn"
MODEL = {
    "model.embed_tokens.weight": torch.linspace(-1, 1, 40).reshape(10, 4),
    **{f"{LAYER}.{part}_proj.weight": torch.full((4, 4), float(i)) for i, part in enumerate("qkv")},
    "model.norm.weight": torch.ones(4),
}


class Sglang:
    """Loads folders as SGLang does, and does on demand what it does badly. ``calls``: paths and what came with them."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.label = "default"
        self.live = read_headers(model)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refusal: tuple[int, str] | None = None
        self.loses = ""
        self.forgets = ""
        self.idle = True
        self.overlapped = False
        self.device = "cpu"

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls if path not in ("/server_info", "/model_info", "/v1/loads")]

    async def answer(self, request: web.Request) -> web.Response:
        content = json.loads(await request.text() or "{}") if request.method == "POST" else {}
        self.calls.append((request.path, {**content, **request.query}))
        return await getattr(self, request.path.rpartition("/")[2])(content)  # type: ignore[no-any-return]

    async def server_info(self, content: dict[str, Any]) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.23", "model_path": str(self.model), "max_req_input_len": 64, "tp_size": 1, "pp_size": 1,
                "device": self.device, "dtype": "float32", "disable_overlap_schedule": not self.overlapped,
                "sampling_mask_max_tokens": 4096,
            }
        )  # fmt: skip

    async def model_info(self, content: dict[str, Any]) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def loads(self, content: dict[str, Any]) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]})

    async def flush_cache(self, content: dict[str, Any]) -> web.Response:
        return web.Response(status=200 if self.idle else 400, text="Flush cache failed.")

    async def pause_generation(self, content: dict[str, Any]) -> web.Response:
        return web.json_response({"status": "ok"})

    continue_generation = pause_generation

    async def update_weights_from_disk(self, content: dict[str, Any]) -> web.Response:
        if self.refusal is not None:
            status, message = self.refusal
            return web.json_response({"success": False, "message": message}, status=status)
        brought = read_headers(Path(content["model_path"]))
        self.live |= {name: stored for name, stored in brought.items() if name != self.loses}
        self.bytes = {name: b"".join(stored.chunks()) for name, stored in self.live.items()}
        self.label = content["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def weights_checker(self, content: dict[str, Any]) -> web.Response:
        whole = {name: data for name, data in self.bytes.items() if LAYER not in name}
        whole[f"{LAYER}.qkv_proj.weight"] = b"".join(self.bytes[f"{LAYER}.{part}_proj.weight"] for part in "qkv")
        if self.forgets:
            whole[self.forgets] = b"old"
        sums = {name: hashlib.sha256(data).hexdigest()[:16] for name, data in whole.items()}
        return web.json_response({"success": True, "ranks": [{"checksums": sums}]})


def engine_folder(parent: Path) -> Path:
    """The model's folder."""
    model = parent / "model"
    model.mkdir()
    save_file(MODEL, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"vocab_size": 10, "tie_word_embeddings": True}))
    return model


@asynccontextmanager
async def serving(engine: Sglang) -> AsyncIterator[str]:
    """A real socket before ``engine``; its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Sglang]:
    yield Sglang(engine_folder(tmp_path))


@pytest.fixture
async def url(engine: Sglang) -> AsyncIterator[str]:
    async with serving(engine) as found:
        yield found


@pytest.fixture
async def link(url: str) -> AsyncIterator[tuple[SglangControl, SglangDialect]]:
    settings = LinkSettings(token="t", version="0.5.23", transport=TransportKind.DISK)
    opened = SglangBackend().connect("s0", url, settings)
    assert isinstance(opened.control, SglangControl)
    assert isinstance(opened.dialect, SglangDialect)
    yield opened.control, opened.dialect
    await opened.control.aclose()


@pytest.fixture
def control(link: tuple[SglangControl, SglangDialect]) -> SglangControl:
    return link[0]


@pytest.fixture
def writer(tmp_path: Path) -> DiskWriter:
    return DiskWriter(tmp_path / "weights", bucket_bytes=2**20)


def version(writer: DiskWriter, number: int, **changes: torch.Tensor | None) -> Manifest:
    weights = {name: tensor + number for name, tensor in MODEL.items()} | {
        name.replace("__", "."): tensor for name, tensor in changes.items()
    }
    return writer.write(number, 0, iter((name, tensor) for name, tensor in weights.items() if tensor is not None))


async def update(control: SglangControl, manifest: Manifest, mode: InterruptMode = InterruptMode.KEEP) -> Any:
    await control.stage(manifest, timeout=10)
    return await control.commit(version=manifest.version, incarnation=0, mode=mode, timeout=10)


async def test_an_update_pauses_loads_checks_and_resumes(
    control: SglangControl, engine: Sglang, writer: DiskWriter
) -> None:
    manifest = version(writer, 1)
    receipt = await update(control, manifest)
    assert (receipt.version, receipt.digest, receipt.interrupted_requests) == (1, manifest.digest, 3)
    assert engine.paths() == [
        "/pause_generation", "/update_weights_from_disk", "/weights_checker", "/continue_generation"
    ]  # fmt: skip
    sent = dict(engine.calls)["/update_weights_from_disk"]
    assert (sent["weight_version"], sent["flush_cache"]) == ("i0.v1", False)
    assert (await control.health(timeout=10)).version == 1


@pytest.mark.parametrize(
    ("mode", "pause", "flush"),
    [
        (InterruptMode.KEEP, "in_place", False),
        (InterruptMode.RECOMPUTE, "retract", True),
        (InterruptMode.DRAIN, "in_place", False),
    ],
)
async def test_each_mode_has_its_pause(
    control: SglangControl, engine: Sglang, writer: DiskWriter, mode: InterruptMode, pause: str, flush: bool
) -> None:
    await update(control, version(writer, 1), mode)
    calls = dict(engine.calls)
    assert calls["/pause_generation"]["mode"] == pause
    assert calls["/update_weights_from_disk"]["flush_cache"] is flush
    assert ("/flush_cache" in calls) is (mode is InterruptMode.DRAIN)


async def test_committing_again_does_nothing(control: SglangControl, engine: Sglang, writer: DiskWriter) -> None:
    await update(control, version(writer, 1))
    before = len(engine.paths())
    await control.commit(version=1, incarnation=0, mode=InterruptMode.KEEP, timeout=10)
    assert len(engine.paths()) == before
    with pytest.raises(WeightUpdateError, match="is not staged"):
        await control.commit(version=2, incarnation=0, mode=InterruptMode.KEEP, timeout=10)


async def test_committing_again_resumes_a_server_that_could_not_be_resumed(
    control: SglangControl, engine: Sglang, writer: DiskWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failed(content: dict[str, Any]) -> web.Response:
        return web.Response(status=500)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "continue_generation", failed)
        with pytest.raises(ServerUnavailable, match="/continue_generation: 500"):
            await update(control, version(writer, 1))
    assert (await control.health(timeout=10)).paused
    assert (await update(control, version(writer, 1))).version == 1
    assert not (await control.health(timeout=10)).paused


async def test_older_commands_are_refused(control: SglangControl, writer: DiskWriter) -> None:
    first, second = version(writer, 1), version(writer, 2)
    await update(control, second)
    with pytest.raises(StaleCommand):
        await control.stage(first, timeout=10)
    with pytest.raises(StaleCommand):
        await control.commit(version=1, incarnation=0, mode=InterruptMode.KEEP, timeout=10)


async def test_a_part_that_is_missing_is_refused_before_anything_is_asked(
    control: SglangControl, engine: Sglang, writer: DiskWriter
) -> None:
    """SGLang would answer 200, and keep the old values."""
    with pytest.raises(WeightUpdateError, match=r"k_proj\.weight' is missing"):
        await control.stage(version(writer, 1, **{f"{LAYER}.k_proj.weight".replace(".", "__"): None}), timeout=10)
    assert engine.paths() == []


async def test_a_load_that_lost_a_tensor_is_found_out(
    control: SglangControl, engine: Sglang, writer: DiskWriter
) -> None:
    engine.loses = f"{LAYER}.k_proj.weight"
    with pytest.raises(WeightUpdateError, match=r"qkv_proj\.weight'\] differ from what was published.*stays paused"):
        await update(control, version(writer, 1))
    with pytest.raises(WeightUpdateError, match="half-loaded"):
        await control.resume(incarnation=0, timeout=10)
    engine.loses = ""
    assert (await update(control, version(writer, 2))).version == 2
    assert not (await control.health(timeout=10)).paused


async def test_where_checksums_are_of_another_kind_they_must_have_changed(
    control: SglangControl, engine: Sglang, writer: DiskWriter
) -> None:
    engine.device = "cuda"
    await update(control, version(writer, 1))
    kept = engine.live

    async def forget(content: dict[str, Any]) -> Any:
        engine.live, engine.label = kept, content["weight_version"]
        return web.json_response({"success": True})

    engine.update_weights_from_disk = forget  # type: ignore[method-assign]
    with pytest.raises(WeightUpdateError, match="those of the version before"):
        await update(control, version(writer, 2))


async def test_a_refusal_before_loading_costs_nothing(
    control: SglangControl, engine: Sglang, writer: DiskWriter
) -> None:
    engine.refusal = (400, "Failed to get weights iterator: gone.")
    with pytest.raises(WeightUpdateError, match="it runs on with the weights it had"):
        await update(control, version(writer, 1))
    assert engine.paths()[-1] == "/continue_generation"


@pytest.mark.parametrize(
    "refusal", [(400, "Weights were updated, but the cache was not flushed"), (500, "Internal Server Error")]
)
async def test_a_failure_whose_effect_nobody_knows_keeps_the_server_out(
    control: SglangControl, engine: Sglang, writer: DiskWriter, refusal: tuple[int, str]
) -> None:
    engine.refusal = refusal
    with pytest.raises(WeightUpdateError, match="it stays paused"):
        await update(control, version(writer, 1), InterruptMode.RECOMPUTE)
    assert "/continue_generation" not in engine.paths()
    engine.refusal = None
    assert (await update(control, version(writer, 1))).version == 1


async def test_keep_needs_a_scheduler_that_does_not_run_ahead(
    control: SglangControl, engine: Sglang, writer: DiskWriter
) -> None:
    engine.overlapped = True
    manifest = version(writer, 1)
    with pytest.raises(WeightUpdateError, match="disable_overlap_schedule"):
        await update(control, manifest)
    assert engine.paths() == []
    assert (await update(control, manifest, InterruptMode.RECOMPUTE)).version == 1


async def test_a_drain_that_overruns_is_withdrawn(
    link: tuple[SglangControl, SglangDialect], engine: Sglang, writer: DiskWriter
) -> None:
    control, dialect = link
    engine.idle = False
    with pytest.raises(WeightUpdateError, match=r"not drained in 10 s.*it runs on with the weights it had"):
        await update(control, version(writer, 1), InterruptMode.DRAIN)
    assert "/update_weights_from_disk" not in engine.paths()
    dialect.generate(body())  # and requests are taken again


async def test_while_a_drain_waits_nothing_new_is_posted(
    link: tuple[SglangControl, SglangDialect], engine: Sglang, writer: DiskWriter
) -> None:
    control, dialect = link
    held: list[bool] = []

    async def flush(content: dict[str, Any]) -> web.Response:
        with pytest.raises(ServerBusy):
            dialect.generate(body())
        held.append(True)
        return web.Response()

    engine.flush_cache = flush  # type: ignore[method-assign]
    await update(control, version(writer, 1), InterruptMode.DRAIN)
    assert held == [True]
    dialect.generate(body())


async def test_a_model_that_cannot_be_read_here_cannot_join(control: SglangControl, engine: Sglang) -> None:
    (engine.model / "config.json").unlink()
    with pytest.raises(ServerUnavailable, match="must be readable here"):
        await control.health(timeout=10)


async def test_served_as_loaded(link: tuple[SglangControl, SglangDialect]) -> None:
    control, _ = link
    answer = await control.digest(timeout=10)
    assert (answer.version, answer.digest) == (0, "")
    assert (await control.health(timeout=10)).context_length == 64


async def test_what_was_published_is_what_is_told(control: SglangControl, writer: DiskWriter) -> None:
    manifest = version(writer, 5)
    await update(control, manifest)
    answer = await control.digest(timeout=10)
    assert (answer.version, answer.digest) == (5, manifest.digest)


async def test_pause_and_resume(control: SglangControl, engine: Sglang) -> None:
    for _ in range(2):
        assert (await control.pause(incarnation=0, mode=InterruptMode.KEEP, timeout=10)).paused
    for _ in range(2):
        assert not (await control.resume(incarnation=0, timeout=10)).paused
    assert engine.paths() == ["/pause_generation"] * 2 + ["/continue_generation"] * 2


async def test_abort(control: SglangControl, engine: Sglang) -> None:
    async def abort(content: dict[str, Any]) -> web.Response:
        return web.Response()

    engine.abort_request = abort  # type: ignore[attr-defined]
    assert await control.abort(["a", "b"], timeout=10) == 2
    assert await control.abort([], timeout=10) == 3
    asked = [content for path, content in engine.calls if path == "/abort_request"]
    assert asked == [{"rid": "a"}, {"rid": "b"}, {"abort_all": True}]
