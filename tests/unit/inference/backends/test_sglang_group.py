"""Updates of an SGLang server over a process group: a real door and real gloo, and a stand-in for the server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from areal_like.api.weights import InterruptMode, Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.inference.backends import sglang_group
from areal_like.inference.backends.base import LinkSettings
from areal_like.inference.backends.sglang import SglangBackend
from areal_like.inference.backends.sglang_control import SglangControl
from areal_like.inference.backends.sglang_group import Meeting, runs
from areal_like.weights.transports.collective import CollectiveWriter
from tests.unit.inference.backends.test_sglang_control import MODEL, Sglang, engine_folder, serving

ITEM = {"float32": 4}


class Grouped(Sglang):
    """With the group and session calls of SGLang >= 0.5.21. ``breaks``: the update call at which it fails.

    ``hears``: its scheduler does; it does not while it waits in a collective call. ``receives``: a broadcast begins.
    """

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.groups: dict[str, Any] = {}
        self.session = False
        self.breaks = -1
        self.updates = 0
        self.bytes = dict.fromkeys(MODEL, b"")
        self.hears = asyncio.Event()
        self.hears.set()
        self.receives = asyncio.Event()
        self.receives.set()

    async def server_info(self, content: dict[str, Any]) -> web.Response:
        await self.hears.wait()
        return await super().server_info(content)

    def refused(self, message: str) -> web.Response:
        return web.json_response({"success": False, "message": message}, status=400)

    async def init_weights_update_group(self, content: dict[str, Any]) -> web.Response:
        def join() -> Any:
            store = TCPStore(content["master_address"], content["master_port"], is_master=False)
            name = content["group_name"]
            keys = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=20)
            return dist.ProcessGroupGloo(keys, content["rank_offset"], content["world_size"], options)

        self.groups[content["group_name"]] = await asyncio.to_thread(join)
        return web.json_response({"success": True})

    async def destroy_weights_update_group(self, content: dict[str, Any]) -> web.Response:
        self.groups.pop(content["group_name"], None)
        return web.json_response({"success": True})

    async def begin_weight_update(self, content: dict[str, Any]) -> web.Response:
        if self.session:
            return self.refused("a weight-update session is already open")
        self.session = True
        return web.json_response({"success": True})

    async def end_weight_update(self, content: dict[str, Any]) -> web.Response:
        if not self.session:
            return self.refused("no weight-update session is open")
        self.session = False
        return web.json_response({"success": True})

    async def update_weights_from_distributed(self, content: dict[str, Any]) -> web.Response:
        self.updates += 1
        if not self.session:
            return self.refused("must run between begin_weight_update() and end_weight_update()")
        sizes = [
            math.prod(shape) * ITEM[dtype] for shape, dtype in zip(content["shapes"], content["dtypes"], strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        await self.receives.wait()
        group = self.groups[content["group_name"]]
        await asyncio.to_thread(lambda: group.broadcast([flat], options).wait())
        if self.updates == self.breaks:
            return self.refused("Failed to update parameter online: no. Please discard the whole weights.")
        for name, part in zip(content["names"], flat.split(sizes), strict=True):
            self.bytes[name] = part.numpy().tobytes()
        self.label = content.get("weight_version") or self.label
        return web.json_response({"success": True})


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Grouped]:
    yield Grouped(engine_folder(tmp_path))


@pytest.fixture
async def control(engine: Grouped) -> AsyncIterator[SglangControl]:
    async with serving(engine) as url:
        settings = LinkSettings(token="t", version="0.5.23", transport=TransportKind.COLLECTIVE)
        opened = SglangBackend().connect("s0", url, settings).control
        assert isinstance(opened, SglangControl)
        yield opened
        await opened.aclose()


@pytest.fixture
def writer() -> Iterator[CollectiveWriter]:
    made = CollectiveWriter(host="127.0.0.1", bucket_bytes=128)  # smaller than the model: several runs
    yield made
    made.close()


def version(writer: CollectiveWriter, number: int) -> Manifest:
    return writer.write(number, 0, iter((name, tensor + number) for name, tensor in MODEL.items()))


async def update(control: SglangControl, manifest: Manifest) -> None:
    await control.stage(manifest, timeout=20)
    await control.commit(version=manifest.version, incarnation=0, mode=InterruptMode.RECOMPUTE, timeout=20)


async def test_bytes_reach_the_live_weights_and_are_checked(
    control: SglangControl, engine: Grouped, writer: CollectiveWriter
) -> None:
    for number in (1, 2):
        await update(control, version(writer, number))
        for name, tensor in MODEL.items():
            assert engine.bytes[name] == (tensor + number).numpy().tobytes()
    assert engine.label == "i0.v2"
    assert engine.updates > 2
    assert len(engine.groups) == 1  # kept over versions
    flushes = [sent["flush_cache"] for path, sent in engine.calls if path == "/update_weights_from_distributed"]
    assert flushes.count(True) == 2  # once an update, with its last bytes


async def test_a_transfer_that_breaks_keeps_the_server_out_until_a_whole_update(
    control: SglangControl, engine: Grouped, writer: CollectiveWriter
) -> None:
    await update(control, version(writer, 1))
    before = set(engine.groups)
    engine.breaks = engine.updates + 2
    with pytest.raises(WeightUpdateError, match=r"discard the whole weights.*it stays paused"):
        await update(control, version(writer, 2))
    assert not engine.session
    assert not engine.groups.keys() & before  # the group is gone on both sides
    engine.breaks = -1
    await update(control, version(writer, 3))
    assert engine.label == "i0.v3"
    assert not (await control.health(timeout=10)).paused


async def test_a_scheduler_that_waits_for_a_lost_trainer_is_told_and_asked_nothing_that_would_run_later(
    control: SglangControl, engine: Grouped, writer: CollectiveWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await update(control, version(writer, 1))
    (group,) = engine.groups
    engine.breaks = engine.updates + 1
    with pytest.raises(WeightUpdateError, match="it stays paused"):
        await update(control, version(writer, 2))
    engine.breaks = -1
    engine.hears.clear()
    monkeypatch.setattr(sglang_group, "_HEARS", 0.1)
    asked = engine.paths()
    with pytest.raises(WeightUpdateError, match=r"scheduler does not answer.*restart the server"):
        await control.stage(version(writer, 3), timeout=20)
    assert engine.paths() == asked
    engine.hears.set()
    await update(control, version(writer, 4))
    assert (engine.label, group in engine.groups) == ("i0.v4", False)


async def test_a_group_that_was_given_up_is_ended_in_the_server_before_the_next(
    control: SglangControl, engine: Grouped, writer: CollectiveWriter
) -> None:
    """Whoever gives up in the middle of a transfer has no time to tell the server."""
    await update(control, version(writer, 1))
    (group,) = engine.groups
    await control.stage(version(writer, 2), timeout=20)
    engine.receives.clear()
    commit = control.commit(version=2, incarnation=0, mode=InterruptMode.RECOMPUTE, timeout=20)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(commit, 0.3)
    engine.receives.set()
    await update(control, version(writer, 3))
    assert (engine.label, group in engine.groups, len(engine.groups)) == ("i0.v3", False, 1)


async def test_a_session_that_somebody_left_open_is_closed_first(
    control: SglangControl, engine: Grouped, writer: CollectiveWriter
) -> None:
    engine.session = True
    await update(control, version(writer, 1))
    assert engine.label == "i0.v1"


async def test_a_trainer_that_is_gone_costs_nothing(
    control: SglangControl, engine: Grouped, writer: CollectiveWriter
) -> None:
    manifest = version(writer, 1)
    writer.close()
    with pytest.raises(WeightUpdateError, match="version 1: the trainer's door"):
        await control.stage(manifest, timeout=20)
    assert "/pause_generation" not in engine.paths()


async def test_a_version_that_is_no_longer_offered_is_refused(
    control: SglangControl, engine: Grouped, writer: CollectiveWriter
) -> None:
    manifest = version(writer, 1)
    version(writer, 2)
    with pytest.raises(WeightUpdateError, match="not offered"):
        await control.stage(manifest, timeout=20)
    await update(control, version(writer, 3))


async def test_lost_bytes_are_found_out(control: SglangControl, engine: Grouped, writer: CollectiveWriter) -> None:
    engine.forgets = "model.norm.weight"
    with pytest.raises(WeightUpdateError, match=r"'model\.norm\.weight'\] differ from what was published"):
        await update(control, version(writer, 1))


def entries(*sizes: tuple[str, int]) -> list[TensorEntry]:
    width = {"float32": 4, "bfloat16": 2}
    return [
        TensorEntry(name=f"t{i}", dtype=dtype, shape=(count,), nbytes=count * width[dtype], digest="")
        for i, (dtype, count) in enumerate(sizes)
    ]


def test_runs_are_limited_and_aligned() -> None:
    cut = runs(entries(("float32", 10), ("float32", 10), ("float32", 30), ("float32", 1)), 80)
    assert [[entry.name for entry in run] for run in cut] == [["t0", "t1"], ["t2"], ["t3"]]
    odd = runs(entries(("bfloat16", 1), ("bfloat16", 2), ("float32", 1)), 1000)
    assert [[entry.name for entry in run] for run in odd] == [["t0", "t1"], ["t2"]]


def test_locations() -> None:
    found = Meeting.parse("tcp://10.0.0.1:99/key.v1.i0?bucket_bytes=64&backend=nccl&door=7")
    assert (found.host, found.port, found.door, found.key) == ("10.0.0.1", 99, 7, "key.v1.i0")
    with pytest.raises(WeightUpdateError, match="no location of the collective transport"):
        Meeting.parse("/a/folder")
