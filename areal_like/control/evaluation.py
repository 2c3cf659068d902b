"""Evaluation: fresh episodes on the servers that also write the training data.

It holds no rollout slots and pauses nothing; its own cap bounds how many episodes run at once. Since weights may change
while it runs, the report names every version that wrote a token of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_like.api.engine import InferenceEngine
from areal_like.api.trajectory import PromptId, Trajectory
from areal_like.api.workflow import RolloutWorkflow
from areal_like.rollout.cursor import PromptVisit
from areal_like.rollout.episode import Converter, run_episode
from areal_like.rollout.episode_engine import EpisodeEngine, EpisodeIdentity
from areal_like.rollout.failure import FailureKind, kind_of
from areal_like.rollout.failure_log import FailureLog

logger = logging.getLogger(__name__)

#: the epoch under which evaluation's prompts go: no training prompt ever has it, so neither ids nor seeds collide
_EVALUATION_EPOCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """``n_samples`` episodes for each prompt, ``max_concurrent`` at once; time limits in seconds."""

    seed: int
    n_samples: int
    max_concurrent: int
    episode_timeout: float
    episode_retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """One evaluation.

    Attributes:
        version: lowest acknowledged version when it began.
        versions: every version that wrote a token of it, ascending.
        reward: mean episode reward over the episodes that returned anything; None if none did.
        episodes, rejected, failed: how many returned something, returned None, or failed for good.
        tokens: tokens generated.
        seconds: wall time.
    """

    version: int
    versions: tuple[int, ...]
    reward: float | None
    episodes: int
    rejected: int
    failed: int
    tokens: int
    seconds: float


@dataclass(slots=True)
class _Score:
    """What the episodes of one evaluation have come to so far."""

    rewards: float = 0.0
    episodes: int = 0
    rejected: int = 0
    failed: int = 0
    tokens: int = 0

    def add_tokens(self, count: int) -> None:
        self.tokens += count


class Evaluator:
    """Runs the validation set. Episodes get the same seeds in every evaluation, so that two of them are comparable."""

    def __init__(
        self,
        *,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        rows: Sequence[Mapping[str, Any]],
        convert: Converter,
        settings: EvaluationSettings,
    ) -> None:
        self._workflow = workflow
        self._engine = engine
        self._rows = rows
        self._convert = convert
        self._settings = settings
        self._failures = FailureLog(logger)

    async def evaluate(self) -> EvaluationReport:
        """Evaluate every prompt once.

        Raises:
            InfrastructureError: nothing can generate any more.
        """
        version, started = self._engine.get_version(), time.monotonic()
        score, versions = _Score(), set[int]()
        room = asyncio.Semaphore(self._settings.max_concurrent)

        async def one(index: int, sibling: int) -> None:
            async with room:
                await self._episode(index, sibling, score, versions)

        async with asyncio.TaskGroup() as episodes:
            for index in range(len(self._rows)):
                for sibling in range(self._settings.n_samples):
                    episodes.create_task(one(index, sibling), name=f"evaluate-{index}-{sibling}")
        return EvaluationReport(
            version=version,
            versions=tuple(sorted(versions)),
            reward=score.rewards / score.episodes if score.episodes else None,
            episodes=score.episodes,
            rejected=score.rejected,
            failed=score.failed,
            tokens=score.tokens,
            seconds=time.monotonic() - started,
        )

    async def _episode(self, index: int, sibling: int, score: _Score, versions: set[int]) -> None:
        visit = PromptVisit(prompt=PromptId(epoch=_EVALUATION_EPOCH, index=index))
        for retry in range(self._settings.episode_retries + 1):
            identity = EpisodeIdentity(visit=visit, sibling=sibling, retry=retry)
            try:
                trajectories = await self._run(identity, score)
            except Exception as error:  # supervision boundary: user code may raise anything; the kind decides
                kind = kind_of(error)
                if kind is FailureKind.FATAL:
                    raise
                self._failures.record(error, where=f"evaluation episode {identity.episode_id}")
                continue
            for trajectory in trajectories:
                versions.update(trajectory.versions[trajectory.loss_mask > 0].tolist())
            if trajectories:
                score.episodes += 1
                score.rewards += sum(t.reward for t in trajectories) / len(trajectories)
            else:
                score.rejected += 1
            return
        score.failed += 1

    async def _run(self, identity: EpisodeIdentity, score: _Score) -> tuple[Trajectory, ...]:
        engine = EpisodeEngine(
            self._engine,
            identity=identity,
            run_seed=self._settings.seed,
            on_dispatch=lambda: None,
            on_tokens=score.add_tokens,
        )
        return await run_episode(
            self._workflow,
            engine,
            self._rows[identity.visit.prompt.index],
            identity=identity,
            time_limit=self._settings.episode_timeout,
            convert=self._convert,
        )
