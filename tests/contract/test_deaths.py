"""What every engine promises when something dies: errors by name within their deadlines, and nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch.distributed as dist
from subjects import HUNG, TEST, ServerProcess, Subject
from subjects import running as started_server

from areal_like.api.generation import GenerationHyperparameters, ModelRequest
from areal_like.api.weights import InterruptMode, Manifest, TransportKind
from areal_like.errors import InfrastructureError, ServerUnavailable, StaleCommand, WeightUpdateError
from areal_like.weights.segments import remove_segments
from launcher.leftovers import sweep_engine_memory

if TYPE_CHECKING:
    from conftest import Line

pytestmark = pytest.mark.timeout(TEST)

PROMPT = [10, 200, 31, 77, 150, 42]
#: seconds after which a request that has no server any more is given up
GIVEN_UP = 20.0


@pytest.fixture
def own_server(subject: Subject, model_path: Path, folder: Path) -> Iterator[ServerProcess]:
    """A server that the test may kill."""
    with started_server(subject, model_path, folder, name="mortal") as started:
        yield started


async def test_a_trainer_that_dies_before_the_bytes_are_fetched_costs_nothing(line: Line) -> None:
    """Its shared memory is gone when the server wants to read it."""
    before = line.version
    write = line.trainer.export_weights

    async def die(version: int, incarnation: int) -> Manifest:
        manifest = await write(version, incarnation)
        remove_segments(line.run_id)
        return manifest

    line.channel._exporter = type("Dying", (), {"export_weights": staticmethod(die)})()
    with pytest.raises(WeightUpdateError):
        await line.publish()
    health = await line.link.control.health(timeout=HUNG)
    assert (health.status, health.version, health.paused) == ("ok", before, False)


async def test_calls_of_the_past_are_refused(line: Line) -> None:
    control = line.link.control
    old = line.channel.manifest
    assert old is not None
    await line.publish()
    with pytest.raises((StaleCommand, WeightUpdateError)):
        await control.stage(old, timeout=HUNG)
    with pytest.raises((StaleCommand, WeightUpdateError)):
        await control.commit(version=old.version, incarnation=0, mode=InterruptMode.KEEP, timeout=HUNG)
    assert (await control.health(timeout=HUNG)).version == line.version
    assert (await line.ask(PROMPT, max_new_tokens=2)).output_versions == [line.version] * 2


async def test_what_was_not_staged_cannot_be_committed(line: Line) -> None:
    with pytest.raises(WeightUpdateError):
        await line.link.control.commit(version=line.version + 500, incarnation=0, mode=InterruptMode.KEEP, timeout=HUNG)
    assert (await line.ask(PROMPT, max_new_tokens=2)).output_versions == [line.version] * 2


async def test_a_killed_server_is_an_error_in_time_and_leaves_nothing(
    open_line: Any, own_server: ServerProcess
) -> None:
    """Requests in flight, a publication and new requests all end with a named error; then no process is left."""
    async with open_line(own_server, timeout=GIVEN_UP) as line:
        family = own_server.descendants()
        asked = asyncio.create_task(line.ask(PROMPT, max_new_tokens=line.subject.longest))
        await line.in_hand()
        began = time.monotonic()
        own_server.engine().send_signal(signal.SIGKILL)
        with pytest.raises(InfrastructureError):
            await asked
        with pytest.raises((WeightUpdateError, ServerUnavailable)):
            await line.publish()
        request = ModelRequest(input_ids=PROMPT, gconfig=GenerationHyperparameters(max_new_tokens=2))
        with pytest.raises(InfrastructureError):
            await line.engine.agenerate(request)
        assert time.monotonic() - began < HUNG / 2
    await asyncio.to_thread(own_server.process.wait, HUNG)
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, HUNG)
    assert [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert left_over(own_server) == []


async def test_a_worker_that_dies_ends_the_whole_server(open_line: Any, own_server: ServerProcess) -> None:
    family = own_server.descendants()
    workers = [p for p in family if any(word in p.name().lower() for word in ("worker", "::enginecor", "::schedul"))]
    if not workers:
        pytest.skip("this engine computes in one process")
    async with open_line(own_server, timeout=GIVEN_UP) as line:
        asked = asyncio.create_task(line.ask(PROMPT, max_new_tokens=line.subject.longest))
        await line.in_hand()
        workers[-1].send_signal(signal.SIGKILL)
        with pytest.raises(InfrastructureError):
            await asked
        with pytest.raises((WeightUpdateError, ServerUnavailable)):
            await line.publish()
    await asyncio.to_thread(own_server.process.wait, HUNG)
    assert left_over(own_server) == []


async def test_a_server_lost_while_it_receives_costs_the_others_nothing(
    open_line: Any, server: ServerProcess, own_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything of it is gone in the middle of a broadcast; the trainer goes on, and so does the other server."""
    async with open_line(server, transport=TransportKind.COLLECTIVE) as line:
        await line.join(own_server, TransportKind.COLLECTIVE)
        await line.publish()
        assert line.pool.statistics().in_rotation == 2
        after = line.prepare()
        kill_in_broadcast(own_server, monkeypatch)
        receipts = await line.channel.publish(after)
        assert await asyncio.to_thread(own_server.process.wait, HUNG) == -signal.SIGKILL
        assert [receipt.server for receipt in receipts] == [server.name]
        assert line.pool.statistics().in_rotation == 1
        answer = await line.ask(PROMPT, max_new_tokens=32)
        assert set(answer.output_versions) == {after}
        assert line.distance(answer, after) < line.subject.noise
    sweep_engine_memory(own_server.began)


def kill_in_broadcast(server: ServerProcess, monkeypatch: pytest.MonkeyPatch, number: int = 3) -> None:
    """Kill all processes of ``server`` as the trainer begins broadcast ``number`` from now on."""
    broadcast, counter = dist.ProcessGroupGloo.broadcast, itertools.count(1)

    def counted(*arguments: Any) -> Any:
        if next(counter) == number:
            os.killpg(server.process.pid, signal.SIGKILL)
        return broadcast(*arguments)

    monkeypatch.setattr(dist.ProcessGroupGloo, "broadcast", counted)


def left_over(server: ServerProcess) -> list[str]:
    """Shared-memory blocks of ours made since the server was started, that nobody maps."""
    made = []
    for path in Path("/dev/shm").glob("psm_*"):
        with suppress(OSError):
            found = path.stat()
            made += [path] * (found.st_ctime >= server.began and found.st_uid == os.geteuid())
    mapped = set()  # looked for later, since others make blocks, too, and map them then
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped |= {line.rpartition("/")[2] for line in maps.read_text().splitlines() if "/psm_" in line}
    return [path.name for path in made if path.name not in mapped and path.exists()]
