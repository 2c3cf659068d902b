from __future__ import annotations

import pytest

from areal_like.client.retry import RetryPolicy


def test_pauses_double_up_to_the_limit() -> None:
    policy = RetryPolicy(first=0.1, limit=1.0)
    assert [policy.pause(n, 0.5) for n in range(1, 7)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_jitter_spreads_by_half_to_either_side() -> None:
    policy = RetryPolicy(first=1.0, limit=1.0)
    assert (policy.pause(1, 0.0), policy.pause(10_000, 1.0)) == (0.5, 1.5)
