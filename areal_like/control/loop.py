"""The training loop of one experiment.

    prompts -> admission -> episodes -> take_batch -> update -> publish -> release
                  ^                                              |
                  +--------------- acknowledged version ---------+

``take_batch`` waits until the batch rule allows a batch and is woken by finished groups; everything before it runs
all the time, through updates, publications, evaluation and saving.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from areal_like.api.trajectory import Batch, UpdateReport
from areal_like.control.state import RunState


class Rollouts(Protocol):
    async def take_batch(self, version: int) -> Batch: ...
    def release(self, batch: Batch) -> None: ...


class Trainer(Protocol):
    async def update(self, batch: Batch) -> UpdateReport: ...


class Publisher(Protocol):
    async def publish(self, version: int) -> object: ...


class Milestones(Protocol):
    """What happens beside training: evaluation, checkpoints."""

    async def before_training(self) -> None: ...
    async def after_step(self, state: RunState) -> None: ...


class Journal(Protocol):
    """What is written down of each step."""

    def taken(self, batch: Batch) -> None: ...
    def training(self, version: int) -> AbstractContextManager[None]: ...
    def step(self, state: RunState, batch: Batch, report: UpdateReport) -> None: ...


class TrainingLoop:
    """Consumes batches and makes versions until ``total_train_steps`` is reached."""

    def __init__(
        self,
        *,
        total_train_steps: int,
        rollouts: Rollouts,
        trainer: Trainer,
        weights: Publisher,
        milestones: Milestones,
        journal: Journal,
    ) -> None:
        self.total_train_steps = total_train_steps
        self.rollouts = rollouts
        self.trainer = trainer
        self.weights = weights
        self.milestones = milestones
        self.journal = journal
        self.state = RunState()

    async def run(self) -> None:
        await self.weights.publish(self.state.version)
        await self.milestones.before_training()
        while self.state.step < self.total_train_steps:
            batch = await self.rollouts.take_batch(self.state.version)
            self.journal.taken(batch)
            with self.journal.training(batch.version):
                report = await self.trainer.update(batch)
            version = self.state.advance(batch)
            await self.weights.publish(version)
            self.journal.step(self.state, batch, report)
            self.rollouts.release(batch)
            await self.milestones.after_step(self.state)
