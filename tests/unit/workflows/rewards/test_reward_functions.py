"""The reward functions that ship with the experiments."""

from __future__ import annotations

import pytest

from workflows.rewards.arithmetic import exact_match
from workflows.rewards.guess import hit_secret


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [("15", "15", 1.0), (" 15\n", 15, 1.0), ("150", "15", 0.0), ("", "15", 0.0), ("1 5", "15", 0.0)],
)
def test_exact_match(completion: str, answer: str | int, reward: float) -> None:
    assert exact_match("12+3=", completion, [], [], answer=answer, level=1) == reward


@pytest.mark.parametrize(
    ("completion", "reward"), [("1 12", 1.0), ("12", 1.0), ("1 2", 0.0), ("112", 0.0), ("", 0.0), ("higher", 0.0)]
)
def test_hit_secret(completion: str, reward: float) -> None:
    assert hit_secret("<bos>", completion, [], [], secret=12) == reward
