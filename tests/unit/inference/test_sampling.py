"""Sampling: distributions against float64 softmax and transformers' warpers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from areal_like.inference.embedded.sampling import LogitChange, SamplingColumns, draw


def columns(rows: int, **given: Any) -> SamplingColumns:
    defaults: dict[str, Any] = {
        "seed": np.arange(rows, dtype=np.uint64),
        "written": np.zeros(rows, np.int64),
        "temperature": 1.0,
        "greedy": False,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    dtypes = {
        "temperature": np.float32,
        "greedy": np.bool_,
        "top_k": np.int64,
        "top_p": np.float32,
        "min_p": np.float32,
    }
    filled = {**defaults, **given}
    for name, dtype in dtypes.items():
        filled[name] = np.broadcast_to(np.asarray(filled[name], dtype), (rows,)).copy()
    return SamplingColumns(**filled)


def peaked_logits(rows: int, vocabulary: int = 40) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3)) * 2


def test_draws_follow_the_softmax() -> None:
    rows = 40_000
    logits = peaked_logits(1, 12).expand(rows, -1).clone()
    expected = torch.softmax(logits[0].double() / 0.7, -1).numpy() * rows
    drawn = draw(logits, columns(rows, temperature=0.7))
    observed = np.bincount(drawn.tokens, minlength=12)
    kept = expected > 5
    chi_square = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    assert chi_square < 31.3  # 0.999 quantile of chi-square with 11 degrees of freedom


def test_draws_follow_the_softmax_along_positions() -> None:
    rows = 40_000
    logits = peaked_logits(1, 12).expand(rows, -1).clone()
    expected = torch.softmax(logits[0].double(), -1).numpy() * rows
    drawn = draw(logits, columns(rows, seed=np.full(rows, 77, np.uint64), written=np.arange(rows)))
    observed = np.bincount(drawn.tokens, minlength=12)
    kept = expected > 5
    assert float(((observed - expected)[kept] ** 2 / expected[kept]).sum()) < 31.3


@pytest.mark.parametrize(
    ("given", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
            [TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)],
        ),
        ({"top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
    ],
)
def test_logprobs_are_those_of_transformers_warpers(given: dict[str, Any], warpers: list[Any]) -> None:
    logits = peaked_logits(200)
    scores = logits.clone()
    for warper in warpers:
        scores = warper(torch.zeros(200, 1, dtype=torch.long), scores)
    expected = torch.log_softmax(scores, -1)
    drawn = draw(logits, columns(200, **given))
    np.testing.assert_allclose(drawn.logprobs, expected[torch.arange(200), drawn.tokens], atol=1e-5)
    assert np.isfinite(drawn.logprobs).all()


def test_restrictions_of_some_rows_leave_the_others_alone() -> None:
    logits = peaked_logits(6)
    alone = draw(logits.clone(), columns(6))
    mixed = draw(logits.clone(), columns(6, top_k=[0, 1, 0, 0, 0, 0], top_p=[1, 1, 1, 1e-6, 1, 1]))
    for row in (0, 2, 4, 5):
        assert mixed.tokens[row] == alone.tokens[row]
        assert mixed.logprobs[row] == alone.logprobs[row]
    assert mixed.tokens[1] == logits[1].argmax() and mixed.tokens[3] == logits[3].argmax()


def test_greedy_rows_take_the_most_likely_token_at_temperature_one() -> None:
    logits = peaked_logits(5)
    expected = torch.log_softmax(logits, -1).max(-1)
    drawn = draw(logits, columns(5, greedy=True))
    np.testing.assert_array_equal(drawn.tokens, expected.indices)
    np.testing.assert_allclose(drawn.logprobs, expected.values, atol=1e-6)


def test_bans_and_penalties_change_raw_logits_before_temperature() -> None:
    logits = peaked_logits(3, 6)
    raw = logits.double().clone()
    raw[0, [2, 4]] = -torch.inf
    raw[2, 1] -= 3 * 0.5
    raw[2, 5] -= 0.5
    expected = torch.log_softmax(raw / 0.5, -1)
    changes = [
        LogitChange(row=0, banned=(2, 4), frequency_penalty=0.0, written_ids=[1, 1]),
        LogitChange(row=2, banned=(), frequency_penalty=0.5, written_ids=[1, 5, 1, 1]),
    ]
    for seed in range(20):
        drawn = draw(logits.clone(), columns(3, seed=np.full(3, seed, np.uint64), temperature=0.5), changes)
        assert drawn.tokens[0] not in (2, 4)
        np.testing.assert_allclose(drawn.logprobs, expected[torch.arange(3), drawn.tokens], atol=1e-5)


def test_a_tiny_temperature_stays_finite() -> None:
    logits = peaked_logits(4) * 1e4
    drawn = draw(logits, columns(4, temperature=1e-37))
    np.testing.assert_array_equal(drawn.tokens, logits.argmax(-1))
    assert drawn.logprobs.tolist() == [0.0] * 4


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((5000, 4), -torch.inf)
    logits[:, [1, 2]] = 0.0
    assert set(draw(logits, columns(5000)).tokens.tolist()) == {1, 2}


def test_bf16_logits_give_float32_logprobs() -> None:
    logits = peaked_logits(8).bfloat16()
    expected = torch.log_softmax(logits.float(), -1)
    drawn = draw(logits, columns(8))
    assert drawn.logprobs.dtype == np.float32
    np.testing.assert_allclose(drawn.logprobs, expected[torch.arange(8), drawn.tokens], atol=1e-6)


def test_a_row_of_nan_shows_in_its_logprob_only() -> None:
    logits = peaked_logits(3)
    logits[1] = torch.nan
    assert np.isfinite(draw(logits, columns(3)).logprobs).tolist() == [True, False, True]
