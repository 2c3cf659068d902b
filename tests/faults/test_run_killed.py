"""A process of the run is killed: the run ends with its name and last words, and leaves nothing behind."""

from __future__ import annotations

import signal
import time

import pytest
from launched import ENDLESS, LONG_ANSWERS, Workspace, summary_of

from areal_like.weights.segments import list_segments
from areal_like.weights.snapshot_folders import list_snapshots

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

#: seconds from the death of a process to the end of the run
SOON = 15.0


@pytest.mark.parametrize("role", ["inference-0", "train-1"])
def test_a_killed_process_ends_the_run_with_its_last_log_lines(workspace: Workspace, role: str) -> None:
    # two ranks: the other one waits in a collective for the dead one
    wide = ("actor.backend=fsdp:d2", "weights.transport=disk")
    launched = workspace.start_run(f"killed-{role}", *ENDLESS, *LONG_ANSWERS, *wide)
    launched.until_steps(1)
    victim = launched.child(role)
    victim.kill()
    ended = launched.end(60)
    assert ended.seconds < SOON
    assert ended.status == 1
    assert f"areal-like: error: {role} (pid {victim.pid}) was ended by SIGKILL" in ended.err
    said = (launched.paths.logs / f"{role}.log").read_text().replace("\r", "\n").splitlines()
    lines = [line for line in said if line.strip() and "%|" not in line]  # progress bars tell nobody why
    assert (f"  | {lines[-1]}" if lines else "  (its log says nothing)") in ended.err
    assert "Traceback" not in ended.err
    assert launched.left() == {}
    assert summary_of(launched.paths)["steps"] >= 1
    assert list_snapshots(launched.paths.weights)  # to look into, or to go on from


def test_a_process_that_dies_while_it_starts_is_named_at_once(workspace: Workspace) -> None:
    launched = workspace.start_run("stillborn", *ENDLESS)
    launched.until(lambda: (launched.paths.specs / "train-0.json").exists(), "the last process is started")
    launched.note_processes()
    launched.child("inference-0").kill()
    ended = launched.end(60)
    assert ended.seconds < SOON
    assert ended.status == 1
    assert "areal-like: error: inference-0 (pid " in ended.err
    assert "was ended by SIGKILL" in ended.err
    assert "Traceback" not in ended.err
    assert launched.left() == {}


def test_children_of_a_killed_controller_die_and_the_next_run_sweeps_its_memory(workspace: Workspace) -> None:
    launched = workspace.start_run("orphaned", *ENDLESS, *LONG_ANSWERS)
    launched.until_steps(1)
    launched.send(signal.SIGKILL)
    launched.process.wait(30)
    deadline = time.monotonic() + 30
    while launched.left().keys() - {"shared memory", "sockets"} and time.monotonic() < deadline:
        time.sleep(0.05)
    assert launched.left().keys() <= {"shared memory", "sockets"}
    dead = launched.run_id
    assert list_segments(dead)  # what nobody was left to remove

    again = workspace.start_run("orphaned", "total_train_steps=2", "--force")
    ended = again.end()
    assert ended.status == 0, ended.err
    assert list_segments(dead) == ()
    assert again.run_id != dead
    assert again.left() == {}
    aside = again.paths.root.with_name("orphaned.old-1")
    assert f"the earlier run is now in {aside}" in ended.err
    assert (aside / "metrics.jsonl").stat().st_size > 0
    assert summary_of(again.paths)["steps"] == 2
