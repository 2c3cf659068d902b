"""Optimiser steps: clipping, learning rate, skipping, and what is exported."""

import numpy as np
import torch
from train_cases import build_engine, random_batch, weights_of

from areal_like.config.actor import ActorConfig
from areal_like.train.batching import TrainRow, build_micro_batch
from areal_like.train.engine import TrainEngine
from areal_like.train.model import PolicyModel, Sampling, load_language_model


def actor_of(**optimizer):
    return ActorConfig.model_validate({"optimizer": optimizer})


def any_batch(dtype=torch.float64):
    _, rows = random_batch()
    return build_micro_batch(
        [TrainRow(trajectory=t, advantage=1.0) for t in rows.values()], layout="padded", dtype=dtype
    )


def backward(engine, scale=1.0):
    logprob_T, _ = engine.logprobs(any_batch(engine.dtype))
    engine.backward(scale * logprob_T.mean(), last=True)


def test_the_learning_rate_follows_its_schedule_per_step(model_dir, one_rank):
    actor = actor_of(lr=1.0, lr_scheduler_type="linear", warmup_steps=2, min_lr_ratio=0.5)
    engine = build_engine(model_dir, one_rank, actor, total_steps=5)
    rates = []
    for _ in range(6):
        backward(engine)
        rates.append(engine.step().lr)
    # warm-up over two steps, then from 1 to 0.5 at the last of five; constant afterwards
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.0, 0.75, 0.5, 0.5])


def test_gradients_add_up_over_micro_batches_and_are_gone_after_the_step(model_dir, one_rank):
    engine = build_engine(model_dir, one_rank, actor_of(lr=1e-9))
    backward(engine)
    once = engine.step().grad_norm
    engine.backward(engine.logprobs(any_batch())[0].mean(), last=False)
    engine.backward(engine.logprobs(any_batch())[0].mean(), last=True)
    assert np.isclose(engine.step().grad_norm, 2 * once, rtol=1e-5)
    backward(engine)
    assert np.isclose(engine.step().grad_norm, once, rtol=1e-5)


def test_not_finite_leaves_weights_moments_and_learning_rate_alone(model_dir, one_rank):
    actor = actor_of(lr=1e-2, lr_scheduler_type="linear")
    engine, clean = (build_engine(model_dir, one_rank, actor) for _ in range(2))
    before = weights_of(engine)
    backward(engine, scale=float("inf"))
    outcome = engine.step()
    assert outcome.skipped and not np.isfinite(outcome.grad_norm)
    assert all((before[name] == now).all() for name, now in weights_of(engine).items())
    statistics = engine.statistics()
    assert (statistics.optimizer_steps, statistics.skipped_steps) == (0, 1)
    for each in (engine, clean):
        for _ in range(2):
            backward(each)
            each.step()
    left, right = weights_of(engine), weights_of(clean)
    assert all((left[name] == right[name]).all() for name in left)


def test_exported_names_are_those_of_hugging_face_and_a_tie_is_sent_once(model_dir, tied_model_dir, one_rank):
    for folder, tied in ((model_dir, False), (tied_model_dir, True)):
        model = load_language_model(folder)
        expected = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
        engine = build_engine(folder, one_rank, actor_of(), dtype=torch.float32)
        found = weights_of(engine)
        assert set(found) == set(expected) - ({"lm_head.weight"} if tied else set())
        assert all((found[name] == expected[name]).all() for name in found)


def test_a_tied_head_moves_with_its_embedding(tied_model_dir, one_rank):
    engine = build_engine(tied_model_dir, one_rank, actor_of(lr=1e-2))
    before = engine.logprobs_without_gradient(any_batch())
    engine.end_of_pass()
    backward(engine, scale=-1.0)
    engine.step()
    after = engine.logprobs_without_gradient(any_batch())
    engine.end_of_pass()
    assert after.mean() > before.mean()


def test_bfloat16_computes_and_exports_so_but_keeps_float32_masters(model_dir, one_rank):
    policy = PolicyModel(load_language_model(model_dir), Sampling())
    # the norms are 1.0: a step of 4e-4 is below bfloat16's spacing there (4e-3), so only float32 can add the steps up
    engine = TrainEngine(policy, one_rank, actor_of(lr=4e-4).optimizer, total_steps=30, compute_dtype=torch.bfloat16)
    exported = {name: tensor.clone() for name, tensor in engine.named_weights()}
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert engine.logprobs_without_gradient(any_batch(torch.float32)).dtype == torch.float32
    engine.end_of_pass()
    for _ in range(30):
        backward(engine)
        engine.step()
    assert (dict(engine.named_weights())["model.norm.weight"] != exported["model.norm.weight"]).any()
