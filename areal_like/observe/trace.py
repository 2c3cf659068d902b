"""A timeline of the run in Chrome's trace-event format: open ``trace.json`` in https://ui.perfetto.dev.

Each process writes a file of its own; :func:`merge_traces` joins them. Times are wall-clock microseconds, made from
one reading of the wall clock and the monotonic clock since, so that they agree between processes and never jump.

A *track* is a named row. Spans of one track that overlap in time go to lanes beside each other (``episodes``,
``episodes 2``, ...), since the format wants the spans of one row nested.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_LOG = logging.getLogger(__name__)
#: events kept in memory between two writes
_BUFFERED = 512
#: events a file may hold (about 100 bytes each): a run of days must not fill the disk
_MOST_EVENTS = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    events: int
    dropped: int
    tracks: int


class Tracer:
    """Writes spans, instants and counters; a context manager. ``path=None`` records nothing, at almost no cost.

    Not thread-safe: one tracer a thread. ``now`` reads monotonic nanoseconds. A timeline is never worth a run: a disk
    that is full or gone switches the tracer off, with one warning.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        process: str,
        process_id: int = 1,
        most_events: int = _MOST_EVENTS,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.now = now
        self._offset = time.time_ns() - now()
        self._process_id = process_id
        self._room = most_events
        self._dropped = 0
        self._events = 0
        self._lines: list[str] = []
        self._lane_ends: dict[str, list[int]] = {}
        self._thread_ids: dict[tuple[str, int], int] = {}
        self._path = path
        self._file = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("w", encoding="utf-8")
            except OSError as error:
                self._switch_off(error)
                return
            self._lines.append("[\n")
            self._write({"ph": "M", "name": "process_name", "pid": process_id, "args": {"name": process}})

    @property
    def enabled(self) -> bool:
        return self._file is not None

    @contextmanager
    def span(self, track: str, name: str, **arguments: Any) -> Iterator[None]:
        """Record how long the body took, also when it raises."""
        start = self.now()
        try:
            yield
        finally:
            self.complete(track, name, start, self.now(), **arguments)

    def complete(self, track: str, name: str, start: int, end: int, **arguments: Any) -> None:
        """Record a span that is over; ``start`` and ``end`` come from :attr:`now`."""
        if self._file is None:
            return
        if not self._take_room():
            return
        event = {"ph": "X", "name": name, "ts": self._micros(start), "dur": (end - start) / 1000}
        self._record(event, self._lane(track, start, end), arguments)

    def instant(self, track: str, name: str, **arguments: Any) -> None:
        """Record a moment, for example a commit."""
        if self._file is not None and self._take_room():
            now = self.now()
            self._record(
                {"ph": "i", "s": "p", "name": name, "ts": self._micros(now)}, self._thread(track, 0), arguments
            )

    def counter(self, name: str, **values: float) -> None:
        """Record values that are drawn as curves, for example running episodes."""
        if self._file is not None and self._take_room():
            self._record({"ph": "C", "name": name, "ts": self._micros(self.now())}, 0, values)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.write("".join(self._lines))
                self._file.flush()
            except OSError as error:
                self._switch_off(error)
        self._lines.clear()

    def close(self) -> None:
        """Finish the file, so that it is complete JSON. Idempotent."""
        if self._file is None:
            return
        closing = {
            "ph": "M",
            "name": "process_labels",
            "pid": self._process_id,
            "args": {"labels": self._closing_label()},
        }
        self._lines.append(json.dumps(closing) + "\n]\n")
        self.flush()
        self._let_go()

    def statistics(self) -> TraceStatistics:
        return TraceStatistics(events=self._events, dropped=self._dropped, tracks=len(self._lane_ends))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _switch_off(self, error: OSError) -> None:
        _LOG.warning("%s: cannot be written (%s); the run goes on without it", self._path, error.strerror or error)
        self._let_go()

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # closing writes again what could not be written
                file.close()

    def _take_room(self) -> bool:
        if self._events >= self._room:
            self._dropped += 1
            return False
        self._events += 1
        return True

    def _closing_label(self) -> str:
        return f"{self._events} events" + (f", {self._dropped} dropped" if self._dropped else "")

    def _micros(self, nanoseconds: int) -> float:
        return (nanoseconds + self._offset) / 1000

    def _lane(self, track: str, start: int, end: int) -> int:
        """The thread id of the first lane of ``track`` that is free since before ``start``."""
        ends = self._lane_ends.setdefault(track, [])
        for lane, last_end in enumerate(ends):
            if last_end <= start:
                ends[lane] = end
                return self._thread(track, lane)
        ends.append(end)
        return self._thread(track, len(ends) - 1)

    def _thread(self, track: str, lane: int) -> int:
        known = self._thread_ids.get((track, lane))
        if known is not None:
            return known
        number = len(self._thread_ids) + 1
        self._thread_ids[track, lane] = number
        name = track if lane == 0 else f"{track} {lane + 1}"
        base = {"ph": "M", "pid": self._process_id, "tid": number}
        self._write({**base, "name": "thread_name", "args": {"name": name}})
        return number

    def _record(self, event: dict[str, Any], thread: int, arguments: dict[str, Any]) -> None:
        event["pid"] = self._process_id
        event["tid"] = thread
        if arguments:
            event["args"] = arguments
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        self._lines.append(json.dumps(event, default=str) + ",\n")
        if len(self._lines) >= _BUFFERED:
            self.flush()


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file; one that a killed process left unfinished is read up to its last whole line."""
    events: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.rstrip(",")
        if text in ("[", "]", ""):
            continue
        try:
            events.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return events


def merge_traces(paths: Iterable[Path], target: Path) -> int:
    """Join the traces of several processes into one file, numbering the processes anew; returns its events."""
    count = 0
    with target.open("w", encoding="utf-8") as file:
        file.write("[")
        for number, path in enumerate(paths, start=1):
            for event in read_trace(path):
                file.write(("," if count else "") + "\n" + json.dumps({**event, "pid": number}))
                count += 1
        file.write("\n]\n")
    return count
