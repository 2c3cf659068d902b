"""A load that fails half-way, in a real vLLM: its layers are then neither the old ones nor the new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from subjects import HUNG, TEST, ServerProcess, Subject, python_path, running

from areal_like.errors import WeightUpdateError

if TYPE_CHECKING:
    from conftest import Line

pytestmark = pytest.mark.timeout(TEST)

PROMPT = [10, 200, 31, 77, 150, 42]
FAULTS = Path(__file__).parent / "vllm_faults"


@dataclass(frozen=True, slots=True)
class Switch:
    """While the file exists, loads fail."""

    file: Path

    def on(self) -> None:
        self.file.touch()

    def off(self) -> None:
        self.file.unlink()


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    return Switch(tmp_path / "fail")


@pytest.fixture
def faulty_server(subject: Subject, model_path: Path, folder: Path, switch: Switch) -> Iterator[ServerProcess]:
    if subject.name != "vllm":
        pytest.skip("what fails half-way elsewhere: test_http_failures.py, and the engine's unit tests")
    environment = {"PYTHONPATH": python_path(folder, FAULTS), "AREAL_LIKE_HALF_LOAD": str(switch.file)}
    with running(subject, model_path, folder, name="faulty", environment=environment) as started:
        yield started


async def test_a_half_loaded_server_stays_out_until_a_whole_update(
    open_line: Any, faulty_server: ServerProcess, switch: Switch
) -> None:
    """It is not resumed, which would end it; the same update sent again, and any later one, finds it in order."""
    async with open_line(faulty_server) as line:
        asked = asyncio.create_task(line.ask(PROMPT, max_new_tokens=line.subject.long))
        switch.on()
        await refused(line, "told to fail half-way")
        health = await line.link.control.health(timeout=HUNG)
        assert health.paused
        with pytest.raises(WeightUpdateError, match="half-loaded"):
            await line.link.control.resume(incarnation=0, timeout=HUNG)
        with pytest.raises(WeightUpdateError, match="told to fail half-way"):
            await line.channel.readmit(faulty_server.name)
        switch.off()
        after = (await line.channel.readmit(faulty_server.name)).version
        assert (await asked).output_len == line.subject.long
        answer = await line.ask(PROMPT, max_new_tokens=32)
        assert set(answer.output_versions) == {after}
        assert line.distance(answer, after) < line.subject.noise
        last = await line.publish()
        answer = await line.ask(PROMPT, max_new_tokens=32)
        assert line.distance(answer, last) < line.subject.noise


async def refused(line: Line, said: str) -> None:
    with pytest.raises(WeightUpdateError, match=said):
        await line.publish()
    assert line.pool.statistics().in_rotation == 0
