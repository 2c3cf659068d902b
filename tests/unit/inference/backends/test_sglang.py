"""The command line of an SGLang server, and what its versions can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_like.api.weights import InterruptMode, TransportKind
from areal_like.errors import ConfigError
from areal_like.inference.backends.base import require
from areal_like.inference.backends.sglang import SglangBackend
from areal_like.inference.spec import EngineSpec


def spec(**changes: Any) -> EngineSpec:
    known = {"backend": "sglang", "name": "s0", "python": "py", "version": "0.5.23", "model_path": "m", "port": 8000}
    return EngineSpec(**{**known, **changes})


def flags(**changes: Any) -> dict[str, str]:
    """Each flag of a server and the word behind it."""
    command = SglangBackend().command(spec(**changes), token="t").arguments
    return {word: after for word, after in zip(command, (*command[1:], ""), strict=True) if word.startswith("--")}


def test_a_server_on_a_cpu_has_neither_graphs_nor_kernels() -> None:
    given = flags()
    assert given["--device"] == "cpu"
    assert given["--attention-backend"] == "torch_native"
    assert given["--cuda-graph-backend-decode"] == "disabled"
    assert "--disable-overlap-schedule" in given
    assert "--sleep-on-idle" in given  # an idle scheduler would keep a core busy
    assert int(given["--watchdog-timeout"]) >= 3600  # a step that takes minutes is no hang
    assert SglangBackend().command(spec(), token="t").environment["SGLANG_USE_CPU_ENGINE"] == "1"


def test_a_server_on_gpus_sees_its_own_only() -> None:
    command = SglangBackend().command(spec(devices=("cuda:2", "cuda:3"), tensor=2), token="t")
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "SGLANG_USE_CPU_ENGINE" not in command.environment
    given = flags(devices=("cuda:2", "cuda:3"), tensor=2)
    assert (given["--device"], given["--tensor-parallel-size"]) == ("cuda", "2")
    assert "--attention-backend" not in given


def test_the_experiments_flags_win_and_false_leaves_a_flag_out() -> None:
    given = flags(flags={"mem-fraction-static": 0.5, "disable_overlap_schedule": False, "page_size": 16})
    assert given["--mem-fraction-static"] == "0.5"
    assert given["--page-size"] == "16"
    assert not any("overlap" in flag for flag in given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": 1}, "is set by rollout.port"),
        ({"api-key": "mine"}, "the run makes its own token"),
        ({"weight_version": "x"}, "versions are published"),
        ({"dp_size": 2}, "must stay 1"),
        ({"skip-tokenizer-init": True}, "must stay False"),
    ],
)
def test_a_flag_that_breaks_the_contract_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SglangBackend().command(spec(flags=given), token="t")


def test_seeds_are_for_gpus_and_said_to_be() -> None:
    with pytest.raises(ConfigError, match=r"sglang\.enable_deterministic_inference: SGLang has its seeded sampling"):
        flags(flags={"enable_deterministic_inference": True})
    assert "--enable-deterministic-inference" in flags(
        devices=("cuda:0",), flags={"enable_deterministic_inference": True}
    )
    assert SglangBackend().capabilities("0.5.23").seeds.endswith("on a GPU")


def test_the_token_is_in_the_environment_and_not_on_the_command_line() -> None:
    command = SglangBackend().command(spec(environment={"MINE": "1"}), token="secret")
    assert command.environment["SGLANG_API_KEY"] == "secret"
    assert not any("secret" in word for word in command.arguments)
    assert command.environment["MINE"] == "1"


@pytest.mark.parametrize(("limit", "asked"), [(1000, "106"), (103, "103")])
def test_the_context_asked_for_has_room_for_what_sglang_reserves(tmp_path: Path, limit: int, asked: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": limit}))
    assert flags(model_path=str(tmp_path), context_length=100)["--context-length"] == asked


def test_what_is_too_old_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0.5.18 is too old.*0.5.19"):
        SglangBackend().capabilities("0.5.18")


def test_every_mode_works_from_the_first_version_with_spans_on() -> None:
    found = SglangBackend().capabilities("0.5.19")
    assert found.spans
    for mode in InterruptMode:
        require(found, interrupt=mode, transport=TransportKind.DISK, where="py")


def test_groups_need_the_session_calls() -> None:
    with pytest.raises(ConfigError, match=r"weights.transport: 'collective'.*it needs SGLang >= 0.5.21"):
        found = SglangBackend().capabilities("0.5.20")
        require(found, interrupt=InterruptMode.KEEP, transport=TransportKind.COLLECTIVE, where="py")
