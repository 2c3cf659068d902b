"""Rewards for sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exact_match(
    prompt: str,
    completions: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: str | int,
    **data: Any,
) -> float:
    """1 if the completion is the row's ``answer``, up to white space around it; else 0."""
    return float(completions.strip() == str(answer).strip())
