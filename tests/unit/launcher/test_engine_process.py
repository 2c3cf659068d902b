"""The keeper of an engine's server: real processes, with a small HTTP server in the engine's place."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from areal_like.inference.backends import get_engine
from areal_like.inference.spec import EngineSpec
from launcher.child import TOKEN_VARIABLE
from launcher.engine_process import command_line
from launcher.leftovers import sweep_engine_memory
from launcher.roles import RoleSpec

#: an engine: a child of its own that sleeps, then a server that is healthy at /health
ENGINE = """
import http.server, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("child", child.pid, flush=True)
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer t" else 401)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
KEEPER = """
import sys
import launcher.engine_process as keeper
from areal_like.inference.backends.base import EngineCommand
from areal_like.inference.spec import EngineSpec

class Fake:
    def command(self, spec, *, token):
        arguments = (sys.executable, "-c", sys.argv[1], str(spec.port))
        return EngineCommand(arguments=arguments, environment={"VLLM_API_KEY": token})

keeper.get_engine = lambda name: Fake()
known = {"backend": "vllm", "name": "s0", "python": "py", "version": "0.32", "model_path": "m"}
spec = EngineSpec(**known, start_timeout=float(sys.argv[2]))
keeper.run_engine(spec, "t", lambda url: print("READY", url, flush=True))
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(engine: str, timeout: float = 60.0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", KEEPER, engine, str(timeout)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def lines_until_ready(process: subprocess.Popen[str]) -> list[list[str]]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.split())
        if lines[-1][0] == "READY":
            return lines
    raise AssertionError(process.communicate()[1])


def gone(pid: int) -> bool:
    """Ended within ten seconds."""
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_healthy_engine_is_reported_and_ends_with_its_keeper(start: Start) -> None:
    process = start(ENGINE)
    (_, child), (_, url) = lines_until_ready(process)
    assert url.startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert gone(int(child))


def test_asking_again_does_not_break_off_the_cleaning_up(start: Start) -> None:
    process = start(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN){ENGINE}")
    (_, child), _ = lines_until_ready(process)
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:  # it waits for an engine that does not listen
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert process.returncode == 0
    assert gone(int(child))


def test_an_engine_that_ends_is_an_error_and_takes_its_children_along(start: Start) -> None:
    process = start(ENGINE)
    (_, child), _ = lines_until_ready(process)
    engine = next(p for p in psutil.Process(process.pid).children() if p.pid != int(child))
    engine.kill()
    assert process.wait(20) == 1
    assert process.stderr is not None
    assert "s0: the engine ended with status -9" in process.stderr.read()
    assert gone(int(child))


def test_an_engine_that_dies_early_is_told_at_once(start: Start) -> None:
    process = start("import sys; sys.exit('no such flag: --frobnicate')")
    output = process.communicate(timeout=30)[1]
    assert "no such flag: --frobnicate" in output
    assert "ended with status 1 before it was healthy" in output
    assert f"starting VLLM_API_KEY=$AREAL_LIKE_TOKEN {sys.executable} -c 'import sys; sys.exit(" in output


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_shell_starts_the_same_server_from_what_is_told(tmp_path: Path, name: str, device: str) -> None:
    """Words with quotes, spaces and dollars; secrets come from the shell's own variables."""
    python = tmp_path / "an interpreter"
    python.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv, dict(os.environ)]))\n")
    python.chmod(0o755)
    given = {"HF_TOKEN": "hidden", "NOTE": 'it\'s $5 and "more"'}
    spec = EngineSpec.model_validate(
        {"backend": name, "name": "s0", "python": str(python), "version": "0.32", "model_path": "a $model's"}
        | {"devices": (device,), "environment": given, "flags": {"chat_template": '{"a": "b c"}'}}
    )
    command = get_engine(name).command(spec, token="t0ken")
    line = command_line(command, "t0ken")
    key = "VLLM_API_KEY" if name == "vllm" else "SGLANG_API_KEY"
    assert f"{key}=$AREAL_LIKE_TOKEN " in line and "HF_TOKEN=$HF_TOKEN " in line
    assert "t0ken" not in line and "hidden" not in line
    ours = {TOKEN_VARIABLE: "t0ken", "HF_TOKEN": "hidden"}
    told = subprocess.run(["sh", "-c", line], env=ours, capture_output=True, text=True, check=True, timeout=30).stdout
    words, variables = json.loads(told)
    assert tuple(words) == command.arguments
    assert {name: variables[name] for name in command.environment} == dict(command.environment)


def test_an_engine_that_never_answers_is_ended_at_its_deadline(start: Start) -> None:
    process = start("import time; time.sleep(1000)", timeout=0.5)
    assert "was not healthy within 0.5 s; raise rollout.start_timeout" in process.communicate(timeout=30)[1]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux's memory file system")
def test_a_semaphore_in_use_stays() -> None:
    """The C library maps it under a name that it has no longer."""
    began = time.time()
    semaphore = multiprocessing.get_context("spawn").Semaphore(1)
    sweep_engine_memory(began - 1)
    assert Path(f"/dev/shm/sem.{semaphore._semlock.name.lstrip('/')}").exists()  # type: ignore[attr-defined]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux's memory file system")
def test_sglangs_board_is_swept_with_its_server() -> None:
    board = Path(f"/dev/shm/sglang_loads_test_{uuid.uuid4().hex[:8]}.shm")
    began = time.time()
    board.write_bytes(bytes(16))
    sweep_engine_memory(began + 60)
    assert board.exists()  # made before
    sweep_engine_memory(began - 1)
    assert not board.exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux's memory file system")
def test_blocks_that_nobody_maps_are_swept_and_others_stay() -> None:
    began = time.time()
    mapped, left = SharedMemory(create=True, size=64), SharedMemory(create=True, size=64)
    try:
        left.close()
        sweep_engine_memory(began - 1)
        blocks = {path.name for path in Path("/dev/shm").glob("psm_*")}
        assert mapped.name in blocks
        assert left.name not in blocks
    finally:
        mapped.close()
        mapped.unlink()
        from multiprocessing.resource_tracker import unregister

        unregister(f"/{left.name}", "shared_memory")  # it was removed behind its tracker's back


def test_an_engines_last_words_are_not_pushed_away_by_our_traceback(tmp_path: Path) -> None:
    """The launcher shows the last lines of a log: of an engine's role they are the engine's own, and one of ours."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'unrecognized arguments: --frobnicate' >&2; exit 2\n")
    python.chmod(0o755)
    engine = EngineSpec(backend="vllm", name="s0", python=str(python), version="0.32.0", model_path="m")
    spec = RoleSpec(role="inference", index=0, controller_address="ipc:///nowhere", part=engine.model_dump_json())
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    ended = subprocess.run(
        [sys.executable, "-m", "launcher.roles", "engine", str(tmp_path / "spec.json")],
        env={**os.environ, TOKEN_VARIABLE: "t"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-2:] == [
        "unrecognized arguments: --frobnicate",
        "the engine ended with status 2 before it was healthy",
    ]
