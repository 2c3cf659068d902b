"""Layouts by hand."""

import numpy as np
import pytest
import torch

from areal_like.api.trajectory import Trajectory
from areal_like.train.batching import TrainRow, build_micro_batch


def row(tokens, mask, advantage=1.0, logprobs=None, versions=None):
    n = len(tokens)
    return TrainRow(
        trajectory=Trajectory(
            token_ids=np.array(tokens, np.int32),
            loss_mask=np.array(mask, np.int32),
            logprobs=np.array(logprobs or [0.0] * n, np.float32),
            versions=np.array(versions or [-1] * n, np.int32),
            reward=0.0,
            episode_id="e",
        ),
        advantage=advantage,
    )


ROWS = [
    row([5, 6, 7, 8], [0, 0, 1, 1], 0.5, [0, 0, -1.0, -2.0], [-1, -1, 3, 4]),
    row([9, 10, 11, 12, 13, 14], [0, 1, 0, 0, 1, 0], -0.5, [0, -3.0, 0, 0, -4.0, 0], [-1, 2, -1, -1, 3, -1]),
]


def test_padded_rows_end_before_their_last_target():
    batch = build_micro_batch(ROWS, layout="padded")
    # row 0 is read at tokens 0..2 (8 is a target only); row 1 at 0..3 (13 is a target, 14 nothing at all)
    assert batch.input_ids.tolist() == [[5, 6, 7, 0], [9, 10, 11, 12]]
    assert batch.position_ids is None and batch.row_starts is None
    assert batch.target_T.tolist() == [7, 8, 10, 13]
    assert batch.select_T.tolist() == [1, 2, 4 + 0, 4 + 3]
    assert batch.behave_T.tolist() == [-1, -2, -3, -4]
    assert batch.version_T.tolist() == [3, 4, 2, 3]
    assert batch.advantage_T.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert batch.row_T.tolist() == [0, 0, 1, 1]
    assert batch.rows == 2 and batch.stop_ban_T is None


def test_packed_rows_lie_end_to_end():
    batch = build_micro_batch(ROWS, layout="packed")
    assert batch.input_ids.tolist() == [[5, 6, 7, 9, 10, 11, 12]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert batch.row_starts.tolist() == [0, 3, 7] and batch.row_starts.dtype == torch.int32
    assert batch.row_lengths == (3, 4)
    assert batch.select_T.tolist() == [1, 2, 3 + 0, 3 + 3]
    assert batch.target_T.tolist() == [7, 8, 10, 13]


def test_stop_tokens_are_banned_anew_in_every_answer():
    tokens = list(range(10, 19))
    batch = build_micro_batch([row(tokens, [0, 1, 1, 1, 0, 1, 1, 0, 1])], layout="padded", min_new_tokens=2)
    assert batch.target_T.tolist() == [11, 12, 13, 15, 16, 18]
    assert batch.stop_ban_T.tolist() == [True, True, False, True, True, True]


def test_an_answer_that_ends_a_row_does_not_go_on_in_the_next():
    rows = [row([1, 2, 3], [0, 1, 1]), row([4, 5, 6], [0, 1, 1])]
    assert build_micro_batch(rows, layout="packed", min_new_tokens=1).stop_ban_T.tolist() == [True, False] * 2


def test_per_token_advantages():
    batch = build_micro_batch([row([1, 2, 3], [0, 1, 1], np.array([9.0, 0.25, -1.0])), ROWS[0]], layout="padded")
    assert batch.advantage_T.tolist() == [0.25, -1.0, 0.5, 0.5]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_rows_make_one_token_that_nothing_is_read_from(layout):
    batch = build_micro_batch([], layout=layout, min_new_tokens=3)
    assert batch.input_ids.shape == (1, 1) and batch.target_T.numel() == 0 and batch.rows == 0


def test_a_row_without_targets_is_one_token_long():
    batch = build_micro_batch([row([1, 2, 3], [0, 0, 0]), ROWS[0]], layout="packed")
    assert batch.row_lengths == (1, 3)
    assert batch.row_T.tolist() == [1, 1]


def test_a_written_first_token_is_refused():
    with pytest.raises(ValueError, match="a prompt is needed"):
        build_micro_batch([row([1, 2], [1, 1])], layout="padded")
