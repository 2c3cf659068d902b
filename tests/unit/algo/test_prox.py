from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from areal_like.algo.prox import ProxInputs, interpolation_weight, proximal_logprobs


@pytest.fixture
def inputs() -> ProxInputs:
    return ProxInputs(
        behave_T=torch.tensor([-1.0, -2.0, -3.0, 0.0], dtype=torch.float64),
        theta_T=torch.tensor([-2.0, -1.0, -1.0, -9.0], dtype=torch.float64, requires_grad=True),
        recomputed_T=torch.tensor([-1.5, -1.5, -1.5, -9.0], dtype=torch.float64),
        version_T=torch.tensor([5, 4, 3, -1]),
        mask_T=torch.tensor([True, True, True, False]),
        version=5,
        progress=0.5,
    )


def test_weights_by_hand() -> None:
    # lags 0, 1, 2 after half of the minibatches
    weights = interpolation_weight(torch.tensor([5, 4, 3]), 5, 0.5)
    torch.testing.assert_close(weights, torch.tensor([0.0, 1 / 1.5, 2 / 2.5], dtype=torch.float64))
    # before the first minibatch theta is version v, so prox is theta wherever it can be told from behave
    assert interpolation_weight(torch.tensor([5, 4, 3]), 5, 0.0).tolist() == [0.0, 1.0, 1.0]


def test_interpolation_by_hand(inputs: ProxInputs) -> None:
    prox_T = proximal_logprobs("interpolate", inputs)
    assert prox_T[:3].tolist() == pytest.approx([-1.0, -2.0 + 1 / 1.5, -3.0 + 2 * 2 / 2.5], rel=1e-15)


def test_interpolation_finds_version_v_when_log_probs_move_linearly() -> None:
    # log-prob of a token at "time" x (versions, fractions within a step) is c + s x; prox is its value at v
    slope, start, version = torch.tensor([0.3, -0.2, 0.7]), torch.tensor([-1.0, -2.0, -4.0]), 7
    born_T = torch.tensor([7, 5, 2])
    for done in (0.0, 0.25, 0.75):
        got = proximal_logprobs(
            "interpolate",
            ProxInputs(
                behave_T=start + slope * born_T,
                theta_T=start + slope * (version + done),
                recomputed_T=None,
                version_T=born_T,
                mask_T=torch.ones(3, dtype=torch.bool),
                version=version,
                progress=done,
            ),
        )
        torch.testing.assert_close(got, start + slope * version)


def test_other_modes_and_no_gradient(inputs: ProxInputs) -> None:
    assert proximal_logprobs("behave", inputs).equal(inputs.behave_T)
    assert inputs.recomputed_T is not None
    assert proximal_logprobs("recompute", inputs).equal(inputs.recomputed_T)
    for mode in ("recompute", "interpolate", "behave"):
        assert not proximal_logprobs(mode, inputs).requires_grad


def test_recompute_without_its_pass_is_refused(inputs: ProxInputs) -> None:
    with pytest.raises(ValueError, match="prox recompute"):
        proximal_logprobs("recompute", replace(inputs, recomputed_T=None))
