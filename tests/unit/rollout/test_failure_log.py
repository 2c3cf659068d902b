import logging

import pytest

from areal_like.rollout import failure_log
from areal_like.rollout.failure_log import FailureLog

logger = logging.getLogger("areal_like.test")


def raised(message: str) -> Exception:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def test_each_failure_has_a_line_and_each_fault_one_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = FailureLog(logger)
    for number in range(3):
        log.record(raised(f"row {number}"), where=f"episode {number}")
    log.record(raised("something else"), where="episode 3")
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False, True]
    # only a fault's first time is for the console, which shows warnings and errors
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO", "INFO", "ERROR"]
    assert "Traceback" in caplog.text
    assert "episode 2 failed: ValueError: row 2 (3 times" in caplog.text


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(failure_log, "_REMEMBERED", 2)
    log = FailureLog(logger)
    for message in ["a", "b", "a", "c", "b", "a"]:  # c pushes b out, b pushes a out
        log.record(raised(message), where="episode")
    assert [record.exc_info is not None for record in caplog.records] == [True, True, False, True, True, True]
