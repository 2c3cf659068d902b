"""Real inference servers, each in a process of its own, around one tiny random model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal_like.api.weights import Manifest, TransportKind
from areal_like.client.control import EmbeddedControl
from areal_like.client.generation import RemoteEngine
from areal_like.client.health import HealthPolicy
from areal_like.client.pool import ServerPool
from areal_like.client.retry import RetryPolicy
from areal_like.inference.spec import InferenceServerSpec
from areal_like.weights.channel import WeightChannel
from areal_like.weights.segments import list_segments, remove_segments
from areal_like.weights.transports.base import WeightWriter, make_writer

TOKEN = "faults-token"
CONTEXT = 4096
#: decisions within a second, on a machine that does other things too
QUICK = HealthPolicy(interval=0.1, timeout=1.0, failures=2, retry=0.05, readmit_after=0.1)

_SERVE = """
import sys
from areal_like.inference.embedded.server import run_server
from areal_like.inference.spec import InferenceServerSpec
spec = InferenceServerSpec.model_validate_json(sys.argv[1])
def ready(address):
    with open(int(sys.argv[3]), "w") as line:
        line.write(address)
run_server(spec, sys.argv[2], ready)
"""


def build_model(seed: int) -> Any:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"vocab_size": 48, "bos_token_id": 0, "eos_token_id": 1}
    config = LlamaConfig(max_position_embeddings=CONTEXT, tie_word_embeddings=True, **ids, **shape)
    return LlamaForCausalLM(config)


@dataclass(slots=True, kw_only=True)
class ServerProcess:
    name: str
    url: str
    process: subprocess.Popen[bytes]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model(0).save_pretrained(path)
    return path


@pytest.fixture
def start_servers(model_path: Path) -> Iterator[Callable[..., list[ServerProcess]]]:
    """Starts servers side by side and waits for all; they are gone afterwards, however the test ended."""
    running: list[ServerProcess] = []

    def start(*names: str, port: int = 0) -> list[ServerProcess]:
        addresses: list[int] = []
        for name in names:
            spec = InferenceServerSpec(
                name=name, model_path=str(model_path), max_batch_size=8, context_length=CONTEXT, port=port
            )
            ours, theirs = os.pipe()  # for its address alone: what it prints is nobody's to read, and a pipe can fill
            command = [sys.executable, "-c", _SERVE, spec.model_dump_json(), TOKEN, str(theirs)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, pass_fds=(theirs,), env=environment)
            os.close(theirs)
            addresses.append(ours)
            running.append(ServerProcess(name=name, url="", process=process))
        for server, ours in zip(running[-len(names) :], addresses, strict=True):
            with open(ours) as line:
                server.url = line.read()
            assert server.url, f"{server.name} did not start"
        return running[-len(names) :]

    yield start
    for server in running:
        server.end()


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Exports one of several models: version v is ``models[v % len(models)]``."""

    writer: WeightWriter
    models: list[Any]

    async def export_weights(self, version: int, incarnation: int) -> Manifest:
        model = self.models[version % len(self.models)]
        return self.writer.write(version, incarnation, model.state_dict().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    pool: ServerPool
    engine: RemoteEngine
    channel: WeightChannel
    trainer: Trainer
    run_id: str


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"faults-{uuid.uuid4().hex[:12]}"
    yield name
    left = list_segments(name)
    remove_segments(name)
    assert left == ()


@pytest.fixture
def open_cluster(run_id: str, tmp_path: Path) -> Callable[..., Any]:
    """Pool, engine and channel around running servers; nothing is published yet."""

    @asynccontextmanager
    async def opened(
        *servers: ServerProcess,
        timeout: float = 30.0,
        update_timeout: float = 20.0,
        health: float = QUICK.timeout,
        interval: float = QUICK.interval,
    ) -> AsyncIterator[Cluster]:
        writer = make_writer(TransportKind.SHM, run_id=run_id, directory=tmp_path, bucket_bytes=4096)
        trainer = Trainer(writer=writer, models=[build_model(0), build_model(1)])
        try:
            async with ServerPool(replace(QUICK, timeout=health, interval=interval)) as pool:
                for server in servers:
                    await pool.add(server.name, server.url, EmbeddedControl(server.name, server.url, token=TOKEN))
                retry = RetryPolicy(first=0.02, limit=0.2)
                async with RemoteEngine(pool, token=TOKEN, timeout=timeout, retry=retry) as engine:
                    channel = WeightChannel(trainer, pool, timeout=update_timeout)
                    yield Cluster(pool=pool, engine=engine, channel=channel, trainer=trainer, run_id=run_id)
        finally:
            writer.close()

    return opened
