"""When to try again. Pure: the count and a random number in, seconds out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """``retries``: tries after the first. Pauses double from ``first`` seconds up to ``limit``, jittered by half."""

    retries: int = 3
    first: float = 0.1
    limit: float = 2.0

    def pause(self, failures: int, random: float) -> float:
        """Seconds before the next try after ``failures`` ≥ 1 in a row; ``random`` in [0, 1) spreads the herd."""
        return min(self.first * 2.0 ** min(failures - 1, 16), self.limit) * (0.5 + random)
