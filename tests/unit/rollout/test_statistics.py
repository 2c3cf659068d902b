from areal_like.api.trajectory import Batch, GroupTag, PromptId, TrajectoryTag
from areal_like.rollout.cursor import PromptVisit
from areal_like.rollout.lifecycle import GroupState
from areal_like.rollout.statistics import GroupExit, RolloutTally


def group(*spans: tuple[int, int]) -> GroupTag:
    trajectories = tuple(
        TrajectoryTag(
            key="k",
            group_id="g",
            episode_id="e",
            length=2,
            loss_tokens=1,
            reward=0.0,
            oldest_version=oldest,
            newest_version=newest,
        )
        for oldest, newest in spans
    )
    prompt = PromptId(epoch=0, index=0)
    return GroupTag(group_id="g", prompt=prompt, attempt=0, stamp=0, trajectories=trajectories)


def test_lag_is_counted_by_the_oldest_token_of_each_group() -> None:
    tally = RolloutTally()
    assert (tally.lag_max, tally.lag_mean) == (0, 0.0)
    tally.taken(Batch(version=3, groups=(group((3, 3), (1, 3)), group((3, 3)))))
    tally.taken(Batch(version=4, groups=(group((3, 4)),)))
    assert tally.lag_last == (1,)
    assert tally.lag_max == 2
    assert tally.lag_mean == 1.0  # (2 + 0 + 1) / 3
    assert tally.multi_version_trajectories == 2


def test_what_expired_is_counted_by_length() -> None:
    tally = RolloutTally()
    visit = PromptVisit(prompt=PromptId(epoch=0, index=0))
    tally.expired(GroupExit(visit=visit, state=GroupState.STALE, reason="expired", lengths=(0, 1, 3, 4, 5)))
    assert (tally.expired_groups, tally.expired_tokens) == (1, 13)
    assert tally.expired_by_length == {0: 1, 1: 1, 4: 2, 8: 1}
