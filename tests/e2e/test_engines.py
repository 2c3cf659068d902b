"""Real engines train a real model: a few steps of ``configs/``, with servers of ours and of others."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_like.api.weights import TransportKind
from areal_like.api.wire import GenerateBody, SamplingBody
from areal_like.client.poster import Poster
from areal_like.config.experiment import ExperimentConfig
from areal_like.config.load import load_config
from areal_like.inference.backends import get_backend
from areal_like.inference.backends.base import LinkSettings
from launcher.child import TOKEN_VARIABLE
from launcher.engine_process import free_port, group_members

ROOT = Path(__file__).parents[2]
ENGINES = ("vllm", "sglang")
#: seconds after which a server that starts, or a run, hangs: no machine that can run them at all is as slow as that
HUNG = 1800.0

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3 * HUNG)]


@pytest.fixture(params=ENGINES)
def experiment(request: pytest.FixtureRequest) -> ExperimentConfig:
    config = load_config(path_of(request.param))
    if not (ROOT / (config.rollout.python or "")).exists() or not (ROOT / config.model.path).exists():
        pytest.skip(f"no environment or no model: make engines-{request.param} smollm2")
    return config


def path_of(engine: str) -> Path:
    return ROOT / "configs" / f"smollm2_{engine}_cpu.yaml"


def trained(config: ExperimentConfig, folder: Path, *overrides: str, token: str = "") -> list[dict[str, Any]]:
    """Run the experiment to its end; its steps."""
    command = [sys.executable, "-m", "launcher", "run", str(path_of(config.rollout.spec.name)), "--plain"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({TOKEN_VARIABLE: token} if token else {})}
    ended = subprocess.run(
        [*command, f"runs_dir={folder}", *overrides],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=HUNG,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    lines = (folder / config.experiment_name / config.trial_name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "step" in line]


def test_smollm2_trains_a_few_steps(experiment: ExperimentConfig, tmp_path: Path) -> None:
    steps = trained(experiment, tmp_path)
    assert [step["version"] for step in steps] == list(range(1, experiment.total_train_steps + 1))
    assert max(step["lag_max"] for step in steps) <= experiment.rollout.max_head_offpolicyness
    assert gaps(steps) and max(gaps(steps)) < 0.15  # mean |log-prob of the engine − of the trainer|, in bfloat16
    assert all(step["train"]["train/skipped_minibatches"] == 0 for step in steps)


def test_a_misspelt_flag_is_told_by_the_engines_own_parser(experiment: ExperimentConfig) -> None:
    name = experiment.rollout.spec.name
    command = [sys.executable, "-m", "launcher", "check", str(path_of(name)), "--engine"]
    for flags, status, said in (((), 0, "flags: read by"), ((f"{name}.blokc_size=16",), 2, "--blokc-size")):
        ended = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, check=False, timeout=HUNG)
        assert (ended.returncode, said in ended.stdout + ended.stderr) == (status, True), ended.stderr


def gaps(steps: list[dict[str, Any]]) -> list[float]:
    """Of steps that trained on tokens of the current version alone: lag has no part in them."""
    return [
        step["train"]["offpolicy/logprob_gap_mean"] for step in steps if step["train"]["offpolicy/fresh_fraction"] == 1
    ]


def test_a_server_that_somebody_started_by_hand(experiment: ExperimentConfig, tmp_path: Path) -> None:
    """As ``docs/engines.md`` says. It gets the run's weights, and goes on when the run is over."""
    engine, token = experiment.rollout.spec.name, "theirs"
    with by_hand(engine, token, tmp_path / "server.log") as url:
        theirs = (f'rollout.servers=["{url}"]', f"{engine}={{}}")  # its flags are those of the shell command
        steps = trained(experiment, tmp_path, *theirs, "total_train_steps=2", token=token)
        assert [step["version"] for step in steps] == [1, 2]
        assert not list(tmp_path.glob("**/inference-*.log"))
        version, in_flight = asyncio.run(state_of(engine, url, token))
        assert (version, in_flight) == (2, 0)


async def state_of(engine: str, url: str, token: str) -> tuple[int, int]:
    """The version that a server holds, and how many requests it has; it answers one."""
    backend = get_backend(engine)
    version = await backend.version(url, token=token, timeout=HUNG)
    link = backend.connect("s0", url, LinkSettings(token=token, version=version, transport=TransportKind.SHM))
    health = await link.control.health(timeout=HUNG)
    await link.control.digest(timeout=HUNG)
    async with Poster(token=token) as poster:
        body = GenerateBody(rid="r", input_ids=[5, 6], sampling=SamplingBody(max_new_tokens=3, ignore_eos=True))
        output, _ = await poster.generate("s0", url, body, link.dialect)
    await link.control.aclose()
    assert [(span.version, span.start, span.end) for span in output.spans] == [(health.version, 0, 3)]
    return health.version, health.in_flight


@contextmanager
def by_hand(engine: str, token: str, log: Path) -> Iterator[str]:
    """The shell command of the page, on a port of our own; the URL once it serves. It is gone afterwards."""
    page = (ROOT / "docs" / "engines.md").read_text()
    name = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
    found = re.search(rf"```sh\n# {name}\n(.*?)```", page, re.DOTALL)
    assert found
    port = free_port("127.0.0.1")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", TOKEN_VARIABLE: token}
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", found[1].replace("--port 8000", f"--port {port}")],
            cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        until_healthy(process, url, token, log)
        yield url
    finally:
        for pid in group_members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def until_healthy(process: subprocess.Popen[bytes], url: str, token: str, log: Path) -> None:
    deadline = time.monotonic() + HUNG
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {token}"}, timeout=30) as http:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
            try:
                if http.get(f"{url}/health").status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
