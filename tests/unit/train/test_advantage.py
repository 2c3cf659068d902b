"""Advantages of a rank's rows against sums written out token by token, in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from train_cases import batch_of, random_batch

from areal_like.algo.settings import ShapingSettings
from areal_like.config.actor import ActorConfig
from areal_like.train.advantage import AdvantageRule
from areal_like.train.rows import fetch_rows

DISCOUNT, LAMBDA, BETA = 0.9, 0.8, 0.3


def actor_of(**changes):
    return ActorConfig.model_validate(changes)


def found(one_rank, batch, rows, actor, *, shaping=None, columns=(), **rule):
    """Advantage of every written token by key, and the rank's rows; ``columns`` are random but the same each time."""
    tags = batch.trajectories
    mine = fetch_rows(lambda keys: [rows[key] for key in keys], tags, range(len(tags)))
    generator = torch.Generator().manual_seed(4)
    for name in columns:
        for i, tag in enumerate(tags):
            mine.put(name, [i], torch.randn(tag.loss_tokens, generator=generator, dtype=torch.float64))
    AdvantageRule(actor=actor, parallel=one_rank, shaping=shaping or ShapingSettings(), **rule).assign(tags, mine)
    advantages = {}
    for i, tag in enumerate(tags):
        whole = np.broadcast_to(mine.rows[i].advantage, tag.length)
        advantages[tag.key] = whole[rows[tag.key].loss_mask == 1]
    return advantages, mine


def by_group(batch, reward_of):
    return {g.group_id: [reward_of(t) for t in g.trajectories] for g in batch.groups}


def test_kl_in_the_reward_is_taken_off_a_rows_total_before_groups_are_compared(one_rank):
    batch, rows = random_batch()
    got, mine = found(one_rank, batch, rows, actor_of(advantage="dr_grpo"), columns=("prox", "ref"), kl_in_reward=BETA)
    index = {tag.key: i for i, tag in enumerate(batch.trajectories)}

    def reward(tag):
        gaps = mine.columns["prox"][index[tag.key]] - mine.columns["ref"][index[tag.key]]
        return tag.reward - BETA * float(gaps.sum())

    for group in batch.groups:
        rewards = [reward(tag) for tag in group.trajectories]
        for tag, own in zip(group.trajectories, rewards, strict=True):
            want = own - sum(rewards) / len(rewards)
            assert got[tag.key].tolist() == pytest.approx([want] * tag.loss_tokens, abs=1e-12)


def test_kl_in_the_reward_of_turns_is_what_comes_after_the_token(one_rank):
    batch, rows = random_batch(sizes=(2,))
    turned = {k: replace(r, returns=np.full(r.length, r.reward, np.float32)) for k, r in rows.items()}
    batch = batch_of(turned, batch.version)
    actor = actor_of(adv_norm={"mean_level": None, "std_level": None})
    got, mine = found(one_rank, batch, turned, actor, columns=("prox", "ref"), kl_in_reward=BETA)
    for i, tag in enumerate(batch.trajectories):
        gaps = (mine.columns["prox"][i] - mine.columns["ref"][i]).tolist()
        want = [tag.reward - BETA * sum(gaps[t:]) for t in range(len(gaps))]
        assert got[tag.key].tolist() == pytest.approx(want, abs=1e-9)


def gae_by_hand(rewards, values):
    values = [*values, 0.0]
    deltas = [r + DISCOUNT * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((DISCOUNT * LAMBDA) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@pytest.mark.parametrize("whiten", [False, True])
def test_gae_with_shaping_and_kl_is_the_double_sum(one_rank, whiten):
    batch, rows = random_batch()
    shaping = ShapingSettings(bias=-0.25, scaling=2.0)
    got, mine = found(
        one_rank,
        batch,
        rows,
        actor_of(advantage="gae", discount=DISCOUNT, gae_lambda=LAMBDA),
        shaping=shaping,
        columns=("prox", "ref", "value"),
        kl_in_reward=BETA,
        whiten=whiten,
    )
    want = {}
    for i, tag in enumerate(batch.trajectories):
        rewards = (-BETA * (mine.columns["prox"][i] - mine.columns["ref"][i])).tolist()
        rewards[-1] += (tag.reward - 0.25) * 2.0
        values = mine.columns["value"][i].tolist()
        want[tag.key] = gae_by_hand(rewards, values)
        returns = [a + v for a, v in zip(want[tag.key], values, strict=True)]
        assert mine.columns["return"][i].tolist() == pytest.approx(returns, abs=1e-12)
    if whiten:
        flat = [a for tokens in want.values() for a in tokens]
        mean = math.fsum(flat) / len(flat)
        deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in flat) / len(flat))
        want = {key: [(a - mean) / deviation for a in tokens] for key, tokens in want.items()}
    for key, tokens in want.items():
        assert got[key].tolist() == pytest.approx(tokens, abs=1e-10)


def test_gae_without_values_gives_the_returns_of_turns_back(one_rank):
    batch, rows = random_batch()
    rng = np.random.default_rng(0)
    turned = {k: replace(r, returns=rng.normal(size=r.length).astype(np.float32)) for k, r in rows.items()}
    tags = batch.trajectories
    mine = fetch_rows(lambda keys: [turned[key] for key in keys], tags, range(len(tags)))
    for i, tag in enumerate(tags):
        mine.put("value", [i], torch.zeros(tag.loss_tokens))
    actor = actor_of(advantage="gae", discount=DISCOUNT)
    AdvantageRule(actor=actor, parallel=one_rank, shaping=ShapingSettings(), whiten=False).assign(tags, mine)
    for i, tag in enumerate(tags):
        written = turned[tag.key].loss_mask == 1
        np.testing.assert_allclose(mine.rows[i].advantage[written], turned[tag.key].returns[written], rtol=0, atol=1e-6)


def test_shaping_adds_to_the_end_of_rows_with_turn_rewards(one_rank):
    """The same advantages as for rows without turns, where the returns are flat."""
    batch, rows = random_batch()
    flat = {k: replace(r, returns=np.full(r.length, r.reward, np.float32)) for k, r in rows.items()}
    shaping = ShapingSettings(length_limit=6, overlong_margin=4, scaling=3.0, bias=1.0, clip=4.5)
    actor = actor_of(advantage="rloo")
    plain, _ = found(one_rank, batch, rows, actor, shaping=shaping)
    turned, _ = found(one_rank, batch, flat, actor, shaping=shaping)
    unshaped, _ = found(one_rank, batch, rows, actor)
    assert all(plain[key] == pytest.approx(turned[key], abs=1e-9) for key in plain)
    assert any(not np.allclose(plain[key], unshaped[key]) for key in plain)


def test_rows_at_the_limit_are_marked(one_rank):
    batch, rows = random_batch()
    shaping = ShapingSettings(length_limit=4, overlong_filter=True)
    _, mine = found(one_rank, batch, rows, actor_of(), shaping=shaping)
    for i, tag in enumerate(batch.trajectories):
        assert mine.columns["keep"][i].tolist() == [tag.loss_tokens < 4] * tag.loss_tokens
    assert {tag.loss_tokens < 4 for tag in batch.trajectories} == {True, False}


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_equal_rewards_and_no_rows_are_well_defined(one_rank, advantage):
    batch, rows = random_batch()
    same = {k: replace(r, reward=0.1) for k, r in rows.items()}
    got, _ = found(one_rank, batch_of(same, 3), same, actor_of(advantage=advantage), columns=("value",))
    assert all(np.isfinite(tokens).all() for tokens in got.values())
    assert advantage == "gae" or not any(tokens.any() for tokens in got.values())
    nothing, _ = found(one_rank, replace(batch, groups=()), {}, actor_of(advantage=advantage), columns=("value",))
    assert nothing == {}
