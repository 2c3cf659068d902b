"""Live progress of a run: a bar on a terminal, a line a step elsewhere; and the closing table."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from areal_like.observe.summary import Summary

#: steps over which the time left is estimated
_RECENT_STEPS = 10
#: redraws a second of the live bar; each costs about a millisecond
_REDRAWS = 4
_SPARKS = "▁▂▃▄▅▆▇█"
#: newest steps that the reward's curve shows
_SPARK_STEPS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What is shown of one step: ``reward`` is its mean, lags are over its groups, tokens/s counts generated ones."""

    step: int
    reward: float | None
    lag_mean: float
    lag_max: int
    tokens_per_second: float


class RunProgress:
    """Shows how a run goes; a context manager. On a terminal one live line, otherwise plain lines.

    Args:
        total_steps: steps of the loop the run will make.
        console: where to show it; stderr by default, so that stdout stays clean for a command's result.
        live: force the bar or plain lines; by default a terminal gets the bar.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        console: Console | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(stderr=True)
        self._total = total_steps
        self._clock = clock
        self._finished: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS + 1)
        self._rewards: deque[float] = deque(maxlen=_SPARK_STEPS)
        self._step = 0
        is_live = self.console.is_terminal if live is None else live
        self._bar = _make_bar(self.console) if is_live else None
        self._task = self._bar.add_task("starting", total=total_steps, figures="", left="") if self._bar else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        self._finished.append((0, self._clock()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str) -> None:
        """Say what the run does now, for example ``evaluating version 0``."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name)
        else:
            self.console.print(Text(name), soft_wrap=True)

    def begin(self) -> None:
        """Training begins: the time left counts from here, not from the start of the processes."""
        self._finished.clear()
        self._finished.append((self._step, self._clock()))

    def step(self, figures: StepFigures) -> None:
        """A step is finished."""
        self._step = figures.step
        self._finished.append((figures.step, self._clock()))
        if figures.reward is not None:
            self._rewards.append(figures.reward)
        left = format_seconds(self.seconds_left())
        if self._bar is not None and self._task is not None:
            text = f"{_figures_text(figures)}  {sparkline(self._rewards)}"
            self._bar.update(self._task, completed=figures.step, description="training", figures=text, left=left)
        else:
            line = f"step {figures.step}/{self._total}  {_figures_text(figures)}  left {left}"
            self.console.print(Text(line), soft_wrap=True)

    def note(self, text: str) -> None:
        """Show one line above the bar."""
        self.console.print(Text(text), soft_wrap=True)

    def seconds_left(self) -> float | None:
        """From the pace of the last steps; None before the first step is finished."""
        if len(self._finished) < 2:
            return None
        (first_step, began), (last_step, now) = self._finished[0], self._finished[-1]
        steps = last_step - first_step
        return (self._total - last_step) * (now - began) / steps if steps > 0 else None

    def console_log(self, level: int = logging.WARNING) -> logging.Handler:
        """A handler that shows records of ``level`` and above without tearing the bar."""
        return RichHandler(level=level, console=self.console, show_path=False, markup=False)


class _LeftColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        left = task.fields.get("left", "")
        return Text(f"left {left}" if left else "", style="progress.remaining")


def _make_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        _LeftColumn(),
        console=console,
        refresh_per_second=_REDRAWS,
    )


def _figures_text(figures: StepFigures) -> str:
    reward = "–" if figures.reward is None else f"{figures.reward:.3f}"
    lag = f"{figures.lag_mean:.1f} (max {figures.lag_max})"
    return f"reward {reward}  lag {lag}  {figures.tokens_per_second:,.0f} tok/s"


def sparkline(values: deque[float] | list[float]) -> str:
    """The values as bars, scaled between their smallest and largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round((v - low) / (high - low) * (len(_SPARKS) - 1))] for v in values)


def format_seconds(seconds: float | None) -> str:
    """``0:41``, ``12:05``, ``3:07:10``; ``–`` when unknown."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(count: int, noun: str) -> str:
    """``1 step``, ``1,200 steps``, ``2 trajectories``."""
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else several}"


def closing_table(summary: Summary, *, title: str, first: Mapping[str, str] | None = None) -> Table:
    """What the run came to, for the end of a terminal's output; ``first``: rows above the figures."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    groups = summary.groups
    lost = {k: getattr(groups, k) for k in ("filtered", "failed", "stale", "cancelled")}
    rows = {
        **(first or {}),
        "time": f"{format_seconds(summary.seconds)} for {counted(summary.steps, 'step')}",
        "evaluation": f"{_score(summary.eval_before)} → {_score(summary.eval_after)}",
        "training reward": f"{_score(summary.reward_first)} → {_score(summary.reward_last)}",
        "lag": f"mean {summary.lag_mean:.2f}, max {summary.lag_max}",
        "groups": f"{groups.trained:,} trained" + "".join(f", {n:,} {k}" for k, n in lost.items() if n),
        "tokens": f"{summary.generated_tokens:,} generated, {summary.trained_tokens:,} trained",
        "weights": (
            f"{counted(summary.versions_published, 'version')}, {summary.weight_bytes_total / 1e6:,.1f} MB, "
            f"servers paused {summary.pause_seconds_total:.2f} s"
        ),
        "interrupted": (
            f"{counted(summary.interrupted_requests, 'request')} at a commit; "
            f"{counted(summary.multi_version_trajectories, 'trajectory')} of several versions"
        ),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
