"""Engines' parsers take the beginning of a flag for the flag: none of ours can be reached under such a name."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from areal_like.errors import ConfigError
from areal_like.inference.backends import get_engine
from areal_like.inference.spec import EngineSpec

ENGINES = ("vllm", "sglang")
#: flags of the engines that are the beginning of one of ours (vLLM 0.26 and 0.32, SGLang 0.5.23)
THEIRS = {"vllm": set[str](), "sglang": {"log_level"}}
#: what the experiment tells by other keys, checks, or fixes, and no server is started with as long as nothing is asked
ELSEWHERE = {
    "vllm": {"api_key", "enable_sleep_mode", "max_model_len", "no_enable_chunked_prefill"},
    "sglang": {"api_key", "admin_api_key", "context_length", "weight_version", "dp_size", "data_parallel_size"}
    | {"enable_hierarchical_cache", "enable_hicache", "skip_tokenizer_init", "speculative_algorithm", "tp_size"},
}


def command(engine: str, **flags: Any) -> tuple[str, ...]:
    version = {"vllm": "0.32.0", "sglang": "0.5.23"}[engine]
    spec = EngineSpec(backend=engine, name="s", python="py", version=version, model_path="m", port=1, flags=flags)
    return get_engine(engine).command(spec, token="t").arguments


def started_with(engine: str) -> set[str]:
    return {word[2:].replace("-", "_") for word in command(engine) if word.startswith("--")}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_beginning_of_a_flag_of_ours_is_refused_with_its_name(engine: str) -> None:
    ours = started_with(engine) | ELSEWHERE[engine]
    beginnings = {name[:length] for name in ours for length in range(1, len(name))} - ours - THEIRS[engine]
    beginnings = {name for name in beginnings if not name.endswith("_")} - {"model", "config"}  # flags of their own
    assert len(beginnings) > 150
    for name in beginnings:
        for given in (name, name.replace("_", "-")):
            with pytest.raises(ConfigError, match=rf"^{engine}\.{given}: ") as told:
                command(engine, **{given: 1})
            assert any(full in str(told.value) for full in ours if full.startswith(name)), name


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine in ENGINES for name in THEIRS[engine]])
def test_a_flag_of_the_engines_that_begins_like_ours_is_passed_on(engine: str, name: str) -> None:
    assert command(engine, **{name: "warning"})[-2:] == (f"--{name.replace('_', '-')}", "warning")


def test_argparse_does_read_them_so() -> None:
    """The reason for the rule, and what ``check --engine`` switches off."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-num-seqs")
    assert parser.parse_args(["--max-num-seqs", "64", "--max-num-seq", "4"]).max_num_seqs == "4"


@pytest.mark.parametrize(
    ("engine", "given", "value", "said"),
    [
        ("vllm", "max_num_seq", 4, r"beginning of max_num_seqs; write the flag in full"),
        ("vllm", "logprobs-mod", "raw_logprobs", r"beginning of logprobs_mode"),
        ("vllm", "no_enable_chunked", True, r"beginning of no_enable_chunked_prefill"),
        ("vllm", "weight_transfer_config.backend", "nccl", r"write vllm\.weight_transfer_config as one mapping"),
        ("vllm", "logprobs_mode=raw_logprobs", True, r"is no flag's name"),
        ("vllm", "config", "flags.yaml", r"name them here"),
        ("sglang", "config", "flags.yaml", r"name them here"),
        ("sglang", "max_running_request", 4, r"beginning of max_running_requests"),
        ("sglang", "data_parallel_size", 2, r"must stay 1"),
        ("sglang", "enable-hicache", True, r"must stay False"),
        ("sglang", "enable_hica", True, r"beginning of enable_hicache"),
    ],
)
def test_other_ways_to_reach_a_flag_of_ours_are_refused(engine: str, given: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{engine}\.{given}: .*{said}"):
        command(engine, **{given: value})


@pytest.mark.parametrize("engine", ENGINES)
def test_other_flags_are_passed_on(engine: str) -> None:
    assert command(engine, block_size=64, **{"compilation_config.level": 2})[-4:] == (
        *("--block-size", "64"),
        *("--compilation-config.level", "2"),
    )
