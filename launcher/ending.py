"""How a run ended, and what is there of it, in words: for the end of a run's own output and for ``report``."""

from __future__ import annotations

from pathlib import Path

import yaml

from areal_like.config.paths import RunPaths
from areal_like.errors import ConfigError
from areal_like.observe.metrics import read_metrics
from areal_like.observe.summary import Summary, read_summary
from launcher.checkpoints import list_checkpoints
from launcher.run_directory import running_process


def ending(steps: int, total: int, stopped_by: str) -> str:
    """How a run that did not fail came to its end, as a clause."""
    if stopped_by:
        return f"stopped by {stopped_by} after {steps:,} of {total:,} steps"
    return (
        f"after all {total:,} steps" if steps >= total else f"prompts were used up after {steps:,} of {total:,} steps"
    )


def newest_kept(run_folder: Path) -> str:
    """The newest checkpoint, as a person would name it in the run's folder."""
    found = list(list_checkpoints(run_folder).values())
    return str(found[-1].relative_to(run_folder)) if found else "none was saved"


def told_ending(paths: RunPaths) -> tuple[str, Summary | None]:
    """How the run in a folder ended, or that it has not, and its summary if it came to write one.

    Raises:
        ConfigError: the folder holds no run, or files that no run wrote.
    """
    total = _total_steps(paths)
    if (process := running_process(paths)) is not None:
        return f"not yet: {process} is running it, {_steps(paths):,} of {total:,} steps are done", None
    if not paths.summary.is_file():
        steps = _steps(paths)
        reached = f"after {steps:,} of {total:,} steps" if steps else "before its first step was done"
        return f"{reached}, without a summary: it was stopped before training began, or killed", None
    summary = read_summary(paths.summary)
    if failure := summary.extra.get("failed_by"):
        return f"failed after {summary.steps:,} of {total:,} steps: {failure}", summary
    return ending(summary.steps, total, str(summary.extra.get("stopped_by") or "")), summary


def _steps(paths: RunPaths) -> int:
    return sum("step" in line for line in read_metrics(paths.metrics)) if paths.metrics.is_file() else 0


def _total_steps(paths: RunPaths) -> int:
    try:
        return int(yaml.safe_load(paths.resolved_config.read_text(encoding="utf-8"))["total_train_steps"])
    except FileNotFoundError:
        raise ConfigError(f"{paths.root}: holds no run; name a folder such as runs/<experiment>/<trial>") from None
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{paths.resolved_config}: is no configuration that a run wrote: {error}") from None
