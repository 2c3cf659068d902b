"""KL estimators by exact enumeration over a tiny softmax, on and off policy."""

from __future__ import annotations

import pytest
import torch

from areal_like.algo.kl import KlEstimator, kl_estimate, kl_loss
from areal_like.algo.ppo import decoupled_ppo
from areal_like.algo.settings import ObjectiveSettings
from areal_like.algo.terms import PolicyTerms

V = 5
ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")


def logits(seed: int) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def true_kl(theta_V: torch.Tensor, ref_V: torch.Tensor) -> torch.Tensor:
    p = torch.softmax(theta_V, 0)
    return (p * (torch.log_softmax(theta_V, 0) - torch.log_softmax(ref_V, 0))).sum()


def expected_gradient(estimator: KlEstimator, behave_V: torch.Tensor) -> torch.Tensor:
    """E over every token the behaviour policy may write, of the loss's gradient by theta's logits."""
    theta_V, ref_V = logits(0).requires_grad_(), logits(1)
    every = torch.ones(V, dtype=torch.bool)
    behave = torch.log_softmax(behave_V, 0)
    loss_T = kl_loss(estimator, torch.log_softmax(theta_V, 0), torch.log_softmax(ref_V, 0), behave, every)
    (behave.exp().detach() * loss_T).sum().backward()
    assert theta_V.grad is not None
    return theta_V.grad


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("behave_seed", [0, 2], ids=["on_policy", "off_policy"])
def test_the_expected_gradient_is_that_of_the_kl(estimator: KlEstimator, behave_seed: int) -> None:
    theta_V = logits(0).requires_grad_()
    true_kl(theta_V, logits(1)).backward()
    torch.testing.assert_close(expected_gradient(estimator, logits(behave_seed)), theta_V.grad, rtol=1e-10, atol=1e-12)


def test_minimising_the_value_of_k1_would_do_nothing() -> None:
    """NeMo 2506: the trap that kl_loss avoids."""
    theta_V = logits(0).requires_grad_()
    theta = torch.log_softmax(theta_V, 0)
    value_T = kl_estimate("k1", theta, torch.log_softmax(logits(1), 0), torch.ones(V, dtype=torch.bool))
    (theta.exp().detach() * value_T).sum().backward()
    assert theta_V.grad is not None
    assert float(theta_V.grad.abs().max()) < 1e-15


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_values_are_unbiased_and_k3_is_never_negative(estimator: KlEstimator) -> None:
    theta, ref = torch.log_softmax(logits(0), 0), torch.log_softmax(logits(1), 0)
    value_T = kl_estimate(estimator, theta, ref, torch.ones(V, dtype=torch.bool))
    assert float((theta.exp() * value_T).sum()) == pytest.approx(float(true_kl(logits(0), logits(1))), rel=1e-12)
    assert estimator == "k1" or bool((value_T >= 0).all())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_monte_carlo_agrees(estimator: KlEstimator) -> None:
    theta_V, behave_V = logits(0).requires_grad_(), logits(2)
    behave = torch.log_softmax(behave_V, 0)
    draws = torch.multinomial(behave.exp(), 20_000, True, generator=torch.Generator().manual_seed(0))
    loss_T = kl_loss(
        estimator,
        torch.log_softmax(theta_V, 0)[draws],
        torch.log_softmax(logits(1), 0)[draws],
        behave[draws],
        torch.ones(len(draws), dtype=torch.bool),
    )
    loss_T.mean().backward()
    assert theta_V.grad is not None
    torch.testing.assert_close(theta_V.grad, expected_gradient(estimator, behave_V), rtol=0.1, atol=0.05)


def reward_gradient(estimator: KlEstimator) -> torch.Tensor:
    """E over every token that behave may write, where the estimate is taken off the reward of decoupled PPO."""
    theta_V, behave = logits(0).requires_grad_(), torch.log_softmax(logits(2), 0)
    theta, every = torch.log_softmax(theta_V, 0), torch.ones(V, dtype=torch.bool)
    prox = theta.detach()
    terms = PolicyTerms(
        theta_T=theta,
        prox_T=prox,
        behave_T=behave,
        advantage_T=-kl_estimate(estimator, prox, torch.log_softmax(logits(1), 0), every),
        mask_T=every,
        row_T=torch.arange(V),
        rows=V,
    )
    loss_T = decoupled_ppo(terms, ObjectiveSettings(behave_cap=None)).loss_T
    (behave.exp() * loss_T).sum().backward()
    assert theta_V.grad is not None
    return theta_V.grad


def test_in_the_reward_only_k1_has_the_kls_gradient_off_policy_too() -> None:
    theta_V = logits(0).requires_grad_()
    true_kl(theta_V, logits(1)).backward()
    torch.testing.assert_close(reward_gradient("k1"), theta_V.grad, rtol=1e-10, atol=1e-12)
    assert theta_V.grad is not None
    for wrong in ("k2", "k3"):
        assert not torch.allclose(reward_gradient(wrong), theta_V.grad, rtol=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_tokens_give_nothing_and_the_cap_holds(estimator: KlEstimator) -> None:
    theta_T = torch.tensor([-1.0, float("-inf"), -1.0], dtype=torch.float64, requires_grad=True)
    ref_T, behave_T = torch.tensor([-1.5, 0.0, -1.5]).double(), torch.tensor([-1.0, 0.0, -4.0]).double()
    loss_T = kl_loss(estimator, theta_T, ref_T, behave_T, torch.tensor([True, False, True]), behave_cap=2.0)
    loss_T.sum().backward()
    assert theta_T.grad is not None and theta_T.grad[1] == 0.0
    assert float(loss_T[1].detach()) == 0.0
    assert float((loss_T[2] / loss_T[0]).detach()) == pytest.approx(2.0)
