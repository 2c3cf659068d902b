from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from areal_like.observe.progress import RunProgress, StepFigures, closing_table, format_seconds, sparkline
from areal_like.observe.summary import GroupCounts, RunTally


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=60 if not terminal else 120), out


def figures(step: int, reward: float | None = 0.5) -> StepFigures:
    return StepFigures(step=step, reward=reward, lag_mean=1.25, lag_max=2, tokens_per_second=3412.4)


def test_without_a_terminal_there_is_one_plain_line_a_step() -> None:
    clock = Clock()
    screen, out = console(terminal=False)
    with RunProgress(10, console=screen, clock=clock) as progress:
        progress.stage("evaluating version 0")
        clock.now += 50
        progress.begin()
        for step in (1, 2):
            clock.now += 3
            progress.step(figures(step))
        progress.step(figures(3, reward=None))
        progress.note("[not markup]")
    assert out.getvalue().splitlines() == [
        "evaluating version 0",
        "step 1/10  reward 0.500  lag 1.2 (max 2)  3,412 tok/s  left 0:27",
        "step 2/10  reward 0.500  lag 1.2 (max 2)  3,412 tok/s  left 0:24",
        "step 3/10  reward –  lag 1.2 (max 2)  3,412 tok/s  left 0:14",
        "[not markup]",
    ]


def test_a_terminal_gets_a_live_bar() -> None:
    screen, out = console(terminal=True)
    with RunProgress(4, console=screen) as progress:
        progress.stage("evaluating")
        progress.step(figures(3))
        logger = logging.getLogger("test_progress")
        handler = progress.console_log()
        logger.addHandler(handler)
        logger.warning("[careful]")
        logger.removeHandler(handler)
    text = out.getvalue()
    assert "3/4" in text
    assert "reward 0.500" in text
    assert "3,412 tok/s" in text
    assert "careful" in text


def test_the_time_left_follows_the_last_ten_steps() -> None:
    clock = Clock()
    screen, _ = console(terminal=False)
    with RunProgress(100, console=screen, clock=clock) as progress:
        assert progress.seconds_left() is None
        for step in range(1, 31):
            clock.now += 10 if step <= 20 else 1  # slow at first
            progress.step(figures(step))
        assert progress.seconds_left() == pytest.approx(70)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0, "0:00"), (41.4, "0:41"), (725, "12:05"), (59.6, "1:00"), (11230, "3:07:10")]
)
def test_seconds_are_shown_as_a_clock(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("values", "bars"), [([], ""), ([1.0, 1.0], "▁▁"), ([0.0, 0.5, 1.0], "▁▅█")])
def test_a_sparkline_spans_its_values(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_the_closing_table_shows_what_the_run_came_to() -> None:
    tally = RunTally()
    tally.evaluated(0.4)
    tally.taken(lags=[1, 2], multi_version_trajectories=3)
    tally.trained(reward=0.25, tokens=1234)
    tally.published(pause_seconds=0.5, interrupted_requests=7, weight_bytes=2_000_000)
    tally.evaluated(0.95)
    summary = tally.summary(seconds=65, groups=GroupCounts(trained=2, failed=1), generated_tokens=5000)
    out = io.StringIO()
    Console(file=out, width=100).print(closing_table(summary, title="sums/cpu", first={"ended": "by [hand]"}))
    text = "\n".join(line.strip(" │┃") for line in out.getvalue().splitlines())
    for part in (
        "by [hand]",
        "1:05 for 1 step\n",
        "1 version, 2.0 MB",
        "0.400 → 0.950",
        "mean 1.50, max 2",
        "2 trained, 1 failed",
        "7 requests at a commit; 3 trajectories of several",
    ):
        assert part in text
    assert "stale" not in text
