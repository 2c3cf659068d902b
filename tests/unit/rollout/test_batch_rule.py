"""B = 2 and eta = 1 throughout, unless said otherwise; version 5 takes the batch."""

from dataclasses import replace

import pytest

from areal_like.rollout.admission import StalenessLimits
from areal_like.rollout.batch_rule import BatchFacts, BatchVerdict, OnStale, decide, is_overdue

LIMITS = StalenessLimits(batch_size=2, max_head_offpolicyness=1, total_train_steps=100, max_concurrent_rollouts=8)


def facts(finished: dict[int, int], running: dict[int, int], *, unstamped: int = 0, ended: bool = False) -> BatchFacts:
    live = {stamp: finished.get(stamp, 0) + running.get(stamp, 0) for stamp in {*finished, *running}}
    return BatchFacts(version=5, finished=finished, live=live, unstamped=unstamped, acknowledged=5, ended=ended)


def test_the_oldest_stamps_are_taken() -> None:
    decision = decide(LIMITS, OnStale.WAIT, facts({4: 1, 5: 3}, {}))
    assert decision.verdict is BatchVerdict.TAKE
    assert decision.chosen == {4: 1, 5: 1}


def test_too_few_wait() -> None:
    assert decide(LIMITS, OnStale.WAIT, facts({4: 1}, {5: 1})).verdict is BatchVerdict.TOO_FEW


def test_a_group_due_now_is_waited_for() -> None:
    # stamp 4 + eta 1 = 5: this batch is its last
    assert decide(LIMITS, OnStale.WAIT, facts({5: 3}, {4: 1})).verdict is BatchVerdict.OLDER_FIRST


def test_newer_groups_overtake_while_the_older_ones_still_fit() -> None:
    limits = replace(LIMITS, max_head_offpolicyness=2)
    # the slow two (stamp 4) are due at 6, and batch 6 has two places
    assert decide(limits, OnStale.WAIT, facts({5: 2}, {4: 2})).chosen == {5: 2}
    # a third would not fit
    assert decide(limits, OnStale.WAIT, facts({5: 2}, {4: 3})).verdict is BatchVerdict.OLDER_FIRST


def test_places_add_up_over_batches() -> None:
    limits = replace(LIMITS, max_head_offpolicyness=3)
    # due at 6: one of at most 2; due at 7: 1 + 3 = 4 of at most 4; one more would not fit
    assert decide(limits, OnStale.WAIT, facts({5: 2}, {3: 1, 4: 3})).verdict is BatchVerdict.TAKE
    assert decide(limits, OnStale.WAIT, facts({5: 2}, {3: 1, 4: 4})).verdict is BatchVerdict.OLDER_FIRST


def test_unstamped_groups_count_at_the_version_they_will_have_at_least() -> None:
    # stamped 5 at the earliest, due at 6: two fit, three do not
    assert decide(LIMITS, OnStale.WAIT, facts({5: 2}, {}, unstamped=2)).verdict is BatchVerdict.TAKE
    assert decide(LIMITS, OnStale.WAIT, facts({5: 2}, {}, unstamped=3)).verdict is BatchVerdict.OLDER_FIRST


@pytest.mark.parametrize("on_stale", [OnStale.DROP, OnStale.TRAIN])
def test_only_wait_waits_for_a_particular_group(on_stale: OnStale) -> None:
    assert decide(LIMITS, on_stale, facts({5: 3}, {4: 1})).chosen == {5: 2}


def test_the_last_batch_may_be_smaller() -> None:
    assert decide(LIMITS, OnStale.WAIT, facts({5: 1}, {}, ended=True)).chosen == {5: 1}


def test_nothing_left_is_exhausted() -> None:
    assert decide(LIMITS, OnStale.WAIT, facts({}, {}, ended=True)).verdict is BatchVerdict.EXHAUSTED


def test_overdue_once_the_last_possible_batch_was_taken() -> None:
    assert [is_overdue(LIMITS, stamp=stamp, version=5) for stamp in (3, 4, 5)] == [True, True, False]
