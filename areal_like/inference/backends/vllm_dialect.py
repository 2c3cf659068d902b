"""Token in, token out with vLLM: ``/inference/v1/generate`` from 0.32 on, ``/v1/completions`` before.

What vLLM would do silently, and what is done about it here (facts measured on 0.32):

* it ignores fields that it does not know: every field sent is one it has;
* it fills the context where ``max_tokens`` is missing: it is always sent, and never beyond the context (the client's);
* it clamps temperatures below 0.01 up: refused;
* it writes -9999 for a log-prob that is no number: refused as malformed, never trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from areal_like.api.generation import StopReason
from areal_like.api.wire import GenerateBody, GenerateOutput, SamplingBody, VersionSpan
from areal_like.client.dialect import HttpCall, Segment
from areal_like.errors import RequestError, ServerBusy, ServerUnavailable
from areal_like.inference.backends.epoch import ServerEpoch
from areal_like.inference.backends.labels import parse_label

#: the name that every server of ours serves its model by
MODEL_NAME = "policy"
#: vLLM samples with this temperature where a lower one is asked for
LEAST_TEMPERATURE = 0.01
#: what vLLM writes for minus infinity and for "not a number"
_NO_LOGPROB = -9999.0
#: seeds are signed 64-bit numbers in vLLM
_SEED_MASK = 2**63 - 1
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Logprob(_Answer):
    token_id: int
    logprob: float


class _Logprobs(_Answer):
    content: list[_Logprob] | None = None


class _Span(_Answer):
    version: str
    start: int
    end: int


class _Choice(_Answer):
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _GenerateAnswer(_Answer):
    choices: list[_Choice]


class VllmDialect:
    """vLLM >= 0.32: spans of versions come with the answer."""

    def __init__(self, epoch: ServerEpoch) -> None:
        self._epoch = epoch

    def closed(self) -> str:
        return ""

    def generate(self, body: GenerateBody) -> HttpCall:
        content = {
            "request_id": body.rid,
            "token_ids": body.input_ids,
            "sampling_params": sampling_params(body.sampling, seeds=self._epoch.seeds),
            "cache_salt": self._epoch.salt(body.rid),
            "stream": False,
        }
        return HttpCall(path="/inference/v1/generate", content=_json(content))

    def read(self, body: GenerateBody, content: bytes) -> Segment:
        choice = _only_choice(_GenerateAnswer, content)
        tokens = choice.token_ids
        found = [] if choice.logprobs is None else choice.logprobs.content or []
        if [entry.token_id for entry in found] != tokens:
            raise ServerUnavailable(f"{len(tokens)} tokens came with the log-probs of {len(found)} others")
        spans = [_span(span) for span in choice.weight_versions or ()]
        return _segment(tokens, [entry.logprob for entry in found], spans, choice.finish_reason)

    def abort(self, rid: str) -> HttpCall:
        """Under the id it has inside: the bare one answers 200 and ends nothing."""
        return HttpCall(path="/abort_requests", content=_json({"request_ids": [internal_id(rid)]}))


class _CompletionLogprobs(_Answer):
    token_logprobs: list[float | None]


class _CompletionChoice(_Answer):
    token_ids: list[int] | None = None
    logprobs: _CompletionLogprobs | None = None
    finish_reason: str | None = None


class _CompletionAnswer(_Answer):
    choices: list[_CompletionChoice]


class CompletionsDialect:
    """vLLM 0.26 to 0.31: no spans, so an answer must lie between two updates; updates abort what runs.

    An answer that was not aborted although an update passed could be of either version: it is refused and written
    again, rather than guessed.
    """

    def __init__(self, epoch: ServerEpoch) -> None:
        self._epoch = epoch

    def closed(self) -> str:
        return "an update is under way" if self._epoch.updating else ""

    def generate(self, body: GenerateBody) -> HttpCall:
        if closed := self.closed():
            raise ServerBusy(closed)
        self._epoch.posted[body.rid] = (self._epoch.commits, self._epoch.version)
        self._forget()
        content = {
            **sampling_params(body.sampling, seeds=self._epoch.seeds),
            "model": MODEL_NAME,
            "request_id": body.rid,
            "prompt": body.input_ids,
            "return_token_ids": True,
            "cache_salt": self._epoch.salt(body.rid),
            "stream": False,
        }
        return HttpCall(path="/v1/completions", content=_json(content))

    def read(self, body: GenerateBody, content: bytes) -> Segment:
        posted = self._epoch.posted.pop(body.rid, None)
        choice = _only_choice(_CompletionAnswer, content)
        cut = choice.finish_reason == "abort"
        if posted is None or not self._epoch.unchanged_since(posted[0], cut=cut):
            raise ServerUnavailable("an update passed while it answered: nobody can tell which version wrote it")
        version = posted[1]
        tokens = choice.token_ids or []
        given = [] if choice.logprobs is None else choice.logprobs.token_logprobs
        logprobs = [_NO_LOGPROB if value is None else value for value in given]
        spans = [VersionSpan(version=version, start=0, end=len(tokens))] if tokens else []
        return _segment(tokens, logprobs, spans, choice.finish_reason)

    def abort(self, rid: str) -> HttpCall:
        self._epoch.posted.pop(rid, None)
        return HttpCall(path="/abort_requests", content=_json({"request_ids": [completion_id(rid)]}))

    def _forget(self) -> None:
        """Requests that failed leave their note behind; the oldest go first."""
        while len(self._epoch.posted) > _MOST_POSTED:
            del self._epoch.posted[next(iter(self._epoch.posted))]


#: requests in flight at one server that are remembered; far above what one serves
_MOST_POSTED = 65_536


def internal_id(rid: str) -> str:
    """What ``/inference/v1/generate`` calls a request inside the engine."""
    return f"generate-tokens-{rid}"


def completion_id(rid: str) -> str:
    """What ``/v1/completions`` calls the only prompt of a request inside the engine."""
    return f"cmpl-{rid}-0"


def sampling_params(sampling: SamplingBody, *, seeds: bool) -> dict[str, Any]:
    """vLLM's ``SamplingParams``, every value given: its defaults are not ours.

    Raises:
        RequestError: a temperature that vLLM would change silently.
    """
    greedy = sampling.greedy or sampling.temperature == 0.0
    if not greedy and sampling.temperature < LEAST_TEMPERATURE:
        raise RequestError(
            f"temperature {sampling.temperature:g}: vLLM samples with {LEAST_TEMPERATURE} instead; use 0 (greedy) or "
            f"at least {LEAST_TEMPERATURE}"
        )
    return {
        "n": 1,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
        "seed": sampling.seed & _SEED_MASK if seeds and sampling.seed is not None else None,
    }


def _only_choice(kind: type[Any], content: bytes) -> Any:
    try:
        answer = kind.model_validate_json(content)
    except ValidationError as error:
        raise ServerUnavailable(f"the answer breaks vLLM's schema: {error}") from error
    if len(answer.choices) != 1:
        raise ServerUnavailable(f"asked for one answer, got {len(answer.choices)}")
    return answer.choices[0]


def _span(span: _Span) -> VersionSpan:
    label = parse_label(span.version)
    if label is None:
        raise ServerUnavailable(
            f"tokens were written under weights labelled {span.version!r}, which no publication of ours has: "
            "the server was restarted or updated by somebody else"
        )
    return VersionSpan(version=label[1], start=span.start, end=span.end)


def _segment(
    tokens: list[int], logprobs: list[float], spans: Sequence[VersionSpan], finish_reason: str | None
) -> Segment:
    reason = _REASONS.get(finish_reason or "")
    if reason is None:
        raise ServerUnavailable(f"it ended with {finish_reason!r}, which is no way for an answer to end")
    if any(value <= _NO_LOGPROB for value in logprobs):
        raise ServerUnavailable("a log-prob is minus infinity or no number")
    output = GenerateOutput(token_ids=tokens, logprobs=logprobs, spans=list(spans), stop_reason=reason)
    return Segment(output=output)


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
