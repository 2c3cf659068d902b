"""Ends a run whose episodes do nothing but fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from areal_like.errors import BreakerTripped
from areal_like.rollout.failure import headline_of, signature_of, traceback_tail


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerStatistics:
    """``in_a_row``: failures since the last success. ``total``: failures of the whole run."""

    in_a_row: int
    total: int
    limit: int


class Breaker:
    """Counts failed episodes; ``limit`` in a row, with no success between them, trip it.

    It keeps text, not exceptions: a traceback would keep the frames of the failed episodes alive.
    """

    def __init__(self, *, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"Breaker: limit must be at least 1, got {limit}")
        self._limit = limit
        self._in_a_row = 0
        self._total = 0
        self._signatures: Counter[str] = Counter()
        self._texts: dict[str, str] = {}

    def success(self) -> None:
        """An episode ended as its workflow meant it to, accepted or rejected."""
        self._in_a_row = 0
        self._signatures.clear()
        self._texts.clear()

    def failure(self, error: BaseException) -> None:
        """An episode failed.

        Raises:
            BreakerTripped: this was the last one allowed; names the fault seen most often.
        """
        self._in_a_row += 1
        self._total += 1
        signature = signature_of(error)
        self._signatures[signature] += 1
        if signature not in self._texts:
            self._texts[signature] = f"{headline_of(error)}\n{traceback_tail(error)}"
        if self._in_a_row >= self._limit:
            top, times = self._signatures.most_common(1)[0]
            raise BreakerTripped(
                f"rollout: {self._in_a_row} episodes failed in a row (rollout.breaker_failures = {self._limit}), "
                f"{times} of them with {self._texts[top]}\n"
                f"Fix the workflow or the reward function; every different fault is in the log with its traceback."
            )

    def statistics(self) -> BreakerStatistics:
        return BreakerStatistics(in_a_row=self._in_a_row, total=self._total, limit=self._limit)
