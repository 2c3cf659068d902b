"""What a pause allows: a state machine of three states, plus commits that wait for running answers to end.

    OPEN ──pause(keep, recompute)──> PAUSED ──resume──> OPEN
    OPEN ──pause(drain)──> DRAINING ──none running──> PAUSED

Every call is legal in every state, and the newest wins; so repeating one changes nothing.
"""

from __future__ import annotations

from enum import StrEnum

from areal_like.api.weights import InterruptMode


class GateState(StrEnum):
    OPEN = "open"
    DRAINING = "draining"
    PAUSED = "paused"


class Gate:
    """May prompts join, and may running answers go on?"""

    def __init__(self) -> None:
        self.state = GateState.OPEN
        self._draining_commits = 0

    @property
    def may_join(self) -> bool:
        return self.state is GateState.OPEN and not self._draining_commits

    @property
    def may_decode(self) -> bool:
        """A commit that waits for running answers lets them go on even if they were frozen before."""
        return self.state is not GateState.PAUSED or self._draining_commits > 0

    def pause(self, mode: InterruptMode) -> None:
        self.state = GateState.DRAINING if mode is InterruptMode.DRAIN else GateState.PAUSED

    def resume(self) -> None:
        self.state = GateState.OPEN

    def drained(self) -> None:
        """No answer is running."""
        if self.state is GateState.DRAINING:
            self.state = GateState.PAUSED

    def begin_draining_commit(self) -> None:
        self._draining_commits += 1

    def end_draining_commit(self) -> None:
        self._draining_commits -= 1
