import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_like.api import EpisodeResult, InferenceEngine, ModelRequest, ModelResponse, RolloutWorkflow, Trajectory
from areal_like.api.trajectory import PromptId
from areal_like.errors import EpisodeError
from areal_like.rollout.convert import to_trajectories
from areal_like.rollout.cursor import PromptVisit
from areal_like.rollout.episode import check_versions, run_episode
from areal_like.rollout.episode_engine import EpisodeIdentity

IDENTITY = EpisodeIdentity(visit=PromptVisit(prompt=PromptId(epoch=0, index=5)), sibling=1)


class NoEngine:
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        raise AssertionError("no request is expected")

    def get_version(self) -> int:
        return 0


class Task(RolloutWorkflow):
    def __init__(self, episode: Callable[[dict[str, Any]], Awaitable[EpisodeResult]]) -> None:
        self.episode = episode

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        return await self.episode(data)


def row(versions: list[int]) -> Trajectory:
    written = np.array(versions) >= 0
    return Trajectory(
        token_ids=np.arange(len(versions), dtype=np.int32),
        loss_mask=written.astype(np.int32),
        logprobs=-written.astype(np.float32),
        versions=np.array(versions, np.int32),
        reward=1.0,
    )


async def run(
    episode: Callable[[dict[str, Any]], Awaitable[EpisodeResult]], data: dict[str, Any] | None = None, limit: float = 60
) -> tuple[Trajectory, ...]:
    return await run_episode(
        Task(episode), NoEngine(), data or {}, identity=IDENTITY, time_limit=limit, convert=to_trajectories
    )


@pytest.mark.parametrize(("result", "count"), [(None, 0), ([], 0), (row([-1, 3]), 1), ([row([-1, 3])] * 2, 2)])
async def test_results_become_trajectories_of_the_episode(result: EpisodeResult, count: int) -> None:
    async def episode(data: dict[str, Any]) -> EpisodeResult:
        return result

    trajectories = await run(episode)
    assert len(trajectories) == count
    assert {(t.group_id, t.episode_id) for t in trajectories} <= {("e0-p5-a0", "e0-p5-a0-s1-r0")}


async def test_the_row_is_a_private_copy() -> None:
    data: dict[str, Any] = {"messages": [{"role": "user"}]}

    async def episode(data: dict[str, Any]) -> None:
        data["messages"].append("mine")
        data["new"] = 1

    await run(episode, data)
    assert data == {"messages": [{"role": "user"}]}


async def test_an_episode_that_never_ends_runs_into_its_limit() -> None:
    async def episode(data: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    with pytest.raises(EpisodeError, match=r"e0-p5-a0-s1-r0 ran past rollout.episode_timeout = 0.01 s"):
        await run(episode, limit=0.01)


async def test_a_timeout_of_the_workflows_own_is_not_the_limit() -> None:
    async def episode(data: dict[str, Any]) -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await run(episode)


async def test_a_workflow_that_cancels_itself_has_failed() -> None:
    async def episode(data: dict[str, Any]) -> None:
        raise asyncio.CancelledError

    with pytest.raises(EpisodeError, match="cancelled by its own code"):
        await run(episode)


async def test_a_workflow_that_exits_has_failed() -> None:
    async def episode(data: dict[str, Any]) -> None:
        sys.exit(3)

    with pytest.raises(EpisodeError, match=r"called exit\(3\)"):
        await run(episode)


class Panic(BaseException):
    """As pyo3's PanicException: no Exception."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Panic("in Rust"), "raised Panic: in Rust, which is no Exception"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt, which"),
        (BaseExceptionGroup("tasks", [Panic("one")]), "raised Panic: one"),
    ],
)
async def test_a_workflow_that_raises_what_is_no_exception_has_failed(error: BaseException, message: str) -> None:
    async def episode(data: dict[str, Any]) -> None:
        raise error

    with pytest.raises(EpisodeError, match=message) as raised:
        await run(episode)
    assert raised.value.__cause__ is error


async def test_our_own_cancellation_comes_through() -> None:
    started = asyncio.Event()

    async def episode(data: dict[str, Any]) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run(episode))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_result_that_breaks_the_contract_has_failed() -> None:
    async def episode(data: dict[str, Any]) -> EpisodeResult:
        return "text"

    with pytest.raises(EpisodeError, match="e0-p5-a0-s1-r0"):
        await run(episode)


def test_no_token_may_be_older_than_the_stamp() -> None:
    check_versions([row([-1, 3, 4])], stamp=3, newest=4, episode_id="e")
    with pytest.raises(EpisodeError, match="version 3, but its group was stamped 4"):
        check_versions([row([-1, 5]), row([-1, 4, 3])], stamp=4, newest=5, episode_id="e")


def test_no_token_may_be_of_a_version_that_was_not_made_yet() -> None:
    with pytest.raises(EpisodeError, match="version 1000, but the newest version made so far is 4"):
        check_versions([row([-1, 4]), row([-1, 4, 1000])], stamp=3, newest=4, episode_id="e")


def test_versions_and_mask_tell_the_same() -> None:
    wrong = replace(row([-1, 4, 4]), versions=np.array([4, 4, 4], np.int32))
    with pytest.raises(EpisodeError, match="versions must be ≥ 0 where loss_mask is 1"):
        check_versions([wrong], stamp=3, newest=4, episode_id="e")


def test_a_trajectory_that_the_policy_did_not_write_is_refused() -> None:
    with pytest.raises(EpisodeError, match="none that the policy wrote"):
        check_versions([row([-1, -1])], stamp=0, newest=0, episode_id="e")
