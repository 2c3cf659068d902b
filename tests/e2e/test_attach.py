"""``rollout.servers``: a run over servers that somebody else started, and which go on when it is over."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
from fakes.proxy import Proxy, proxied
from launched import PATIENCE

from launcher.child import TOKEN_VARIABLE
from launcher.engine_process import free_port

if TYPE_CHECKING:
    from launched import Launched, Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def serve(workspace: Workspace, *overrides: str) -> tuple[Launched, str]:
    """A server in the foreground of its own, and its URL."""
    served = workspace.start("serve", "exp.yaml", *overrides)
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


def test_servers_of_others_serve_one_run_after_another(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins at version 0 again, where the servers have a later one of the first."""
    from launched import steps_of

    monkeypatch.setenv(TOKEN_VARIABLE, "theirs")
    served, url = serve(workspace)
    for name in ("first", "second"):
        paths = workspace.run(name, f'rollout.servers=["{url}"]', "total_train_steps=2")
        assert [step["version"] for step in steps_of(paths)] == [1, 2]
    served.send(signal.SIGINT)
    served.end()


@pytest.mark.parametrize("busy", [True, False])
def test_a_run_whose_server_was_taken_over_says_by_whom_and_ends(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """``busy``: at its next publication; or, where none is near, as soon as the server's health tells of it."""
    from launched import ENDLESS, steps_of

    monkeypatch.setenv(TOKEN_VARIABLE, "theirs")
    served, url = serve(workspace)
    waits = () if busy else ("workflow=tasks.Waiting", "workflow_args={}", "reward_fn=null", "valid_dataset=null")
    first = workspace.start_run(f"first-{busy}", f'rollout.servers=["{url}"]', *ENDLESS, *waits)
    first.until(lambda: first.paths.metrics.exists(), "training has begun")
    if busy:
        first.until_steps(2)
    first.note_processes()
    second = workspace.start_run(f"second-{busy}", f'rollout.servers=["{url}"]', "total_train_steps=3")
    ended = first.end()
    assert ended.status == 1
    (error,) = [line for line in ended.err.splitlines() if line.startswith("areal-like: error:")]
    assert f"another run has taken over {url} (by incarnation 2); this run is incarnation 1" in error
    assert "let that run end, or give each run servers of its own" in error
    assert "Traceback" not in ended.err
    assert first.left() == {}
    assert second.end().status == 0
    assert [step["version"] for step in steps_of(second.paths)] == [1, 2, 3]
    served.send(signal.SIGINT)
    served.end()


def test_of_two_runs_that_join_a_fresh_server_at_once_one_goes_on(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launched import ENDLESS, steps_of

    monkeypatch.setenv(TOKEN_VARIABLE, "theirs")
    served, url = serve(workspace)
    runs = [workspace.start_run(f"at-once-{i}", f'rollout.servers=["{url}"]', *ENDLESS) for i in range(2)]
    deadline = time.monotonic() + PATIENCE
    while all(run.process.poll() is None for run in runs):
        assert time.monotonic() < deadline, [run.said() for run in runs]
        time.sleep(0.05)
    lost, left = sorted(runs, key=lambda run: run.process.poll() is None)
    ended = lost.end()
    assert ended.status == 1
    found = re.search(r"taken over \S+ \(by incarnation (\d)\); this run is incarnation (\d)", ended.err)
    assert found is not None, ended.err
    assert found.groups() == ("2", "1")
    left.until_steps(max(2, len(steps_of(left.paths)) + 1))
    left.press_ctrl_c()
    assert left.end().status == 128 + signal.SIGINT
    served.send(signal.SIGINT)
    served.end()


def test_a_wrong_token_is_told_by_name(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "theirs")
    served, url = serve(workspace)
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    ended = workspace.call("run", "exp.yaml", "--plain", "trial_name=locked-out", f'rollout.servers=["{url}"]')
    assert ended.status == 1
    assert "401" in ended.err
    assert f"{TOKEN_VARIABLE} must hold the token" in ended.err
    served.send(signal.SIGINT)
    served.end()


def test_a_server_that_is_not_there_is_told_by_key_and_address(workspace: Workspace) -> None:
    with socket.socket() as held:  # bound and not listening: nobody else answers there
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        ended = workspace.call("run", "exp.yaml", "--plain", "trial_name=nobody", f'rollout.servers=["{url}"]')
    assert ended.status == 1
    assert f"rollout.servers: {url} does not answer" in ended.err
    assert "start it, or name where it is" in ended.err


def test_a_run_goes_on_beside_a_server_that_answers_500(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no update and answers nothing; the other one does everything."""
    from launched import steps_of

    monkeypatch.setenv(TOKEN_VARIABLE, "theirs")
    (well, one), (sick, two) = serve(workspace), serve(workspace)
    with in_a_thread(two) as proxy:
        run = workspace.start_run(
            "one-sick",
            "rollout.backend=embedded:d2",
            f'rollout.servers=["{one}", "{proxy.url}"]',
            "total_train_steps=8",
        )
        run.until_steps(2)
        proxy.failing = "/generate"
        run.until(lambda: proxy.failures, "a request failed")
        run.until(lambda: len(steps_of(run.paths)) >= 4, "4 steps")
        proxy.failing = "/weights/commit"
        ended = run.end()
    assert ended.status == 0, ended.err
    assert [step["version"] for step in steps_of(run.paths)] == list(range(1, 9))
    for server in (well, sick):
        server.send(signal.SIGINT)
        server.end()


def test_a_run_ends_when_its_only_server_answers_500(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """In time, with what the server said: it answers, and two more tries are all that it gets."""
    from launched import ENDLESS

    monkeypatch.setenv(TOKEN_VARIABLE, "theirs")
    served, url = serve(workspace)
    with in_a_thread(url) as proxy:
        run = workspace.start_run("all-sick", f'rollout.servers=["{proxy.url}"]', *ENDLESS)
        run.until_steps(1)
        proxy.failing = "/weights/commit"
        ended = run.end()
    assert ended.status == 1
    assert re.search(r"version \d+ reached no server .*500", ended.err, re.DOTALL)
    assert run.left() == {}
    served.send(signal.SIGINT)
    served.end()


def test_the_only_server_may_die_and_be_started_again(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the run was about to publish or waits for answers: it goes on, under its own weights alone."""
    from launched import ENDLESS, steps_of

    monkeypatch.setenv(TOKEN_VARIABLE, "theirs")
    port = f"rollout.port={free_port('127.0.0.1')}"
    served, url = serve(workspace, port)
    run = workspace.start_run("comeback", f'rollout.servers=["{url}"]', *ENDLESS)
    run.until_steps(2)
    served.process.kill()
    run.until(lambda: "left the rotation" in run.said(), "the loss is seen")
    again, _ = serve(workspace, port)
    run.until(lambda: "is back in rotation" in run.said(), "the server has its weights")
    before = len(steps_of(run.paths))
    run.until_steps(before + 2)
    run.press_ctrl_c()
    ended = run.end()
    assert ended.status == 128 + signal.SIGINT
    assert "Traceback" not in ended.err
    assert run.left() == {}
    steps = steps_of(run.paths)
    assert [step["version"] for step in steps] == list(range(1, len(steps) + 1))
    assert max(step["lag_max"] for step in steps) <= 2
    again.send(signal.SIGINT)
    again.end()


@contextmanager
def in_a_thread(target: str) -> Iterator[Proxy]:
    """A proxy with an event loop of its own, since these tests have none."""
    opened: Future[Proxy] = Future()
    over = asyncio.Event()

    async def serve_until_over() -> None:
        async with proxied(target) as proxy:
            opened.set_result(proxy)
            await over.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve_until_over(),), daemon=True)
    thread.start()
    try:
        yield opened.result(30)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        loop.close()
