"""Runs an experiment's own workflow in lockstep: every episode of a batch waits, then all are answered at once.

This is what makes a synchronous system slow: nobody goes on before the slowest has been answered.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from areal_like.api import ModelRequest, ModelResponse, Trajectory
from areal_like.config.experiment import ExperimentConfig
from areal_like.rollout.convert import to_trajectories
from areal_like.rollout.cursor import PromptCursor
from areal_like.rollout.datasets import read_jsonl
from areal_like.rollout.plugins import build_workflow
from areal_like.rollout.rewards import open_rewards
from areal_like.rollout.tokenizer import load_tokenizer

Generate = Callable[[Sequence[ModelRequest]], list[ModelResponse]]


def core_of(config: ExperimentConfig) -> ExperimentConfig:
    """``config``, if it keeps to what the short baseline repeats: no other models, regularisers or shaping.

    Raises:
        SystemExit: it does not; the baseline would train something else without a word.
    """
    actor = config.actor
    beyond = {
        "critic": config.critic is not None,
        "ref": config.ref is not None,
        "actor.objective: m2po": actor.objective == "m2po",
        "actor.entropy_coef": actor.entropy_coef != 0.0,
        "actor.shaping": actor.shaping != type(actor.shaping)(),
    }
    found = [key for key, used in beyond.items() if used]
    if found:
        raise SystemExit(f"the synchronous baseline does without {', '.join(found)}; remove it, or use areal-like run")
    return config


class LockstepEngine:
    """An ``InferenceEngine`` for ``running`` concurrent episodes over one function that answers a whole batch."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._waiting: list[tuple[ModelRequest, asyncio.Future[ModelResponse]]] = []
        self.running = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        answer: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._answer_if_all_wait()
        return await answer

    def get_version(self) -> int:
        return 0

    def leave(self) -> None:
        """An episode has ended: the others need not wait for it."""
        self.running -= 1
        self._answer_if_all_wait()

    def _answer_if_all_wait(self) -> None:
        if self._waiting and len(self._waiting) == self.running:
            waiting, self._waiting = self._waiting, []
            for (_, future), answer in zip(waiting, self._generate([r for r, _ in waiting]), strict=True):
                future.set_result(answer)


class Episodes:
    """Prompts, workflow and reward of an experiment; one batch of trajectories at a time."""

    def __init__(self, config: ExperimentConfig, generate: Generate) -> None:
        self._config = config
        self._engine = LockstepEngine(generate)
        self._data = read_jsonl(config.train_dataset.path)
        self._cursor = PromptCursor(n_prompts=len(self._data), seed=config.seed, shuffle=config.train_dataset.shuffle)
        inline = config.rewards.model_copy(update={"workers": 0})
        self._workflow = build_workflow(
            config.workflow,
            reward_fn=open_rewards(config.reward_fn, inline) if config.reward_fn else None,
            gconfig=config.gconfig,
            tokenizer=load_tokenizer(config.model.path),
            workflow_args=config.workflow_args,
        )

    def next_batch(self) -> list[Trajectory]:
        """``n_samples`` episodes of the next ``batch_size`` prompts."""
        visits = [self._cursor.advance() for _ in range(self._config.train_dataset.batch_size)]
        return asyncio.run(self._play({visit.group_id: self._data[visit.prompt.index] for visit in visits}))

    async def _play(self, groups: dict[str, dict[str, Any]]) -> list[Trajectory]:
        samples = self._config.gconfig.n_samples
        self._engine.running = len(groups) * samples
        episodes = [self._episode(group_id, data, i) for group_id, data in groups.items() for i in range(samples)]
        found = await asyncio.gather(*episodes)
        return [trajectory for trajectories in found for trajectory in trajectories]

    async def _episode(self, group_id: str, data: dict[str, Any], sibling: int) -> tuple[Trajectory, ...]:
        try:
            result = await self._workflow.arun_episode(self._engine, dict(data))
        finally:
            self._engine.leave()
        return to_trajectories(result, group_id=group_id, episode_id=f"{group_id}-s{sibling}")
