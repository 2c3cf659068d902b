"""Weights on one rank: what sharding over it would learn, to the bit, and never a second set of gradients."""

from __future__ import annotations

import pytest
import torch
from train_cases import random_batch, run_update, weights_of

import areal_like.train.engine as engine_module
from areal_like.config.actor import ActorConfig
from areal_like.train.engine import TrainEngine
from areal_like.train.model import PolicyModel, Sampling, load_language_model
from areal_like.train.parameters import ShardedParameters, WholeParameters, hold
from areal_like.train.reference import Reference

BASE = {"ppo_n_minibatches": 2, "optimizer": {"lr": 1e-2}, "mb_spec": {"max_tokens_per_mb": 20}}


def learned(folder, parallel, actor, compute_dtype):
    torch.manual_seed(1)
    model = load_language_model(folder, lora=actor.lora, gradient_checkpointing=actor.gradient_checkpointing)
    policy = PolicyModel(model, Sampling())
    engine = TrainEngine(policy, parallel, actor.optimizer, total_steps=10, compute_dtype=compute_dtype)
    figures = [run_update(engine, actor, *random_batch(seed=seed)).metrics for seed in (0, 1)]
    return weights_of(engine), engine.state(), figures


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 3, "alpha": 6}}, {"gradient_checkpointing": True}])
def test_whole_and_sharded_weights_learn_the_same(tied_model_dir, one_rank, monkeypatch, compute_dtype, changes):
    actor = ActorConfig.model_validate(BASE | changes)
    weights, state, figures = learned(tied_model_dir, one_rank, actor, compute_dtype)
    monkeypatch.setattr(
        engine_module, "hold", lambda module, parallel, dtype, *, offload: ShardedParameters(module, parallel, dtype)
    )
    sharded, sharded_state, sharded_figures = learned(tied_model_dir, one_rank, actor, compute_dtype)
    assert weights.keys() == sharded.keys() and state.keys() == sharded_state.keys()
    assert all((weights[name] == sharded[name]).all() for name in weights)
    for key, tensor in sharded_state.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(state[key], whole), key
    assert [f["train/grad_norm"] for f in figures] == [f["train/grad_norm"] for f in sharded_figures]


def test_a_gradient_goes_to_its_sum_at_once(tied_model_dir, one_rank):
    model = load_language_model(tied_model_dir)
    masters = list(model.parameters())
    parameters = hold(model, one_rank, torch.bfloat16)
    assert isinstance(parameters, WholeParameters)
    assert [a is b for a, b in zip(parameters.trained, masters, strict=True)] == [True] * len(masters)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    held = []  # sets of gradients of the copies, whenever one of them arrives
    for copy in model.parameters():
        copy.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(p.grad is not None for p in model.parameters()))
        )
    for repeat in (1, 2):
        parameters.backward(model(torch.tensor([[3, 4, 5]])).logits.float().sum(), last=repeat == 2)
    assert max(held) == 0 and len(held) == 2 * len(masters)
    assert {p.grad.dtype for p in masters} == {torch.float32}


def test_frozen_weights_are_kept_in_the_dtype_computed_in_alone(model_dir, one_rank):
    policy = PolicyModel(load_language_model(model_dir), Sampling())
    Reference(policy, one_rank, compute_dtype=torch.bfloat16)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
