from __future__ import annotations

from control_cases import batch_of

from areal_like.control.state import RunState


def test_one_step_makes_one_version() -> None:
    state = RunState()
    assert [state.advance(batch_of(version, groups=3)) for version in range(2)] == [1, 2]
    assert (state.step, state.version, state.trained_groups) == (2, 2, 6)
