from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.observe.logs import LineFormatter, setup_logging


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_line_has_time_level_process_source_and_what_extra_named(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "train-0.log"
    setup_logging("train-0", path=path)
    logging.getLogger("areal_like.train").info("step %d done", 3, extra={"seconds": 1.23456789, "why": "two words"})
    logging.getLogger("httpx").info("a request")
    line = path.read_text()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO train-0 areal_like\.train: "
        r"step 3 done seconds=1\.23457 why='two words'\n",
        line,
    )


def test_a_traceback_and_a_warning_are_logged(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    setup_logging("p", path=path)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("x").exception("it failed")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    text = path.read_text()
    assert "ERROR p x: it failed\nTraceback (most recent call last):" in text
    assert "ValueError: bad" in text
    assert "careful" in text


def test_setting_up_again_replaces_and_without_a_path_lines_go_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("a", path=tmp_path / "a.log")
    setup_logging("b", level="WARNING")
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("loud")
    assert (tmp_path / "a.log").read_text() == ""
    error = capsys.readouterr().err
    assert "WARNING b x: loud" in error
    assert "quiet" not in error


def test_a_console_handler_receives_records_beside_the_file(tmp_path: Path) -> None:
    seen: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    setup_logging("a", path=tmp_path / "a.log", console=Collect(logging.WARNING))
    logging.getLogger("x").info("one")
    logging.getLogger("x").warning("two")
    assert seen == ["two"]


def test_times_are_utc() -> None:
    record = logging.makeLogRecord({"created": 0.25, "msecs": 250.0, "msg": "m", "levelname": "INFO", "name": "n"})
    assert LineFormatter("p").format(record) == "1970-01-01T00:00:00.250Z INFO p n: m"


def test_a_full_disk_is_told_once_and_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("controller", path=Path("/dev/full"))
    for number in range(2000):
        logging.getLogger("areal_like").warning("line %d of a log that fills its buffers %s", number, "x" * 20)
    setup_logging("controller")
    assert capsys.readouterr().err == "/dev/full: cannot be written (No space left on device); lines are lost\n"
