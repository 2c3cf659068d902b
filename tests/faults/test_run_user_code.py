"""User code that fails every time: the run says so within a minute, and names the exception."""

from __future__ import annotations

import time

import pytest
from launched import ENDLESS, Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WITHIN = 60.0


@pytest.mark.parametrize(
    ("trial", "overrides", "words"),
    [
        (
            "workflow",
            ("workflow=tasks.Broken", "workflow_args={}", "reward_fn=null"),
            ("ZeroDivisionError: this workflow always fails", "tasks.py", "breaker_failures = 32"),
        ),
        (
            "reward",
            ("reward_fn=tasks.broken_reward",),
            ("LookupError: no such answer key", "tasks.broken_reward", "breaker_failures = 32"),
        ),
        (
            "stuck",
            (
                "reward_fn=tasks.stuck_reward",
                "rewards.timeout=0.2",
                "valid_dataset=null",
                "rollout.breaker_failures=4",
            ),
            ("tasks.stuck_reward ran longer than rewards.timeout = 0.2 s", "breaker_failures = 4"),
        ),
    ],
)
def test_user_code_that_always_fails_ends_the_run(
    workspace: Workspace, trial: str, overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    launched = workspace.start_run(trial, *ENDLESS, *overrides)
    ended = launched.end()
    assert time.monotonic() - launched.started < WITHIN
    assert ended.status == 1
    _, message = ended.err.split("areal-like: error: ")
    for word in words:
        assert word in message
    log = (launched.paths.logs / "controller.log").read_text()
    assert words[0] in log
    assert launched.left() == {}
