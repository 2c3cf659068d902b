"""Ctrl-C and SIGTERM: the run ends soon, keeps what it learned, and leaves nothing behind on the machine."""

from __future__ import annotations

import signal

import pytest
from launched import ENDLESS, LONG_ANSWERS, Launched, Workspace, steps_of, summary_of
from safetensors import safe_open

from areal_like.weights.snapshot_folders import list_snapshots

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

#: seconds the product promises between the signal and its end
PROMISED = 10.0
BATCH = 4


def _assert_stopped_in_order(launched: Launched, *, by: signal.Signals) -> None:
    ended = launched.end(60)
    assert ended.seconds < PROMISED
    assert ended.status == 128 + by
    assert "Traceback" not in ended.err
    assert launched.left() == {}
    summary, steps = summary_of(launched.paths), steps_of(launched.paths)
    assert summary["stopped_by"] == by.name
    assert summary["steps"] == len(steps)
    assert summary["groups"]["trained"] == BATCH * len(steps)
    assert summary["groups"]["failed"] == summary["groups"]["filtered"] == 0
    checkpoint = launched.paths.checkpoint(summary["steps"])
    assert f"stopped by {by.name} after {len(steps)} of 100,000 steps" in ended.err
    assert f"checkpoints/{checkpoint.name}" in ended.err
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:  # whole: its header is read and checked
        assert "lm_head.weight" in weights.keys()  # noqa: SIM118 - not a mapping
    assert [p.name for p in launched.paths.checkpoints.iterdir()] == [checkpoint.name]


def test_ctrl_c_in_mid_run_saves_a_checkpoint_and_leaves_nothing(workspace: Workspace) -> None:
    launched = workspace.start_run("interrupted", *ENDLESS, *LONG_ANSWERS)
    launched.until_steps(2)
    assert {address for address, _ in launched.ports} == {"127.0.0.1"}
    launched.press_ctrl_c()
    _assert_stopped_in_order(launched, by=signal.SIGINT)


def test_sigterm_ends_several_ranks_and_servers_too(workspace: Workspace) -> None:
    wide = ("actor.backend=fsdp:d2", "rollout.backend=embedded:d2", "weights.transport=disk")
    launched = workspace.start_run("terminated", *ENDLESS, *LONG_ANSWERS, *wide)
    launched.until_steps(2)
    assert len(launched.ports) >= 2
    assert {address for address, _ in launched.ports} == {"127.0.0.1"}
    launched.send(signal.SIGTERM)
    _assert_stopped_in_order(launched, by=signal.SIGTERM)
    assert not launched.paths.weights.exists()  # the checkpoint has them


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_still_starts_ends_at_once(workspace: Workspace, number: signal.Signals) -> None:
    launched = workspace.start_run(f"starting-{number.name}", *ENDLESS)
    launched.until(lambda: (launched.paths.specs / "train-0.json").exists(), "the last process is started")
    launched.note_processes()
    launched.send(number)
    ended = launched.end(60)
    assert ended.seconds < PROMISED
    assert ended.status == 128 + number
    assert "Traceback" not in ended.err
    assert f"ended by {number.name} before training began: no step was made" in ended.err.replace("\n", " ")
    assert launched.left() == {}
    assert not launched.paths.metrics.exists() or not steps_of(launched.paths)


def test_a_second_ctrl_c_does_not_wait_for_the_checkpoint(workspace: Workspace) -> None:
    launched = workspace.start_run("twice", *ENDLESS, "workflow=tasks.Waiting", "workflow_args={}", "reward_fn=null")
    launched.until(lambda: "evaluating version 0" in launched.said(), "an evaluation that never ends")
    launched.note_processes()
    launched.press_ctrl_c()
    launched.until(lambda: "SIGINT" in launched.said(), "the first one is heard")
    launched.press_ctrl_c()
    ended = launched.end(60)
    assert ended.seconds < PROMISED
    assert ended.status == 128 + signal.SIGINT
    assert "Traceback" not in ended.err
    assert launched.left() == {}
    assert summary_of(launched.paths)["stopped_by"] == "SIGINT"
    assert list(launched.paths.checkpoints.iterdir()) == []


def test_a_trainer_that_is_busy_for_long_loses_the_checkpoint_and_frightens_nobody(workspace: Workspace) -> None:
    """It answers nothing, nor SIGTERM: it is stopped here. The user's code blocks nothing, and is not blamed."""
    launched = workspace.start_run("busy", *ENDLESS, *LONG_ANSWERS, "weights.transport=disk")
    launched.until_steps(1)
    launched.child("train-0").suspend()
    launched.press_ctrl_c()
    ended = launched.end(60)
    assert ended.seconds < PROMISED
    assert ended.status == 128 + signal.SIGINT
    assert launched.left() == {}
    for word in ("Traceback", "user code", "TimeoutError", "Error("):
        assert word not in ended.err
    assert "no checkpoint of version" in ended.err
    assert "none was saved" in ended.err
    assert len(list_snapshots(launched.paths.weights)) >= 2  # the newest weights are nowhere else
    assert "stopped by SIGINT after" in ended.err
    assert summary_of(launched.paths)["stopped_by"] == "SIGINT"


def test_user_code_that_blocks_everything_does_not_keep_the_run_alive(workspace: Workspace) -> None:
    launched = workspace.start_run("blocked", *ENDLESS, "workflow=tasks.Blocking", "workflow_args={}", "reward_fn=null")
    launched.until(lambda: "blocking now" in launched.out_file.read_text(), "the event loop is blocked")
    launched.note_processes()
    launched.press_ctrl_c()
    ended = launched.end(60)
    assert ended.seconds < PROMISED
    assert ended.status == 128 + signal.SIGINT
    assert "SIGINT was not followed in time" in ended.err
    assert launched.left() == {}
