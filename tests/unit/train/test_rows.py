"""Columns of written tokens go in per row and come out end to end, in the order asked for."""

import numpy as np
import pytest
import torch
from train_cases import random_batch

from areal_like.train.rows import fetch_rows, written_tokens


def test_columns_follow_their_rows():
    batch, rows = random_batch()
    tags = batch.trajectories
    mine = [3, 0, 5]
    found = fetch_rows(lambda keys: [rows[key] for key in keys], tags, mine)
    assert len(found) == 3
    counts = {i: tags[i].loss_tokens for i in mine}
    whole = torch.arange(sum(counts.values()), dtype=torch.float64)
    found.put("value", mine, whole)
    assert found.column("value", mine, whole).tolist() == whole.tolist()
    turned = found.column("value", [5, 3], whole)
    parts = dict(zip(mine, torch.split(whole, list(counts.values())), strict=True))
    assert turned.tolist() == torch.cat([parts[5], parts[3]]).tolist()
    assert found.column("value", [], whole).shape == (0,)
    assert found.column("absent", mine, whole) is None


def test_nothing_is_fetched_for_a_rank_without_rows():
    def fetch(_):
        raise AssertionError("asked for nothing")

    assert len(fetch_rows(fetch, random_batch()[0].trajectories, [])) == 0


def test_an_advantage_may_be_one_number_or_one_a_token():
    batch, rows = random_batch()
    found = fetch_rows(lambda keys: [rows[key] for key in keys], batch.trajectories, [1])
    assert found.of([1])[0].advantage == 0.0
    found.set_advantage(1, np.ones(3))
    assert found.of([1])[0].advantage.tolist() == [1.0] * 3
    with pytest.raises(KeyError):
        found.of([2])


def test_written_tokens_are_those_with_mask_one():
    row = random_batch()[1]["0/0"]
    assert written_tokens(row) == int(row.loss_mask.sum())
