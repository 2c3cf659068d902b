"""The command line of a vLLM server, and what its versions can do."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.api.weights import InterruptMode, TransportKind
from areal_like.errors import ConfigError
from areal_like.inference.backends.base import flag_arguments, require, version_tuple, visible_gpus
from areal_like.inference.backends.vllm import VllmBackend
from areal_like.inference.spec import EngineSpec
from areal_like.inference.vllm_plugin.front_door import FrontDoor


def spec(**changes: Any) -> EngineSpec:
    known = {"backend": "vllm", "name": "s0", "python": "py", "version": "0.32.0", "model_path": "m", "port": 8000}
    return EngineSpec(**{**known, **changes})


def flags(command: tuple[str, ...]) -> dict[str, str]:
    """Each flag and the word behind it."""
    return {word: after for word, after in zip(command, (*command[1:], ""), strict=True) if word.startswith("--")}


def test_the_contracts_flags_are_always_there() -> None:
    given = flags(VllmBackend().command(spec(), token="t").arguments)
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--generation-config"] == "vllm"
    assert given["--weight-transfer-config"] == '{"backend":"areal_like"}'
    assert given["--middleware"] == f"{FrontDoor.__module__}.{FrontDoor.__qualname__}"
    assert "--no-enable-chunked-prefill" in given  # a seed would end the server


def test_the_experiments_flags_come_last_and_untouched() -> None:
    arguments = VllmBackend().command(spec(flags={"block_size": 64, "enforce_eager": False}), token="t").arguments
    assert arguments[-2:] == ("--block-size", "64")
    assert "--no-enforce-eager" in arguments
    assert "--enforce-eager" not in arguments


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "must stay 'processed_logprobs'"),
        ({"generation-config": "auto"}, "must stay 'vllm'"),
        ({"port": 1}, "is set by rollout.port"),
        ({"enable_chunked_prefill": True}, "a seeded request ends a CPU engine"),
    ],
)
def test_a_flag_that_breaks_the_contract_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        VllmBackend().command(spec(flags=given), token="t")


def test_the_token_is_in_the_environment_and_not_on_the_command_line() -> None:
    command = VllmBackend().command(spec(environment={"VLLM_CPU_KVCACHE_SPACE": "3"}), token="secret")
    assert command.environment["VLLM_API_KEY"] == "secret"
    assert not any("secret" in word for word in command.arguments)
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_a_server_on_gpus_sees_its_own_only() -> None:
    command = VllmBackend().command(spec(devices=("cuda:2", "cuda:3"), tensor=2), token="t")
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "--no-enable-chunked-prefill" not in command.arguments
    assert flags(command.arguments)["--tensor-parallel-size"] == "2"


@pytest.mark.parametrize(
    ("ours", "theirs"), [("5,7", "5,7"), ("6", "6,1"), ("GPU-a, GPU-b", "GPU-a,GPU-b"), ("", "0,1")]
)
def test_its_gpus_are_among_those_that_we_were_given(monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
    assert visible_gpus(("cuda:0", "cuda:1")) == theirs
    command = VllmBackend().command(spec(devices=("cuda:0", "cuda:1"), tensor=2), token="t")
    assert command.environment["CUDA_VISIBLE_DEVICES"] == theirs


def test_before_spans_nothing_can_be_kept() -> None:
    found = VllmBackend().capabilities("0.28.1")
    assert not found.spans
    require(found, interrupt=InterruptMode.RECOMPUTE, transport=TransportKind.SHM, where="py")
    with pytest.raises(ConfigError, match=r"rollout.interrupt: 'keep'.*py has vLLM 0.28.1: it needs vLLM >= 0.32"):
        require(found, interrupt=InterruptMode.KEEP, transport=TransportKind.SHM, where="py")


def test_what_is_too_old_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0.19.0 is too old.*0.32"):
        VllmBackend().capabilities("0.19.0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.32.0+cpu", (0, 32, 0)), ("0.33.0rc1", (0, 33, 0)), ("v1.2", (1, 2, 0)), ("0.32.1.dev3", (0, 32, 1))],
)
def test_versions_in_all_their_forms(text: str, expected: tuple[int, int, int]) -> None:
    assert version_tuple(text) == expected


def test_flags_become_words() -> None:
    given = {"a_b": True, "c": False, "d": None, "e": 1.5, "f": ["x", 2], "g": {"k": [1]}}
    assert flag_arguments(given) == ("--a-b", "--no-c", "--e", "1.5", "--f", "x", "2", "--g", '{"k":[1]}')
