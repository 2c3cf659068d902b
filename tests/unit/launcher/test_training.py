"""Which version a checkpoint holds that is saved on the way out."""

from __future__ import annotations

import pytest

from areal_like.errors import RpcError
from areal_like.train.group import RankHealth
from launcher.training import held_version


@pytest.mark.parametrize(
    ("method", "at_rank", "held"),
    [
        ("", 3, 3),
        ("update", 3, 4),  # it goes on, and the save waits for it
        ("update", 4, 4),  # it is over but for its answer
        ("", 4, 4),
        ("export_weights", 3, 3),
    ],
)
def test_a_checkpoint_is_named_after_the_weights_in_it(method: str, at_rank: int, held: int) -> None:
    assert held_version(RankHealth(rank=0, alive=True, method=method, version=at_rank), 3) == held


def test_a_rank_that_does_not_answer_holds_nothing() -> None:
    with pytest.raises(RpcError, match="train-0 does not answer: gone"):
        held_version(RankHealth(rank=0, alive=False, reason="gone"), 3)
