"""``metrics.jsonl``: one line a step, on disk as soon as the step is over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from areal_like.observe.disk import writing
from areal_like.observe.figures import non_finite, tidy


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsStatistics:
    lines: int
    bytes: int


class MetricsFile:
    """Appends records to a JSON-lines file; a context manager.

    A figure that is NaN or infinite is written as ``null`` and named under ``non_finite``, so that it is neither
    lost nor breaks a reader.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        self._lines = 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one line and hand it to the operating system: a killed run keeps it.

        Raises:
            ArealLikeError: the disk is full or gone.
        """
        bad = non_finite(record)
        line = {**record, "non_finite": bad} if bad else record
        text = json.dumps(tidy(line), allow_nan=False) + "\n"
        with writing(self.path):
            self._file.write(text)
            self._file.flush()
        self._lines += 1

    def statistics(self) -> MetricsStatistics:
        return MetricsStatistics(lines=self._lines, bytes=self.path.stat().st_size)

    def close(self) -> None:
        with suppress(OSError):  # every line was flushed, or its error told, when it was written
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a last line that a killed run wrote half is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
