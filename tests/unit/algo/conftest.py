"""Random micro-batches for the objectives' tests: float64, uneven rows, masked tokens that hold garbage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings

from areal_like.algo.terms import PolicyTerms

settings.register_profile("unhurried", deadline=None)  # a busy machine is no fault of an example
settings.load_profile("unhurried")

MakeTerms = Callable[..., PolicyTerms]


@pytest.fixture
def make_terms() -> MakeTerms:
    def make(seed: int = 0, rows: tuple[int, ...] = (5, 1, 7), spread: float = 0.6, masked: bool = True) -> PolicyTerms:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(sum(rows), generator=generator, dtype=torch.float64)

        row_T = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
        mask_T = torch.ones(sum(rows), dtype=torch.bool)
        behave_T = -1.5 + normal(0.3)
        prox_T = behave_T + normal(spread)
        theta_T = prox_T + normal(spread)
        advantage_T = normal(1.0)
        if masked:
            mask_T[1] = mask_T[8] = False
            behave_T[1], prox_T[8], theta_T[1], advantage_T[8] = 0.0, -float("inf"), -80.0, float("nan")
        return PolicyTerms(
            theta_T=theta_T.requires_grad_(),
            prox_T=prox_T,
            behave_T=behave_T,
            advantage_T=advantage_T,
            mask_T=mask_T,
            row_T=row_T,
            rows=len(rows),
        )

    return make
