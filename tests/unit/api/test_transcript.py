"""The transcript: ids, mask, log-probs and versions of what was really sampled."""

from __future__ import annotations

import numpy as np
import pytest

from areal_like.api.generation import ModelResponse, StopReason
from areal_like.api.transcript import Transcript
from areal_like.rollout.convert import to_trajectories


def answer(tokens: list[int], versions: list[int]) -> ModelResponse:
    return ModelResponse(
        input_tokens=[],
        output_tokens=tokens,
        output_logprobs=[-0.5] * len(tokens),
        output_versions=versions,
        stop_reason=StopReason.STOP,
    )


def conversation() -> Transcript:
    transcript = Transcript()
    transcript.add_context([1, 2])
    transcript.add_answer(answer([10, 11], [3, 4]))
    transcript.add_context([5])
    transcript.add_answer(answer([12], [4]))
    return transcript


def test_only_answers_are_written() -> None:
    row = conversation().build(1)
    assert row.token_ids.tolist() == [1, 2, 10, 11, 5, 12]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert row.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert row.versions.tolist() == [-1, -1, 3, 4, -1, 4]
    assert row.reward == 1.0
    assert row.returns is None
    assert to_trajectories(row, group_id="g", episode_id="e")  # it is what the converter expects


def test_ids_are_a_copy_and_lengths_count() -> None:
    transcript = conversation()
    transcript.ids.append(99)
    assert transcript.ids == [1, 2, 10, 11, 5, 12]
    assert (len(transcript), transcript.n_written) == (6, 3)


def test_turn_rewards_become_discounted_returns_to_go() -> None:
    row = conversation().build_with_turn_rewards([1.0, 4.0], discount=0.5)
    assert row.returns is not None
    # first answer: 1 + 0.5 * 4 = 3; second: 4; nothing on context
    assert row.returns.tolist() == [0, 0, 3, 3, 0, 4]
    assert row.returns.dtype == np.float32
    assert row.reward == 3.0


def test_an_answer_that_a_server_mislabelled_stays_visible_to_the_converter() -> None:
    transcript = Transcript()
    transcript.add_answer(answer([10], [-1]))
    assert transcript.build(0.0).loss_mask.tolist() == [1]


def test_turn_rewards_must_match_the_turns() -> None:
    with pytest.raises(ValueError, match="1 turn rewards for 2 answers"):
        conversation().build_with_turn_rewards([1.0])
    with pytest.raises(ValueError, match=r"discount must be within \[0, 1\], not 1.5"):
        conversation().build_with_turn_rewards([1.0, 1.0], discount=1.5)
