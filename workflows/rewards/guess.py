"""Rewards for guess-a-number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def hit_secret(
    prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, secret: int, **data: Any
) -> float:
    """1 if ``completions``, the guesses of one game separated by white space, hold the row's ``secret``; else 0."""
    return float(str(secret) in completions.split())
