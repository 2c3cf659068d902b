"""How a run ended, and what is there of it, in words: for the end of a run's own output and for ``report``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from areal_like.config.paths import RunPaths
from areal_like.errors import ArealLikeError, ConfigError
from areal_like.observe.metrics import read_metrics
from areal_like.observe.progress import counted, format_seconds
from areal_like.observe.summary import Summary, read_summary
from areal_like.rollout.failure import headline_of, message_of, root_of, traceback_tail
from launcher.checkpoints import list_checkpoints
from launcher.leftovers import left_behind, size_of
from launcher.log_text import readable_lines
from launcher.run_directory import last_holder, running_process

#: characters of a failure that the summary keeps: of its beginning, and of its end, where a traceback has the error
_FIRST, _LAST = 1000, 3000
#: lines of a failure that are shown
_SHOWN_LINES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """``how`` is a clause; ``details`` are more of it by name; ``summary`` is there if the run came to write one."""

    how: str
    details: Mapping[str, str] = field(default_factory=dict)
    summary: Summary | None = None


def ending(steps: int, total: int, stopped_by: str) -> str:
    """How a run that did not fail came to its end, as a clause."""
    if stopped_by:
        return f"stopped by {stopped_by} after {_of(steps, total)}"
    if steps < total:
        return f"prompts were used up after {_of(steps, total)}"
    return "after its only step" if total == 1 else f"after all {total:,} steps"


def newest_kept(run_folder: Path) -> str:
    """The newest checkpoint, as a person would name it in the run's folder."""
    found = list(list_checkpoints(run_folder).values())
    return str(found[-1].relative_to(run_folder)) if found else "none was saved"


def failure_text(error: BaseException) -> str:
    """What the summary keeps of the error that ended a run: its lines; with its place where nobody foresaw it."""
    leaf = root_of(error)
    if isinstance(leaf, ArealLikeError):
        text = f"{type(leaf).__qualname__}: {message_of(leaf).strip()}"
    else:
        text = f"{headline_of(leaf)}\n{traceback_tail(leaf)}"
    return text if len(text) <= _FIRST + _LAST else f"{text[:_FIRST]}\n...\n{text[-_LAST:]}"


def told_ending(paths: RunPaths) -> Ending:
    """How the run in a folder ended, or that it has not.

    Raises:
        ConfigError: the folder holds no run, or files that no run wrote.
    """
    total = _total_steps(paths)
    if (process := running_process(paths)) is not None:
        steps, last = _steps(paths)
        done = f"{_of(steps, total)} {'is' if total == 1 else 'are'} done"
        return Ending(how=f"not yet: {process} is running it, {done}", details=last)
    if not paths.summary.is_file():
        return _without_summary(paths, total)
    summary = read_summary(paths.summary)
    after = _of(summary.steps, total)
    if failure := summary.extra.get("failed_by"):
        first, *more = readable_lines(str(failure)) or ["nothing that it says"]
        details = {"error": "\n".join(more[-_SHOWN_LINES:])} if more else {}
        details["log"] = str(paths.logs / "controller.log")
        return Ending(how=f"failed after {after}: {first}", details=details, summary=summary)
    stopped_by = str(summary.extra.get("stopped_by") or "")
    return Ending(how=ending(summary.steps, total, stopped_by), summary=summary)


def _without_summary(paths: RunPaths, total: int) -> Ending:
    """A run writes its summary whatever ends its training, as long as its process lives."""
    steps, details = _steps(paths)
    details["log"] = str(paths.logs / "controller.log")
    holder = last_holder(paths)
    if holder is not None and (left := left_behind(holder.run_id)):
        megabytes = sum(map(size_of, left)) / 1e6
        details["left over"] = (
            f"{counted(len(left), 'file')} in {' and '.join(sorted({str(path.parent) for path in left}))} "
            f"({megabytes:,.1f} MB); the next run of this name removes them: areal-like run EXPERIMENT.yaml --force "
            f"(this folder is moved aside)"
        )
    if steps:
        return Ending(how=f"killed after {_of(steps, total)}: it left no summary", details=details)
    how = "before its first step was done, without a summary: it was stopped before training began, or killed"
    return Ending(how=how, details=details)


def _of(steps: int, total: int) -> str:
    return f"{steps:,} of {counted(total, 'step')}"


def _steps(paths: RunPaths) -> tuple[int, dict[str, str]]:
    """How many steps are done, and what the last of them came to, as details."""
    try:
        lines = list(read_metrics(paths.metrics)) if paths.metrics.is_file() else []
    except ValueError as error:
        raise ConfigError(f"{paths.metrics}: holds no metrics that a run wrote: {error}") from None
    steps = [line for line in lines if isinstance(line, dict) and "step" in line]
    return len(steps), {"last step": _step_in_words(steps[-1])} if steps else {}


def _step_in_words(line: Mapping[str, Any]) -> str:
    def shown(name: str, form: str) -> str:
        return format(line[name], form) if isinstance(line.get(name), int | float) else "–"

    lag = f"lag {shown('lag_mean', '.1f')} (max {shown('lag_max', '')})"
    seconds = line.get("seconds")
    when = f", {format_seconds(seconds)} after the start" if isinstance(seconds, int | float) else ""
    return f"{line['step']}: reward {shown('reward', '.3f')}, {lag}{when}"


def _total_steps(paths: RunPaths) -> int:
    try:
        return int(yaml.safe_load(paths.resolved_config.read_text(encoding="utf-8"))["total_train_steps"])
    except (FileNotFoundError, NotADirectoryError):
        kind = "is a file and " if paths.root.is_file() else ""
        raise ConfigError(
            f"{paths.root}: {kind}holds no run; name a folder such as runs/<experiment>/<trial>"
        ) from None
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{paths.resolved_config}: is no configuration that a run wrote: {error}") from None
