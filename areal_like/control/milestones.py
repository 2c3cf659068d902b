"""What happens beside training, at certain steps: evaluation and checkpoints. Neither holds up rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from areal_like.config.schedule import EvaluatorConfig, SaverConfig
from areal_like.control.evaluation import Evaluator
from areal_like.control.journal import RunJournal
from areal_like.control.state import RunState


class CheckpointWriter(Protocol):
    async def save_hf(self, directory: str) -> str: ...


class RunMilestones:
    """Evaluations run one at a time in the background; the last one, after rollouts have stopped, is waited for.

    Args:
        evaluator: None where the experiment has no validation set.
        checkpoint: folder for the checkpoint of a version.
        background: owns the evaluations that run beside training.
    """

    def __init__(
        self,
        *,
        evaluator: Evaluator | None,
        evaluator_config: EvaluatorConfig,
        saver_config: SaverConfig,
        trainer: CheckpointWriter,
        checkpoint: Callable[[int], Path],
        journal: RunJournal,
        background: asyncio.TaskGroup,
    ) -> None:
        self._evaluator = evaluator
        self._evaluator_config = evaluator_config
        self._saver_config = saver_config
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._journal = journal
        self._background = background
        self._evaluation: asyncio.Task[None] | None = None
        self._saved: int | None = None

    async def before_training(self) -> None:
        """Evaluate version 0. Rollouts fill the pipeline meanwhile, as far as staleness allows."""
        if self._evaluator is not None and self._evaluator_config.at_start:
            self._journal.stage("evaluating version 0")
            await self._evaluate()
        self._journal.begin()

    async def after_step(self, state: RunState) -> None:
        every = self._evaluator_config.freq_steps
        if self._evaluator is not None and every is not None and state.step % every == 0:
            # one at a time: the next waits for the last, so that a slow evaluation holds up training, not memory
            await self._evaluation_ended()
            self._evaluation = self._background.create_task(self._evaluate(), name=f"evaluate-{state.version}")
        if self._saver_config.freq_steps is not None and state.step % self._saver_config.freq_steps == 0:
            await self.save(state.version)

    async def after_training(self, state: RunState) -> None:
        """Evaluate and save the last version, after rollouts have stopped."""
        await self._evaluation_ended()
        if self._saver_config.at_end:
            await self.save(state.version)
        if self._evaluator is not None and self._evaluator_config.at_end:
            self._journal.stage(f"evaluating version {state.version}")
            await self._evaluate()

    async def save(self, version: int) -> None:
        """Write the Hugging Face checkpoint of ``version``, which the trainer holds, unless it is there."""
        if self._saved != version:
            await self._trainer.save_hf(str(self._checkpoint(version)))
            self._saved = version

    def cancel(self) -> None:
        """Give up an evaluation that is still under way: the run is being left."""
        if self._evaluation is not None:
            self._evaluation.cancel()

    async def _evaluation_ended(self) -> None:
        if self._evaluation is not None:
            await self._evaluation

    async def _evaluate(self) -> None:
        if self._evaluator is not None:
            self._journal.evaluated(await self._evaluator.evaluate())
