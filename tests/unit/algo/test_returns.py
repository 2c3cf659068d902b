"""GAE against the definition as a double sum."""

from __future__ import annotations

import pytest
import torch

from areal_like.algo.returns import discounted_returns, gae, whiten


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.95, 0.0)])
def test_gae_is_the_sum_of_discounted_errors(discount: float, lam: float) -> None:
    rows = [4, 1, 6]
    generator = torch.Generator().manual_seed(0)
    reward_T, value_T = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    row_T = torch.repeat_interleave(torch.arange(3), torch.tensor(rows))
    mask_T = torch.ones(11, dtype=torch.bool)
    mask_T[[0, 7, 8]] = False  # environment text before and between answers
    got = gae(reward_T, value_T, mask_T, row_T, 3, discount=discount, gae_lambda=lam)
    for row in range(3):
        at = [t for t in range(11) if row_T[t] == row and mask_T[t]]
        values = [float(value_T[t]) for t in at] + [0.0]
        delta = [float(reward_T[t]) + discount * values[i + 1] - values[i] for i, t in enumerate(at)]
        for i, t in enumerate(at):
            want = sum((discount * lam) ** (k - i) * delta[k] for k in range(i, len(at)))
            assert float(got.advantage_T[t]) == pytest.approx(want, rel=1e-12, abs=1e-14)
            assert float(got.return_T[t]) == pytest.approx(want + values[i], rel=1e-12, abs=1e-14)
    assert not got.advantage_T[~mask_T].any()
    assert not got.return_T[~mask_T].any()


def test_discounted_returns_by_hand() -> None:
    reward_T = torch.tensor([1.0, 9.0, 2.0, 4.0, 5.0])
    mask_T = torch.tensor([True, False, True, True, True])
    row_T = torch.tensor([0, 0, 0, 0, 1])
    got = discounted_returns(reward_T, mask_T, row_T, 2, discount=0.5)
    assert got.tolist() == [3.0, 0.0, 4.0, 4.0, 5.0]


def test_nothing_written_gives_zeros() -> None:
    zeros = torch.zeros(3)
    got = gae(zeros + 1, zeros + 1, zeros.bool(), zeros.long(), 1, discount=1.0, gae_lambda=1.0)
    assert got.advantage_T.tolist() == [0.0] * 3


def alone(value: torch.Tensor) -> torch.Tensor:
    """What one rank alone sums over ranks."""
    return value


def test_whitened_values_have_mean_0_and_deviation_1() -> None:
    got = whiten(torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64), alone)
    assert got.tolist() == pytest.approx([-2 / (14 / 3) ** 0.5, -1 / (14 / 3) ** 0.5, 3 / (14 / 3) ** 0.5])


def test_whitening_over_ranks_is_that_of_all_tokens() -> None:
    parts = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([6.0], dtype=torch.float64)]
    whole = whiten(torch.cat(parts), alone)
    seen = iter([torch.tensor([3.0, 9.0]), torch.tensor(14.0)])  # tokens and total; squares about the mean
    assert whiten(parts[1], lambda _: next(seen).double()).tolist() == pytest.approx(whole[2:].tolist())


@pytest.mark.parametrize("values", [[], [0.3], [0.1] * 7, [1e6, 1e6 + 0.5]])
def test_equal_values_become_0_and_not_noise(values: list[float]) -> None:
    assert not whiten(torch.tensor(values, dtype=torch.float64), alone).any()
