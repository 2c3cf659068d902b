"""The user's reward function as workflows call it: awaited, under a time limit, its failures as RewardError."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from areal_like.api.workflow import reward_fields
from areal_like.config.rewards import RewardsConfig
from areal_like.errors import RewardError
from areal_like.rollout.episode import is_our_cancellation
from areal_like.rollout.plugins import import_callable
from areal_like.rollout.reward_pool import RewardCounts, RewardPool, RewardStatistics
from areal_like.rollout.reward_worker import describe, finite_number

__all__ = ["InlineReward", "RewardPool", "RewardStatistics", "open_rewards"]


def open_rewards(path: str, settings: RewardsConfig, *, log_path: Path | None = None) -> RewardPool | InlineReward:
    """The reward function at dotted path ``path``; use the result as an async context, and call it.

    A plain function runs in the pool's processes, or on the event loop where ``settings.workers`` is 0. An
    ``async def`` function always runs on the event loop, as it spends its time waiting.

    Raises:
        ConfigError: nothing callable is found there.
    """
    function = import_callable(path, "reward_fn")
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself is wanted: an object may be async to call
    )
    if asynchronous or settings.workers == 0:
        return InlineReward(path, function, settings)
    return RewardPool(path, settings, log_path=log_path)


class InlineReward:
    """Runs the function on the event loop: an ``async def`` one, or (with ``workers`` = 0) a trusted, fast plain one.

    At most ``settings.queue_size`` asynchronous calls run at once. A plain function cannot be interrupted here.
    """

    def __init__(self, path: str, function: Callable[..., Any], settings: RewardsConfig) -> None:
        self._path = path
        self._function = function
        self._timeout = settings.timeout
        self._room = asyncio.Semaphore(settings.queue_size)
        self._counts = RewardCounts()
        self._pending = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], /, **data: Any
    ) -> float:
        """Score one completion; see :class:`~areal_like.api.RewardFunction`.

        Raises:
            RewardError: the function raised, ran past its limit, or returned no finite number.
        """
        loop = asyncio.get_running_loop()
        self._pending += 1
        try:
            async with self._room:
                self._counts.calls += 1
                started = loop.time()
                try:
                    return await self._score(
                        (prompt, completions, list(prompt_ids), list(completion_ids)), reward_fields(data)
                    )
                finally:
                    self._counts.seconds += loop.time() - started
        finally:
            self._pending -= 1

    def statistics(self) -> RewardStatistics:
        return RewardStatistics(
            calls=self._counts.calls,
            failures=self._counts.failures,
            timeouts=self._counts.timeouts,
            pending=self._pending,
            seconds=self._counts.seconds,
        )

    async def _score(self, positional: tuple[Any, ...], keywords: dict[str, Any]) -> float:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                value = self._function(*positional, **keywords)
                return finite_number(await value if inspect.isawaitable(value) else value)
        except BaseException as error:  # supervision boundary: whatever user code raises is a failed episode
            if is_our_cancellation(error):
                raise
            self._counts.failures += 1
            if limit.expired():
                self._counts.timeouts += 1
                message = f"ran longer than rewards.timeout = {self._timeout:g} s"
            else:
                message = f"failed: {describe(error)}"
            raise RewardError(f"reward function {self._path} {message}") from error
