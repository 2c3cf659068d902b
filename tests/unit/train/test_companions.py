"""A rank's critic and reference are what its spec names, and a saved run holds the critic."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from train_cases import SCENARIOS, random_batch, run_update, weights_of
from transformers import AutoModelForTokenClassification

from areal_like.api.generation import GenerationHyperparameters
from areal_like.config.actor import ActorConfig
from areal_like.config.critic import CriticConfig
from areal_like.config.model import ModelConfig
from areal_like.config.reference import ReferenceConfig
from areal_like.config.weights import WeightsConfig
from areal_like.train.companions import build_companions
from areal_like.train.engine import TrainEngine
from areal_like.train.model import PolicyModel, load_language_model, replayed_sampling
from areal_like.train.spec import TrainWorkerSpec


def spec_of(model_dir, tmp_path, **sections):
    return TrainWorkerSpec(
        rank=0,
        world_size=1,
        rendezvous=f"file://{tmp_path}/rendezvous",
        model=ModelConfig(path=str(model_dir)),
        gconfig=GenerationHyperparameters(max_new_tokens=4, temperature=0.7),
        weights=WeightsConfig(),
        store_address="ipc:///nowhere",
        bind="ipc:///nowhere",
        run_dir=tmp_path,
        run_id="test",
        total_train_steps=4,
        **sections,
    )


def test_without_sections_there_are_none(model_dir, one_rank, tmp_path):
    companions = build_companions(spec_of(model_dir, tmp_path, actor=ActorConfig()), one_rank)
    assert (companions.critic, companions.reference) == (None, None)
    assert companions.shaping(ActorConfig()).length_limit == 4


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_both_serve_an_update(model_dir, tied_model_dir, one_rank, tmp_path, packing):
    actor = ActorConfig.model_validate({"advantage": "gae", "mb_spec": {"packing": packing}})
    critic = CriticConfig.model_validate({"path": str(tied_model_dir), "optimizer": {"lr": 1e-2}})
    ref = ReferenceConfig(kl_in="reward", kl_estimator="k1", kl_coef=0.1)
    spec = spec_of(model_dir, tmp_path, actor=actor, critic=critic, ref=ref)
    companions = build_companions(spec, one_rank)
    assert companions.critic is not None
    before = weights_of(companions.critic.engine)
    model = load_language_model(model_dir, layout=packing)
    engine = TrainEngine(
        PolicyModel(model, replayed_sampling(spec.gconfig, model)), one_rank, actor.optimizer, total_steps=4
    )
    first = run_update(engine, actor, *random_batch(), companions).metrics
    # the reference is the policy itself, before its first step and at the sampling temperature
    assert first["ref/kl_k3"] == pytest.approx(0.0, abs=1e-6)
    assert first["critic/value_mean"] == 0.0
    assert run_update(engine, actor, *random_batch(), companions).metrics["critic/value_mean"] != 0.0
    after = weights_of(companions.critic.engine)
    assert any((before[name] != after[name]).any() for name in before)
    companions.critic.write(tmp_path, tensors=companions.critic.engine.named_weights(), source=model_dir)
    saved = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    assert saved.config.architectures == ["LlamaForTokenClassification"]


def values_and_references(model_dir, one_rank, tmp_path, **actor_keys):
    """Weights of the critic after an update with both, and the figures of a second one."""
    keys = {"advantage": "gae", "ppo_n_minibatches": 2, "optimizer": {"lr": 1e-2}} | actor_keys
    actor = ActorConfig.model_validate(keys)
    critic = CriticConfig.model_validate({"optimizer": {"lr": 1e-2}})
    spec = spec_of(model_dir, tmp_path, actor=actor, critic=critic, ref=ReferenceConfig(kl_coef=0.1))
    companions = build_companions(spec, one_rank)
    model = load_language_model(model_dir)
    engine = TrainEngine(
        PolicyModel(model, replayed_sampling(spec.gconfig, model)), one_rank, actor.optimizer, total_steps=4
    )
    figures = [run_update(engine, actor, *random_batch(seed=seed), companions).metrics for seed in (0, 1)][-1]
    return weights_of(companions.critic.engine), figures


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # read by the compiler
def test_the_actors_options_reach_both_and_change_nothing(model_dir, one_rank, tmp_path, monkeypatch):
    plain, figures = values_and_references(model_dir, one_rank, tmp_path)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    counters.clear()
    options = {"compile": True, "offload_optimizer": True, "gradient_checkpointing": True}
    weights, found = values_and_references(model_dir, one_rank, tmp_path, **options)
    assert counters["stats"]["unique_graphs"] >= 2  # layers of the critic, which has gradients, and of the reference
    torch._dynamo.reset()
    for name in plain:
        torch.testing.assert_close(torch.from_numpy(weights[name]), torch.from_numpy(plain[name]), rtol=0, atol=2e-5)
    for name in figures.keys() - {figure for figure in figures if figure.startswith("seconds/")}:
        assert found[name] == pytest.approx(figures[name], rel=1e-3, abs=1e-5), name


def test_adapters_learn_beside_a_critic_and_are_held_to_what_they_are_added_to(model_dir, one_rank):
    pytest.importorskip("peft")
    weights, figures = SCENARIOS["adapters_with_critic_and_reference"](one_rank, model_dir)
    base = load_language_model(model_dir, dtype=torch.float64).state_dict()
    moved = {name for name, tensor in base.items() if (weights[name] != tensor.numpy()).any()}
    assert moved and all(name.endswith("_proj.weight") for name in moved)
    # the first minibatch measured the reference's own policy, the second one a step away
    assert 0 < figures["ref/kl_k3"] < 0.5
    assert figures["critic/optimizer_steps"] == figures["train/optimizer_steps"] == 2
