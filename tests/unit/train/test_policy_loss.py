"""KL to a reference, the entropy bonus, M2PO and the length filter, against row-by-row updates in float64."""

import math

import numpy as np
import pytest
import torch
from train_cases import build_engine, build_reference, exact_norms, random_batch, run_update, shake, weights_of
from transformers import AutoModelForCausalLM

from areal_like.config.actor import ActorConfig
from areal_like.config.reference import ReferenceConfig
from areal_like.train.ppo import Companions

TOLERANCE = 1e-10
BETA, BONUS = 0.2, 0.05


def actor_of(**changes):
    base = {"optimizer": {"lr": 3e-3}, "ppo_n_minibatches": 2, "behave_cap": 1.5}
    return ActorConfig.model_validate(base | changes)


def distributions(model, row):
    """Log-probs over the vocabulary at every written token [T, V], and the tokens' own [T]."""
    at = [t for t in range(1, row.length) if row.loss_mask[t]]
    ids = torch.from_numpy(row.token_ids.astype(np.int64))
    whole = torch.log_softmax(model(input_ids=ids[None]).logits[0, [t - 1 for t in at]], -1)
    return whole, whole.gather(1, ids[at][:, None])[:, 0]


def advantages(batch):
    """(r - mean) / std of every group, 0 where all are equal."""
    found = {}
    for group in batch.groups:
        rewards = np.array([t.reward for t in group.trajectories])
        spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        for tag in group.trajectories:
            found[tag.key] = (tag.reward - rewards.mean()) / (spread + 1e-6) if spread else 0.0
    return found


def oracle(folder, batch, rows, actor, token_loss):
    """Parameters after two minibatches; ``token_loss(tag, theta, prox, behave, ref, entropy, part)`` gives [T]."""
    model = exact_norms(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    frozen = exact_norms(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    shake(frozen)
    tags = batch.trajectories
    with torch.no_grad():
        prox = {t.key: distributions(model, rows[t.key])[1] for t in tags}
        ref = {t.key: distributions(frozen, rows[t.key])[1] for t in tags}
    behave = {k: torch.from_numpy(r.logprobs[r.loss_mask == 1]).double() for k, r in rows.items()}
    adamw = torch.optim.AdamW(
        model.parameters(), lr=actor.optimizer.lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=False
    )
    cuts = [len(batch.groups) * i // 2 for i in range(3)]
    for step in range(2):
        part = [t for g in batch.groups[cuts[step] : cuts[step + 1]] for t in g.trajectories]
        loss = torch.zeros((), dtype=torch.float64)
        for tag in part:
            whole, theta = distributions(model, rows[tag.key])
            entropy = -(whole.exp() * whole).sum(-1)
            known = {"prox": prox, "behave": behave, "ref": ref}
            loss = loss + token_loss(tag, theta, entropy, known, [t.key for t in part]).sum()
        adamw.zero_grad()
        (loss / sum(t.loss_tokens for t in part)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def decoupled(actor, a, theta, prox, behave):
    r, w = torch.exp(theta - prox), torch.exp(prox - behave).clamp(max=actor.behave_cap)
    return w * torch.maximum(-a * r, -a * r.clamp(1 - actor.eps_clip, 1 + actor.eps_clip))


def updated(folder, one_rank, actor, batch, rows, ref, **more):
    engine = build_engine(folder, one_rank, actor)
    reference = build_reference(folder, one_rank, actor) if ref is not None else None
    report = run_update(engine, actor, batch, rows, Companions(reference=reference, ref=ref, **more))
    return weights_of(engine), report.metrics


def assert_same(left, right):
    for name in right:
        np.testing.assert_allclose(left[name], right[name], rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_and_the_entropy_bonus(model_dir, one_rank, estimator):
    batch, rows = random_batch()
    actor = actor_of(entropy_coef=BONUS)
    advantage = advantages(batch)

    def token_loss(tag, theta, entropy, known, _):
        prox, behave, ref = (known[name][tag.key] for name in ("prox", "behave", "ref"))
        d, rho = theta - ref, torch.exp(theta - behave).clamp(max=actor.behave_cap)
        kl = {
            "k1": rho * d,
            "k2": rho.detach() * d**2 / 2,
            "k3": rho * (torch.exp(-d) - 1 + d),
        }[estimator]
        return decoupled(actor, advantage[tag.key], theta, prox, behave) - BONUS * entropy + BETA * kl

    ref = ReferenceConfig(kl_coef=BETA, kl_estimator=estimator)
    got, metrics = updated(model_dir, one_rank, actor, batch, rows, ref)
    assert_same(got, oracle(model_dir, batch, rows, actor, token_loss))
    assert metrics["ref/kl_k3"] > 0 and math.isfinite(metrics["ref/kl_k1"])
    assert "seconds/ref" in metrics


def test_m2po_takes_its_bound_from_the_whole_minibatch(model_dir, one_rank):
    batch, rows = random_batch(seed=6)
    actor = actor_of(
        objective="m2po", m2_limit=0.05, behave_cap=None, mb_spec={"packing": "packed", "max_tokens_per_mb": 12}
    )
    advantage = advantages(batch)
    dropped = []

    def token_loss(tag, theta, entropy, known, part):
        log_w = {key: known["prox"][key] - known["behave"][key] for key in part}
        constrained = sorted(float(x) ** 2 for key in part for x in log_w[key] if float(x) * advantage[key] > 0)
        while constrained and sum(constrained) / len(constrained) > actor.m2_limit:
            constrained.pop()
        bound = constrained[-1] if constrained else 0.0
        kept = ~((log_w[tag.key] * advantage[tag.key] > 0) & (log_w[tag.key] ** 2 > bound))
        dropped.append(int((~kept).sum()))
        return -kept.double() * advantage[tag.key] * torch.exp(theta - known["behave"][tag.key])

    got, metrics = updated(model_dir, one_rank, actor, batch, rows, None)
    assert_same(got, oracle(model_dir, batch, rows, actor, token_loss))
    tokens = sum(t.loss_tokens for t in batch.trajectories)
    assert metrics["offpolicy/dropped_fraction"] == pytest.approx(sum(dropped) / tokens)
    assert 0 < sum(dropped) < tokens


def test_rows_at_the_limit_teach_nothing_and_still_count(model_dir, one_rank):
    batch, rows = random_batch()
    actor = actor_of(shaping={"overlong_filter": True}, entropy_coef=BONUS)
    advantage = advantages(batch)

    def token_loss(tag, theta, entropy, known, _):
        whole = decoupled(actor, advantage[tag.key], theta, known["prox"][tag.key], known["behave"][tag.key])
        return (whole - BONUS * entropy) * float(tag.loss_tokens < 5)

    got, metrics = updated(model_dir, one_rank, actor, batch, rows, None, max_new_tokens=5)
    assert_same(got, oracle(model_dir, batch, rows, actor, token_loss))
    long = [t for t in batch.trajectories if t.loss_tokens >= 5]
    assert 0 < len(long) < len(batch.trajectories)
    assert metrics["offpolicy/rejected_fraction"] == pytest.approx(len(long) / len(batch.trajectories))


def test_a_coefficient_of_zero_only_measures(model_dir, one_rank):
    batch, rows = random_batch()
    plain, _ = updated(model_dir, one_rank, actor_of(), batch, rows, None)
    measured, metrics = updated(model_dir, one_rank, actor_of(), batch, rows, ReferenceConfig(kl_coef=0.0))
    assert all((plain[name] == measured[name]).all() for name in plain)
    assert metrics["ref/kl_k3"] > 0


def test_without_correction_the_weights_are_one(model_dir, one_rank):
    batch, rows = random_batch()
    actor = actor_of(behave_mode="ignore")
    advantage = advantages(batch)

    def token_loss(tag, theta, entropy, known, _):
        prox = known["prox"][tag.key]
        return decoupled(actor, advantage[tag.key], theta, prox, prox)

    got, _ = updated(model_dir, one_rank, actor, batch, rows, None)
    assert_same(got, oracle(model_dir, batch, rows, actor, token_loss))
