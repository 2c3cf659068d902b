"""The little of vLLM that our path asks for, where vLLM is not installed, and an engine that writes what it is told.

``tests/contract/test_token_path.py`` asks the real ones.
"""

from __future__ import annotations

import asyncio
import enum
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CONTEXT, VOCABULARY = 32, 100


class VLLMClientError(Exception):
    """From 0.32 on; no ValueError."""


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_clone: bool = False
    _eos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise VLLMClientError(f"temperature must be non-negative, got {self.temperature}.")


def encode(value: Any) -> bytes:
    """As msgspec's, what it refuses."""
    if isinstance(value, (tuple, list)):
        return b"".join(map(encode, value))
    if isinstance(value, SamplingParams):
        return encode(list(asdict(value).values()))
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise OverflowError("can't serialize ints < -2**63 or > 2**64 - 1")
    return str(value).encode()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the names by which our path imports them."""
    modules: Mapping[str, Mapping[str, Any]] = {
        "vllm": {},
        "vllm.sampling_params": {"SamplingParams": SamplingParams, "RequestOutputKind": RequestOutputKind},
        "vllm.inputs": {},
        "vllm.inputs.engine": {"tokens_input": lambda ids, *, cache_salt: {"ids": ids, "salt": cache_salt}},
        "msgspec": {"msgpack": SimpleNamespace(encode=encode)},
    }
    for name, held in modules.items():
        module = ModuleType(name)
        module.__dict__.update(held)
        monkeypatch.setitem(sys.modules, name, module)


def flat(*positions: Mapping[int, float]) -> SimpleNamespace:
    """``FlatLogprobs`` of positions, in each the sampled token first."""
    found = SimpleNamespace(start_indices=[], end_indices=[], token_ids=[], logprobs=[])
    for position in positions:
        found.start_indices.append(len(found.token_ids))
        found.token_ids += position.keys()
        found.logprobs += position.values()
        found.end_indices.append(len(found.token_ids))
    return found


def output(**changes: Any) -> SimpleNamespace:
    """A ``RequestOutput`` with one ``CompletionOutput``."""
    choice = {"token_ids": [7, 8], "logprobs": flat({7: -0.5}, {8: -1.5}), "finish_reason": "length", **changes}
    return SimpleNamespace(outputs=[SimpleNamespace(**choice)])


@dataclass(slots=True, kw_only=True)
class Engine:
    """Answers every request with ``outputs``, or fails with ``error``, or hangs until it is cancelled."""

    outputs: list[SimpleNamespace] = field(default_factory=lambda: [output()])
    error: Exception | None = None
    hangs: bool = False
    asked: list[tuple[Any, SamplingParams, str]] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    model_config: Any = field(
        default_factory=lambda: SimpleNamespace(max_model_len=CONTEXT, get_vocab_size=lambda: VOCABULARY)
    )

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[SimpleNamespace]:
        self.asked.append((prompt, params, request_id))
        self.began.set()
        if self.error is not None:
            raise self.error
        for made in self.outputs:
            yield made
        if self.hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up.set()
                raise
