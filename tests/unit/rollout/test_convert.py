"""What a workflow may return, and what is refused with which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_like.api.trajectory import Trajectory
from areal_like.errors import EpisodeError
from areal_like.rollout.convert import to_trajectories


def row(**changes: Any) -> Trajectory:
    """Two context tokens, then two written ones under versions 3 and 4."""
    good = Trajectory(
        token_ids=np.array([5, 6, 7, 8], np.int32),
        loss_mask=np.array([0, 0, 1, 1], np.int32),
        logprobs=np.array([0, 0, -0.5, -0.25], np.float32),
        versions=np.array([-1, -1, 3, 4], np.int32),
        reward=1.0,
    )
    return replace(good, **changes)


def convert(result: object) -> tuple[Trajectory, ...]:
    return to_trajectories(result, group_id="g1", episode_id="e1")


def areal_dict(**changes: Any) -> dict[str, Any]:
    """Two rows of one episode, the first padded on the left, the second on the right; plain lists."""
    return {
        "input_ids": [[0, 5, 6, 7], [5, 8, 9, 0]],
        "loss_mask": [[0, 0, 1, 1], [0, 1, 1, 0]],
        "logprobs": [[0.0, 0.0, -0.5, -0.25], [0.0, -1.0, -2.0, 0.0]],
        "versions": [[-1, -1, 2, 2], [-1, 2, 3, -1]],
        "attention_mask": [[False, True, True, True], [True, True, True, False]],
        "rewards": [1.0, 0.5],
        **changes,
    }


def test_a_trajectory_gets_its_ids_and_keeps_its_tokens() -> None:
    (converted,) = convert(row())
    assert (converted.group_id, converted.episode_id) == ("g1", "e1")
    assert converted.token_ids.tolist() == [5, 6, 7, 8]
    assert converted.versions.tolist() == [-1, -1, 3, 4]
    assert converted.reward == 1.0


def test_none_and_an_empty_list_are_a_rejected_episode() -> None:
    assert convert(None) == ()
    assert convert([]) == ()


def test_a_list_keeps_its_order() -> None:
    assert [t.reward for t in convert([row(reward=1.0), row(reward=2.0)])] == [1.0, 2.0]


def test_plain_lists_and_other_integer_types_become_the_promised_dtypes() -> None:
    (converted,) = convert(
        row(token_ids=[5, 6, 7, 8], loss_mask=np.array([False, False, True, True]), logprobs=[0, 0, -1, -1.5])
    )
    assert converted.token_ids.dtype == converted.loss_mask.dtype == converted.versions.dtype == np.int32
    assert converted.logprobs.dtype == np.float32
    assert converted.logprobs.tolist() == [0, 0, -1, -1.5]


def test_areals_dict_is_one_trajectory_per_row_without_its_padding() -> None:
    first, second = convert(areal_dict())
    assert first.token_ids.tolist() == [5, 6, 7]
    assert first.loss_mask.tolist() == [0, 1, 1]
    assert first.versions.tolist() == [-1, 2, 2]
    assert second.token_ids.tolist() == [5, 8, 9]
    assert second.logprobs.tolist() == [0.0, -1.0, -2.0]
    assert (first.reward, second.reward) == (1.0, 0.5)
    assert first.episode_id == second.episode_id == "e1"


def test_areals_dict_of_torch_tensors_gives_the_same() -> None:
    torch = pytest.importorskip("torch")
    tensors = {key: torch.tensor(value) for key, value in areal_dict().items()}
    tensors["logprobs"] = tensors["logprobs"].to(torch.bfloat16).requires_grad_()
    assert [t.token_ids.tolist() for t in convert(tensors)] == [t.token_ids.tolist() for t in convert(areal_dict())]
    assert [t.logprobs.tolist() for t in convert(tensors)] == [t.logprobs.tolist() for t in convert(areal_dict())]


def test_areals_dict_of_one_row_without_batch_dimension_or_attention_mask() -> None:
    flat = {
        "input_ids": [5, 6],
        "loss_mask": [0, 1],
        "logprobs": [0.0, -0.5],
        "versions": [-1, 0],
        "rewards": 2.0,
        "seqlen": 2,
    }
    (converted,) = convert(flat)
    assert converted.token_ids.tolist() == [5, 6]
    assert converted.reward == 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": np.array([0, 1, 1], np.int32)}, "one length, but these are: token_ids 4, loss_mask 3"),
        ({"token_ids": np.array([5, -6, 7, 8])}, "token_ids must be ≥ 0, but it is -6 at position 1 of 4"),
        ({"token_ids": np.array([5, 2**31, 7, 8])}, "must fit 32 bits"),
        ({"token_ids": np.array([5.0, 6.0, 7.0, 8.0])}, "token_ids must be integers, not float64"),
        ({"token_ids": np.zeros((2, 2), np.int32)}, r"one dimension, not shape \[2, 2\]"),
        ({"loss_mask": np.array([0, 0, 2, 1])}, "loss_mask must be 0 or 1, but it is 2 at position 2"),
        ({"loss_mask": np.zeros(4, np.int32)}, "loss_mask has no 1"),
        ({"loss_mask": np.array([1, 0, 1, 1])}, "loss_mask begins with a 1"),
        (
            {"logprobs": np.array([0, 0, np.nan, -1])},
            "finite and ≤ 0 where loss_mask is 1, but it is nan at position 2",
        ),
        ({"logprobs": np.array([0, 0, -1, -np.inf])}, "finite and ≤ 0"),
        ({"logprobs": np.array([0, 0, -1, -1e300])}, "finite and ≤ 0"),
        ({"logprobs": np.array([0, 0, 0.5, -1])}, "but it is 0.5 at position 2"),
        ({"logprobs": np.array([0, -3, -1, -1])}, "logprobs must be 0 where loss_mask is 0"),
        ({"versions": np.array([-1, -1, -1, 4])}, "versions must be ≥ 0 where loss_mask is 1"),
        ({"versions": np.array([-1, 3, 3, 4])}, "versions must be -1 where loss_mask is 0"),
        ({"returns": np.array([0, 0, 1, np.inf])}, "returns must be finite"),
        ({"returns": np.array([0, 0, 1])}, "returns 3"),
        ({"reward": float("nan")}, "the reward must be finite"),
        ({"reward": None}, "the reward must be a number, not a NoneType"),
        ({"token_ids": ["a", "b", "c", "d"]}, "token_ids must hold numbers"),
    ],
)
def test_an_inconsistent_trajectory_is_refused_with_the_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EpisodeError, match=message) as raised:
        convert(row(**changes))
    assert "episode e1 of group g1" in str(raised.value)


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    assert to_trajectories(row(), group_id="g1", episode_id="e1", vocabulary_size=9)
    with pytest.raises(EpisodeError, match="trajectory 1: token_ids must be < 9, the model's vocabulary, but"):
        to_trajectories(
            [row(), row(token_ids=np.array([5, 9, 7, 8]))], group_id="g1", episode_id="e1", vocabulary_size=9
        )


def test_the_message_counts_trajectories_of_a_list() -> None:
    with pytest.raises(EpisodeError, match="trajectory 1: the reward must be finite"):
        convert([row(), row(reward=float("inf"))])


def test_rounding_above_zero_is_a_log_prob() -> None:
    (converted,) = convert(row(logprobs=np.array([0, 0, 1e-7, -1], np.float32)))
    assert converted.logprobs[2] > 0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (1.0, "arun_episode returned a float"),
        ("text", "arun_episode returned a str"),
        ([row(), None], "element 1 of the returned list is a NoneType"),
        ({}, "lacks input_ids, loss_mask, logprobs, versions, rewards; it has nothing"),
        (areal_dict(rewards=[1.0]), "1 rewards for 2 rows"),
        (areal_dict(versions=[[-1, 2]]), r"versions has shape \[1, 2\] and input_ids \[2, 4\]"),
        (areal_dict(input_ids=[[1, 2], [3]]), "input_ids is ragged"),
    ],
)
def test_other_results_are_refused(result: object, message: str) -> None:
    with pytest.raises(EpisodeError, match=message):
        convert(result)
