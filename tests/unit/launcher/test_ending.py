"""How a run ended is told from what it left, whatever ended it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_like.config.paths import RunPaths
from areal_like.errors import ConfigError
from areal_like.observe.summary import GroupCounts, RunTally, read_summary
from launcher.cli import main
from launcher.ending import ending, newest_kept, told_ending
from launcher.run_directory import claim_run_directory


@pytest.mark.parametrize(
    ("steps", "stopped_by", "told"),
    [
        (1200, "", "after all 1,200 steps"),
        (7, "SIGINT", "stopped by SIGINT after 7 of 1,200 steps"),
        (0, "SIGTERM", "stopped by SIGTERM after 0 of 1,200 steps"),
        (7, "", "prompts were used up after 7 of 1,200 steps"),
    ],
)
def test_the_end_of_a_run_is_told_in_words(steps: int, stopped_by: str, told: str) -> None:
    assert ending(steps, 1200, stopped_by) == told


def test_what_is_left_to_use_is_told_in_words(tmp_path: Path) -> None:
    assert newest_kept(tmp_path) == "none was saved"
    for version in (2, 10):
        (tmp_path / "checkpoints" / f"version-{version:06d}").mkdir(parents=True)
    assert newest_kept(tmp_path) == "checkpoints/version-000010"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """The folder of a run of 1,200 steps of which two were done, without a summary."""
    paths = RunPaths(root=tmp_path / "runs" / "sums" / "cpu")
    paths.create()
    paths.resolved_config.write_text("total_train_steps: 1200\n")
    paths.metrics.write_text('{"step": 1}\n{"evaluation": {}}\n{"step": 2}\n{"step": 3')
    return paths


def write_summary(paths: RunPaths, **extra: Any) -> None:
    tally = RunTally()
    tally.trained(reward=0.25, tokens=9)
    tally.summary(seconds=5, groups=GroupCounts(trained=8), generated_tokens=10, extra=extra).write(paths.summary)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"stopped_by": "SIGINT", "failed_by": None}, "stopped by SIGINT after 1 of 1,200 steps"),
        (
            {"stopped_by": None, "failed_by": "ProcessDied: train-0"},
            "failed after 1 of 1,200 steps: ProcessDied: train-0",
        ),
        ({"stopped_by": None, "failed_by": None}, "prompts were used up after 1 of 1,200 steps"),
    ],
)
def test_a_summary_tells_how_its_run_ended(paths: RunPaths, extra: dict[str, Any], told: str) -> None:
    write_summary(paths, **extra)
    said, summary = told_ending(paths)
    assert said == told
    assert summary is not None
    assert (summary.steps, summary.groups, summary.reward_last) == (1, GroupCounts(trained=8), 0.25)
    assert summary.extra == extra


def test_without_a_summary_its_lines_tell_how_far_it_came(paths: RunPaths) -> None:
    assert told_ending(paths)[0].startswith("after 2 of 1,200 steps, without a summary: ")
    paths.metrics.unlink()
    assert told_ending(paths)[0].startswith("before its first step was done, without a summary: ")


def test_a_run_that_goes_on_is_not_called_ended(paths: RunPaths) -> None:
    other = RunPaths(root=paths.root.with_name("running"))
    with claim_run_directory(other, run_id="20260101-abcdef", force=False):
        other.resolved_config.write_text("total_train_steps: 4\n")
        assert told_ending(other)[0].startswith("not yet: process ")
    assert told_ending(other)[0].startswith("before its first step")


def test_report_shows_it_with_the_figures(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(paths.root)]) == 0
    assert "after 2 of 1,200 steps, without a summary" in capsys.readouterr().out
    write_summary(paths, stopped_by="SIGTERM")
    paths.checkpoint(1).mkdir()
    assert main(["report", str(paths.root)]) == 0
    out = capsys.readouterr().out
    for part in ("stopped by SIGTERM after 1 of 1,200 steps", "checkpoints/version-000001", "8 trained"):
        assert part in out


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"steps": 1}'])
def test_what_no_run_wrote_is_an_error(paths: RunPaths, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    paths.summary.write_text(text)
    with pytest.raises(ConfigError, match="is no summary that a run wrote"):
        read_summary(paths.summary)
    assert main(["report", str(paths.root)]) == 2
    assert main(["report", str(paths.root / "logs")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_summary_is_read_as_it_was_written(paths: RunPaths) -> None:
    write_summary(paths, seed=3)
    assert read_summary(paths.summary).to_dict() == json.loads(paths.summary.read_text())
