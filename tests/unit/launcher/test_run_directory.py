"""Two runs never share a folder, and a finished one is never written over."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_like.config.paths import RunPaths
from areal_like.errors import ArealLikeError, ConfigError
from areal_like.weights.segments import list_segments, segment_name, segment_path
from launcher.leftovers import make_socket_folder, new_run_id
from launcher.run_directory import check_run_directory, claim_run_directory

HOLD = """
import sys
from pathlib import Path
from areal_like.config.paths import RunPaths
from launcher.run_directory import claim_run_directory
with claim_run_directory(RunPaths(root=Path(sys.argv[1])), run_id="feedbeef", force=False):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(root=tmp_path / "sums" / "cpu")


def test_a_new_run_gets_its_folders_and_its_name_is_noted(paths: RunPaths) -> None:
    check_run_directory(paths, force=False)
    with claim_run_directory(paths, run_id="0123abcd", force=False) as moved:
        assert moved is None
        assert paths.logs.is_dir()
        assert json.loads(paths.lock.read_text())["run_id"] == "0123abcd"


def test_a_finished_run_is_refused_or_moved_aside(paths: RunPaths) -> None:
    for number in range(3):
        force = number > 0
        with claim_run_directory(paths, run_id=new_run_id(), force=force):
            paths.summary.write_text(str(number))
        with pytest.raises(ConfigError, match="holds an earlier run"):
            check_run_directory(paths, force=False)
        with (
            pytest.raises(ConfigError, match="holds an earlier run"),
            claim_run_directory(paths, run_id=new_run_id(), force=False),
        ):
            pass
        check_run_directory(paths, force=True)
    kept = {p.name: (p / "summary.json").read_text() for p in paths.root.parent.iterdir() if p.is_dir()}
    assert kept == {"cpu": "2", "cpu.old-1": "0", "cpu.old-2": "1"}


def test_an_evaluation_before_the_run_is_no_run(paths: RunPaths) -> None:
    RunPaths(root=paths.evaluations / "0123abcd").create()
    check_run_directory(paths, force=False)
    with claim_run_directory(paths, run_id="0123abcd", force=False) as moved:
        assert moved is None


def test_a_running_trial_is_refused_even_by_force_and_free_once_its_process_is_killed(paths: RunPaths) -> None:
    command = [sys.executable, "-c", HOLD, str(paths.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        for force in (False, True):
            with pytest.raises(ConfigError, match=f"process {holder.pid} is running this trial now"):
                check_run_directory(paths, force=force)
            with (
                pytest.raises(ConfigError, match=f"process {holder.pid} is running"),
                claim_run_directory(paths, run_id="aaaa0000", force=force),
            ):
                pass
        segment = segment_path(segment_name("feedbeef", "left"))
        segment.touch()
        sockets = make_socket_folder("feedbeef")
        holder.kill()
    check_run_directory(paths, force=True)
    with claim_run_directory(paths, run_id=new_run_id(), force=True):
        assert list_segments("feedbeef") == ()  # what the killed run left is swept
        assert not sockets.exists()


@pytest.mark.parametrize("text", ["", "{", '{"pid": 1}', '{"pid": 1, "run_id": "../*"}', "[]"])
def test_a_lock_file_that_says_nothing_steers_nothing(paths: RunPaths, text: str) -> None:
    paths.lock.parent.mkdir(parents=True)
    paths.lock.write_text(text)
    with claim_run_directory(paths, run_id="0123abcd", force=False):
        pass


def in_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def in_a_loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


@pytest.mark.parametrize(
    "runs",
    [
        in_a_file,
        in_a_loop,
        lambda folder: in_a_file(folder) / "runs",
        lambda _: Path("/proc/nope"),
        lambda folder: folder / ("x" * 300),
        lambda folder: folder.joinpath(*["y" * 200] * 30),
    ],
)
def test_runs_that_can_be_kept_nowhere_are_a_fault(tmp_path: Path, runs: Callable[[Path], Path]) -> None:
    paths = RunPaths(root=runs(tmp_path) / "sums" / "cpu")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"^runs_dir: "):
        check_run_directory(paths, force=False)
    with pytest.raises(ConfigError, match=r"^runs_dir: "), claim_run_directory(paths, run_id="0123abcd", force=False):
        pass
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_in_place_of_a_file_is_a_fault(paths: RunPaths) -> None:
    paths.root.parent.mkdir()
    paths.root.touch()
    with pytest.raises(ConfigError, match=r"cpu is no folder; set runs_dir"):
        check_run_directory(paths, force=True)


def test_a_full_disk_is_no_fault_of_the_experiment(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with (
        pytest.raises(ArealLikeError, match="No space left on device; free space on its disk") as caught,
        claim_run_directory(paths, run_id="0123abcd", force=False),
    ):
        pass
    assert not isinstance(caught.value, ConfigError)


def test_checking_leaves_nothing_behind(paths: RunPaths, tmp_path: Path) -> None:
    check_run_directory(paths, force=False)
    assert list(tmp_path.iterdir()) == []
