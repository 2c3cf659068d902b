"""Admission: whether one more group may enter, decided from counts alone.

With s the lowest acknowledged version, t batches taken, T the steps of the run and B groups per batch, a group
enters while

    live < min(eta + 1 - (t - s), T - t) * B        and        running < max_concurrent_rollouts

The first bound keeps data fresh (docs/staleness.md), the second keeps a run from generating what it will never train.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AdmissionVerdict(StrEnum):
    """Why the next group may enter, or what it waits for."""

    ADMIT = "admit"
    UNPUBLISHED = "unpublished"  #: no server has acknowledged any version yet
    STALENESS = "staleness"  #: its data might become older than eta allows; waits for a batch or a publication
    END_OF_RUN = "end_of_run"  #: the batches that are left are already covered by live groups
    CONCURRENCY = "concurrency"  #: max_concurrent_rollouts groups run
    NO_PROMPT = "no_prompt"  #: the prompt cursor is exhausted
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessLimits:
    """What a run fixes once: B, eta, T and the concurrency cap. All counts are groups, versions or steps."""

    batch_size: int
    max_head_offpolicyness: int
    total_train_steps: int
    max_concurrent_rollouts: int

    def __post_init__(self) -> None:
        lowest = {"batch_size": 1, "max_head_offpolicyness": 0, "total_train_steps": 1, "max_concurrent_rollouts": 1}
        for name, least in lowest.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"StalenessLimits.{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionFacts:
    """What admission looks at. ``acknowledged`` is s, or None before the first publication."""

    live: int
    running: int
    batches_taken: int
    acknowledged: int | None
    prompts_left: bool
    stopped: bool = False


def slots(limits: StalenessLimits, *, batches_taken: int, acknowledged: int) -> int:
    """Groups that may be live at once; zero or less while the servers are too far behind."""
    fresh = limits.max_head_offpolicyness + 1 - (batches_taken - acknowledged)
    return min(fresh, limits.total_train_steps - batches_taken) * limits.batch_size


def decide(limits: StalenessLimits, facts: AdmissionFacts) -> AdmissionVerdict:
    """Whether one more group may enter."""
    if facts.stopped:
        return AdmissionVerdict.STOPPED
    if facts.acknowledged is None:
        return AdmissionVerdict.UNPUBLISHED
    if facts.live >= (limits.total_train_steps - facts.batches_taken) * limits.batch_size:
        return AdmissionVerdict.END_OF_RUN
    if facts.live >= slots(limits, batches_taken=facts.batches_taken, acknowledged=facts.acknowledged):
        return AdmissionVerdict.STALENESS
    if facts.running >= limits.max_concurrent_rollouts:
        return AdmissionVerdict.CONCURRENCY
    if not facts.prompts_left:
        return AdmissionVerdict.NO_PROMPT
    return AdmissionVerdict.ADMIT
