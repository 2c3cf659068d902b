"""The batch rule: which finished groups may be trained now, decided from counts per stamp alone.

A group stamped c has deadline c + eta: the last trainer version that may consume it. Take the B finished groups with
the oldest stamps if afterwards, for every k >= 0, at most k * B live groups have a deadline <= v + k; otherwise wait.
A newer group that finished early so overtakes a slow older one only while the older ones still fit into the batches
left to them. Taking the oldest stamps lowers each of those counts as far as any choice can: if this choice is not
allowed, none is. docs/staleness.md has the proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from areal_like.rollout.admission import StalenessLimits


class OnStale(StrEnum):
    """What keeps groups from growing too old."""

    WAIT = "wait"  #: the batch rule: the trainer waits for an old group rather than let it expire
    DROP = "drop"  #: never wait for a particular group; expired ones are cancelled
    TRAIN = "train"  #: admission alone: lag is bounded on average only


class BatchVerdict(StrEnum):
    """Why a batch may be taken, or what it waits for."""

    TAKE = "take"
    TOO_FEW = "too_few"  #: fewer finished groups than a batch holds
    OLDER_FIRST = "older_first"  #: slow older groups would no longer fit into the batches left to them
    EXHAUSTED = "exhausted"  #: nothing finished, nothing runs, and no prompt is left


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """What the rule looks at.

    Attributes:
        version: trainer version v that would take the batch.
        finished: finished groups per stamp.
        live: all live groups per stamp, finished ones included.
        unstamped: live groups that have sent no request yet; their stamp will be at least ``acknowledged``.
        acknowledged: s.
        ended: no prompt is left and nothing runs, so the batch may be smaller.
    """

    version: int
    finished: Mapping[int, int]
    live: Mapping[int, int]
    unstamped: int
    acknowledged: int
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecision:
    """``chosen``: how many finished groups to take per stamp; empty unless the verdict is TAKE."""

    verdict: BatchVerdict
    chosen: Mapping[int, int] = field(default_factory=dict)


def decide(limits: StalenessLimits, on_stale: OnStale, facts: BatchFacts) -> BatchDecision:
    """Whether a batch may be taken now, and of which stamps. O(number of different stamps)."""
    wanted = limits.batch_size
    available = sum(facts.finished.values())
    if available < wanted:
        if not facts.ended:
            return BatchDecision(verdict=BatchVerdict.TOO_FEW)
        if not available:
            return BatchDecision(verdict=BatchVerdict.EXHAUSTED)
        wanted = available
    chosen = _oldest(facts.finished, wanted)
    if on_stale is OnStale.WAIT and not _others_still_fit(limits, facts, chosen):
        return BatchDecision(verdict=BatchVerdict.OLDER_FIRST)
    return BatchDecision(verdict=BatchVerdict.TAKE, chosen=chosen)


def is_overdue(limits: StalenessLimits, *, stamp: int, version: int) -> bool:
    """True when the batch of ``version`` was the last that a group stamped ``stamp`` could have joined."""
    return stamp + limits.max_head_offpolicyness <= version


def _oldest(finished: Mapping[int, int], wanted: int) -> dict[int, int]:
    chosen: dict[int, int] = {}
    for stamp in sorted(finished):
        if not wanted:
            break
        chosen[stamp] = min(wanted, finished[stamp])
        wanted -= chosen[stamp]
    return chosen


def _others_still_fit(limits: StalenessLimits, facts: BatchFacts, chosen: Mapping[int, int]) -> bool:
    """For every k >= 0: at most k * B of the groups left have a deadline <= version + k."""
    left = Counter(facts.live)
    left[facts.acknowledged] += facts.unstamped
    left.subtract(chosen)
    due = 0
    for stamp in sorted(left):  # between two stamps `due` stands still while k * B grows: checking at stamps is enough
        due += left[stamp]
        batches_left = max(stamp + limits.max_head_offpolicyness - facts.version, 0)
        if due > batches_left * limits.batch_size:
            return False
    return True
