"""How a run ended is told from what it left, whatever ended it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from areal_like.config.paths import RunPaths
from areal_like.errors import ArealLikeError, BreakerTripped, ConfigError
from areal_like.observe.summary import GroupCounts, RunTally, read_summary
from areal_like.rollout.breaker import Breaker
from areal_like.weights.segments import segment_directory
from launcher.cli import main
from launcher.ending import ending, failure_text, newest_kept, told_ending
from launcher.leftovers import left_behind, new_run_id, sweep
from launcher.log_text import readable_lines
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


@pytest.mark.parametrize(
    ("steps", "stopped_by", "told"),
    [(1, "", "after its only step"), (0, "SIGINT", "stopped by SIGINT after 0 of 1 step")],
)
def test_one_step_is_not_called_steps(steps: int, stopped_by: str, told: str) -> None:
    assert ending(steps, 1, stopped_by) == told


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
    found = told_ending(paths)
    summary = found.summary
    assert found.how == told
    assert summary is not None
    assert (summary.steps, summary.groups, summary.reward_last) == (1, GroupCounts(trained=8), 0.25)
    assert summary.extra == extra


def test_a_run_that_was_killed_is_called_so_with_its_last_step(paths: RunPaths) -> None:
    step = {"step": 3, "reward": 0.53125, "lag_mean": 1.25, "lag_max": 2, "seconds": 71.0}
    paths.metrics.write_text('{"step": 1}\n{"step": 2}\n' + json.dumps(step) + '\n{"evaluation": {}}\n{"step": 4')
    found = told_ending(paths)
    assert (found.how, found.summary) == ("killed after 3 of 1,200 steps: it left no summary", None)
    assert found.details["last step"] == "3: reward 0.531, lag 1.2 (max 2), 1:11 after the start"
    assert found.details["log"] == str(paths.logs / "controller.log")
    paths.metrics.write_text('{"step": 1, "reward": null}\n')  # an empty batch has no reward
    assert told_ending(paths).details["last step"] == "1: reward –, lag – (max –)"
    paths.metrics.unlink()
    assert told_ending(paths).how.startswith("before its first step was done, without a summary: ")
    assert "last step" not in told_ending(paths).details


KILLED = """
import os, signal, sys
from pathlib import Path
from areal_like.config.paths import RunPaths
from areal_like.weights.segments import create_segment, segment_name, write_at
from launcher.leftovers import make_socket_folder
from launcher.run_directory import claim_run_directory

paths, run_id = RunPaths(root=Path(sys.argv[1])), sys.argv[2]
with claim_run_directory(paths, run_id=run_id, force=False):
    paths.resolved_config.write_text("total_train_steps: 4\\n")
    paths.metrics.write_text('{"step": 1, "reward": 0.5, "lag_mean": 0.0, "lag_max": 0}\\n')
    write_at(create_segment(segment_name(run_id, "weights-0")), memoryview(bytes(2_000_000)), 0)
    (make_socket_folder(run_id) / "store").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_in_memory_is_told_and_the_next_run_of_its_name_removes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, run_id = RunPaths(root=tmp_path / "runs" / "sums" / "killed"), new_run_id()
    try:
        ended = subprocess.run([sys.executable, "-c", KILLED, str(paths.root), run_id], timeout=60, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert main(["report", str(paths.root)]) == 0
        told = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "killed after 1 of 4 steps" in told
        assert "1: reward 0.500, lag 0.0 (max 0)" in told
        assert f"2 files in {' and '.join(sorted({str(segment_directory()), tempfile.gettempdir()}))} (2.0 MB)" in told
        assert "areal-like run EXPERIMENT.yaml --force" in told
        with claim_run_directory(paths, run_id=new_run_id(), force=True) as moved:
            assert moved is not None
            assert not left_behind(run_id)
        assert main(["report", str(moved)]) == 0  # nothing is said of what is no longer there
        assert "--force" not in capsys.readouterr().out
    finally:
        sweep(run_id)


def test_a_run_that_goes_on_is_not_called_ended(paths: RunPaths) -> None:
    other = RunPaths(root=paths.root.with_name("running"))
    with claim_run_directory(other, run_id="20260101-abcdef", force=False):
        other.resolved_config.write_text("total_train_steps: 4\n")
        assert told_ending(other).how.startswith("not yet: process ")
        assert told_ending(other).how.endswith(" is running it, 0 of 4 steps are done")
    assert told_ending(other).how.startswith("before its first step")


def user_workflow(tmp_path: Path) -> BaseException:
    """An error out of a library, called by a workflow of the user's."""
    file = tmp_path / "my_workflow.py"
    file.write_text("import json\n\ndef score(answer):\n    return json.loads(answer)['score']\n")
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with pytest.raises(json.JSONDecodeError) as caught:
        scope["score"]("no json")
    return caught.value


def test_a_workflow_that_fails_is_shown_with_its_line_and_its_error(
    tmp_path: Path, paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    breaker = Breaker(limit=1)
    with pytest.raises(BreakerTripped) as tripped:
        breaker.failure(user_workflow(tmp_path))
    write_summary(paths, failed_by=failure_text(tripped.value))
    assert main(["report", str(paths.root)]) == 0
    out = capsys.readouterr().out
    lines = [line.strip("│┃ ") for line in out.splitlines()]
    (failed,) = (number for number, line in enumerate(lines) if "failed after 1 of 1,200 steps" in line)
    assert "BreakerTripped: rollout: 1 episodes failed in a row" in lines[failed]
    rest = "\n".join(lines[failed:])
    assert "line 4, in score\nreturn json.loads(answer)['score']\n" in rest
    assert "\njson.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n" in rest
    assert "^" not in out
    assert "controller.log" in rest


def test_an_error_that_nobody_foresaw_is_kept_with_its_place(tmp_path: Path) -> None:
    lines = failure_text(ExceptionGroup("tasks", [user_workflow(tmp_path)])).splitlines()
    assert lines[0].startswith("JSONDecodeError: Expecting value")
    assert "    return json.loads(answer)['score']" in lines


def test_of_a_failure_that_says_much_beginning_and_end_are_kept() -> None:
    text = failure_text(ArealLikeError(f"begins {'x' * 100_000} ends"))
    assert text.startswith("ArealLikeError: begins ")
    assert text.endswith(" ends")
    assert len(text) < 5000


def test_marks_and_progress_bars_are_not_shown() -> None:
    text = (
        "Loading:   0%|          | 0/9\rLoading: 100%|##########| 9/9\r\n"
        "old\rnew  \n    x = 1 ^ 2\n        ~~^~~\n    ^^^^ ~\n\nValueError: 5 %\n\n"
    )
    assert readable_lines(text) == ["new", "    x = 1 ^ 2", "", "ValueError: 5 %"]


def test_report_shows_it_with_the_figures(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(paths.root)]) == 0
    assert "killed after 2 of 1,200 steps" in capsys.readouterr().out
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


def test_a_file_is_no_run_and_neither_is_a_folder_of_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("# Runs\n")
    for name, said in (
        ("README.md", "is a file and holds no run"),
        (".", ": holds no run"),
        ("none", ": holds no run"),
    ):
        assert main(["report", str(tmp_path / name)]) == 2
        assert f"{said}; name a folder such as runs/" in capsys.readouterr().err


def test_figures_that_no_run_wrote_are_an_error(paths: RunPaths) -> None:
    paths.metrics.write_text("no json\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: holds no metrics"):
        told_ending(paths)
