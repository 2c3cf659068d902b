"""Bad input ends before any process starts: exit code 2 and one message that says what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from launched import Ended, Workspace

pytestmark = pytest.mark.e2e

#: overrides -> the message of the refusal
Refused = Callable[..., str]


@pytest.fixture
def refused(workspace: Workspace) -> Iterator[Refused]:
    """Runs the experiment with overrides, and checks how it was refused."""

    def run(*overrides: str) -> str:
        ended: Ended = workspace.call("run", "exp.yaml", "--plain", "trial_name=bad", *overrides)
        assert ended.status == 2, ended.err
        assert ended.out == ""
        assert ended.err.startswith("areal-like: error: ")
        assert ended.err.count("areal-like: error: ") == 1
        assert "Traceback" not in ended.err
        assert not workspace.paths("bad").root.exists()
        return ended.err

    yield run
    assert not (workspace.folder / "runs").exists() or not list((workspace.folder / "runs").rglob("*.log"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.max_head_offpolicynes=1", ("rollout.max_head_offpolicynes", "rollout.max_head_offpolicyness")),
        ("actor.path=models/x", ("actor.path", "model.path")),
        ("actor.ppo_n_minibatches=two", ("actor.ppo_n_minibatches", "whole number", "two")),
        ("actor.optimizer.lr=high", ("actor.optimizer.lr", "number", "high")),
        ("rollout.max_head_offpolicyness=-1", ("rollout.max_head_offpolicyness", "at least 0", "-1")),
        ("actor.ppo_n_minibatches=3", ("train_dataset.batch_size (4)", "actor.ppo_n_minibatches (3)")),
        ("gconfig.top_p=0.9", ("gconfig.top_p", "eval_gconfig")),
        ("model.path=missing/model", ("model.path", "missing/model", "does not exist")),
        ("rollout.backend=tgi:d1", ("rollout.backend", "tgi", "embedded")),
        ("rollout.backend=embedded:d1t2", ("rollout.backend", "embedded:d1")),
        ("actor.backend=fsdp:d1t2", ("actor.backend", "fsdp:d2")),
        ("workflow=tasks.Missing", ("workflow", "tasks.Missing")),
        ("workflow=no_such_module.Workflow", ("workflow", "no_such_module")),
        ("reward_fn=tasks.missing", ("reward_fn", "tasks.missing")),
        ("train_dataset.path=missing.jsonl", ("train_dataset.path", "missing.jsonl")),
        ("recover.mode=auto", ("recover.mode", "disabled", "auto")),
        ("recover={mode: auto, freq_steps: 20}", ("recover",)),
    ],
)
def test_a_wrong_value_is_named(refused: Refused, override: str, words: tuple[str, ...]) -> None:
    message = refused(override)
    for word in words:
        assert word in message


def test_several_faults_are_told_at_once(refused: Refused) -> None:
    message = refused("model.path=missing", "train_dataset.path=absent.jsonl", "workflow=tasks.Missing")
    for word in ("3 faults", "missing", "absent.jsonl", "tasks.Missing"):
        assert word in message


def test_a_broken_dataset_line_is_named_by_its_number(refused: Refused, workspace: Workspace) -> None:
    (workspace.folder / "broken.jsonl").write_text('{"secret": 1}\n{"secret": 2}\n{"secret": \n')
    message = refused("train_dataset.path=broken.jsonl")
    assert "broken.jsonl, line 3" in message


def test_a_port_in_use_is_named(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(f"rollout.port={port}")
    assert f"127.0.0.1:{port} is in use" in message


def test_a_file_that_is_no_yaml_is_named_with_its_line(workspace: Workspace) -> None:
    (workspace.folder / "wrong.yaml").write_text("experiment_name: x\ntrial_name: [y\n")
    for name, words in (("wrong.yaml", "wrong.yaml:3"), ("absent.yaml", "no such experiment file")):
        ended = workspace.call("run", name)
        assert ended.status == 2
        assert words in ended.err
        assert "Traceback" not in ended.err
