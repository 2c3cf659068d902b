"""Logging of one process: one line a record, with time, level, process, source, and whatever ``extra`` named."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from pathlib import Path

#: attributes every record has; anything else came from ``extra=`` and is shown as key=value
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "process_name"}
#: libraries that log every request
_CHATTY = ("httpx", "httpcore", "uvicorn.access", "aiohttp.access", "asyncio", "urllib3", "filelock")


class LineFormatter(logging.Formatter):
    """``2026-11-29T15:00:00.123Z INFO train-0 areal_like.train.worker: step done version=3 seconds=1.2``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = (
            f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {self.process} {record.name}: {record.getMessage()}"
        )
        extra = " ".join(f"{k}={_shown(v)}" for k, v in vars(record).items() if k not in _OWN_ATTRIBUTES)
        if extra:
            line = f"{line} {extra}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        if record.stack_info:
            line = f"{line}\n{self.formatStack(record.stack_info)}"
        return line


class _LogFile(logging.FileHandler):
    """A disk that is full costs lines of the log, and never a run; it is told once, without a traceback a line."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with suppress(OSError):
                sys.stderr.write(
                    f"{self.baseFilename}: cannot be written ({error.strerror or error}); lines are lost\n"
                )

    def close(self) -> None:
        with suppress(OSError):  # closing writes again what could not be written
            super().close()


def setup_logging(
    process: str,
    *,
    path: Path | None = None,
    level: int | str = logging.INFO,
    console: logging.Handler | None = None,
) -> None:
    """Send this process's log records to ``path``, or to stderr without one; replaces what was set up before.

    Warnings of the ``warnings`` module are logged too. ``console`` receives records beside the file: the controller
    passes the one of its live display, so that a warning does not tear the progress bar.
    """
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    target: logging.Handler
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = _LogFile(path, encoding="utf-8")
    else:
        target = logging.StreamHandler(sys.stderr)
    target.setFormatter(LineFormatter(process))
    root.addHandler(target)
    if console is not None:
        root.addHandler(console)
    root.setLevel(level)
    logging.captureWarnings(True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if " " in text or not text else text
