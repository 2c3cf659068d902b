"""Evaluation over the real episode code, with an engine that answers from its seed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal_like.api import ModelRequest, ModelResponse, RolloutWorkflow, StopReason, Trajectory
from areal_like.api.transcript import Transcript
from areal_like.control.evaluation import EvaluationSettings, Evaluator
from areal_like.errors import NoServerAvailable, ServerUnavailable
from areal_like.rollout.convert import to_trajectories


class Engine:
    """Answers two tokens under version 4 and then 5; may fail first, and counts how many run at once."""

    def __init__(self, failures: int = 0, error: Exception | None = None) -> None:
        self.failures = failures
        self.error = error or ServerUnavailable("gone")
        self.seeds: list[int | None] = []
        self.running = self.most = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if self.failures:
                self.failures -= 1
                raise self.error
        finally:
            self.running -= 1
        self.seeds.append(request.seed)
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=[7, 8],
            output_logprobs=[-0.5, -0.5],
            output_versions=[4, 5],
            stop_reason=StopReason.LENGTH,
        )

    def get_version(self) -> int:
        return 4


class Task(RolloutWorkflow):
    """A row is what happens: a reward, ``reject``, ``raise`` or ``hang``; ``several`` returns two trajectories."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        transcript = Transcript()
        transcript.add_context([1])
        transcript.add_answer(await engine.agenerate(ModelRequest(input_ids=[1])))
        match data["do"]:
            case "reject":
                return None
            case "raise":
                raise ZeroDivisionError
            case "hang":
                await asyncio.Event().wait()
            case "several":
                return [transcript.build(0.0), transcript.build(1.0)]
        built: Trajectory = transcript.build(data["do"])
        return built


def _evaluator(engine: Engine, *rows: object, **settings: Any) -> Evaluator:
    plain = {"seed": 1, "n_samples": 1, "max_concurrent": 4, "episode_timeout": 5.0, "episode_retries": 1}
    return Evaluator(
        workflow=Task(),
        engine=engine,
        rows=[{"do": row} for row in rows],
        convert=to_trajectories,
        settings=EvaluationSettings(**{**plain, **settings}),
    )


async def test_the_score_is_the_mean_over_episodes() -> None:
    report = await _evaluator(Engine(), 1.0, 0.0, "several", "reject").evaluate()
    assert report.reward == pytest.approx((1.0 + 0.0 + 0.5) / 3)
    assert (report.episodes, report.rejected, report.failed) == (3, 1, 0)
    assert (report.version, report.versions) == (4, (4, 5))
    assert report.tokens == 8
    assert report.seconds > 0


async def test_every_sibling_has_a_seed_of_its_own_and_the_same_in_every_evaluation() -> None:
    engine = Engine()
    evaluator = _evaluator(engine, 1.0, 0.0, n_samples=3)
    report = await evaluator.evaluate()
    assert report.episodes == 6
    assert len(set(engine.seeds)) == 6
    await evaluator.evaluate()
    assert sorted(map(str, engine.seeds[:6])) == sorted(map(str, engine.seeds[6:]))


async def test_no_more_run_at_once_than_allowed() -> None:
    engine = Engine()
    await _evaluator(engine, *[1.0] * 20, max_concurrent=3).evaluate()
    assert engine.most == 3


async def test_a_fault_that_passes_is_no_failure() -> None:
    report = await _evaluator(Engine(failures=1), 1.0).evaluate()
    assert (report.reward, report.failed) == (1.0, 0)


async def test_what_keeps_failing_is_counted_and_never_a_reward(caplog: pytest.LogCaptureFixture) -> None:
    report = await _evaluator(Engine(), "raise", "hang", episode_timeout=0.05).evaluate()
    assert (report.reward, report.episodes, report.failed) == (None, 0, 2)
    assert report.versions == ()
    assert "ZeroDivisionError" in caplog.text
    assert "ran past rollout.episode_timeout" in caplog.text


async def test_without_servers_it_ends() -> None:
    engine = Engine(failures=100, error=NoServerAvailable("none is left"))
    with pytest.raises(ExceptionGroup) as ended:
        await _evaluator(engine, *[1.0] * 5).evaluate()
    assert ended.group_contains(NoServerAvailable)
