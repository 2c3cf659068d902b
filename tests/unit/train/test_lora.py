"""LoRA: only adapters are trained and published; server, checkpoint and PEFT agree on what they make of the weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from train_cases import batch_of, exact_norms, random_batch, run_update
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.api.weights import TransportKind
from areal_like.config.actor import ActorConfig
from areal_like.errors import ConfigError
from areal_like.train.batching import TrainRow, build_micro_batch
from areal_like.train.checkpoint import write_checkpoint
from areal_like.train.engine import TrainEngine
from areal_like.train.lora import adapted_layers
from areal_like.train.model import PolicyModel, Sampling, load_language_model
from areal_like.weights.staging import StagedWeights
from areal_like.weights.transports.base import make_writer

pytest.importorskip("peft")

ACTOR = ActorConfig.model_validate(
    {"lora": {"rank": 3, "alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}, "optimizer": {"lr": 3e-2}}
)


def engine_of(folder, parallel, dtype=torch.float64, actor=ACTOR):
    torch.manual_seed(3)
    model = exact_norms(load_language_model(folder, dtype=dtype, lora=actor.lora))
    return TrainEngine(PolicyModel(model, Sampling()), parallel, actor.optimizer, total_steps=10)


@pytest.fixture
def trained(model_dir, one_rank):
    """An engine after two updates."""
    engine = engine_of(model_dir, one_rank)
    for seed in (0, 1):
        run_update(engine, ACTOR, *random_batch(seed=seed))
    return engine


def some_batch():
    return build_micro_batch(
        [TrainRow(trajectory=t, advantage=0.0) for t in random_batch()[1].values()],
        layout="padded",
        dtype=torch.float64,
    )


def test_nothing_changes_before_the_first_step(model_dir, one_rank):
    engine = engine_of(model_dir, one_rank)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).state_dict()
    found = dict(engine.named_weights())
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_adapters_alone_are_trained_published_and_saved(trained, model_dir):
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).state_dict()
    published = {name: tuple(tensor.shape) for name, tensor in trained.published_weights()}
    assert len(published) == 2 * 3 * 2  # layers x targets x halves
    assert published["model.layers.0.self_attn.v_proj.lora_A"] == (3, 16)
    assert published["model.layers.1.mlp.down_proj.lora_B"] == (16, 3)
    merged = dict(trained.named_weights())
    changed = {name for name in plain if not torch.equal(merged[name], plain[name])}
    assert changed == {f"{name.removesuffix('.lora_A')}.weight" for name in published if name.endswith("_A")}
    assert all(".lora_" in name for name in trained.state() if name != "steps")
    assert len(trained.state()) == 1 + 3 * len(published)


def test_a_server_with_the_adapters_has_the_trainers_policy(trained, model_dir, tmp_path):
    policy = exact_norms(load_language_model(model_dir, dtype=torch.float64))
    live = policy.state_dict()
    staged = StagedWeights(live)
    writer = make_writer(TransportKind.DISK, run_id="t", directory=tmp_path)
    for version in (1, 2):  # the second is added to the base, not to the first
        manifest = writer.write(version, 0, trained.published_weights())
        report = staged.stage(manifest)
        assert (staged.digest() == manifest.digest) == (version == 2)  # the same adapters twice
        staged.commit(version)
        assert staged.digest() == manifest.digest
    assert report.bytes == manifest.total_bytes < 0.5 * sum(t.nbytes for t in live.values())
    for name, tensor in trained.named_weights():
        torch.testing.assert_close(live[name], tensor, rtol=0, atol=1e-14, msg=name)
    with torch.no_grad():
        served = PolicyModel(policy, Sampling())(some_batch())[0]
    torch.testing.assert_close(served, trained.logprobs_without_gradient(some_batch()), rtol=0, atol=1e-10)
    trained.end_of_pass()
    with torch.no_grad():
        live["model.layers.0.self_attn.v_proj.weight"][0, 0] += 1e-3
    assert staged.digest() != manifest.digest


def test_the_sum_is_that_of_peft(trained):
    for name, layer in adapted_layers(trained._policy.language_model).items():
        base = layer.base_layer.weight.detach()
        delta = copy.deepcopy(layer).get_delta_weight("default") if not hasattr(base, "full_tensor") else None
        if delta is None:
            a, b = (m["default"].weight.full_tensor() for m in (layer.lora_A, layer.lora_B))
            delta, base = 6 / 3 * (b @ a), base.full_tensor()
        torch.testing.assert_close(dict(trained.named_weights())[f"{name}.weight"], base + delta, rtol=0, atol=1e-14)


def test_a_checkpoint_holds_the_sum(trained, model_dir, tmp_path):
    config = AutoConfig.from_pretrained(model_dir)
    folder = write_checkpoint(tmp_path / "saved", trained.named_weights(), config=config, source=model_dir)
    policy = PolicyModel(exact_norms(load_language_model(folder, dtype=torch.float64)), Sampling())
    with torch.no_grad():
        found = policy(some_batch())[0]
    torch.testing.assert_close(found, trained.logprobs_without_gradient(some_batch()), rtol=0, atol=1e-10)


def test_a_full_rank_adapter_on_every_layer_learns_what_the_batch_says(model_dir, one_rank):
    actor = ActorConfig.model_validate({"lora": {"rank": 16, "alpha": 16}, "optimizer": {"lr": 1e-2}})
    engine = engine_of(model_dir, one_rank, actor=actor)
    batch, rows = random_batch(sizes=(4, 4))
    before = engine.logprobs_without_gradient(some_batch())
    engine.end_of_pass()
    report = run_update(engine, actor, batch_of(rows, batch.version), rows)
    assert report.metrics["train/grad_norm"] > 0 and np.isfinite(report.metrics["train/loss"])
    assert not torch.equal(engine.logprobs_without_gradient(some_batch()), before)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["no_such_layer"], "no_such_layer is not in the model"),
        (["q_proj", "vproj"], "vproj is not in the model"),
        (["lm_head"], "lm_head is the head"),
        (["q_proj", "lm_head"], "lm_head is the head"),
        (["embed_tokens"], "embed_tokens is Embedding"),
        (["norm"], "norm is LlamaRMSNorm"),
        (["self_attn"], "self_attn is LlamaAttention"),
    ],
)
def test_what_is_no_linear_layer_below_the_head_is_refused(model_dir, targets, said):
    lora = ActorConfig.model_validate({"lora": {"target_modules": targets}}).lora
    names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ConfigError, match=f"{said}; name linear layers below the head: {names}$"):
        load_language_model(model_dir, lora=lora)
