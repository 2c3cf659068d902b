import pytest

from areal_like.rollout.lifecycle import EXITS, LEGAL_MOVES, LIVE, GroupState, IllegalMove, Lifecycle


def finished(lifecycle: Lifecycle, group_id: str, stamp: int) -> None:
    lifecycle.admit(group_id)
    lifecycle.dispatch(group_id, stamp)
    lifecycle.finish(group_id, stamp)


def test_a_group_goes_from_admission_to_training() -> None:
    lifecycle = Lifecycle()
    lifecycle.admit("g")
    assert (lifecycle.live, lifecycle.running, lifecycle.unstamped) == (1, 1, 1)
    assert lifecycle.dispatch("g", 3) == 3
    assert (lifecycle.live, lifecycle.running, lifecycle.unstamped) == (1, 1, 0)
    assert lifecycle.finish("g", 3) == 3
    assert (lifecycle.live, lifecycle.running) == (1, 0)
    lifecycle.take("g")
    assert lifecycle.live == 0
    lifecycle.end("g", GroupState.TRAINED)
    counters = lifecycle.counters()
    assert counters.balanced
    assert (counters.admitted, counters.live, counters.exits[GroupState.TRAINED]) == (1, 0, 1)


def test_the_first_request_stamps_and_later_ones_do_not() -> None:
    lifecycle = Lifecycle()
    lifecycle.admit("g")
    lifecycle.dispatch("g", 3)
    assert lifecycle.dispatch("g", 5) == 3
    assert lifecycle.live_stamps == {3: 1}


def test_evidence_raises_a_stamp_and_never_lowers_it() -> None:
    lifecycle = Lifecycle()
    for group_id in "ab":
        lifecycle.admit(group_id)
        lifecycle.dispatch(group_id, 3)
    assert lifecycle.finish("a", 5) == 5
    assert lifecycle.finish("b", 2) == 3
    assert lifecycle.live_stamps == {3: 1, 5: 1}


@pytest.mark.parametrize("exit_", sorted(EXITS))
@pytest.mark.parametrize("state", sorted(LIVE | {GroupState.TAKEN}))
def test_every_exit_frees_its_slot_exactly_once(state: GroupState, exit_: GroupState) -> None:
    lifecycle = Lifecycle()
    lifecycle.admit("g")
    if state is not GroupState.ADMITTED:
        lifecycle.dispatch("g", 0)
    if state in (GroupState.FINISHED, GroupState.TAKEN):
        lifecycle.finish("g", 0)
    if state is GroupState.TAKEN:
        lifecycle.take("g")
    before = lifecycle.live
    if exit_ not in LEGAL_MOVES[state]:
        with pytest.raises(IllegalMove, match=f"cannot go from {state} to {exit_}"):
            lifecycle.end("g", exit_)
        assert lifecycle.live == before
        return
    lifecycle.end("g", exit_)
    assert lifecycle.live == 0
    assert lifecycle.live_stamps == {}
    with pytest.raises(IllegalMove, match="ends exactly once"):
        lifecycle.end("g", exit_)
    assert lifecycle.counters().balanced
    assert lifecycle.state("g") is None


def test_only_taken_groups_are_trained_and_only_finished_ones_are_taken() -> None:
    assert [s for s, targets in LEGAL_MOVES.items() if GroupState.TRAINED in targets] == [GroupState.TAKEN]
    assert [s for s, targets in LEGAL_MOVES.items() if GroupState.TAKEN in targets] == [GroupState.FINISHED]


def test_an_id_is_admitted_once_while_it_lives() -> None:
    lifecycle = Lifecycle()
    lifecycle.admit("g")
    with pytest.raises(IllegalMove, match="already admitted"):
        lifecycle.admit("g")


def test_a_live_state_is_no_way_out() -> None:
    lifecycle = Lifecycle()
    lifecycle.admit("g")
    with pytest.raises(IllegalMove, match="ways out: cancelled, failed"):
        lifecycle.end("g", GroupState.FINISHED)


def test_groups_are_listed_in_order_of_admission() -> None:
    lifecycle = Lifecycle()
    for group_id, stamp in [("a", 4), ("b", 1), ("c", 2)]:
        finished(lifecycle, group_id, stamp)
    lifecycle.admit("d")
    lifecycle.take("b")
    assert list(lifecycle.groups(*LIVE)) == [("a", 4), ("c", 2), ("d", None)]
    assert lifecycle.sequence("c") == 2


def test_ended_groups_leave_nothing_behind() -> None:
    lifecycle = Lifecycle()
    for number in range(100):
        finished(lifecycle, f"g{number}", number)
        lifecycle.take(f"g{number}")
        lifecycle.end(f"g{number}", GroupState.TRAINED)
    assert list(lifecycle.groups(*GroupState)) == []
    assert lifecycle.counters().exits[GroupState.TRAINED] == 100
