"""What the contract tests stand on: nothing of the test's can stop a server, and what hangs is shown."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import overruns
import pytest
from subjects import DEVICE, FLAGS, KV_CACHE, VLLM_PYTHON, chosen_device, python_of, spec_of, started, subjects_on

from areal_like.inference.backends import get_engine
from areal_like.inference.spec import EngineSpec

#: more than any pipe holds unless it was told to
MUCH = 2**21
_TALKER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
with open(int(sys.argv[-1]), "w") as line:
    line.write(f"http://127.0.0.1:{listener.getsockname()[1]}")
while True:
    connection, _ = listener.accept()
    sys.stdout.write("o" * int(sys.argv[1]))
    sys.stderr.write("e" * int(sys.argv[1]))
    sys.stdout.flush()
    with connection:
        connection.sendall(b"here")
"""


def test_a_server_that_prints_more_than_a_pipe_holds_goes_on_answering(tmp_path: Path) -> None:
    with started([sys.executable, "-c", _TALKER, str(MUCH)], tmp_path, "talker") as server:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(2):
            with socket.create_connection((host, int(port)), timeout=20) as asked:
                assert asked.recv(16) == b"here"
    assert server.log.stat().st_size >= 4 * MUCH


def test_a_server_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"stillborn did not start:\n.*no room"),
        started([sys.executable, "-c", "raise SystemExit('no room')"], tmp_path, "stillborn"),
    ):
        pass


def test_on_a_gpu_vllm_is_started_with_memory_to_lend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever interpreter, as the environment says; one outside of this folder too."""
    monkeypatch.setenv(VLLM_PYTHON, sys.executable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    subject = subjects_on("cuda")["vllm"]
    spec = EngineSpec.model_validate_json(spec_of(subject, tmp_path, "s0"))
    command = get_engine("vllm").command(spec.model_copy(update={"version": "0.26.0"}), token="t")
    words = " ".join(command.arguments)
    assert command.arguments[0] == sys.executable == str(python_of("vllm"))
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert (
        f"--enforce-eager --enable-sleep-mode --gpu-memory-utilization 0.2 --kv-cache-memory-bytes {KV_CACHE}" in words
    )
    assert f"--max-model-len {subject.context} " in words
    assert "chunked-prefill" not in words  # that is a CPU's
    assert subject.lends and subject.longest < subject.context
    monkeypatch.setenv(FLAGS, '{"enable_sleep_mode": null, "gpu_memory_utilization": 0.5}')
    assert not subjects_on("cuda")["vllm"].lends
    spec = EngineSpec.model_validate_json(spec_of(subject, tmp_path, "s0"))
    words = " ".join(get_engine("vllm").command(spec.model_copy(update={"version": "0.26.0"}), token="t").arguments)
    assert "sleep" not in words and "--gpu-memory-utilization 0.5" in words


def test_the_device_is_one_that_the_suite_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    assert chosen_device() == "cpu"
    monkeypatch.setenv(DEVICE, "cuda")
    assert chosen_device() == "cuda"
    assert "sglang" not in subjects_on("cuda")
    monkeypatch.setenv(DEVICE, "tpu")
    with pytest.raises(ValueError, match=r"AREAL_LIKE_CONTRACT_DEVICE='tpu': must be cpu or cuda"):
        chosen_device()


async def test_a_test_that_takes_too_long_shows_where_it_stands(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overruns, "OVERRUN", 0.05)
    (tmp_path / "s0.log").write_text("begun\n" + "x" * 5000 + "\nthe last words")
    shown: list[tuple[str, ...]] = []
    item = SimpleNamespace(
        funcargs={"folder": tmp_path}, nodeid="one", config=request.config,
        add_report_section=lambda *section: shown.append(section),
    )  # fmt: skip
    monkeypatch.setattr(request.config.pluginmanager, "get_plugin", lambda name: None)
    with overruns.watched(cast(pytest.Item, item), [asyncio.get_running_loop()]):
        async with asyncio.timeout(20):
            while not shown:  # noqa: ASYNC110  # a thread
                await asyncio.sleep(0.01)
    ((when, title, text),) = shown
    assert (when, title) == ("call", "overrun")
    assert "await asyncio.sleep(0.01)" in text
    assert "the last words" in text
    assert "begun" not in text
