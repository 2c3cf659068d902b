"""The embedded server as a process of its own: how it starts, ends, and dies."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal_like.errors import ConfigError
from areal_like.inference.embedded.server import run_server
from areal_like.inference.spec import InferenceServerSpec

SERVE = """
import sys
from areal_like.inference.embedded import model, server
from areal_like.inference.spec import InferenceServerSpec

if sys.argv[2] == "broken":
    def decode(*_):
        raise RuntimeError("kernel panic")
    model.ModelRunner.decode = decode
spec = InferenceServerSpec(name="server-0", model_path=sys.argv[1])
server.run_server(spec, "secret", lambda address: print(address, flush=True))
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Running:
    def __init__(self, model_path: Path, kind: str) -> None:
        command = [sys.executable, "-c", SERVE, str(model_path), kind]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.host, port = self.process.stdout.readline().strip().removeprefix("http://").split(":")
        self.port = int(port)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        connection.close()
        return response.status, answer

    def generate(self, tokens: int) -> tuple[int, dict[str, Any]]:
        sampling = {"max_new_tokens": tokens}
        return self.ask("POST", "/generate", {"rid": "r", "input_ids": [3], "sampling": sampling})

    def end(self) -> tuple[int, str]:
        """Exit status and standard error, once the process has ended by itself."""
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture
def start(model_path: Path) -> Iterator[Any]:
    started: list[Running] = []

    def start(kind: str) -> Running:
        started.append(Running(model_path, kind))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.communicate()


def test_sigterm_answers_those_in_flight_and_leaves_nothing(start: Any) -> None:
    server: Running = start("sound")
    answers: list[tuple[int, dict[str, Any]]] = []
    asking = threading.Thread(target=lambda: answers.append(server.generate(10_000)))
    asking.start()
    while server.ask("GET", "/health")[1]["in_flight"] == 0:
        pass
    server.process.send_signal(signal.SIGTERM)
    status, errors = server.end()
    asking.join(30)
    assert status == 0, errors
    ((code, answer),) = answers
    assert code == 200
    assert answer["outputs"][0]["stop_reason"] == "abort"
    assert len(answer["outputs"][0]["token_ids"]) > 0
    with socket.socket() as probe:
        assert probe.connect_ex((server.host, server.port)) != 0


def test_a_failed_decode_loop_ends_the_process_with_its_reason(start: Any) -> None:
    server: Running = start("broken")
    code, answer = server.generate(2)
    assert code == 500 and "kernel panic" in answer["error"]["message"]
    assert server.ask("GET", "/health")[1]["status"] == "failed"
    status, errors = server.end()
    assert status != 0
    assert "InfrastructureError: server-0: the decode loop failed: RuntimeError: kernel panic" in errors


def test_a_port_in_use_is_a_config_error(model_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = InferenceServerSpec(name="server-0", model_path=str(model_path), port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen on"):
            run_server(spec, "secret", lambda address: None)
