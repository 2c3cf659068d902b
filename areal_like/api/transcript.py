"""Builds a trajectory from what an episode really saw and wrote: token ids are appended, never encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from areal_like.api.generation import ModelResponse
from areal_like.api.trajectory import NOT_WRITTEN, Trajectory


class Transcript:
    """One conversation as the model knows it: context (mask 0) and answers (mask 1), in order.

    ``transcript.ids`` is the prompt of the next request. An answer is appended with the ids that were sampled, since
    decoding and encoding text again may give other ids than those the log-probs belong to.
    """

    __slots__ = ("_answers", "_ids", "_logprobs", "_versions")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._answers: list[tuple[int, int]] = []

    @property
    def ids(self) -> list[int]:
        """A copy of all token ids so far."""
        return list(self._ids)

    @property
    def n_written(self) -> int:
        """How many tokens the policy wrote."""
        return sum(end - start for start, end in self._answers)

    def __len__(self) -> int:
        return len(self._ids)

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not write: a prompt, or what the environment said."""
        self._ids.extend(token_ids)
        self._logprobs.extend([0.0] * len(token_ids))
        self._versions.extend([NOT_WRITTEN] * len(token_ids))

    def add_answer(self, response: ModelResponse) -> None:
        """Append what the policy wrote, with the log-prob and the version of every token."""
        start = len(self._ids)
        self._ids.extend(response.output_tokens)
        self._logprobs.extend(response.output_logprobs)
        self._versions.extend(response.output_versions)
        self._answers.append((start, len(self._ids)))

    def build(self, reward: float) -> Trajectory:
        """The trajectory, with one reward for all of it."""
        loss_mask = np.zeros(len(self._ids), np.int32)
        for start, end in self._answers:
            loss_mask[start:end] = 1
        return Trajectory(
            token_ids=np.array(self._ids, np.int32),
            loss_mask=loss_mask,
            logprobs=np.array(self._logprobs, np.float32),
            versions=np.array(self._versions, np.int32),
            reward=float(reward),
        )

    def build_with_turn_rewards(self, rewards: Sequence[float], *, discount: float = 1.0) -> Trajectory:
        """The trajectory, with a reward for every answer.

        ``returns`` of answer t's tokens is the discounted return-to-go, the sum over k ≥ t of
        discount^(k - t) · rewards[k] (0 on context). The trajectory's reward is the return of its first answer: the
        total by which its group is compared.

        Raises:
            ValueError: not one reward per answer, or ``discount`` outside [0, 1].
        """
        if len(rewards) != len(self._answers):
            raise ValueError(f"{len(rewards)} turn rewards for {len(self._answers)} answers; give one per add_answer")
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount must be within [0, 1], not {discount}")
        returns = np.zeros(len(self._ids), np.float32)
        to_go = 0.0
        for (start, end), reward in zip(reversed(self._answers), reversed(rewards), strict=True):
            to_go = reward + discount * to_go
            returns[start:end] = to_go
        return replace(self.build(to_go), returns=returns)
