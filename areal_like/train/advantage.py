"""From the rewards of a batch to the advantage of every token of this rank's rows.

Rewards are shaped, then compared: with the rewards of the group or batch (from tags, on every rank alike), or with the
values of the critic (GAE). KL to the reference is taken off a row's reward first, where it belongs there.

Legend: ``_B`` rows of the whole batch, ``_T`` written tokens of a row or of this rank, ``_L`` positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal_like.algo.advantages import RewardScale, RewardTable, reward_scale, reward_table, token_advantages
from areal_like.algo.returns import gae, whiten
from areal_like.algo.settings import ShapingSettings
from areal_like.algo.shaping import shape_rewards, within_limit
from areal_like.api.trajectory import TrajectoryTag
from areal_like.config.actor import ActorConfig
from areal_like.train.batching import Array
from areal_like.train.parallel import Parallel
from areal_like.train.rows import BatchRows


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRule:
    """How advantages are found. Collective where the KL lies in the reward, and with a critic.

    Attributes:
        shaping: what is done to rewards first.
        kl_in_reward: β of the KL to the reference in the reward; None: it is not there.
        whiten: whether a critic's advantages are normalised over the batch's tokens.
    """

    actor: ActorConfig
    parallel: Parallel
    shaping: ShapingSettings
    kl_in_reward: float | None = None
    whiten: bool = True

    def assign(self, tags: Sequence[TrajectoryTag], rows: BatchRows) -> None:
        """Give every row its advantage; with a critic, the column ``return`` too; with a length filter, ``keep``.

        Reads the columns ``prox`` and ``ref`` (KL in the reward) and ``value`` (critic).
        """
        if not tags:
            return
        raw = reward_table([t.reward for t in tags], [t.group_id for t in tags], [t.episode_id for t in tags])
        length_B = torch.tensor([t.loss_tokens for t in tags])
        shaped = replace(raw, reward_B=shape_rewards(raw.reward_B, length_B, raw.group_B, self.shaping))
        returns = {i: self._return(i, rows, raw, shaped) for i in rows.rows}
        penalties = self._penalties(rows)
        if self.actor.advantage == "gae":
            self._against_values(rows, shaped, returns, penalties)
        else:
            self._against_rewards(rows, shaped, returns, penalties)
        if self.shaping.overlong_filter:
            kept = within_limit(length_B, self.shaping).tolist()
            for i in rows.rows:
                rows.put("keep", [i], torch.full((tags[i].loss_tokens,), kept[i], dtype=torch.bool))

    def _return(self, index: int, rows: BatchRows, raw: RewardTable, shaped: RewardTable) -> Tensor | None:
        """Return-to-go [L] of a row with turn rewards; what shaping added to its total comes at the row's end."""
        found = rows.rows[index].trajectory.returns
        if found is None:
            return None
        scaling = self.shaping.scaling
        added = shaped.reward_B[index] - scaling * raw.reward_B[index]
        return scaling * torch.tensor(found, dtype=torch.float64) + added

    def _penalties(self, rows: BatchRows) -> dict[int, Tensor]:
        """β · log(prox/ref) of every written token [T] by row, float64: k1, the one that is right in the reward."""
        if self.kl_in_reward is None:
            return {}
        beta, columns = self.kl_in_reward, rows.columns
        return {i: beta * (columns["prox"][i] - columns["ref"][i]).double().cpu() for i in rows.rows}

    def _against_rewards(
        self, rows: BatchRows, table: RewardTable, returns: dict[int, Tensor | None], penalties: dict[int, Tensor]
    ) -> None:
        """(reward − baseline) / scale, by group or batch. The KL of a row is taken off its total on every rank."""
        if self.kl_in_reward is not None:
            off_B = torch.zeros_like(table.reward_B)
            for i, penalty_T in penalties.items():
                off_B[i] = penalty_T.sum()
            table = replace(table, reward_B=table.reward_B - self._sum(off_B))
        scale = reward_scale(table, self.actor.normalisation)
        advantage_B = ((table.reward_B - scale.baseline_B) / scale.scale_B).tolist()
        for i in rows.rows:
            return_L = returns[i]
            if return_L is None:
                rows.set_advantage(i, advantage_B[i])
                continue
            if i in penalties:
                return_L = return_L.clone()
                return_L[_written(rows, i)] -= penalties[i].flip(0).cumsum(0).flip(0)
            rows.set_advantage(i, _turn_advantages(return_L, i, scale))

    def _against_values(
        self, rows: BatchRows, table: RewardTable, returns: dict[int, Tensor | None], penalties: dict[int, Tensor]
    ) -> None:
        """GAE over this rank's rows, end to end."""
        members = sorted(rows.rows)
        parts = []
        for i in members:
            reward_T = self._token_rewards(rows, i, float(table.reward_B[i]), returns[i])
            parts.append(reward_T - penalties[i] if i in penalties else reward_T)
        reward_T = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
        counts = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        value_T = rows.column("value", members, reward_T)
        assert value_T is not None, "a critic's values come before its advantages"
        found = gae(
            reward_T,
            value_T.double(),
            torch.ones_like(reward_T, dtype=torch.bool),
            torch.repeat_interleave(torch.arange(len(members)), counts),
            len(members),
            discount=self.actor.discount,
            gae_lambda=self.actor.gae_lambda,
        )
        rows.put("return", members, found.return_T)
        advantage_T = whiten(found.advantage_T, self._sum) if self.whiten else found.advantage_T
        for i, row_T in zip(members, torch.split(advantage_T, counts.tolist()), strict=True):
            advantage_L = torch.zeros(rows.rows[i].trajectory.length, dtype=torch.float64)
            advantage_L[_written(rows, i)] = row_T
            rows.set_advantage(i, advantage_L.numpy())

    def _token_rewards(self, rows: BatchRows, index: int, reward: float, return_L: Tensor | None) -> Tensor:
        """Reward of every written token [T]: the row's at its last one, or those whose discounted sums are the returns.

        So GAE with λ = 1 and values of 0 gives the returns back.
        """
        written = _written(rows, index)
        if return_L is not None:
            return_T = return_L[written]
            return return_T - self.actor.discount * torch.cat([return_T[1:], return_T.new_zeros(1)])[: len(return_T)]
        reward_T = torch.zeros(int(written.sum()), dtype=torch.float64)
        reward_T[-1:] = reward
        return reward_T

    def _sum(self, value: Tensor) -> Tensor:
        return self.parallel.sum(value.to(self.parallel.device)).cpu()


def _written(rows: BatchRows, index: int) -> Tensor:
    return torch.from_numpy(rows.rows[index].trajectory.loss_mask == 1)


def _turn_advantages(return_L: Tensor, index: int, scale: RewardScale) -> Array:
    row_L = torch.full_like(return_L, index, dtype=torch.int64)
    return token_advantages(scale, return_L, row_L).numpy()
