"""An asyncio loop on virtual time: sleeping costs nothing, and waiting for what can never come is an error."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

RunVirtual = Callable[[Coroutine[Any, Any, Any]], Any]


class Deadlock(Exception):
    """Every task waits for an event, and no timer is left that could set one."""


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for ``timeout`` seconds it moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Deadlock
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


@pytest.fixture
def run_virtual() -> RunVirtual:
    """Runs a coroutine to its end on a fresh virtual loop."""

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(main)

    return run


@pytest.fixture
def deadlock() -> type[Exception]:
    return Deadlock
