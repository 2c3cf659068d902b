"""The critic against a row-by-row one with torch's own AdamW, in float64; its head, its figures, its checkpoint."""

import math

import numpy as np
import pytest
import torch
from train_cases import build_critic, build_engine, exact_norms, random_batch, run_update, weights_of
from transformers import AutoModelForTokenClassification

from areal_like.config.actor import ActorConfig
from areal_like.errors import ConfigError
from areal_like.train.critic import load_value_model
from areal_like.train.ppo import Companions

TOLERANCE = 1e-10


def actor_of(**changes):
    base = {"optimizer": {"lr": 3e-3}, "ppo_n_minibatches": 2, "advantage": "gae", "gae_lambda": 0.9}
    return ActorConfig.model_validate(base | changes)


def oracle(folder, batch, rows, actor, *, clip, lr=2e-3):
    """The critic's parameters by name after one update, with GAE and the loss spelled out per row."""
    model = exact_norms(
        AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64, num_labels=1).eval()
    )
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-0.4, 0.5, model.score.weight.numel(), dtype=torch.float64)[None])
        model.score.bias.zero_()

    def values(key):
        row = rows[key]
        at = [t - 1 for t in range(row.length) if row.loss_mask[t]]
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        return model(input_ids=ids[None]).logits[0, at, 0]

    targets, old = {}, {}
    with torch.no_grad():
        for tag in batch.trajectories:
            value = [*values(tag.key).tolist(), 0.0]
            count = len(value) - 1
            reward = [0.0] * (count - 1) + [tag.reward]
            delta = [reward[t] + value[t + 1] - value[t] for t in range(count)]
            gains = [sum(actor.gae_lambda ** (k - t) * delta[k] for k in range(t, count)) for t in range(count)]
            old[tag.key] = torch.tensor(value[:-1], dtype=torch.float64)
            targets[tag.key] = torch.tensor(gains, dtype=torch.float64) + old[tag.key]
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    cuts = [len(batch.groups) * i // 2 for i in range(3)]
    for step in range(2):
        part = [t for g in batch.groups[cuts[step] : cuts[step + 1]] for t in g.trajectories]
        tokens = sum(t.loss_tokens for t in part)
        loss = torch.zeros((), dtype=torch.float64)
        for tag in part:
            value, before, target = values(tag.key), old[tag.key], targets[tag.key]
            error = (value - target) ** 2
            if clip is not None:
                error = torch.maximum(error, (before + (value - before).clamp(-clip, clip) - target) ** 2)
            loss = loss + 0.5 * error.sum() / tokens
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("packing", ["padded", "packed"])
@pytest.mark.parametrize("clip", [None, 0.02])
def test_an_update_equals_the_row_by_row_oracle(model_dir, one_rank, packing, clip):
    batch, rows = random_batch()
    actor = actor_of(mb_spec={"packing": packing, "max_tokens_per_mb": 30})
    critic = build_critic(model_dir, one_rank, actor, value_clip=clip)
    report = run_update(build_engine(model_dir, one_rank, actor), actor, batch, rows, Companions(critic=critic))
    want, got = oracle(model_dir, batch, rows, actor, clip=clip), weights_of(critic.engine)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=TOLERANCE, err_msg=name)
    assert report.metrics["critic/optimizer_steps"] == 2
    assert (report.metrics["critic/clipped_fraction"] > 0) == (clip is not None)


def test_it_learns_the_value_of_what_it_sees(model_dir, one_rank):
    batch, rows = random_batch()
    actor = actor_of(gae_lambda=1.0, optimizer={"lr": 1e-12})
    critic = build_critic(model_dir, one_rank, actor, optimizer={"lr": 0.02})
    engine = build_engine(model_dir, one_rank, actor)
    explained = [
        run_update(engine, actor, batch, rows, Companions(critic=critic)).metrics["critic/explained_variance"]
        for _ in range(25)
    ]
    assert explained[-1] > 0.8 > explained[0]


def test_figures_are_those_of_the_batch(model_dir, one_rank):
    batch, rows = random_batch()
    actor = actor_of(gae_lambda=1.0)
    critic = build_critic(model_dir, one_rank, actor)
    m = run_update(build_engine(model_dir, one_rank, actor), actor, batch, rows, Companions(critic=critic)).metrics
    returns = np.concatenate([np.full(t.loss_tokens, t.reward) for t in batch.trajectories])  # λ = γ = 1
    assert m["critic/return_mean"] == pytest.approx(returns.mean())
    assert math.isfinite(m["critic/value_mean"]) and m["critic/explained_variance"] < 1
    assert {"critic/loss", "critic/grad_norm", "critic/lr", "seconds/critic", "seconds/values"} <= m.keys()
    assert abs(m["train/loss"]) > 0


def test_a_new_head_is_zero_and_a_saved_critic_comes_back(model_dir, one_rank, tmp_path):
    model = load_value_model(model_dir)
    assert not model.score.weight.any() and not model.score.bias.any()
    actor = actor_of()
    critic = build_critic(model_dir, one_rank, actor, dtype=torch.float32)
    critic.write(tmp_path, tensors=critic.engine.named_weights(), source=model_dir)
    again = load_value_model(tmp_path / "critic").state_dict()
    for name, tensor in critic.engine.named_weights():
        assert torch.equal(again[name], tensor), name
    assert (tmp_path / "critic" / "tokenizer.json").is_file()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"critic\.path: .*value head"):
        load_value_model(tmp_path)
