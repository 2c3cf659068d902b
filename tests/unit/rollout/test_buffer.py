import pytest

from areal_like.api.trajectory import GroupTag, PromptId
from areal_like.rollout.buffer import FinishedBuffer


def tag(group_id: str, stamp: int) -> GroupTag:
    return GroupTag(group_id=group_id, prompt=PromptId(epoch=0, index=0), attempt=0, stamp=stamp, trajectories=())


def test_order_is_of_admission_and_not_of_finishing() -> None:
    buffer = FinishedBuffer()
    for group_id, stamp, sequence in [("d", 1, 3), ("b", 1, 1), ("c", 1, 2), ("a", 2, 0)]:
        buffer.add(tag(group_id, stamp), sequence=sequence)
    assert buffer.counts == {1: 3, 2: 1}
    assert [group.group_id for group in buffer.first({1: 2, 2: 1})] == ["a", "b", "c"]


def test_choosing_leaves_and_removing_takes() -> None:
    buffer = FinishedBuffer()
    buffer.add(tag("a", 1), sequence=0)
    buffer.first({1: 1})
    assert len(buffer) == 1
    assert buffer.remove("a", stamp=1).group_id == "a"
    assert (len(buffer), buffer.counts) == (0, {})
    with pytest.raises(KeyError):
        buffer.remove("a", stamp=1)
