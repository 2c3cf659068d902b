"""What every engine promises when the trainer dies or hangs while it sends weights."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from subjects import HUNG, ROOT, TEST, ServerProcess, Subject, bucket_bytes_of, running

from areal_like.api.weights import Manifest, TransportKind
from areal_like.errors import WeightUpdateError

if TYPE_CHECKING:
    from conftest import Line

pytestmark = pytest.mark.timeout(TEST)

PROMPT = [10, 200, 31, 77, 150, 42]
DOOMED = Path(__file__).parent / "doomed_trainer.py"


class DoomedTrainer:
    """:class:`areal_like.weights.channel.WeightExporter` in another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    async def export_weights(self, version: int, incarnation: int) -> Manifest:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{version} {incarnation}\n")
        self.process.stdin.flush()
        return Manifest.model_validate_json(await asyncio.to_thread(self.process.stdout.readline))


@contextmanager
def doomed(model_path: Path, subject: Subject, number: signal.Signals, moment: str) -> Iterator[DoomedTrainer]:
    """``moment``: see ``doomed_trainer``."""
    how = (str(model_path), subject.dtype, str(bucket_bytes_of(model_path)), str(int(number)), moment)
    command = [sys.executable, str(DOOMED), *how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n"
            yield DoomedTrainer(process)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_a_trainer_that_ends_while_it_sends(
    open_line: Any, server: ServerProcess, subject: Subject, model_path: Path, number: signal.Signals
) -> None:
    """The publication ends in time, the server is whole or out of the rotation, and another trainer takes over.

    In the middle of a tensor where the engine's own limits end the wait, else between two.
    """
    moment = "within" if subject.staged else "between"
    async with open_line(server, transport=TransportKind.COLLECTIVE) as line:
        before, own = line.version, line.trainer
        with doomed(model_path, subject, number, moment) as trainer:
            lost = line.prepare()
            asked = asyncio.create_task(line.ask(PROMPT, max_new_tokens=64))
            line.channel._exporter, line.channel._timeout = trainer, subject.update
            async with asyncio.timeout(HUNG):
                with pytest.raises(WeightUpdateError):
                    await line.publish(lost)
            if number is signal.SIGKILL:
                assert trainer.process.wait(10) == -signal.SIGKILL
            assert line.pool.statistics().in_rotation == 0
            if subject.staged:
                health = await line.link.control.health(timeout=HUNG)
                assert (health.version, health.paused) == (before, False)
        line.channel._exporter, line.channel._timeout = own, HUNG
        after = await taken_over(line)
        assert set((await asked).output_versions) <= {before, after}
        answer = await line.ask(PROMPT, max_new_tokens=32)
        assert set(answer.output_versions) == {after}
        assert line.distance(answer, after) < line.subject.noise


async def test_a_server_that_waits_for_a_lost_trainer_is_told_to_be_restarted(
    open_line: Any, subject: Subject, model_path: Path, folder: Path
) -> None:
    """Lost in the middle of a tensor: gloo does not notice, and an engine without a limit of ours waits on.

    It is out of the rotation and keeps nobody waiting; another takes its place. Where the whole tensor had left before
    its sender was gone, which a quick machine may do, the server is free, and a new trainer brings it back.
    """
    if subject.staged:
        pytest.skip(f"{subject.name} receives beside its engine, and for as long as we say")
    with running(subject, model_path, folder, name="orphan") as orphan:
        async with open_line(orphan, transport=TransportKind.COLLECTIVE) as line:
            own = line.trainer
            with doomed(model_path, subject, signal.SIGKILL, "within") as trainer:
                line.channel._exporter, line.channel._timeout = trainer, subject.update
                with pytest.raises(WeightUpdateError):
                    await line.publish()
            line.channel._exporter, line.channel._timeout = own, HUNG
            try:
                await taken_over(line)
            except WeightUpdateError as error:
                assert "restart the server" in str(error)
                assert line.pool.statistics().in_rotation == 0
            else:
                answer = await line.ask(PROMPT, max_new_tokens=8)
                assert set(answer.output_versions) == {line.version}
            os.killpg(orphan.process.pid, signal.SIGKILL)
            with running(subject, model_path, folder, name="heir") as heir:
                await line.join(heir, TransportKind.COLLECTIVE)
                after = await line.publish()
                answer = await line.ask(PROMPT, max_new_tokens=32)
                assert set(answer.output_versions) == {after}
                assert line.distance(answer, after) < line.subject.noise


async def taken_over(line: Line) -> int:
    """The version that a new trainer brings to a server which is out; it may take a try or two until it is free.

    Raises:
        WeightUpdateError: it must be restarted.
    """
    after = line.prepare()
    with pytest.raises(WeightUpdateError, match="none was in rotation"):
        await line.publish(after)
    async with asyncio.timeout(HUNG):
        while True:
            try:
                line.version = (await line.channel.readmit(line.server.name)).version
            except WeightUpdateError as error:
                if "restart the server" in str(error):
                    raise
                await asyncio.sleep(1.0)
                continue
            return after
