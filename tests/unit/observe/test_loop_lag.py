"""A blocked event loop is measured, and the line that blocks it is named while it does (prime-rl 1713)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from areal_like.observe.loop_lag import LoopLagMonitor


class Alarm(logging.Handler):
    """Sets an event at the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.rang = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.rang.set()


async def test_the_line_that_blocks_the_loop_is_named_while_it_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")  # where it is stuck is for the log file
    alarm = Alarm()
    logger = logging.getLogger("areal_like.observe.loop_lag")
    logger.addHandler(alarm)
    try:
        async with LoopLagMonitor(interval=0.01, alarm_after=0.05) as monitor:
            await asyncio.sleep(0.02)

            def blocking_work_of_a_user() -> bool:
                return alarm.rang.wait(10)  # blocks the loop until the watching thread has noticed

            assert blocking_work_of_a_user()
            before = monitor.statistics()
            await asyncio.sleep(0.02)
            after = monitor.statistics()
    finally:
        logger.removeHandler(alarm)
    assert "blocking_work_of_a_user" in caplog.text
    assert after.alarms == 1
    assert after.largest >= 0.04 > before.last
    assert after.largest >= after.mean > 0


async def test_a_free_loop_raises_no_alarm_and_the_monitor_ends_at_once() -> None:
    async with LoopLagMonitor(interval=0.005, alarm_after=5.0) as monitor:
        await asyncio.sleep(0.03)
        assert monitor.statistics().alarms == 0
        began = time.monotonic()
    assert time.monotonic() - began < 1.0
    assert not [thread for thread in threading.enumerate() if thread.name == "loop-lag-watch"]
