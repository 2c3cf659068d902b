"""The loop does its steps in the one order that the staleness contract allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from control_cases import batch_of, report_of

from areal_like.api.trajectory import Batch, UpdateReport
from areal_like.control.loop import TrainingLoop
from areal_like.control.state import RunState
from areal_like.errors import RolloutsEnded


class Everything:
    """Plays every part of the loop, and writes down what it was told."""

    def __init__(self, batches: int = 100) -> None:
        self.told: list[str] = []
        self.batches = batches

    async def take_batch(self, version: int) -> Batch:
        if version >= self.batches:
            raise RolloutsEnded("no prompt is left")
        self.told.append(f"take {version}")
        return batch_of(version, groups=2)

    def release(self, batch: Batch) -> None:
        self.told.append(f"release {batch.version}")

    async def update(self, batch: Batch) -> UpdateReport:
        self.told.append(f"update {batch.version}")
        return report_of(batch.version)

    async def publish(self, version: int) -> None:
        self.told.append(f"publish {version}")

    async def before_training(self) -> None:
        self.told.append("begin")

    async def after_step(self, state: RunState) -> None:
        self.told.append(f"after {state.step}")

    def taken(self, batch: Batch) -> None:
        self.told.append(f"note {batch.version}")

    @contextmanager
    def training(self, version: int) -> Iterator[None]:
        self.told.append(f"[{version}")
        yield
        self.told.append(f"{version}]")

    def step(self, state: RunState, batch: Batch, report: UpdateReport) -> None:
        assert (state.step, state.version) == (batch.version + 1, report.version + 1)
        self.told.append(f"line {state.step}")


def _loop(parts: Everything, steps: int) -> TrainingLoop:
    return TrainingLoop(
        total_train_steps=steps, rollouts=parts, trainer=parts, weights=parts, milestones=parts, journal=parts
    )


async def test_every_version_is_published_and_every_batch_trained_and_released_once() -> None:
    parts = Everything()
    loop = _loop(parts, steps=2)
    await loop.run()
    step_0 = ["take 0", "note 0", "[0", "update 0", "0]", "publish 1", "line 1", "release 0", "after 1"]
    step_1 = ["take 1", "note 1", "[1", "update 1", "1]", "publish 2", "line 2", "release 1", "after 2"]
    assert parts.told == ["publish 0", "begin", *step_0, *step_1]
    assert loop.state == RunState(step=2, version=2, trained_groups=4)


async def test_when_no_batch_comes_the_state_is_that_of_the_last_step() -> None:
    loop = _loop(Everything(batches=1), steps=3)
    with pytest.raises(RolloutsEnded):
        await loop.run()
    assert (loop.state.step, loop.state.version) == (1, 1)
