"""One update against an independent one, and under every cut of the same batch.

The oracle below goes row by row over full logits with plain autograd and torch's own AdamW, in float64.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from train_cases import batch_of, build_engine, exact_norms, random_batch, run_update, weights_of
from transformers import AutoModelForCausalLM

from areal_like.api.generation import GenerationHyperparameters
from areal_like.config.actor import ActorConfig

#: float64 throughout; only the order of sums differs
TOLERANCE = 1e-10


def actor_of(**changes):
    base = {
        "optimizer": {"lr": 3e-3, "gradient_clipping": 0.05, "lr_scheduler_type": "linear", "weight_decay": 0.1},
        "ppo_n_minibatches": 2,
    }
    return ActorConfig.model_validate(base | changes)


def oracle(folder, batch, rows, actor, *, gconfig=None, total_steps=10):
    """Parameters after one update, by name: the formulas of the design, spelled out."""
    gconfig = gconfig or GenerationHyperparameters()
    model = exact_norms(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    tags = batch.trajectories

    def logp(key):
        row = rows[key]
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0] / gconfig.temperature
        out, run = [], 0
        for t in range(1, row.length):
            run = run + 1 if row.loss_mask[t] else 0
            if not row.loss_mask[t]:
                continue
            z = logits[t - 1]
            if run <= gconfig.min_new_tokens:
                banned = torch.zeros_like(z, dtype=torch.bool)
                banned[[2, *gconfig.stop_token_ids]] = True
                z = z.masked_fill(banned, -torch.inf)
            out.append(torch.log_softmax(z, -1)[ids[t]])
        return torch.stack(out)

    advantage = {}
    for group in batch.groups:
        rewards = np.array([t.reward for t in group.trajectories])
        for tag in group.trajectories:
            spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
            advantage[tag.key] = (tag.reward - rewards.mean()) / (spread + 1e-6) if spread else 0.0

    with torch.no_grad():
        prox = {t.key: logp(t.key) for t in tags}
    o = actor.optimizer
    adamw = torch.optim.AdamW(
        model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, foreach=False
    )
    count = actor.ppo_n_minibatches
    cuts = [len(batch.groups) * i // count for i in range(count + 1)]
    for step in range(count):
        part = [t for g in batch.groups[cuts[step] : cuts[step + 1]] for t in g.trajectories]
        tokens = sum(t.loss_tokens for t in part)
        loss = torch.zeros((), dtype=torch.float64)
        for tag in part:
            row = rows[tag.key]
            written = row.loss_mask == 1
            behave = torch.from_numpy(row.logprobs[written]).double()
            theta = logp(tag.key)
            r = torch.exp(theta - prox[tag.key])
            w = torch.exp(prox[tag.key] - behave).clamp(max=actor.behave_cap)
            a = torch.tensor(advantage[tag.key], dtype=torch.float64)
            clipped = r.clamp(1 - actor.eps_clip, 1 + actor.eps_clip)
            loss = loss + (w * torch.maximum(-a * r, -a * clipped)).sum() / tokens
        adamw.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
        if norm > o.gradient_clipping:
            for p in model.parameters():
                p.grad *= o.gradient_clipping / (norm + 1e-6)
        adamw.param_groups[0]["lr"] = o.lr * (1 - step / (total_steps - 1))
        adamw.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def assert_same(left, right, tolerance=TOLERANCE):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=0, atol=tolerance, err_msg=name)


def updated(folder, parallel, actor, batch, rows, **kwargs):
    engine = build_engine(folder, parallel, actor, **kwargs)
    report = run_update(engine, actor, batch, rows)
    return weights_of(engine), report


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_an_update_equals_the_row_by_row_oracle(model_dir, tied_model_dir, one_rank, tied, packing):
    folder = tied_model_dir if tied else model_dir
    batch, rows = random_batch()
    actor = actor_of(mb_spec={"packing": packing})
    found, report = updated(folder, one_rank, actor, batch, rows)
    assert_same(found, oracle(folder, batch, rows, actor))
    assert report.tokens == sum(int(r.loss_mask.sum()) for r in rows.values())
    assert report.metrics["train/optimizer_steps"] == 2


def test_temperature_and_the_stop_ban_of_every_answer_are_replayed(model_dir, one_rank):
    gconfig = GenerationHyperparameters(temperature=0.7, min_new_tokens=2, stop_token_ids=(5,))
    batch, rows = random_batch(turns=3)
    # tokens that were banned cannot have been written: replace them
    rows = {k: replace(r, token_ids=np.where(np.isin(r.token_ids, (2, 5)), 6, r.token_ids)) for k, r in rows.items()}
    actor = actor_of()
    found, _ = updated(model_dir, one_rank, actor, batch, rows, gconfig=gconfig)
    assert_same(found, oracle(model_dir, batch, rows, actor, gconfig=gconfig))
    unbanned, _ = updated(model_dir, one_rank, actor, batch, rows)
    assert any(np.abs(unbanned[name] - found[name]).max() > 1e-4 for name in found)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize("budget", [1, 13, 40])
@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_micro_batches_and_packing_change_nothing(model_dir, one_rank, aggregation, budget, packing):
    batch, rows = random_batch(seed=1)
    constant = 7.0 if aggregation == "seq_mean_token_sum" else None
    common = {"aggregation": aggregation, "aggregation_constant": constant}
    whole, report = updated(model_dir, one_rank, actor_of(**common), batch, rows)
    cut = actor_of(mb_spec={"packing": packing, "max_tokens_per_mb": budget}, **common)
    parts, cut_report = updated(model_dir, one_rank, cut, batch, rows)
    assert_same(whole, parts)
    assert cut_report.metrics["train/micro_batches"] > report.metrics["train/micro_batches"]
    for name in ("train/loss", "train/grad_norm", "offpolicy/ess", "offpolicy/kl_k3", "offpolicy/entropy"):
        assert cut_report.metrics[name] == pytest.approx(report.metrics[name], abs=1e-9), name


def test_the_order_of_siblings_changes_nothing(model_dir, one_rank):
    batch, rows = random_batch()
    turned = replace(
        batch, groups=tuple(replace(g, trajectories=tuple(reversed(g.trajectories))) for g in batch.groups)
    )
    actor = actor_of()
    assert_same(
        updated(model_dir, one_rank, actor, batch, rows)[0], updated(model_dir, one_rank, actor, turned, rows)[0]
    )


@pytest.mark.parametrize("prox", ["interpolate", "behave"])
def test_the_other_ways_to_prox_need_no_pass(model_dir, one_rank, prox):
    batch, rows = random_batch()
    found, report = updated(model_dir, one_rank, actor_of(prox=prox), batch, rows)
    assert all(np.isfinite(tensor).all() for tensor in found.values())
    assert report.metrics["offpolicy/ess"] == 1.0 or prox == "interpolate"


def test_prox_is_that_of_the_weights_before_the_first_step(model_dir, one_rank):
    """On the second minibatch r is not 1: it is taken to the weights before the first step, not to the current ones."""
    batch, rows = random_batch()
    actor = actor_of(optimizer={"lr": 0.05, "gradient_clipping": 10.0})
    _, report = updated(model_dir, one_rank, actor, batch, rows)
    assert report.metrics["offpolicy/ratio_max"] > 1.05
    one_step = actor_of(optimizer={"lr": 0.05}, ppo_n_minibatches=1)
    assert updated(model_dir, one_rank, one_step, batch, rows)[1].metrics["offpolicy/ratio_max"] == pytest.approx(
        1, abs=1e-9
    )


def test_turn_rewards_move_the_advantage_of_their_turn(model_dir, one_rank):
    """With returns equal to the total reward everywhere, per-token advantages equal the row's; else they do not."""
    batch, rows = random_batch()
    flat = {k: replace(r, returns=np.full(r.length, r.reward, np.float32)) for k, r in rows.items()}
    actor = actor_of()
    plain, _ = updated(model_dir, one_rank, actor, batch, rows)
    assert_same(plain, updated(model_dir, one_rank, actor, batch, flat)[0])
    sloped = {k: replace(r, returns=np.linspace(r.reward, 0, r.length, dtype=np.float32)) for k, r in rows.items()}
    other, _ = updated(model_dir, one_rank, actor, batch, sloped)
    assert any(np.abs(plain[name] - other[name]).max() > 1e-6 for name in plain)


def test_a_non_finite_gradient_skips_its_minibatch_and_is_counted(model_dir, one_rank):
    batch, rows = random_batch()
    key = batch.groups[0].trajectories[0].key  # in the first of two minibatches
    broken = rows | {key: replace(rows[key], returns=np.full(rows[key].length, np.nan, np.float32))}
    actor = actor_of()
    found, report = updated(model_dir, one_rank, actor, batch, broken)
    assert report.metrics["train/skipped_minibatches"] == 1
    assert report.metrics["train/optimizer_steps"] == 1
    assert math.isfinite(report.metrics["train/loss"]) and math.isfinite(report.metrics["train/grad_norm"])
    assert all(np.isfinite(tensor).all() for tensor in found.values())
    # what is left is the second minibatch alone, at the schedule's first learning rate
    rest = replace(batch, groups=batch.groups[2:])
    alone, _ = updated(model_dir, one_rank, actor_of(ppo_n_minibatches=1), rest, rows)
    assert_same(found, alone)


def test_a_batch_that_lost_groups_still_makes_a_version(model_dir, one_rank):
    batch, rows = random_batch()
    actor = actor_of(ppo_n_minibatches=4)
    short = replace(batch, groups=batch.groups[:3])
    _, report = updated(model_dir, one_rank, actor, short, rows)
    assert report.metrics["train/optimizer_steps"] == 3
    _, empty = updated(model_dir, one_rank, actor, replace(batch, groups=()), rows)
    assert (empty.tokens, empty.metrics["train/optimizer_steps"]) == (0, 0)


def test_a_row_without_written_tokens_teaches_nothing(model_dir, one_rank):
    batch, rows = random_batch(sizes=(2,))
    silent = replace(
        rows["0/0"],
        loss_mask=np.zeros_like(rows["0/0"].loss_mask),
        versions=np.full_like(rows["0/0"].versions, -1),
    )
    changed = rows | {"0/0": silent}
    found, report = updated(model_dir, one_rank, actor_of(), batch_of(changed, batch.version), changed)
    assert all(np.isfinite(tensor).all() for tensor in found.values())
    assert report.tokens == sum(int(r.loss_mask.sum()) for r in changed.values())


def test_a_row_that_is_not_what_its_tag_says_is_refused(model_dir, one_rank):
    batch, rows = random_batch()
    longer = replace(rows["1/0"], loss_mask=np.zeros_like(rows["1/0"].loss_mask))
    engine = build_engine(model_dir, one_rank, actor_of())
    with pytest.raises(ValueError, match="trajectory 1/0: the store holds"):
        run_update(engine, actor_of(), batch, rows | {"1/0": longer})


def test_figures_of_the_report(model_dir, one_rank):
    batch, rows = random_batch()
    _, report = updated(model_dir, one_rank, actor_of(), batch, rows)
    m = report.metrics
    lags = np.concatenate([batch.version - r.versions[r.loss_mask == 1] for r in rows.values()])
    assert m["offpolicy/lag_mean"] == pytest.approx(lags.mean())
    assert [m.get(f"offpolicy/lag_tokens_{i}", 0) for i in range(3)] == [int((lags == i).sum()) for i in range(3)]
    assert m["reward/mean"] == pytest.approx(np.mean([r.reward for r in rows.values()]))
    assert m["train/lr"] == pytest.approx(3e-3 * (1 - 1 / 9))
    assert {"seconds/fetch", "seconds/prox", "seconds/train"} <= m.keys()
    assert report.version == batch.version and report.seconds >= m["seconds/train"]
