"""How a training run ends, and which version a checkpoint holds that is saved on the way out."""

from __future__ import annotations

import pytest

from areal_like.control.supervision import Stop
from areal_like.errors import PromptsExhausted, RolloutsEnded, RpcError
from areal_like.train.group import RankHealth
from launcher.event_loop import FORCE_AFTER
from launcher.session import KILL_GRACE, TERM_GRACE
from launcher.training import SAVE_GRACE, STEP_GRACE, held_version, until_no_batch_is_left


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


def test_every_grace_together_ends_before_force_is_used() -> None:
    assert STEP_GRACE + SAVE_GRACE + TERM_GRACE + KILL_GRACE < FORCE_AFTER


async def raising(error: Exception) -> None:
    raise error


async def test_rollouts_that_end_unasked_are_an_error() -> None:
    with pytest.raises(RolloutsEnded, match="were stopped"):
        await until_no_batch_is_left(raising(RolloutsEnded("rollouts were stopped")), Stop())


async def test_the_last_prompt_and_the_wish_to_stop_end_a_run_well() -> None:
    await until_no_batch_is_left(raising(PromptsExhausted("no prompt is left")), Stop())
    stop = Stop()
    stop.ask("SIGINT")
    await until_no_batch_is_left(raising(RolloutsEnded("rollouts were stopped")), stop)
