"""Advantages against statistics written out per episode; never by position."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_like.algo.advantages import reward_scale, reward_table, row_advantages, token_advantages
from areal_like.algo.norms import ADVANTAGES, NormSettings, norm_settings
from areal_like.config.actor import NormConfig

GROUPS = ["a", "b", "a", "c", "b", "a", "b", "d", "d"]
EPISODES = [f"{g}{i}" for i, g in enumerate(GROUPS)]
REWARDS = [1.0, 0.0, 0.0, 0.7, 3.0, 0.5, 1.0, 0.3, 0.3]


def advantages(rewards: list[float], groups: list[str], norm: NormSettings) -> list[float]:
    episodes = [f"{g}{i}" for i, g in enumerate(groups)]
    result: list[float] = row_advantages(reward_table(rewards, groups, episodes), norm).tolist()
    return result


def by_hand(norm: NormSettings) -> list[float]:
    """One row per episode; every rule spelled out with the statistics module."""
    members = defaultdict(list)
    for group, reward in zip(GROUPS, REWARDS, strict=True):
        members[group].append(reward)

    def unit(level: Any, group: str) -> list[float]:
        return members[group] if level == "group" else REWARDS

    def centre(group: str, reward: float) -> float:
        if norm.mean_level is None:
            return 0.0
        rewards = unit(norm.mean_level, group)
        if len(set(rewards)) == 1:
            return reward
        if norm.mean_leave1out:
            return (sum(rewards) - reward) / (len(rewards) - 1)
        return statistics.fmean(rewards)

    centred = [r - centre(g, r) for g, r in zip(GROUPS, REWARDS, strict=True)]
    out = []
    for i, group in enumerate(GROUPS):
        scale = 1.0
        if norm.std_level is not None:
            values = centred if norm.std_of == "centred" else REWARDS
            chosen = [v for v, g in zip(values, GROUPS, strict=True) if norm.std_level == "batch" or g == group]
            if max(chosen) - min(chosen) > 1e-6:
                scale = statistics.stdev(chosen) + 1e-6
        out.append(centred[i] / scale)
    return out


@pytest.mark.parametrize("mean", ["group", "batch", None])
@pytest.mark.parametrize("std", ["group", "batch", None])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("std_of", ["rewards", "centred"])
def test_every_combination_matches_the_statistics_module(mean: Any, std: Any, leave_one_out: bool, std_of: Any) -> None:
    norm = NormSettings(mean_level=mean, std_level=std, mean_leave1out=leave_one_out, std_of=std_of)
    assert advantages(REWARDS, GROUPS, norm) == pytest.approx(by_hand(norm), rel=1e-12, abs=1e-13)


def test_named_methods_by_hand() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], ["x", "x", "x", "x", "y", "y"]
    half, third = statistics.stdev([1, 0, 0, 1]), statistics.stdev([1, 0])
    all_six = statistics.stdev(rewards)
    want = {
        "grpo": [0.5 / half, -0.5 / half, -0.5 / half, 0.5 / half, 0.5 / third, -0.5 / third],
        "dr_grpo": [0.5, -0.5, -0.5, 0.5, 0.5, -0.5],
        "rloo": [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1.0, -1.0],
        "reinforce_plus_plus": [s * 0.5 / all_six for s in (1, -1, -1, 1, 1, -1)],
        "reinforce_plus_plus_baseline": [s * 0.5 / all_six for s in (1, -1, -1, 1, 1, -1)],
        "lite_ppo": [s * 0.5 / all_six for s in (1, -1, -1, 1, 1, -1)],
        "reinforce_baseline": [0.5, -0.5, -0.5, 0.5, 0.5, -0.5],
    }
    assert set(want) == set(ADVANTAGES)
    for name, values in want.items():
        assert advantages(rewards, groups, ADVANTAGES[name]) == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize("name", ADVANTAGES)
@given(value=st.floats(-1e6, 1e6), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_all_equal_rewards_give_exactly_zero(name: str, value: float, sizes: list[int]) -> None:
    groups = [f"g{i}" for i, n in enumerate(sizes) for _ in range(n)]
    assert set(advantages([value] * len(groups), groups, ADVANTAGES[name])) <= {0.0, -0.0}


def test_rewards_that_differ_by_rounding_give_exactly_zero() -> None:
    rewards = [0.1 + 0.2, 0.3, float(torch.tensor(0.3)), 3 * 0.1]
    assert len(set(rewards)) == 3
    assert advantages(rewards, ["a"] * 4, ADVANTAGES["grpo"]) == [0.0] * 4


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "lite_ppo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_has_nothing_to_learn_from(name: str) -> None:
    assert advantages([5.0, 1.0, 0.0], ["alone", "b", "b"], ADVANTAGES[name])[0] == 0.0


@given(order=st.permutations(range(len(GROUPS))), norm=st.sampled_from(list(ADVANTAGES.values())))
def test_the_order_of_rows_means_nothing(order: list[int], norm: NormSettings) -> None:
    straight = advantages(REWARDS, GROUPS, norm)
    shuffled = advantages([REWARDS[i] for i in order], [GROUPS[i] for i in order], norm)
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-12, abs=1e-12)


def test_a_lost_sibling_shifts_no_other_group() -> None:
    """AReaL 1419: seven rows at group size four must not mix prompts."""
    groups = ["a"] * 3 + ["b"] * 4
    rewards = [1.0, 0.0, 0.0, 5.0, 5.0, 5.0, 9.0]
    whole = advantages(rewards, groups, ADVANTAGES["grpo"])
    assert whole[3:] == pytest.approx(advantages(rewards[3:], groups[3:], ADVANTAGES["grpo"]))
    assert max(map(abs, whole)) < 2.0


def test_an_episode_counts_once_however_many_trajectories_it_has() -> None:
    # episodes p (reward 1, three rows), q (reward 0, one row), r (reward 0, two rows)
    rewards, episodes = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], ["p", "p", "p", "q", "r", "r"]
    got = row_advantages(reward_table(rewards, ["g"] * 6, episodes), ADVANTAGES["grpo"]).tolist()
    mean, std = 1 / 3, statistics.stdev([1, 0, 0]) + 1e-6
    assert got == pytest.approx([(1 - mean) / std] * 3 + [-mean / std] * 3, rel=1e-12)
    alone = row_advantages(reward_table(rewards[2:5], ["g"] * 3, ["p", "q", "r"]), ADVANTAGES["grpo"]).tolist()
    assert alone == pytest.approx(got[2:5], rel=1e-12)


def test_the_same_episode_id_in_two_groups_is_two_episodes() -> None:
    table = reward_table([1.0, 0.0, 3.0, 1.0], ["a", "a", "b", "b"], ["0", "1", "0", "1"])
    assert row_advantages(table, ADVANTAGES["dr_grpo"]).tolist() == [0.5, -0.5, 1.0, -1.0]


def test_rows_without_an_episode_id_are_episodes_of_their_own() -> None:
    table = reward_table([1.0, 0.0], ["a", "a"], ["", ""])
    assert row_advantages(table, ADVANTAGES["dr_grpo"]).tolist() == [0.5, -0.5]


def test_turn_rewards_compete_with_the_groups_baseline_of_totals() -> None:
    # totals 3 and 1: baseline 2; the second turns' returns-to-go are 2 and 0
    table = reward_table([3.0, 1.0], ["g", "g"], ["p", "q"])
    return_T, row_T = torch.tensor([3.0, 3.0, 2.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    plain = token_advantages(reward_scale(table, ADVANTAGES["dr_grpo"]), return_T, row_T)
    assert plain.tolist() == [1.0, 1.0, 0.0, -1.0, -2.0]
    scaled = token_advantages(reward_scale(table, ADVANTAGES["grpo"]), return_T, row_T)
    torch.testing.assert_close(scaled, plain / math.sqrt(2), rtol=1e-5, atol=1e-6)
    assert scaled.dtype == torch.float32


def test_an_empty_batch_is_legal() -> None:
    assert row_advantages(reward_table([], [], []), ADVANTAGES["grpo"]).shape == (0,)


def test_bad_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        reward_table([math.nan], ["a"], ["0"])
    with pytest.raises(ValueError, match="number"):
        reward_table([1.0, 2.0], ["a"], ["0"])


def test_settings_are_read_from_the_experiment_file() -> None:
    assert norm_settings(NormConfig()) == ADVANTAGES["grpo"]
    section = NormConfig(mean_level="group", std_level=None, mean_leave1out=True)
    assert norm_settings(section) == ADVANTAGES["rloo"]
    section = NormConfig(std_level="batch", std_of="centred")
    assert norm_settings(section) == ADVANTAGES["reinforce_plus_plus_baseline"]
