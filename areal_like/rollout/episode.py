"""One episode: the user's coroutine under a time limit, and its result as trajectories that may be trained on."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from areal_like.api.engine import InferenceEngine
from areal_like.api.trajectory import Trajectory
from areal_like.api.workflow import EpisodeResult, RolloutWorkflow
from areal_like.errors import EpisodeError
from areal_like.rollout.episode_engine import EpisodeIdentity
from areal_like.rollout.failure import headline_of


class Converter(Protocol):
    """Turns whatever a workflow may return into trajectories; no trajectories when it rejected the episode."""

    def __call__(self, result: EpisodeResult, *, group_id: str, episode_id: str) -> tuple[Trajectory, ...]:
        """Convert and check one result.

        Raises:
            EpisodeError: the result breaks the contract of ``arun_episode``.
        """
        ...


async def run_episode(
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    data: Mapping[str, Any],
    *,
    identity: EpisodeIdentity,
    time_limit: float,
    convert: Converter,
) -> tuple[Trajectory, ...]:
    """Run one episode. An empty result means that the workflow rejected it.

    Args:
        data: the dataset row; the workflow gets a deep copy.
        time_limit: seconds.

    Raises:
        EpisodeError: it ran past the limit, cancelled itself, raised what is no Exception, or broke the contract.
        Exception: whatever the workflow raised.
    """
    deadline = asyncio.timeout(time_limit)
    try:
        with own_cancellation_only(f"episode {identity.episode_id}"):
            async with deadline:
                result = await workflow.arun_episode(engine, copy.deepcopy(dict(data)))
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EpisodeError(
            f"episode {identity.episode_id} ran past rollout.episode_timeout = {time_limit} s; "
            f"raise the limit, or bound what the workflow waits for"
        ) from error
    if result is None:
        return ()
    with own_cancellation_only(f"the result of episode {identity.episode_id}"):  # it may hold objects of the user's
        return convert(result, group_id=identity.group_id, episode_id=identity.episode_id)


@contextmanager
def own_cancellation_only(what: str) -> Iterator[None]:
    """Around user code: lets our cancellation of this task through, and turns what the code does to itself into errors.

    A ``CancelledError`` that leaks out of it would end the task in silence, and its group would never end; a
    ``SystemExit`` or ``KeyboardInterrupt`` would end the controller; a panic of a Rust extension passes every
    ``except Exception``.

    Raises:
        EpisodeError: the code cancelled itself, called ``sys.exit``, or raised another BaseException.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:  # supervision boundary: it must not reach our loop
        if is_our_cancellation(error):
            raise
        if isinstance(error, asyncio.CancelledError):
            raise EpisodeError(f"{what} was cancelled by its own code; let no CancelledError out of it") from error
        if isinstance(error, SystemExit):
            raise EpisodeError(f"{what} called exit({error.code!r}); return or raise instead") from error
        raise EpisodeError(f"{what} raised {headline_of(error)}, which is no Exception; raise one instead") from error


def is_our_cancellation(error: BaseException) -> bool:
    """Whether we cancelled this task, or its coroutine is being closed, rather than that user code raised this."""
    if isinstance(error, GeneratorExit):
        return True
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def check_versions(trajectories: Sequence[Trajectory], *, stamp: int, newest: int, episode_id: str) -> None:
    """The staleness bound rests on this: no token of a group is older than its stamp, or from the future.

    Args:
        newest: no version after this one has been made yet.

    Raises:
        EpisodeError: a trajectory holds no token that the policy wrote, or one of a version < ``stamp`` or
            > ``newest``; or ``versions`` and ``loss_mask`` disagree about which tokens were written.
    """
    for trajectory in trajectories:
        if not np.array_equal(trajectory.versions >= 0, trajectory.loss_mask == 1):
            raise EpisodeError(
                f"episode {episode_id}: versions must be ≥ 0 where loss_mask is 1, and -1 elsewhere; in a trajectory "
                f"of {trajectory.length} tokens they are not"
            )
        written = trajectory.versions[trajectory.versions >= 0]
        if not written.size:
            raise EpisodeError(
                f"episode {episode_id}: a trajectory of {trajectory.length} tokens holds none that the policy wrote "
                f"(every version is -1); pass the versions of the engine's answer on, or return None to reject it"
            )
        oldest, latest = int(written.min()), int(written.max())
        if latest > newest:
            raise EpisodeError(
                f"episode {episode_id}: a trajectory holds a token of version {latest}, but the newest version made "
                f"so far is {newest}; pass the versions of the engine's answer on as they are"
            )
        if oldest < stamp:
            raise EpisodeError(
                f"episode {episode_id}: a trajectory holds a token of version {oldest}, but its group was stamped "
                f"{stamp} when its first request left; return only what this episode generated"
            )
