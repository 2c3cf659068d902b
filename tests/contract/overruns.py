"""What is shown of a test that takes too long: where its tasks stand, and what its servers said last."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

#: seconds of a test's body after which it is looked at; below the limits that end it
OVERRUN = 200.0
#: seconds; a log that was not written to for longer is not of this test
_RECENT = 600.0
#: characters of the end of a log
_END = 3000


@contextmanager
def watched(item: pytest.Item, loops: Iterable[asyncio.AbstractEventLoop]) -> Iterator[None]:
    """If the body is still running after ``OVERRUN`` seconds, say where: at once, and in the report of its failure."""

    def tell() -> None:
        folder = getattr(item, "funcargs", {}).get("folder")
        text = f"{tasks_of(loops)}\n{logs_in(folder) if folder else ''}"
        item.add_report_section("call", "overrun", text)
        if terminal := item.config.pluginmanager.get_plugin("terminalreporter"):
            terminal.write(f"\n{item.nodeid} has taken {OVERRUN:g} s:\n{text}\n")

    timer = threading.Timer(OVERRUN, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tasks_of(loops: Iterable[asyncio.AbstractEventLoop]) -> str:
    """The stacks of all tasks that are not done."""
    text = io.StringIO()
    for loop in list(loops):
        if not loop.is_closed():
            for task in asyncio.all_tasks(loop):
                task.print_stack(file=text)
    return text.getvalue()


def logs_in(folder: Path) -> str:
    """The ends of the logs that were written to lately."""
    logs = [log for log in sorted(folder.glob("*.log")) if time.time() - log.stat().st_mtime < _RECENT]
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-_END:]}" for log in logs)
