"""What ends the work of a run, and which error is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from areal_like.control.supervision import Stop, supervise, until_stopped
from areal_like.errors import ProcessDied, RpcError


async def _nothing() -> None:
    return None


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def _fail(error: Exception) -> None:
    raise error


async def test_work_that_ends_ends_its_watchers() -> None:
    cancelled: list[str] = []

    async def watcher() -> None:
        try:
            await _for_ever()
        finally:
            cancelled.append("watcher")

    done: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0)
        done.append("work")

    await supervise(work(), (watcher(),))
    assert (done, cancelled) == (["work"], ["watcher"])


async def test_a_watcher_s_failure_cancels_the_work_and_waits_for_its_clean_up() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await _for_ever()
        finally:
            await asyncio.sleep(0)
            cleaned.append("work")

    with pytest.raises(ProcessDied, match="train-0"):
        await supervise(work(), (_for_ever(), _fail(ProcessDied("train-0"))))
    assert cleaned == ["work"]


async def test_cancelled_work_hears_which_watcher_failed_and_of_what() -> None:
    """Through a task group and a nested wait, as the work of a run has them."""
    heard: list[str] = []

    async def work() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_for_ever())
                await until_stopped(_for_ever(), Stop(), ask_to_end=_nothing, grace=1.0)
        except asyncio.CancelledError as error:
            heard.append(str(error))
            raise

    with pytest.raises(ProcessDied):
        await supervise(work(), (_for_ever(), _fail(ProcessDied("train-0 was ended by SIGKILL"))))
    assert heard == ["ProcessDied: train-0 was ended by SIGKILL"]


async def test_a_dead_process_is_the_cause_of_the_call_that_it_broke() -> None:
    broken = asyncio.Event()

    async def work() -> None:
        broken.set()
        raise RpcError("train-0 does not answer")

    async def watch() -> None:
        await broken.wait()
        for _ in range(10):  # its exit is seen a few turns of the loop later
            await asyncio.sleep(0)
        raise ProcessDied("train-0 was ended by SIGKILL")

    with pytest.raises(ProcessDied):
        await supervise(work(), (watch(),))


async def test_work_that_fails_by_itself_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_like.control.supervision._CAUSE_GRACE", 0.01)
    with pytest.raises(RpcError, match="refused"):
        await supervise(_fail(RpcError("refused")), (_for_ever(),))


async def test_cancelling_the_supervisor_cancels_everything() -> None:
    states: list[str] = []

    async def part(name: str) -> None:
        try:
            await _for_ever()
        finally:
            states.append(name)

    task = asyncio.create_task(supervise(part("work"), (part("watcher"),)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(states) == ["watcher", "work"]


def _recorder() -> tuple[list[str], Callable[[], Awaitable[None]]]:
    asked: list[str] = []

    async def ask() -> None:
        asked.append("asked")

    return asked, ask


async def test_work_that_is_never_stopped_comes_to_its_own_end_or_error() -> None:
    asked, ask = _recorder()
    assert await until_stopped(_nothing(), Stop(), ask_to_end=ask, grace=1) is False
    with pytest.raises(ZeroDivisionError):
        await until_stopped(_fail(ZeroDivisionError()), Stop(), ask_to_end=ask, grace=1)
    assert asked == []


async def test_a_stop_lets_the_work_end_by_itself() -> None:
    stop, wished, ended = Stop(), asyncio.Event(), list[str]()

    async def work() -> None:
        await wished.wait()
        ended.append("in order")

    async def ask() -> None:
        wished.set()

    stop.ask("SIGINT")
    assert await until_stopped(work(), stop, ask_to_end=ask, grace=60) is True
    assert ended == ["in order"]


@pytest.mark.parametrize("again", [False, True])
async def test_work_that_goes_on_is_cancelled_after_the_grace_or_at_the_second_wish(again: bool) -> None:
    stop, ended = Stop(), list[str]()

    async def work() -> None:
        try:
            await _for_ever()
        finally:
            ended.append("cancelled")

    async def ask() -> None:
        if again:
            stop.ask("SIGTERM")

    stop.ask("SIGINT")
    async with asyncio.timeout(5):
        assert await until_stopped(work(), stop, ask_to_end=ask, grace=60 if again else 0.01) is True
    assert ended == ["cancelled"]
    assert stop.reason == "SIGINT"  # the first wish is the reason


async def test_an_error_of_work_that_was_asked_to_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    stop, wished = Stop(), asyncio.Event()

    async def work() -> None:
        await wished.wait()
        raise RpcError("train-0 does not answer")

    async def ask() -> None:
        wished.set()

    stop.ask("SIGTERM")
    assert await until_stopped(work(), stop, ask_to_end=ask, grace=60) is True
    assert "train-0 does not answer" in caplog.text
