"""Learning rate as a pure function of the optimiser step. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """A schedule.

    Attributes:
        peak: learning rate after warm-up.
        kind: constant, linear or cosine decay after warm-up.
        warmup_steps: optimiser steps of linear warm-up, starting at peak / warmup_steps.
        total_steps: optimiser steps of the whole run; decay ends here.
        min_ratio: last learning rate over the peak (no effect on ``constant``).
    """

    peak: float
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    min_ratio: float = 0.0

    def at(self, step: int) -> float:
        """The rate used by optimiser step number ``step`` (0 is the first)."""
        if step < 0:
            raise ValueError(f"optimiser step must not be negative, got {step}")
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        span = max(self.total_steps - 1 - self.warmup_steps, 1)
        done = min((step - self.warmup_steps) / span, 1.0)
        left = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * left)
