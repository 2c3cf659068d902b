"""When evaluations run and checkpoints are written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from areal_like.config.schedule import EvaluatorConfig, SaverConfig
from areal_like.control.evaluation import Evaluator
from areal_like.control.journal import RunJournal
from areal_like.control.milestones import RunMilestones
from areal_like.control.state import RunState
from areal_like.errors import NoServerAvailable


class Parts:
    """Evaluator, trainer and journal at once; an evaluation ends when the test says so."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.error: Exception | None = None

    async def evaluate(self) -> str:
        self.told.append("evaluate")
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return "report"

    async def save_hf(self, directory: str) -> str:
        self.told.append(f"save {directory}")
        return directory

    def evaluated(self, report: str) -> None:
        self.told.append(report)

    def begin(self) -> None:
        self.told.append("begin")

    def stage(self, name: str) -> None:
        self.told.append(name)


@asynccontextmanager
async def _open(
    parts: Parts, *, evaluator: bool = True, evaluate: dict[str, Any] | None = None, save: dict[str, Any] | None = None
) -> AsyncIterator[RunMilestones]:
    async with asyncio.TaskGroup() as background:
        yield RunMilestones(
            evaluator=cast(Evaluator, parts) if evaluator else None,
            evaluator_config=EvaluatorConfig(**(evaluate or {})),
            saver_config=SaverConfig(**(save or {})),
            trainer=parts,
            checkpoint=lambda version: Path(f"v{version}"),
            journal=cast(RunJournal, parts),
            background=background,
        )


def _state(step: int) -> RunState:
    return RunState(step=step, version=step)


async def test_by_default_the_first_and_the_last_version_are_evaluated_and_the_last_is_saved() -> None:
    parts = Parts()
    async with _open(parts) as milestones:
        await milestones.before_training()
        await milestones.after_step(_state(1))
        await milestones.after_training(_state(1))
    first = ["evaluating version 0", "evaluate", "report", "begin"]
    assert parts.told == [*first, "save v1", "evaluating version 1", "evaluate", "report"]


async def test_nothing_is_evaluated_without_a_validation_set_or_where_it_is_off() -> None:
    for evaluator, config in ((False, {"freq_steps": 1}), (True, {"at_start": False, "at_end": False})):
        parts = Parts()
        async with _open(parts, evaluator=evaluator, evaluate=config, save={"at_end": False}) as milestones:
            await milestones.before_training()
            await milestones.after_step(_state(1))
            await milestones.after_training(_state(1))
        assert parts.told == ["begin"]


async def test_a_version_is_saved_once() -> None:
    parts = Parts()
    async with _open(parts, evaluator=False, save={"freq_steps": 2}) as milestones:
        for step in (1, 2, 3, 4):
            await milestones.after_step(_state(step))
        await milestones.after_training(_state(4))
        await milestones.save(4)
    assert parts.told == ["save v2", "save v4"]


async def test_an_evaluation_runs_beside_training_and_the_next_one_waits_for_it() -> None:
    parts = Parts()
    parts.go_on.clear()
    async with _open(parts, evaluate={"freq_steps": 1}) as milestones:
        await milestones.after_step(_state(1))
        next_step = asyncio.create_task(milestones.after_step(_state(2)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert parts.told == ["evaluate"]
        assert not next_step.done()
        parts.go_on.set()
        await next_step
    assert parts.told == ["evaluate", "report", "evaluate", "report"]


async def test_the_run_may_leave_an_evaluation_behind() -> None:
    parts = Parts()
    parts.go_on.clear()
    async with _open(parts, evaluate={"freq_steps": 1}) as milestones:
        milestones.cancel()  # none is under way yet
        await milestones.after_step(_state(1))
        await asyncio.sleep(0)
        milestones.cancel()
    assert parts.told == ["evaluate"]


async def test_an_evaluation_that_fails_ends_the_run() -> None:
    parts = Parts()
    parts.error = NoServerAvailable("none is left")
    with pytest.raises(ExceptionGroup) as ended:
        async with _open(parts, evaluate={"freq_steps": 1}) as milestones:
            await milestones.after_step(_state(1))
            await asyncio.Event().wait()
    assert ended.group_contains(NoServerAvailable)
