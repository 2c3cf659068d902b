"""HTTP bodies between our client and the embedded inference server. Ids in, ids out; JSON.

Every call carries ``Authorization: Bearer <token>``. An error answer is ``{"error": {"type", "message"}}`` with
status 400 (the request is wrong: final), 401 (token), 404, 409 (older incarnation or version), 503 (not now).

| method and path        | body                | answer            |
| ---------------------- | ------------------- | ----------------- |
| POST /generate         | GenerateBody        | GenerateAnswer    |
| POST /abort            | AbortBody           | {"aborted": int}  |
| POST /pause            | PauseBody           | PauseAnswer       |
| POST /resume           | ControlBody         | PauseAnswer       |
| POST /claim            | ClaimBody           | HealthAnswer      |
| POST /weights/stage    | StageBody           | StageAnswer       |
| POST /weights/commit   | CommitBody          | CommitReceipt     |
| GET  /weights/digest   |                     | DigestAnswer      |
| GET  /health           |                     | HealthAnswer      |
| GET  /metrics          |                     | {name: number}    |
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from areal_like.api.generation import StopReason
from areal_like.api.weights import InterruptMode, Manifest


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SamplingBody(_Body):
    """Sampling parameters of one request; budget and minimum count only the tokens still to be written."""

    max_new_tokens: int = Field(ge=1)
    min_new_tokens: int = Field(0, ge=0)
    greedy: bool = False
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


class GenerateBody(_Body):
    """``n`` siblings of one prompt in one request; sibling i samples with a seed derived from (seed, i).

    ``n`` = 1 samples with ``sampling.seed`` itself, token t with a counter-based function of (seed, t).
    """

    rid: str
    input_ids: list[int]
    n: int = Field(1, ge=1)
    sampling: SamplingBody


class VersionSpan(_Body):
    """Tokens [start, end) of one answer were written under ``version``."""

    version: int
    start: int
    end: int


class GenerateOutput(_Body):
    """One answer. ``token_ids`` and ``logprobs`` have equal length and hold the stop token if one ended it.

    A matched stop string ends generation; its tokens stay in ``token_ids`` (the client trims).
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    stop_reason: StopReason


class GenerateAnswer(_Body):
    rid: str
    outputs: list[GenerateOutput]
    seconds_to_first_token: float
    seconds: float


class AbortBody(_Body):
    """Empty ``rids`` aborts everything in flight. Aborted requests are answered with what they have."""

    rids: list[str] = Field(default_factory=list)


class ControlBody(_Body):
    """A control call; the server refuses (409) an incarnation older than the newest it has seen."""

    incarnation: int


class ClaimBody(ControlBody):
    """A run joins under a new ``incarnation``: granted to one run, and to that one again; else refused (409)."""

    run_id: str = Field(min_length=1)


class PauseBody(ControlBody):
    """``keep``/``recompute``: requests freeze between two tokens; ``drain``: returns once none is in flight.

    New requests are queued while paused. Idempotent.
    """

    mode: InterruptMode = InterruptMode.KEEP


class PauseAnswer(_Body):
    paused: bool
    in_flight: int
    version: int


class StageBody(_Body):
    """Copy what ``manifest`` describes beside the live weights, verifying it; generation goes on."""

    manifest: Manifest


class StageAnswer(_Body):
    version: int
    bytes: int
    seconds: float


class CommitBody(ControlBody):
    """Swap the staged ``version`` in: pause by ``mode``, apply, set the version, resume, all in one call."""

    version: int
    mode: InterruptMode = InterruptMode.KEEP


class DigestAnswer(_Body):
    version: int
    digest: str


class HealthAnswer(_Body):
    status: Literal["ok", "failed"]
    version: int
    incarnation: int
    paused: bool
    in_flight: int
    queued: int
    context_length: int
    reason: str = ""
