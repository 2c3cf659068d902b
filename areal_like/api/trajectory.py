"""Training rows, and the tags by which the controller knows them without holding their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

#: version of a token that the policy did not write
NOT_WRITTEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One training row: L tokens, unshifted.

    Attributes:
        token_ids: int32 [L], prompt, answers and environment text, ids exactly as sampled.
        loss_mask: int32 [L], 1 where the policy wrote the token.
        logprobs: float32 [L], log-prob of each written token under its sampling distribution, 0 elsewhere.
        versions: int32 [L], weight version that wrote the token, -1 elsewhere.
        reward: reward of the whole row.
        returns: float32 [L] or None; per-token discounted return-to-go where turns had rewards of their own.
        group_id, episode_id: set by the executor; a workflow leaves them empty.
    """

    token_ids: IntArray
    loss_mask: IntArray
    logprobs: FloatArray
    versions: IntArray
    reward: float
    returns: FloatArray | None = None
    group_id: str = ""
    episode_id: str = ""

    @property
    def length(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTag:
    """What the controller knows of a stored trajectory. ``key`` fetches its tensors from the store."""

    key: str
    group_id: str
    episode_id: str
    length: int
    loss_tokens: int
    reward: float
    oldest_version: int
    newest_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptId:
    """One visit to one prompt: unique along a run."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTag:
    """A finished group: the unit of admission, filtering and batching."""

    group_id: str
    prompt: PromptId
    attempt: int
    stamp: int
    trajectories: tuple[TrajectoryTag, ...]

    @property
    def oldest_version(self) -> int:
        return min(t.oldest_version for t in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups consumed by one step of the loop, taken at trainer version ``version``."""

    version: int
    groups: tuple[GroupTag, ...]

    @property
    def trajectories(self) -> tuple[TrajectoryTag, ...]:
        return tuple(t for g in self.groups for t in g.trajectories)

    @property
    def lags(self) -> tuple[int, ...]:
        """Lag of every group: ``version`` minus the version of its oldest token."""
        return tuple(self.version - g.oldest_version for g in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Figures of one training step, reduced over all ranks. Values are plain floats, keyed ``area/name``."""

    version: int
    seconds: float
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
