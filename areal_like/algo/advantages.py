"""Advantages from the rewards of a whole batch, by group id.

Legend: ``_B`` rows (trajectories) of the batch, ``_E`` episodes, ``_T`` target tokens.

Statistics are taken over *episodes*: an episode with several trajectories counts once, with the mean of its rows'
rewards (which normally share one reward). All arithmetic is float64. Nothing depends on the order of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_like.algo.norms import Level, NormSettings

#: rewards whose spread is below this, relative to the largest (at least 1), are equal: float32 noise is not a signal
EQUAL_TOLERANCE = 1e-6
#: added to a standard deviation before dividing by it
STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTable:
    """Rewards of every row of a batch, on all ranks alike.

    Attributes:
        reward_B: float64 [B], total reward of each row.
        group_B: int64 [B], dense index of the row's group.
        episode_B: int64 [B], dense index of the row's episode, unique over groups.
    """

    reward_B: Tensor
    group_B: Tensor
    episode_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScale:
    """float64 [B] each: a row's advantage is (return − ``baseline_B``) / ``scale_B``."""

    baseline_B: Tensor
    scale_B: Tensor


def reward_table(rewards: Sequence[float], group_ids: Sequence[str], episode_ids: Sequence[str]) -> RewardTable:
    """A table from ids as tags carry them; an empty episode id is an episode of its own.

    Raises:
        ValueError: lengths differ, or a reward is not finite.
    """
    if not len(rewards) == len(group_ids) == len(episode_ids):
        raise ValueError(
            f"rewards ({len(rewards)}), group ids ({len(group_ids)}) and episode ids ({len(episode_ids)}) differ in "
            "number: give one of each for every row of the batch"
        )
    reward_B = torch.tensor(list(rewards), dtype=torch.float64)
    if not bool(torch.isfinite(reward_B).all()):
        raise ValueError(
            f"rewards must be finite numbers, got {[r for r in rewards if r != r or abs(r) == float('inf')]}"
        )
    episodes = [(g, e or f"\0row{i}") for i, (g, e) in enumerate(zip(group_ids, episode_ids, strict=True))]
    return RewardTable(reward_B=reward_B, group_B=_dense(group_ids), episode_B=_dense(episodes))


def _dense(keys: Sequence[object]) -> Tensor:
    """int64 index of every key in order of first appearance."""
    order = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([order[key] for key in keys], dtype=torch.int64)


def reward_scale(table: RewardTable, norm: NormSettings) -> RewardScale:
    """Baseline and scale of every row.

    A unit (group or batch) whose rewards are all equal has each reward as its own baseline, so that its advantages are
    exactly 0; so does an episode that has no siblings to leave out. A deviation that does not exist (one episode) or
    is 0 counts as 1.
    """
    reward_E, group_E = _episodes(table)
    if norm.mean_level is None:
        baseline_E = torch.zeros_like(reward_E)
    else:
        baseline_E = _means(reward_E, _units(norm.mean_level, group_E), norm.mean_leave1out)
    scale_E = torch.ones_like(reward_E)
    if norm.std_level is not None:
        value_E = reward_E - baseline_E if norm.std_of == "centred" else reward_E
        scale_E = _deviations(value_E, _units(norm.std_level, group_E))
    return RewardScale(baseline_B=baseline_E[table.episode_B], scale_B=scale_E[table.episode_B])


def row_advantages(table: RewardTable, norm: NormSettings) -> Tensor:
    """(reward − baseline) / scale of every row, float64 [B]."""
    scale = reward_scale(table, norm)
    return (table.reward_B - scale.baseline_B) / scale.scale_B


def token_advantages(scale: RewardScale, return_T: Tensor, row_T: Tensor) -> Tensor:
    """(return-to-go − baseline) / scale of every token [T], in the dtype of ``return_T``.

    Turn rewards: ``return_T`` is the discounted return-to-go of each token; the baseline is that of the totals of the
    group (``reward_B`` of the table), the same for all turns, so an early turn and a late one compete alike.
    """
    advantage_T = (return_T.to(torch.float64) - scale.baseline_B[row_T]) / scale.scale_B[row_T]
    return advantage_T.to(return_T.dtype)


def _episodes(table: RewardTable) -> tuple[Tensor, Tensor]:
    """Mean reward and group of every episode, [E] each."""
    count = int(table.episode_B.max()) + 1 if table.episode_B.numel() else 0
    rows_E = torch.zeros(count, dtype=torch.float64).index_add(0, table.episode_B, torch.ones_like(table.reward_B))
    sum_E = torch.zeros(count, dtype=torch.float64).index_add(0, table.episode_B, table.reward_B)
    low_E = _reduce(table.reward_B, table.episode_B, count, "amin")
    high_E = _reduce(table.reward_B, table.episode_B, count, "amax")
    group_E = torch.zeros(count, dtype=torch.int64).index_copy(0, table.episode_B, table.group_B)
    return torch.where(low_E == high_E, low_E, sum_E / rows_E), group_E


def _units(level: Level, group_E: Tensor) -> Tensor:
    """The unit that each episode's statistics are taken over: its group, or the one batch."""
    return group_E if level == "group" else torch.zeros_like(group_E)


def _means(reward_E: Tensor, unit_E: Tensor, leave_one_out: bool) -> Tensor:
    units = _count(unit_E)
    size_E = torch.bincount(unit_E, minlength=units).to(torch.float64)[unit_E]
    sum_E = torch.zeros(units, dtype=torch.float64).index_add(0, unit_E, reward_E)[unit_E]
    mean_E = (sum_E - reward_E) / (size_E - 1).clamp(min=1) if leave_one_out else sum_E / size_E
    return torch.where(_all_equal(reward_E, unit_E), reward_E, mean_E)


def _deviations(value_E: Tensor, unit_E: Tensor) -> Tensor:
    units = _count(unit_E)
    size_U = torch.bincount(unit_E, minlength=units).to(torch.float64)
    mean_U = torch.zeros(units, dtype=torch.float64).index_add(0, unit_E, value_E) / size_U
    square_U = torch.zeros(units, dtype=torch.float64).index_add(0, unit_E, (value_E - mean_U[unit_E]) ** 2)
    std_E = (square_U / (size_U - 1).clamp(min=1)).sqrt()[unit_E]
    return torch.where(_all_equal(value_E, unit_E), 1.0, std_E + STD_EPSILON)


def _all_equal(value_E: Tensor, unit_E: Tensor) -> Tensor:
    """True where the episode's unit has values within :data:`EQUAL_TOLERANCE` of each other (units of one too)."""
    units = _count(unit_E)
    low_U, high_U = (_reduce(value_E, unit_E, units, how) for how in ("amin", "amax"))
    largest_U = torch.maximum(low_U.abs(), high_U.abs()).clamp(min=1.0)
    return (high_U - low_U <= EQUAL_TOLERANCE * largest_U)[unit_E]


def _count(unit_E: Tensor) -> int:
    return int(unit_E.max()) + 1 if unit_E.numel() else 0


def _reduce(value: Tensor, index: Tensor, size: int, how: str) -> Tensor:
    return torch.zeros(size, dtype=value.dtype).scatter_reduce(0, index, value, how, include_self=False)
