"""Rewards for sums."""

from __future__ import annotations

import re
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


def last_number(
    prompt: str,
    completions: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    answer: str | int,
    **data: Any,
) -> float:
    """1 if the last whole number in the completion is the row's ``answer``: for models that answer in a sentence."""
    numbers = re.findall(r"-?\d+", completions)
    return float(bool(numbers) and numbers[-1] == str(answer).strip())
