from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_like.algo.m2po import constrained_squares, kept_tokens, m2po, second_moment_bound
from areal_like.algo.settings import ObjectiveSettings
from areal_like.algo.terms import PolicyTerms

MakeTerms = Callable[..., PolicyTerms]


def test_the_bound_by_hand() -> None:
    squares = torch.tensor([0.01, 0.09, 0.04, 1.0])
    # means of the ascending prefixes: 0.01, 0.025, 0.0467, 0.285
    assert second_moment_bound(squares, 0.3) == float("inf")
    assert second_moment_bound(squares, 0.05) == pytest.approx(0.09)
    assert second_moment_bound(squares, 0.03) == pytest.approx(0.04)
    assert second_moment_bound(squares, 0.001) == 0.0
    assert second_moment_bound(torch.zeros(0), 0.04) == float("inf")


@given(values=st.lists(st.floats(0, 4), max_size=30), limit=st.floats(1e-3, 1))
def test_what_stays_is_within_the_limit_and_one_more_would_not_be(values: list[float], limit: float) -> None:
    squares = torch.tensor(values, dtype=torch.float64)
    bound = second_moment_bound(squares, limit)
    kept = sorted(v for v in values if v <= bound)
    assert not kept or sum(kept) / len(kept) <= limit * (1 + 1e-12)
    dropped = sorted(v for v in values if v > bound)
    if dropped:
        more = kept + [v for v in dropped if v == dropped[0]]
        assert sum(more) / len(more) > limit * (1 - 1e-12)


def test_only_tokens_that_would_move_further_away_are_constrained(make_terms: MakeTerms) -> None:
    terms = make_terms(2)
    log_w = terms.prox_T - terms.behave_T
    harmful = [t for t in range(13) if terms.mask_T[t] and float(terms.advantage_T[t]) * float(log_w[t]) > 0]
    assert sorted(constrained_squares(terms).tolist()) == pytest.approx(sorted(float(log_w[t]) ** 2 for t in harmful))
    bound = second_moment_bound(constrained_squares(terms), 0.05)
    dropped = (~kept_tokens(terms, bound)).nonzero().flatten().tolist()
    assert dropped == [t for t in harmful if float(log_w[t]) ** 2 > bound]
    assert 0 < len(dropped) < len(harmful)


def test_the_loss_is_the_unclipped_surrogate_of_what_stays(make_terms: MakeTerms) -> None:
    terms = make_terms(2)
    keep_T = kept_tokens(terms, second_moment_bound(constrained_squares(terms), 0.05))
    loss = m2po(replace(terms, keep_T=keep_T), ObjectiveSettings(behave_cap=None))
    want = -terms.advantage_T * (terms.theta_T - terms.behave_T).exp()
    on = terms.mask_T & keep_T
    torch.testing.assert_close(loss.loss_T[on], want[on], rtol=1e-12, atol=0)
    assert not loss.loss_T[~on].any()
    assert loss.dropped_T.equal(terms.mask_T & ~keep_T)
    loss.loss_T.sum().backward()
    assert terms.theta_T.grad is not None
    torch.testing.assert_close(terms.theta_T.grad[on], want[on].detach(), rtol=1e-12, atol=0)
    assert not terms.theta_T.grad[~on].any()


def test_without_the_minibatchs_bound_it_is_refused(make_terms: MakeTerms) -> None:
    with pytest.raises(ValueError, match="keep_T is needed"):
        m2po(make_terms(), ObjectiveSettings())
