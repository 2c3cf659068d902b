"""Token ids in, token ids out with vLLM, through our own path in its API server (``vllm_plugin/token_route.py``).

What vLLM would do silently, and what is done about it here (facts measured on 0.32):

* it ignores fields that it does not know: our path refuses them;
* it fills the context where ``max_tokens`` is missing: it is always sent, and never beyond the context (the client's);
* it clamps temperatures below 0.01 up: refused;
* a log-prob may be no number: refused as malformed, never trained.
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
from areal_like.inference.token_path import PATH

#: the name that every server of ours serves its model by
MODEL_NAME = "policy"
#: vLLM samples with this temperature where a lower one is asked for
LEAST_TEMPERATURE = 0.01
#: seeds are signed 64-bit numbers in vLLM
_SEED_MASK = 2**63 - 1
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}


class _Span(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str
    start: int
    end: int


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    token_ids: list[int]
    logprobs: list[float | None]
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class VllmDialect:
    """vLLM >= 0.32: spans of versions come with the answer."""

    def __init__(self, epoch: ServerEpoch) -> None:
        self._epoch = epoch

    def closed(self) -> str:
        return ""

    def generate(self, body: GenerateBody) -> HttpCall:
        return _call(body, self._epoch)

    def read(self, body: GenerateBody, content: bytes) -> Segment:
        answer = _answer(content)
        return _segment(answer, [_span(span) for span in answer.weight_versions or ()])

    def abort(self, rid: str) -> HttpCall:
        return _abort(rid)


class CutDialect:
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
        return _call(body, self._epoch)

    def read(self, body: GenerateBody, content: bytes) -> Segment:
        posted = self._epoch.posted.pop(body.rid, None)
        answer = _answer(content)
        cut = answer.finish_reason == "abort"
        if posted is None or not self._epoch.unchanged_since(posted[0], cut=cut):
            raise ServerUnavailable("an update passed while it answered: nobody can tell which version wrote it")
        n = len(answer.token_ids)
        return _segment(answer, [VersionSpan(version=posted[1], start=0, end=n)] if n else [])

    def abort(self, rid: str) -> HttpCall:
        self._epoch.posted.pop(rid, None)
        return _abort(rid)

    def _forget(self) -> None:
        """Requests that failed leave their note behind; the oldest go first."""
        while len(self._epoch.posted) > _MOST_POSTED:
            del self._epoch.posted[next(iter(self._epoch.posted))]


#: requests in flight at one server that are remembered; far above what one serves
_MOST_POSTED = 65_536


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
        "seed": sampling.seed & _SEED_MASK if seeds and sampling.seed is not None else None,
    }


def _call(body: GenerateBody, epoch: ServerEpoch) -> HttpCall:
    content = {
        "request_id": body.rid,
        "token_ids": body.input_ids,
        "sampling_params": sampling_params(body.sampling, seeds=epoch.seeds),
        "cache_salt": epoch.salt(body.rid),
    }
    return HttpCall(path=PATH, content=json.dumps(content, separators=(",", ":")).encode())


def _abort(rid: str) -> HttpCall:
    content = json.dumps({"request_ids": [rid]}, separators=(",", ":"))
    return HttpCall(path="/abort_requests", content=content.encode())


def _answer(content: bytes) -> _Answer:
    try:
        return _Answer.model_validate_json(content)
    except ValidationError as error:
        raise ServerUnavailable(f"the answer breaks our schema: {error}") from error


def _span(span: _Span) -> VersionSpan:
    label = parse_label(span.version)
    if label is None:
        raise ServerUnavailable(
            f"tokens were written under weights labelled {span.version!r}, which no publication of ours has: "
            "the server was restarted or updated by somebody else"
        )
    return VersionSpan(version=label[1], start=span.start, end=span.end)


def _segment(answer: _Answer, spans: Sequence[VersionSpan]) -> Segment:
    reason = _REASONS.get(answer.finish_reason or "")
    if reason is None:
        raise ServerUnavailable(f"it ended with {answer.finish_reason!r}, which is no way for an answer to end")
    logprobs = [value for value in answer.logprobs if value is not None]
    if len(logprobs) < len(answer.logprobs):
        raise ServerUnavailable("a log-prob is minus infinity or no number")
    if len(logprobs) != len(answer.token_ids):
        raise ServerUnavailable(f"{len(answer.token_ids)} tokens came with {len(logprobs)} log-probs")
    output = GenerateOutput(token_ids=answer.token_ids, logprobs=logprobs, spans=list(spans), stop_reason=reason)
    return Segment(output=output)
