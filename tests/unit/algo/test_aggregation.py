"""Aggregation against sums by hand; the cut into parts must change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_like.algo.aggregation import AggregationMode, aggregate, local_denominator

MODES: tuple[AggregationMode, ...] = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")
LOSSES = [[1.0, 2.0, 6.0], [4.0], [], [5.0, 7.0]]
MASKS = [[True, True, False], [True], [], [False, False]]


def flat(rows: list[int]) -> dict[str, Any]:
    return {
        "loss_T": torch.tensor([v for r in rows for v in LOSSES[r]], dtype=torch.float64),
        "mask_T": torch.tensor([m for r in rows for m in MASKS[r]], dtype=torch.bool),
        "row_T": torch.tensor([i for i, r in enumerate(rows) for _ in LOSSES[r]], dtype=torch.int64),
        "rows": len(rows),
    }


def denominator(mode: AggregationMode, part: dict[str, Any]) -> float:
    return local_denominator(mode, part["mask_T"], part["row_T"], part["rows"])


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token_mean", (1 + 2 + 4) / 3),
        ("seq_mean_token_mean", (1.5 + 4) / 2),  # rows without a written token are no sequences
        ("seq_mean_token_sum", (3 + 4) / (10 * 2)),
    ],
)
def test_values_by_hand(mode: AggregationMode, value: float) -> None:
    whole = flat([0, 1, 2, 3])
    got = aggregate(**whole, mode=mode, denominator=denominator(mode, whole), constant=10.0)
    assert float(got) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("mode", MODES)
@given(cut=st.permutations([0, 1, 2, 3]), at=st.integers(0, 4))
def test_parts_add_up_to_the_whole(mode: AggregationMode, cut: list[int], at: int) -> None:
    parts = [flat(cut[:at]), flat(cut[at:])]
    total = sum(denominator(mode, part) for part in parts)
    whole = flat([0, 1, 2, 3])
    together = aggregate(**whole, mode=mode, denominator=total, constant=8.0)
    apart = sum(float(aggregate(**part, mode=mode, denominator=total, constant=8.0)) for part in parts)
    assert apart == pytest.approx(float(together), rel=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_the_token_weight_and_zero_where_masked(mode: AggregationMode) -> None:
    whole = flat([0, 1, 2, 3])
    whole["loss_T"].requires_grad_()
    aggregate(**whole, mode=mode, denominator=6.0, constant=5.0).backward()
    per_token = {
        "token_mean": [1 / 6, 1 / 6, 0, 1 / 6, 0, 0],
        "seq_mean_token_mean": [1 / 12, 1 / 12, 0, 1 / 6, 0, 0],
        "seq_mean_token_sum": [1 / 30, 1 / 30, 0, 1 / 30, 0, 0],
    }[mode]
    np.testing.assert_allclose(whole["loss_T"].grad.numpy(), per_token, rtol=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_or_local_denominator_is_refused(mode: AggregationMode) -> None:
    whole = flat([0, 1])
    with pytest.raises(TypeError, match="denominator"):
        aggregate(**whole, mode=mode, constant=1.0)  # type: ignore[call-arg]
    for wrong in (None, float("nan"), denominator(mode, whole) - 1):
        with pytest.raises(ValueError, match="global denominator"):
            aggregate(**whole, mode=mode, denominator=wrong, constant=1.0)  # type: ignore[arg-type]


def test_the_sum_needs_its_constant() -> None:
    with pytest.raises(ValueError, match="constant > 0"):
        aggregate(**flat([0]), mode="seq_mean_token_sum", denominator=1.0)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_part_gives_zero_with_a_gradient_path(mode: AggregationMode) -> None:
    empty = flat([3])
    empty["loss_T"].requires_grad_()
    loss = aggregate(**empty, mode=mode, denominator=0.0, constant=1.0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert empty["loss_T"].grad.tolist() == [0.0, 0.0]
