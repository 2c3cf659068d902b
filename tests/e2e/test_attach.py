"""``rollout.servers``: a run over servers that somebody else started, and which go on when it is over."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import httpx
import pytest

from launcher.child import TOKEN_VARIABLE

if TYPE_CHECKING:
    from launched import Launched, Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def serve(workspace: Workspace) -> tuple[Launched, str]:
    """A server in the foreground of its own, and its URL."""
    served = workspace.start("serve", "exp.yaml")
    found = served.until(lambda: re.search(r"at (http://\S+)", served.out_file.read_text()), "an address")
    return served, found[1]


@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_a_run_trains_with_servers_of_others(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    from launched import steps_of

    monkeypatch.setenv(TOKEN_VARIABLE, "theirs")
    (first, one), (second, two) = serve(workspace), serve(workspace)
    paths = workspace.run(
        f"attach-{transport}",
        "rollout.backend=embedded:d2",
        f'rollout.servers=["{one}", "{two}"]',
        f"weights.transport={transport}",
        "total_train_steps=3",
    )
    assert [step["version"] for step in steps_of(paths)] == [1, 2, 3]
    assert not list(paths.logs.glob("inference-*.log"))
    for server, url in ((first, one), (second, two)):
        health = httpx.get(f"{url}/health", headers={"Authorization": "Bearer theirs"}, trust_env=False).json()
        assert (health["version"], health["paused"]) == (3, False)
        server.send(signal.SIGINT)
        server.end()


def test_a_wrong_token_is_told_by_name(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "theirs")
    served, url = serve(workspace)
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    ended = workspace.call("run", "exp.yaml", "--plain", "trial_name=locked-out", f'rollout.servers=["{url}"]')
    assert ended.status == 1
    assert "401" in ended.err
    served.send(signal.SIGINT)
    served.end()
