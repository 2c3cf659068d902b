"""The command line: exit codes, one message, no traceback."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.checkpoints import list_checkpoints
from launcher.cli import main, parse_arguments


@pytest.fixture
def experiment_file(tree: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_options_may_stand_between_overrides() -> None:
    arguments = parse_arguments(["run", "exp.yaml", "a=1", "--force", "b=2", "--plain", "c=-3"])
    assert (arguments.experiment, arguments.overrides) == ("exp.yaml", ["a=1", "b=2", "c=-3"])
    assert arguments.force
    assert arguments.plain


@pytest.mark.parametrize(
    "words",
    [[], ["fly"], ["run"], ["run", "x.yaml", "--fast"], ["plan", "x.yaml", "--force"], ["export", "a", "b", "c=1"]],
)
def test_a_wrong_command_line_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: areal-like" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "plan", "check", "serve", "eval", "export", "report"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: areal-like {command}" in capsys.readouterr().out


def test_check_says_what_it_found(experiment_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(experiment_file)]) == 0
    out = capsys.readouterr().out
    assert "exp.yaml: ok (8 training prompts" in out
    assert "context of 64 tokens" in out


def test_plan_starts_nothing_and_needs_neither_model_nor_data(
    experiment_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", str(experiment_file), "model.path=nowhere", "train_dataset.path=nowhere"]) == 0
    assert "8 groups × 4 siblings = 32 trajectories" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["run", "check", "eval", "serve"])
def test_bad_input_is_exit_code_2_with_one_message_and_no_run_folder(
    experiment_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    assert main([command, str(experiment_file), "rollout.backend=vllm:d1", "valid_dataset.path=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("areal-like: error: ")
    assert "Traceback" not in captured.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.max_head_offpolicynes=2", "did you mean rollout.max_head_offpolicyness?"),
        ("rollout.max_head_offpolicyness=-1", "must be at least 0; got -1"),
        ("rollout.backend=tgi:d1", "unknown backend 'tgi'"),
        ("actor.ppo_n_minibatches=3", "must be a multiple of actor.ppo_n_minibatches (3)"),
        ("workflow=nowhere.Words", "nowhere"),
        ("recover.mode=auto", "must be 'disabled'; got 'auto'"),
    ],
)
def test_a_real_process_ends_the_same_way(experiment_file: Path, override: str, said: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "launcher", "run", str(experiment_file), override],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_serve_starts_no_server_that_is_there_already(
    experiment_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(experiment_file), 'rollout.servers=["http://a:1"]']) == 2
    assert "rollout.servers: names servers that are there already" in capsys.readouterr().err


def test_eval_without_a_validation_set_or_a_checkpoint_says_so(
    experiment_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(experiment_file)]) == 2
    assert "valid_dataset: is required to evaluate" in capsys.readouterr().err
    assert main(["eval", str(experiment_file), "valid_dataset.path=x"]) == 2
    assert "has no checkpoints" in capsys.readouterr().err


def test_export_copies_the_newest_checkpoint(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = tmp_path / "run"
    (run_folder / "checkpoints").mkdir(parents=True)
    model_folder.rename(run_folder / "checkpoints" / "version-000007")
    assert main(["export", str(run_folder), str(tmp_path / "out")]) == 0
    assert "version-000007" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert main(["export", str(run_folder), str(tmp_path / "out2"), "--checkpoint", "3"]) == 2
    assert "has no checkpoint of version 3; it has 7" in capsys.readouterr().err
    assert list(list_checkpoints(run_folder)) == [7]


def test_a_reader_that_closes_early_is_no_traceback(experiment_file: Path) -> None:
    command = f"{sys.executable} -m launcher plan {experiment_file} | head -c 1"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr


def test_a_full_disk_is_exit_code_1_with_one_message(
    experiment_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/runs/a/logs/train-0.log")

    monkeypatch.setattr("launcher.commands.plan.run", full)
    assert main(["plan", str(experiment_file)]) == 1
    assert capsys.readouterr().err == "areal-like: error: /runs/a/logs/train-0.log: No space left on device\n"
