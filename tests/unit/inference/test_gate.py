"""The pause gate."""

from __future__ import annotations

import pytest

from areal_like.api.weights import InterruptMode
from areal_like.inference.embedded.gate import Gate, GateState


@pytest.mark.parametrize("mode", [InterruptMode.KEEP, InterruptMode.RECOMPUTE])
def test_a_pause_stops_everything(mode: InterruptMode) -> None:
    gate = Gate()
    gate.pause(mode)
    assert (gate.may_join, gate.may_decode) == (False, False)


def test_a_drain_lets_running_answers_end() -> None:
    gate = Gate()
    gate.pause(InterruptMode.DRAIN)
    assert (gate.may_join, gate.may_decode) == (False, True)
    gate.drained()
    assert gate.state is GateState.PAUSED


def test_repeating_a_call_changes_nothing() -> None:
    gate = Gate()
    gate.resume()
    assert gate.state is GateState.OPEN
    gate.pause(InterruptMode.KEEP)
    gate.pause(InterruptMode.KEEP)
    gate.resume()
    gate.resume()
    assert (gate.may_join, gate.may_decode) == (True, True)


def test_nothing_running_ends_only_a_drain() -> None:
    gate = Gate()
    gate.drained()
    assert gate.state is GateState.OPEN


def test_a_draining_commit_holds_prompts_and_frees_frozen_answers() -> None:
    gate = Gate()
    gate.pause(InterruptMode.KEEP)
    gate.begin_draining_commit()
    assert (gate.may_join, gate.may_decode) == (False, True)
    gate.end_draining_commit()
    assert gate.state is GateState.PAUSED
    gate.resume()
    gate.begin_draining_commit()
    assert not gate.may_join
