"""The critic's loss against plain Python, value and gradient."""

from __future__ import annotations

import pytest
import torch

from areal_like.algo.value import value_loss


def expected(value: float, old: float, target: float, clip: float | None) -> tuple[float, float, bool]:
    """Loss, its derivative by the value, and whether the clip took that away."""
    plain = 0.5 * (value - target) ** 2
    if clip is None:
        return plain, value - target, False
    near = min(max(value, old - clip), old + clip)
    bounded = 0.5 * (near - target) ** 2
    if bounded > plain:
        return bounded, 0.0 if near != value else value - target, near != value
    return plain, value - target, False


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_and_gradient_match_plain_python(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    value_T, old_T, return_T = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    mask_T = torch.arange(40) % 5 != 0
    value_T[0], old_T[5], return_T[10] = float("nan"), float("inf"), float("nan")
    value_T.requires_grad_()
    got = value_loss(value_T, old_T, return_T, mask_T, clip=clip)
    got.loss_T.sum().backward()
    assert value_T.grad is not None
    clipped = 0
    for t in range(40):
        want = (0.0, 0.0, False)
        if mask_T[t]:
            want = expected(*(float(v[t].detach()) for v in (value_T, old_T, return_T)), clip)
        assert float(got.loss_T[t].detach()) == pytest.approx(want[0], rel=1e-12)
        assert float(value_T.grad[t]) == pytest.approx(want[1], rel=1e-12)
        assert bool(got.clipped_T[t]) == want[2]
        clipped += want[2]
    assert (clipped > 5) == (clip is not None)
