import pytest

from areal_like.api.trajectory import GroupTag, PromptId, TrajectoryTag
from areal_like.rollout.admission import AdmissionVerdict, StalenessLimits
from areal_like.rollout.batch_rule import BatchDecision, BatchVerdict, OnStale
from areal_like.rollout.ledger import GroupLedger, StalenessBroken
from areal_like.rollout.lifecycle import GroupState

LIMITS = StalenessLimits(batch_size=2, max_head_offpolicyness=1, total_train_steps=3, max_concurrent_rollouts=8)


def tag(group_id: str, oldest: int) -> GroupTag:
    trajectory = TrajectoryTag(
        key=group_id,
        group_id=group_id,
        episode_id="",
        length=2,
        loss_tokens=1,
        reward=0.0,
        oldest_version=oldest,
        newest_version=oldest,
    )
    prompt = PromptId(epoch=0, index=0)
    return GroupTag(group_id=group_id, prompt=prompt, attempt=0, stamp=0, trajectories=(trajectory,))


def ledger_with(*group_ids: str, on_stale: OnStale = OnStale.WAIT, acknowledged: int = 0) -> GroupLedger:
    """A ledger whose groups were all dispatched."""
    ledger = GroupLedger(LIMITS, on_stale)
    ledger.acknowledge(acknowledged)
    for group_id in group_ids:
        ledger.admit(group_id)
        ledger.dispatch(group_id)
    return ledger


def take(ledger: GroupLedger, version: int) -> list[str]:
    decision = ledger.batch_decision(version, prompts_left=True)
    assert decision.verdict is BatchVerdict.TAKE
    return [group.group_id for group in ledger.take(decision)]


def test_admission_follows_batches_and_acknowledgements() -> None:
    ledger = ledger_with("a", "b", "c")
    assert ledger.admission(prompts_left=True) is AdmissionVerdict.ADMIT
    ledger.admit("d")
    assert ledger.admission(prompts_left=True) is AdmissionVerdict.STALENESS  # (eta + 1) * B = 4
    ledger.finish(tag("a", 0))
    ledger.finish(tag("b", 0))
    take(ledger, 0)
    assert ledger.admission(prompts_left=True) is AdmissionVerdict.STALENESS  # one batch taken, not yet published
    ledger.acknowledge(1)
    assert ledger.admission(prompts_left=True) is AdmissionVerdict.ADMIT


def test_a_dropped_group_gives_its_slot_back() -> None:
    ledger = ledger_with("a", "b", "c", "d")
    assert ledger.admission(prompts_left=True) is AdmissionVerdict.STALENESS
    ledger.end("b", GroupState.FILTERED)
    assert ledger.admission(prompts_left=True) is AdmissionVerdict.ADMIT


def test_a_batch_waits_for_the_group_that_is_due() -> None:
    ledger = ledger_with("slow", "a", "b", "c")
    for group_id in "ab":
        ledger.finish(tag(group_id, 0))
    assert take(ledger, 0) == ["a", "b"]
    ledger.acknowledge(1)
    ledger.admit("d")
    ledger.dispatch("d")
    for group_id, oldest in [("c", 0), ("d", 1)]:
        ledger.finish(tag(group_id, oldest))
    assert ledger.batch_decision(1, prompts_left=True).verdict is BatchVerdict.OLDER_FIRST
    ledger.finish(tag("slow", 0))
    assert take(ledger, 1) == ["slow", "c"]


def test_a_batch_is_in_order_of_admission() -> None:
    ledger = ledger_with("a", "b")
    for group_id in "ba":
        ledger.finish(tag(group_id, 0))
    assert take(ledger, 0) == ["a", "b"]


def test_finishing_returns_the_stamp_that_the_tokens_allow() -> None:
    ledger = GroupLedger(LIMITS, first_version=1)
    ledger.acknowledge(0)
    ledger.admit("a")
    assert ledger.dispatch("a") == 0
    assert ledger.finish(tag("a", 1)).stamp == 1


def test_each_version_takes_one_batch() -> None:
    ledger = ledger_with("a")
    with pytest.raises(ValueError, match="asked for version 1, but 0 batches were taken"):
        ledger.batch_decision(1, prompts_left=True)


def test_after_the_last_step_nothing_is_left() -> None:
    ledger = GroupLedger(LIMITS, first_version=3)
    assert ledger.batch_decision(3, prompts_left=True).verdict is BatchVerdict.EXHAUSTED


def test_before_the_first_publication_nothing_happens() -> None:
    ledger = GroupLedger(LIMITS)
    assert ledger.admission(prompts_left=True) is AdmissionVerdict.UNPUBLISHED
    assert ledger.batch_decision(0, prompts_left=True).verdict is BatchVerdict.TOO_FEW
    ledger.admit("a")
    with pytest.raises(ValueError, match="publish before generating"):
        ledger.dispatch("a")


def test_acknowledged_versions_never_fall_and_never_run_ahead() -> None:
    ledger = GroupLedger(LIMITS, first_version=2)
    ledger.acknowledge(2)
    ledger.acknowledge(2)
    with pytest.raises(ValueError, match="fell from 2 to 1"):
        ledger.acknowledge(1)
    with pytest.raises(ValueError, match="version 3 cannot exist after 2 batches"):
        ledger.acknowledge(3)


def test_expired_groups_are_those_that_no_later_batch_may_take() -> None:
    ledger = ledger_with("slow", "a", "b", "c", on_stale=OnStale.DROP)
    for group_id in "ab":
        ledger.finish(tag(group_id, 0))
    take(ledger, 0)
    assert ledger.overdue(0) == ()  # stamp 0, due at 1
    ledger.acknowledge(1)
    ledger.admit("d")
    ledger.dispatch("d")
    for group_id, oldest in [("c", 0), ("d", 1)]:
        ledger.finish(tag(group_id, oldest))
    assert take(ledger, 1) == ["c", "d"]
    assert ledger.overdue(1) == ("slow",)


def test_a_group_without_a_request_expires_by_the_version_it_would_be_stamped_with() -> None:
    ledger = ledger_with("a", "b", on_stale=OnStale.DROP)
    ledger.admit("silent")
    assert ledger.overdue(0) == ()
    assert ledger.overdue(1) == ("a", "b", "silent")


@pytest.mark.parametrize("on_stale", [OnStale.WAIT, OnStale.TRAIN])
def test_only_drop_lets_groups_expire(on_stale: OnStale) -> None:
    assert ledger_with("a", on_stale=on_stale).overdue(9) == ()


def test_a_group_lost_after_it_was_taken_has_failed() -> None:
    ledger = ledger_with("a", "b")
    for group_id in "ab":
        ledger.finish(tag(group_id, 0))
    take(ledger, 0)
    assert ledger.taken() == ("a", "b")
    assert ledger.release(["b"]) == ("a",)
    exits = ledger.statistics().counters.exits
    assert (exits[GroupState.TRAINED], exits[GroupState.FAILED]) == (1, 1)


@pytest.mark.parametrize("on_stale", [OnStale.WAIT, OnStale.DROP])
def test_a_broken_bound_is_loud_and_takes_nothing(on_stale: OnStale) -> None:
    ledger = GroupLedger(LIMITS, on_stale, first_version=2)
    ledger.acknowledge(0)  # two behind, although eta is 1: admission would not have let this group in
    ledger.admit("a")
    ledger.dispatch("a")
    ledger.finish(tag("a", 0))
    with pytest.raises(StalenessBroken, match="lag 2 at version 2"):
        ledger.take(BatchDecision(verdict=BatchVerdict.TAKE, chosen={0: 1}))
    assert ledger.live() == ("a",)


def test_admission_alone_may_exceed_the_bound() -> None:
    ledger = GroupLedger(LIMITS, OnStale.TRAIN, first_version=2)
    ledger.acknowledge(0)
    ledger.admit("a")
    ledger.dispatch("a")
    ledger.finish(tag("a", 0))
    assert len(ledger.take(BatchDecision(verdict=BatchVerdict.TAKE, chosen={0: 1}))) == 1
