from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.observe.trace import Tracer, merge_traces, read_trace


class Clock:
    """Nanoseconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def track_names(events: list[dict[str, Any]]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}


def test_a_finished_trace_is_json_with_named_tracks_spans_instants_and_counters(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "trace.json"
    with Tracer(path, process="controller", now=clock) as tracer:
        with tracer.span("train", "update", version=3):
            clock.now += 2_000_000
        tracer.instant("weights", "commit", version=4)
        tracer.counter("groups", running=5, finished=2)
    events = json.loads(path.read_text())
    assert events[0]["args"] == {"name": "controller"}
    (span,) = spans(events)
    assert (span["name"], span["dur"], span["args"]) == ("update", 2000.0, {"version": 3})
    assert abs(span["ts"] / 1e6 - time.time()) < 60
    assert sorted(track_names(events).values()) == ["train", "weights"]
    instant = next(event for event in events if event["ph"] == "i")
    assert instant["ts"] == pytest.approx(span["ts"] + 2000)
    counter = next(event for event in events if event["ph"] == "C")
    assert counter["args"] == {"running": 5, "finished": 2}
    assert all({"ph", "pid", "name"} <= event.keys() for event in events)


def test_a_span_is_recorded_when_its_body_raises(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with Tracer(path, process="p") as tracer, pytest.raises(KeyError), tracer.span("a", "b"):
        raise KeyError
    assert [event["name"] for event in spans(read_trace(path))] == ["b"]


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 300)), max_size=40))
def test_spans_of_one_lane_never_overlap(
    tmp_path_factory: pytest.TempPathFactory, intervals: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    by_end = sorted((start + length, start) for start, length in intervals)
    with Tracer(path, process="p", now=Clock()) as tracer:
        for end, start in by_end:
            tracer.complete("episodes", "e", start * 1000, end * 1000, s=start, e=end)
    lanes: dict[int, int] = {}
    for event in spans(json.loads(path.read_text())):
        assert lanes.get(event["tid"], 0) <= event["args"]["s"]
        lanes[event["tid"]] = event["args"]["e"]


def test_overlapping_spans_share_a_track_name_by_lane(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with Tracer(path, process="p", now=Clock()) as tracer:
        for start, end in ((0, 10), (5, 12), (10, 20)):
            tracer.complete("episodes", f"{start}", start, end)
    events = json.loads(path.read_text())
    names = track_names(events)
    assert [names[event["tid"]] for event in spans(events)] == ["episodes", "episodes 2", "episodes"]


def test_no_path_records_nothing(tmp_path: Path) -> None:
    with Tracer(None, process="p") as tracer:
        with tracer.span("a", "b"):
            pass
        tracer.instant("a", "b")
        tracer.counter("a", b=1)
        assert not tracer.enabled
        assert tracer.statistics().events == 0


def test_events_beyond_the_limit_are_counted_not_written(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with Tracer(path, process="p", most_events=3) as tracer:
        for _ in range(5):
            tracer.instant("a", "b")
        assert (tracer.statistics().events, tracer.statistics().dropped) == (3, 2)
    assert "2 dropped" in path.read_text()


def test_a_trace_cut_short_is_read_up_to_its_last_line_and_processes_are_merged(tmp_path: Path) -> None:
    for name in ("controller", "train"):
        with Tracer(tmp_path / f"{name}.json", process=name) as tracer, tracer.span("work", name):
            pass
    cut = tmp_path / "train.json"
    text = cut.read_text()
    cut.write_text(text[: text.rindex('"ph": "X"') + 40])
    with Tracer(tmp_path / "train2.json", process="train2") as tracer, tracer.span("work", "again"):
        pass
    target = tmp_path / "all.json"
    count = merge_traces([tmp_path / "controller.json", cut, tmp_path / "train2.json"], target)
    events = json.loads(target.read_text())
    assert len(events) == count
    assert {(event["pid"], event["name"]) for event in spans(events)} == {(1, "controller"), (3, "again")}


def test_a_thousand_spans_cost_little(tmp_path: Path) -> None:
    with Tracer(tmp_path / "t.json", process="p") as tracer:
        began = time.process_time()
        for number in range(1000):
            with tracer.span("episodes", "episode", number=number):
                pass
        assert time.process_time() - began < 0.2  # measured: 0.01


def test_a_full_disk_switches_the_tracer_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Tracer(Path("/dev/full"), process="p") as tracer:
        for _ in range(3):
            for _ in range(600):
                tracer.instant("track", "moment")
            tracer.flush()
        assert not tracer.enabled
    assert len(caplog.records) == 1
    assert "/dev/full: cannot be written (No space left on device); the run goes on without it" in caplog.text


def test_a_full_disk_met_at_the_end_is_a_warning_too(caplog: pytest.LogCaptureFixture) -> None:
    with Tracer(Path("/dev/full"), process="p") as tracer:
        tracer.instant("track", "moment")
    assert len(caplog.records) == 1


def test_a_trace_that_cannot_be_opened_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with Tracer(tmp_path / "file" / "trace.json", process="p") as tracer, tracer.span("track", "work"):
        assert not tracer.enabled
    assert "cannot be written (File exists)" in caplog.text
