"""Means over tokens and over the minibatches that took their step."""

import pytest
import torch

from areal_like.train.engine import StepOutcome
from areal_like.train.figures import OptimiserFigures, TokenMeans


def test_token_means_weigh_tokens_and_not_micro_batches(one_rank):
    means = TokenMeans()
    means.add(value=torch.tensor([1.0, 2.0]), flag=torch.tensor([True, False]))
    means.add(value=torch.tensor([6.0]), flag=torch.tensor([True]))
    means.add(value=torch.zeros(0), flag=torch.zeros(0, dtype=torch.bool))
    assert means.reduced(one_rank) == {"value": pytest.approx(3.0), "flag": pytest.approx(2 / 3)}
    assert TokenMeans().reduced(one_rank) == {}


def test_a_skipped_minibatch_counts_in_no_mean(one_rank):
    figures = OptimiserFigures()
    for loss, norm, skipped in ((1.0, 2.0, False), (float("nan"), float("nan"), True), (3.0, 6.0, False)):
        figures.losses.append(torch.tensor(loss, dtype=torch.float64))
        figures.outcomes.append(StepOutcome(grad_norm=norm, lr=0.1, skipped=skipped))
    assert figures.reduced(one_rank) == {
        "loss": 2.0,
        "grad_norm": 4.0,
        "grad_norm_max": 6.0,
        "lr": 0.1,
        "optimizer_steps": 2.0,
        "skipped_minibatches": 1.0,
    }
    assert OptimiserFigures().reduced(one_rank)["loss"] == 0.0
