"""Token in, token out with SGLang's ``/generate``.

What SGLang would do, and what is done about it here (read and measured on 0.5.23):

* an id outside the vocabulary ends the whole server: it is refused here;
* its log-probs have the temperature in them, but neither top-p, top-k nor min-p: where one of those is asked for, the
  "sampling mask" is, too, with which log-probs of the distribution really sampled from come;
* fields that it does not know are ignored: every field sent is one it has;
* stop strings end an answer before its minimum of tokens, and ``ignore_eos`` makes it ignore stop ids as well: see
  :func:`_stops`;
* where it samples by seeds, requests without one all get 42, and min-p ends the server: see :func:`_seed`;
* the text may lack what the ids have: only ids are read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from areal_like.api.generation import StopReason
from areal_like.api.wire import GenerateBody, GenerateOutput, SamplingBody, VersionSpan
from areal_like.client.dialect import HttpCall, Segment
from areal_like.errors import RequestError, ServerBusy, ServerUnavailable
from areal_like.inference.backends.labels import parse_label
from areal_like.inference.backends.sglang_server import ServerFacts, ServerState

#: SGLang takes lower temperatures for greedy
LEAST_TEMPERATURE = 1e-6
#: candidates below the server's limit, for ties at the edge of a filter
_TIES = 96
#: seeds are signed 64-bit numbers
_SEED_MASK = 2**63 - 1
#: added to the logit of an id that may not be written
_BANNED = -1e9
#: stop strings that one request may have
_MOST_STOPS = 32
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Finish(_Answer):
    """``matched``: the stop id or string that ended it."""

    type: str
    matched: int | str | None = None


class _Span(_Answer):
    version: str
    start: int
    end: int


class _Meta(_Answer):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    output_token_sampling_logprobs: list[float | None] | None = None
    weight_versions: list[_Span] | None = None


class _GenerateAnswer(_Answer):
    output_ids: list[int] = []
    meta_info: _Meta


class SglangDialect:
    """One server's language; what it needs to know of the server comes with ``state``."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def closed(self) -> str:
        if self._state.facts is None:
            return "it was not asked yet what it is"
        return "an update waits until it has answered what it has" if self._state.closed else ""

    def generate(self, body: GenerateBody) -> HttpCall:
        facts, closed = self._state.facts, self.closed()
        if facts is None or closed:
            raise ServerBusy(closed)
        _check_ids(body.input_ids, facts)
        filtered = _filtered(body.sampling)
        params = {**sampling_params(body.sampling, facts), "sampling_seed": _seed(body, facts)}
        content = {
            "rid": body.rid,
            "input_ids": body.input_ids,
            "sampling_params": params,
            "return_logprob": True,
            "cache_salt": self._state.epoch.salt(body.rid),
            "stream": False,
            **({"return_sampling_mask": True} if filtered else {}),
        }
        return HttpCall(path="/generate", content=json.dumps(content, separators=(",", ":")).encode())

    def read(self, body: GenerateBody, content: bytes) -> Segment:
        try:
            answer = _GenerateAnswer.model_validate_json(content)
        except ValidationError as error:
            raise ServerUnavailable(f"the answer breaks SGLang's schema: {error}") from error
        meta, tokens = answer.meta_info, answer.output_ids
        if [token for _, token, _ in meta.output_token_logprobs] != tokens:
            raise ServerUnavailable(
                f"{len(tokens)} tokens came with the log-probs of {len(meta.output_token_logprobs)} others"
            )
        logprobs: Sequence[float | None] = [value for value, _, _ in meta.output_token_logprobs]
        if _filtered(body.sampling):
            logprobs = _of_filtered(meta, len(tokens))
        reason = _reason(meta.finish_reason, body.sampling, len(tokens))
        spans = [self._span(span) for span in meta.weight_versions or () if span.start < span.end]
        output = GenerateOutput(token_ids=tokens, logprobs=_finite(logprobs), spans=spans, stop_reason=reason)
        return Segment(output=output)

    def abort(self, rid: str) -> HttpCall:
        return HttpCall(path="/abort_request", content=json.dumps({"rid": rid}).encode())

    def _span(self, span: _Span) -> VersionSpan:
        label = parse_label(span.version)
        if label is not None:
            return VersionSpan(version=label[1], start=span.start, end=span.end)
        if self._state.as_loaded:
            return VersionSpan(version=self._state.epoch.version, start=span.start, end=span.end)
        raise ServerUnavailable(
            f"tokens were written under weights labelled {span.version!r}, which no publication of ours has: "
            "the server was restarted or updated by somebody else"
        )


def sampling_params(sampling: SamplingBody, facts: ServerFacts) -> dict[str, Any]:
    """SGLang's ``sampling_params`` but the seed, every value given: its defaults are not ours.

    Raises:
        RequestError: it cannot do that, or not tell the log-probs of it.
    """
    greedy = _greedy(sampling)
    if not greedy and sampling.temperature < LEAST_TEMPERATURE:
        raise RequestError(
            f"temperature {sampling.temperature:g}: SGLang takes it for greedy; use 0 or at least {LEAST_TEMPERATURE:g}"
        )
    if len(sampling.stop) > _MOST_STOPS:
        raise RequestError(f"{len(sampling.stop)} stop strings: SGLang takes at most {_MOST_STOPS}")
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": 0,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": -1 if greedy else _top_k(sampling, facts),
        "min_p": 0.0 if greedy else sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": None,
        "ignore_eos": False,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        **_stops(sampling),
    }


def _seed(body: GenerateBody, facts: ServerFacts) -> int | None:
    """The request's own; where the server samples by seeds, a request that has none gets one of its name.

    Raises:
        RequestError: it samples by seeds, and min-p was asked for.
    """
    if body.sampling.seed is not None:
        seed = body.sampling.seed
    elif facts.deterministic:
        seed = int.from_bytes(hashlib.sha256(body.rid.encode()).digest()[:8], "big")
    else:
        return None
    if facts.deterministic and _filtered(body.sampling) and body.sampling.min_p > 0.0:
        raise RequestError("min_p: a server with sglang.enable_deterministic_inference cannot sample with it")
    return seed & _SEED_MASK


def _top_k(sampling: SamplingBody, facts: ServerFacts) -> int:
    """-1 for all. Log-probs of a filtered distribution can be told for a limited number of candidates only."""
    if not _filtered(sampling):
        return -1
    most = facts.filtered_tokens - _TIES
    if most < 1:
        raise RequestError("top_p, top_k and min_p: this server cannot tell log-probs of them; SGLang >= 0.5.21 can")
    if sampling.top_k > most:
        raise RequestError(
            f"top_k {sampling.top_k}: the server tells log-probs of at most {most} candidates; ask for fewer or raise "
            "its --sampling-mask-max-tokens"
        )
    return sampling.top_k or most


def _reason(finish: _Finish | None, sampling: SamplingBody, count: int) -> StopReason:
    """How it ended; ABORT for what only SGLang takes for an end, so that the client goes on from there."""
    reason = _REASONS.get(finish.type if finish else "")
    if finish is None or reason is None:
        raise ServerUnavailable(f"it ended with {finish!r}, which is no way for an answer to end")
    ignored_eos = (
        reason is StopReason.STOP
        and isinstance(finish.matched, int)
        and sampling.ignore_eos
        and finish.matched not in sampling.stop_token_ids
    )
    first_part = reason is StopReason.LENGTH and count < sampling.max_new_tokens
    return StopReason.ABORT if ignored_eos or first_part else reason


def _stops(sampling: SamplingBody) -> dict[str, Any]:
    """What ends an answer, and what may not before the minimum.

    SGLang's minimum does not hold back stop strings. Under ``ignore_eos`` it ignores stop ids as well, and its minimum
    bans the end token all the same. So a minimum is a first part of its own, without stop strings and, where the end
    token is ignored, with the stop ids banned by hand; and stop ids beside an ignored end token are asked for without
    ``ignore_eos``, ends by the end token counting as cuts.
    """
    least, ids = sampling.min_new_tokens, list(sampling.stop_token_ids)
    first_part = least > 0 and bool(sampling.stop or (sampling.ignore_eos and ids))
    asked: dict[str, Any] = {"stop": list(sampling.stop) or None}
    if first_part:
        asked = {"stop": None, "max_new_tokens": min(least, sampling.max_new_tokens)}
    if not sampling.ignore_eos:
        return {**asked, "min_new_tokens": least, "stop_token_ids": ids or None}
    if first_part or not ids:
        return {**asked, "ignore_eos": True, "logit_bias": {str(token): _BANNED for token in ids} if ids else None}
    return {**asked, "stop_token_ids": ids}


def _greedy(sampling: SamplingBody) -> bool:
    return sampling.greedy or sampling.temperature == 0.0


def _filtered(sampling: SamplingBody) -> bool:
    return not _greedy(sampling) and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0)


def _check_ids(ids: Sequence[int], facts: ServerFacts) -> None:
    wrong = next((token for token in ids if not 0 <= token < facts.vocabulary), None)
    if wrong is not None:
        raise RequestError(f"token id {wrong} is outside the model's vocabulary of {facts.vocabulary}")


def _of_filtered(meta: _Meta, count: int) -> list[float | None]:
    found = meta.output_token_sampling_logprobs
    if found is None or len(found) != count:
        raise ServerUnavailable(f"{count} tokens came with {len(found or ())} log-probs of the filtered distribution")
    return found


def _finite(logprobs: Sequence[float | None]) -> list[float]:
    found = [value for value in logprobs if value is not None and math.isfinite(value)]
    if len(found) != len(logprobs):
        raise ServerUnavailable("a log-prob is missing, infinite or no number")
    return found
