"""Servers that lend their device memory, with stand-ins that end where the real engines would."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from areal_like.api.weights import InterruptMode, Manifest, TransportKind
from areal_like.client.control import EmbeddedControl
from areal_like.client.memory import MemoryPart, ReleasesMemory, memory_of
from areal_like.errors import ConfigError, RequestError, ServerUnavailable, StaleCommand, WeightUpdateError
from areal_like.inference.backends import get_backend, get_engine
from areal_like.inference.backends.base import LinkSettings
from areal_like.inference.spec import EngineSpec
from areal_like.weights.transports.disk import DiskWriter
from tests.unit.inference.backends.test_sglang_control import Sglang, engine_folder, serving, version
from tests.unit.inference.backends.test_vllm_control import FakeVllm, connected, manifest

WEIGHTS, KV_CACHE = MemoryPart.WEIGHTS, MemoryPart.KV_CACHE
KEEP = InterruptMode.KEEP


@dataclass
class Device:
    """What is out, and what would have ended a real server. ``calls``: releases and reclaims."""

    able: bool = True
    busy: bool = False
    breaks: bool = False
    out: set[str] = field(default_factory=set)
    runs: bool = True
    calls: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def give(self, call: str, parts: set[str]) -> None:
        self.calls.append(call)
        if self.busy:
            self.faults.append("released while a request runs")
        self.out, self.runs = set(parts), False

    def take(self, call: str, parts: set[str]) -> None:
        self.calls.append(call)
        if not parts <= self.out:
            self.faults.append(f"{parts} taken back twice")
        self.out -= parts

    def run(self) -> None:
        if self.out:
            self.faults.append(f"it runs without {self.out}")
        self.runs = True


class LendingSglang(Sglang):
    def __init__(self, model: Path, device: Device) -> None:
        super().__init__(model)
        self.memory, self.backup = device, False
        self.device = "cuda" if device.able else "cpu"

    async def server_info(self, content: dict[str, Any]) -> web.Response:
        info = {"enable_memory_saver": self.memory.able, "enable_weights_cpu_backup": self.backup}
        return web.json_response({**await _json(await super().server_info(content)), **info})

    async def flush_cache(self, content: dict[str, Any]) -> web.Response:
        return web.Response(status=400 if self.memory.busy else 200, text="Flush cache failed.")

    async def pause_generation(self, content: dict[str, Any]) -> web.Response:
        self.memory.runs = False
        return web.json_response({})

    async def continue_generation(self, content: dict[str, Any]) -> web.Response:
        self.memory.run()
        return web.json_response({})

    async def release_memory_occupation(self, content: dict[str, Any]) -> web.Response:
        self.memory.give("release", set(content["tags"]) - {"cuda_graph"})
        return web.Response(status=500 if self.memory.breaks else 200)

    async def resume_memory_occupation(self, content: dict[str, Any]) -> web.Response:
        self.memory.take(f"reclaim {content['tags'][0]}", set(content["tags"]) - {"cuda_graph"})
        return web.Response()

    async def update_weights_from_disk(self, content: dict[str, Any]) -> web.Response:
        if "weights" in self.memory.out:
            self.memory.faults.append("loaded into memory that is out")
        return await super().update_weights_from_disk(content)


async def _json(answer: web.Response) -> Any:
    assert isinstance(answer.body, bytes)
    return json.loads(answer.body)


@dataclass(slots=True, kw_only=True)
class LendingVllm(FakeVllm):
    device: Device

    def _get(self, path: str) -> web.Response:
        if path == "/metrics":
            return web.Response(text=f"vllm:num_requests_running {2.0 if self.device.busy else 0.0}")
        return FakeVllm._get(self, path)

    async def _do(self, path: str, body: dict[str, Any]) -> None:
        device = self.device
        if path.startswith("/sleep"):
            device.give("release", {"weights", "kv_cache"})
            self.paused = True
            assert "mode=wait" in path
            if device.breaks:
                raise web.HTTPInternalServerError
        elif path.startswith("/wake_up"):
            part = path.rpartition("=")[2]
            device.take(f"reclaim {part}", {part})
            if not device.out:
                device.run()
        elif path == "/resume":
            device.run()
        if path == "/finish_weight_update" and "weights" in device.out:
            device.faults.append("loaded into memory that is out")
        await FakeVllm._do(self, path, body)


@dataclass
class Lender:
    """One stand-in behind its real control. ``make``: the manifest of a version."""

    name: str
    device: Device
    control: Any
    stand_in: Any
    make: Any
    made: int = 0

    def next(self) -> Manifest:
        self.made += 1
        found: Manifest = self.make(self.made)
        return found

    async def update(self) -> Manifest:
        brought = self.next()
        await self.control.stage(brought, timeout=10)
        await self.control.commit(version=brought.version, incarnation=0, mode=KEEP, timeout=10)
        return brought

    async def release(self, *, keep_weights: bool = False) -> None:
        await self.control.release_memory(incarnation=0, keep_weights=keep_weights, timeout=10)

    async def reclaim(self, part: MemoryPart) -> None:
        await self.control.reclaim_memory(part, incarnation=0, timeout=10)


@asynccontextmanager
async def lender_of(name: str, folder: Path, device: Device) -> AsyncIterator[Lender]:
    if name == "vllm":
        fake = LendingVllm(device=device)
        fake.status["sleeps"] = device.able
        async with connected(fake) as control:
            yield Lender(name, device, control, fake, manifest)
        return
    stand_in = LendingSglang(engine_folder(folder), device)
    writer = DiskWriter(folder / "weights", bucket_bytes=2**20)
    async with serving(stand_in) as url:
        settings = LinkSettings(token="t", version="0.5.23", transport=TransportKind.DISK)
        control = get_backend("sglang").connect("s0", url, settings).control
        yield Lender(name, device, control, stand_in, lambda number: version(writer, number))
        await control.aclose()


@pytest.fixture(params=["sglang", "vllm"])
async def lender(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lender]:
    """Serves version 1. Nothing that would have ended the real server may have been done to it."""
    device = Device()
    async with lender_of(request.param, tmp_path, device) as opened:
        await opened.update()
        yield opened
    assert device.faults == []


async def test_weights_that_were_given_up_come_back_with_an_update(lender: Lender) -> None:
    await lender.release()
    assert (lender.device.out, lender.device.runs) == ({"weights", "kv_cache"}, False)
    with pytest.raises(RequestError, match="reclaim weights, a whole update, reclaim kv_cache"):
        await lender.control.resume(incarnation=0, timeout=10)
    with pytest.raises(WeightUpdateError, match="reclaim weights first"):
        await lender.update()
    with pytest.raises(RequestError, match="kv_cache is reclaimed last"):
        await lender.reclaim(KV_CACHE)
    await lender.reclaim(WEIGHTS)
    with pytest.raises(RequestError, match="a whole update"):
        await lender.reclaim(KV_CACHE)
    await lender.update()
    assert (lender.device.out, lender.device.runs) == ({"kv_cache"}, False)
    await lender.reclaim(KV_CACHE)
    assert (lender.device.out, lender.device.runs) == (set(), True)
    assert (await lender.control.health(timeout=10)).version == lender.made


async def test_weights_that_are_kept_need_no_update(lender: Lender) -> None:
    await lender.release(keep_weights=True)
    for part in MemoryPart:
        assert not lender.device.runs
        await lender.reclaim(part)
    assert lender.device.runs
    assert (await lender.control.health(timeout=10)).version == 1
    assert (await lender.control.digest(timeout=10)).digest


async def test_what_was_served_before_weights_were_given_up_is_no_version_any_more(lender: Lender) -> None:
    await lender.release()
    await lender.reclaim(WEIGHTS)
    assert (await lender.control.digest(timeout=10)).digest == ""
    with pytest.raises(WeightUpdateError, match="stage"):
        await lender.control.commit(version=1, incarnation=0, mode=KEEP, timeout=10)


async def test_a_busy_server_is_refused_and_goes_on(lender: Lender) -> None:
    lender.device.busy = True
    with pytest.raises(RequestError, match="not released while requests run"):
        await lender.release()
    assert (lender.device.out, lender.device.runs, lender.device.calls) == (set(), True, [])
    lender.device.busy = False
    await lender.release()


async def test_each_call_may_be_repeated(lender: Lender) -> None:
    for _ in range(2):
        await lender.release(keep_weights=True)
    for part in MemoryPart:
        for _ in range(2):
            await lender.reclaim(part)
    taken = ["reclaim weights"] if lender.name == "vllm" else []  # SGLang keeps them where they are
    assert lender.device.calls == ["release", *taken, "reclaim kv_cache"]


async def test_a_release_amid_taking_back_is_refused(lender: Lender) -> None:
    await lender.release()
    await lender.reclaim(WEIGHTS)
    with pytest.raises(RequestError, match="an earlier release is half undone"):
        await lender.release()


async def test_a_release_that_broke_counts_as_one(lender: Lender) -> None:
    lender.device.breaks = True
    with pytest.raises(ServerUnavailable):
        await lender.release()
    with pytest.raises(RequestError, match="its memory is released"):
        await lender.control.resume(incarnation=0, timeout=10)
    await lender.reclaim(WEIGHTS)
    await lender.update()
    await lender.reclaim(KV_CACHE)
    assert lender.device.runs


async def test_a_vllm_whose_weights_are_lent_stages_nothing() -> None:
    """On a GPU it would, in the memory that somebody else has got."""
    fake = LendingVllm(device=Device())
    fake.status.update(sleeps=True)
    async with connected(fake) as control:
        lender = Lender("vllm", fake.device, control, fake, manifest)
        await lender.update()
        await lender.release()
        fake.heard.clear()
        with pytest.raises(WeightUpdateError, match="reclaim weights first"):
            await control.stage(lender.next(), timeout=10)
        assert "areal_like_stage" not in fake.heard


async def test_memory_that_vllm_only_says_it_took_back_is_no_memory() -> None:
    """Its sleep failed inside, so that the engine thinks it is awake: ``/wake_up`` answers 200, and does nothing."""
    device = Device(breaks=True)
    fake = LendingVllm(device=device)
    fake.status.update(sleeps=True)
    async with connected(fake) as control:
        lender = Lender("vllm", device, control, fake, manifest)
        await lender.update()
        with pytest.raises(ServerUnavailable):
            await lender.release()
        fake.status.update(asleep=["kv_cache", "weights"])
        with pytest.raises(WeightUpdateError, match=r"its workers have not: .*restart the server"):
            await lender.reclaim(WEIGHTS)
        with pytest.raises(WeightUpdateError, match="its memory for weights is released"):
            await lender.update()


@pytest.mark.parametrize("out", [["kv_cache", "weights"], ["kv_cache"]])
async def test_a_vllm_that_another_run_left_asleep_is_not_run_and_not_loaded_into(out: list[str]) -> None:
    """A real one would end: it says that it is paused, and runs and loads as it is told."""
    device = Device(out=set(out), runs=False)
    fake = LendingVllm(device=device)
    fake.paused = True
    fake.status.update(sleeps=True, asleep=out)
    async with connected(fake) as control:
        lender = Lender("vllm", device, control, fake, manifest)
        await control.health(timeout=10)
        with pytest.raises(RequestError, match=r"its memory is released; before it runs: .*reclaim kv_cache"):
            await control.resume(incarnation=0, timeout=10)
        if "weights" in out:
            with pytest.raises(WeightUpdateError, match="reclaim weights first"):
                await lender.update()
        fake.status.update(asleep=["kv_cache"])
        await lender.reclaim(WEIGHTS)
        await lender.update()
        fake.status.update(asleep=[])
        await lender.reclaim(KV_CACHE)
        fake.status.update(asleep=["kv_cache"])  # an answer that was long on its way changes nothing
        await control.health(timeout=10)
        await lender.update()
    assert (device.faults, device.out, device.runs) == ([], set(), True)


async def test_a_call_of_the_past_is_refused(lender: Lender) -> None:
    brought = lender.next().model_copy(update={"incarnation": 3})
    lender.control._newest_incarnation = brought.incarnation
    with pytest.raises(StaleCommand):
        await lender.release()
    with pytest.raises(StaleCommand):
        await lender.reclaim(WEIGHTS)


async def test_sglang_gives_weights_away_too_where_it_backs_them_up(tmp_path: Path) -> None:
    async with lender_of("sglang", tmp_path, Device()) as lender:
        lender.stand_in.backup = True
        await lender.update()
        await lender.release(keep_weights=True)
        assert lender.device.out == {"weights", "kv_cache"}
        await lender.reclaim(WEIGHTS)
        await lender.reclaim(KV_CACHE)
        assert lender.device.runs


@pytest.mark.parametrize(("name", "flag"), [("sglang", "sglang.enable_memory_saver"), ("vllm", "vllm.enable_sleep")])
async def test_a_server_that_cannot_says_which_flag_it_needs(tmp_path: Path, name: str, flag: str) -> None:
    async with lender_of(name, tmp_path, Device(able=False)) as lender:
        with pytest.raises(RequestError, match=f"memory is released on GPUs, with {flag}"):
            await lender.release()
        assert lender.device.calls == []
    assert flag in get_backend(name).capabilities("0.32.0").memory


@pytest.mark.parametrize(("name", "flag"), [("sglang", "enable_memory_saver"), ("vllm", "enable_sleep_mode")])
def test_on_a_cpu_the_flag_is_refused(name: str, flag: str) -> None:
    spec = EngineSpec.model_validate(
        {"backend": name, "name": "s", "python": "py", "version": "0.32.0", "model_path": "m", "flags": {flag: True}}
    )
    with pytest.raises(ConfigError, match=rf"{name}\.{flag}: .*on GPUs only"):
        get_engine(name).command(spec, token="t")
    assert flag.replace("_", "-") in " ".join(
        get_engine(name).command(spec.model_copy(update={"devices": ("cuda:0",)}), token="t").arguments
    )


async def test_the_embedded_engine_keeps_its_memory() -> None:
    control = EmbeddedControl("s0", "http://127.0.0.1:1", token="t")
    assert not isinstance(control, ReleasesMemory)
    with pytest.raises(RequestError, match="s0: its engine cannot release memory"):
        memory_of(control, "s0")
    await control.aclose()
