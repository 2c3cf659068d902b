"""Leaving a task group that lives inside an object's own context manager."""

from __future__ import annotations

import asyncio
from types import TracebackType


async def leave(
    tasks: asyncio.TaskGroup,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Wait for ``tasks`` without wrapping the caller's own exception into an ExceptionGroup.

    A task group takes any exception of its body for one of its own. Here the body belongs to whoever entered the
    object: its errors pass as they are. Cancellation must reach the group, since that is how it reports a failed task.
    """
    if isinstance(error, asyncio.CancelledError):
        await tasks.__aexit__(kind, error, trace)
    else:
        await tasks.__aexit__(None, None, None)
