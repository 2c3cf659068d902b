"""What a workflow asks of an engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class StopReason(StrEnum):
    """Why an answer ended. ``abort`` never leaves the client (DESIGN.md, section 5)."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


class GenerationHyperparameters(BaseModel):
    """Sampling parameters of one request (the ``gconfig`` section). Frozen: use :meth:`new` for a changed copy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    n_samples: int = Field(1, ge=1, description="sibling episodes per prompt (the group size)")
    max_new_tokens: int = Field(512, ge=1, description="most tokens one answer may have")
    min_new_tokens: int = Field(0, ge=0, description="tokens before which no stop token or stop string may end it")
    max_tokens: int | None = Field(None, ge=1, description="most tokens prompt and answer may have together")
    greedy: bool = Field(False, description="take the most likely token")
    temperature: float = Field(1.0, ge=0.0, le=100.0, description="0 means greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus sampling; 1 is off")
    top_k: int = Field(0, ge=0, description="sample among the k most likely tokens; 0 is off")
    min_p: float = Field(0.0, ge=0.0, lt=1.0, description="drop tokens below min_p times the likeliest; 0 is off")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="0 is off")
    stop: tuple[str, ...] = Field((), description="strings that end the answer; matched text is trimmed")
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="ids that end the answer, besides eos"
    )
    ignore_eos: bool = Field(False, description="go on after the end-of-sequence token")

    @model_validator(mode="after")
    def _min_fits_max(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens ({self.max_new_tokens})"
            )
        return self

    @model_validator(mode="after")
    def _stop_strings_are_texts(self) -> Self:
        if "" in self.stop:
            raise ValueError("stop must not hold an empty string, which would end every answer at once; remove it")
        return self

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """A validated copy with ``changes`` applied; never shared between concurrent calls."""
        return type(self).model_validate({**self.model_dump(), **changes})

    @property
    def is_greedy(self) -> bool:
        """True when every token is the most likely one."""
        return self.greedy or self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One generation request.

    Attributes:
        input_ids: prompt token ids, at least one.
        gconfig: sampling parameters (``n_samples`` is ignored: one request, one answer).
        rid: request id, unique within the run; empty lets the engine choose.
        session_id: conversation this request belongs to; its requests prefer one server (prefix cache).
        group_id: prompt group; siblings prefer one server.
        seed: 64-bit sampling seed; None lets the engine derive one from the episode.
    """

    input_ids: Sequence[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = ""
    session_id: str | None = None
    group_id: str | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResponse:
    """One finished answer, stitched from all of its segments.

    ``output_tokens``, ``output_logprobs`` and ``output_versions`` have equal length T. Log-probs are natural
    logarithms under the distribution that was sampled from, in float32; versions name the weights that
    wrote each token. ``latency`` and ``ttft`` are seconds.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    latency: float = 0.0
    ttft: float = 0.0
    interruptions: int = 0
    server: str = ""

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)
