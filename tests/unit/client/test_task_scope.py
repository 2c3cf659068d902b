from __future__ import annotations

import asyncio
from types import TracebackType

import pytest

from areal_like.client.task_scope import leave


class Owner:
    """An object with a task group inside."""

    def __init__(self) -> None:
        self.tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> asyncio.TaskGroup:
        return await self.tasks.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await leave(self.tasks, kind, error, trace)


async def _raise(error: Exception) -> None:
    raise error


async def test_the_callers_error_passes_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Owner():
            raise KeyError("mine")


async def test_a_task_that_fails_ends_the_body() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with Owner() as tasks:
            tasks.create_task(_raise(KeyError("a bug")))
            await asyncio.Event().wait()
    assert isinstance(caught.value.exceptions[0], KeyError)


async def test_cancellation_from_outside_passes_too() -> None:
    entered = asyncio.Event()

    async def body() -> None:
        async with Owner():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
