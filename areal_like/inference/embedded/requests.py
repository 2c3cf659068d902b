"""A generation request inside the server: what was asked, checked, and the answers as they grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_like.api.generation import StopReason
from areal_like.api.wire import GenerateBody
from areal_like.errors import RequestError
from areal_like.inference.embedded.seeds import as_uint64, sibling_seed
from areal_like.inference.embedded.stops import Decoder, StopWatcher

#: version before an answer's first token: no weights have it
_NO_VERSION = -(2**62)
#: siblings of one request; more is a mistake, not a group
_MOST_SIBLINGS = 4096
_LARGEST_SEED = 2**64
_SMALLEST_SEED = -(2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a request is checked against. ``decoder`` is None where the model folder has no tokenizer."""

    vocabulary: int
    context_length: int
    eos_ids: frozenset[int]
    decoder: Decoder | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """When the answers of one request end.

    ``budget`` tokens at most; tokens in ``stop_ids`` end an answer; until ``min_tokens`` are written, ``banned`` ids
    (the stop ids in a fixed order) have probability 0 and stop strings are ignored. ``changes_logits`` says that
    something bans or penalises tokens.
    """

    budget: int
    min_tokens: int
    stop_ids: frozenset[int]
    banned: tuple[int, ...]
    changes_logits: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One checked request and its ``n`` answers. ``error`` is set when the server failed it."""

    rid: str
    prompt: tuple[int, ...]
    body: GenerateBody
    bounds: Bounds
    submitted: float
    answers: list[Answer] = field(default_factory=list)
    unfinished: int = 0
    first_token: float | None = None
    finished: float | None = None
    error: str = ""

    @property
    def started(self) -> bool:
        """Some answer has a token: weights have been used for it."""
        return self.first_token is not None

    def answer(self) -> dict[str, Any]:
        """The fields of ``GenerateAnswer``, once every answer has ended.

        Plain values: building three models per answer costs more than encoding them.
        """
        end = self.submitted if self.finished is None else self.finished
        first = end if self.first_token is None else self.first_token
        return {
            "rid": self.rid,
            "outputs": [a.output() for a in self.answers],
            "seconds_to_first_token": first - self.submitted,
            "seconds": end - self.submitted,
        }


class Answer:
    """One answer as it grows. Every token has the version that wrote it: ``marks`` say where the version changes."""

    __slots__ = ("bounds", "logprobs", "marks", "request", "seed", "stop_reason", "tokens", "version", "watcher")

    def __init__(self, request: Request, seed: int, watcher: StopWatcher | None) -> None:
        self.request = request
        self.bounds = request.bounds
        self.seed = seed
        self.watcher = watcher
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.marks: list[tuple[int, int]] = []
        self.version = _NO_VERSION
        self.stop_reason: StopReason | None = None

    @property
    def longest(self) -> int:
        """Most tokens that prompt and answer can have together."""
        return len(self.request.prompt) + self.bounds.budget

    @property
    def cached_ids(self) -> list[int]:
        """Ids whose keys and values the cache holds: all but the last token, which is the next input."""
        return [*self.request.prompt, *self.tokens[:-1]]

    def write(self, token: int, logprob: float, version: int) -> bool:
        """Append one token written under ``version``; True if it ends the answer."""
        written = len(self.tokens)
        if version != self.version:
            self.marks.append((version, written))
            self.version = version
        self.tokens.append(token)
        self.logprobs.append(logprob)
        bounds = self.bounds
        if token in bounds.stop_ids or (
            self.watcher is not None and self.watcher.push(token, may_end=written >= bounds.min_tokens)
        ):
            self.stop_reason = StopReason.STOP
            return True
        if written + 1 >= bounds.budget:
            self.stop_reason = StopReason.LENGTH
            return True
        return False

    def output(self) -> dict[str, Any]:
        """The fields of ``GenerateOutput``."""
        ends = [start for _, start in self.marks[1:]] + [len(self.tokens)]
        return {
            "token_ids": self.tokens,
            "logprobs": self.logprobs,
            "spans": [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(self.marks, ends, strict=False)
            ],
            "stop_reason": (self.stop_reason or StopReason.ABORT).value,
        }


def make_request(body: GenerateBody, limits: RequestLimits, *, default_seed: Callable[[], int], now: float) -> Request:
    """Check ``body`` and make it a request.

    Raises:
        RequestError: it can never succeed on this server (HTTP 400).
    """
    _check_prompt(body, limits)
    bounds = _bounds(body, limits)
    seed = body.sampling.seed
    if seed is None:
        seed = default_seed()
    elif not _SMALLEST_SEED <= seed < _LARGEST_SEED:
        raise RequestError(f"sampling.seed must be a 64-bit integer; got {seed}")
    if body.n > _MOST_SIBLINGS:
        raise RequestError(f"n must be at most {_MOST_SIBLINGS}; got {body.n}; split the group over several requests")
    if body.sampling.stop:
        _check_stop_strings(body.sampling.stop, limits)
    request = Request(
        rid=body.rid, prompt=tuple(body.input_ids), body=body, bounds=bounds, submitted=now, unfinished=body.n
    )
    seeds = [as_uint64(seed)] if body.n == 1 else [sibling_seed(seed, i) for i in range(body.n)]
    request.answers = [Answer(request, s, _watcher(body, limits)) for s in seeds]
    return request


def _watcher(body: GenerateBody, limits: RequestLimits) -> StopWatcher | None:
    if not body.sampling.stop or limits.decoder is None:
        return None
    return StopWatcher(limits.decoder, body.sampling.stop)


def _check_prompt(body: GenerateBody, limits: RequestLimits) -> None:
    ids = body.input_ids
    if not ids:
        raise RequestError("input_ids must hold at least one token id; got an empty list")
    if min(ids) < 0 or max(ids) >= limits.vocabulary:
        position = next(i for i, token in enumerate(ids) if not 0 <= token < limits.vocabulary)
        raise RequestError(
            f"input_ids[{position}] must lie in [0, {limits.vocabulary}), the model's vocabulary; got {ids[position]}"
        )
    if len(ids) >= limits.context_length:
        raise RequestError(
            f"input_ids must leave room for an answer: at most {limits.context_length - 1} of the context of "
            f"{limits.context_length} tokens; got {len(ids)}; shorten the prompt or raise rollout.context_length"
        )


def _bounds(body: GenerateBody, limits: RequestLimits) -> Bounds:
    sampling = body.sampling
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise RequestError(
            f"sampling.min_new_tokens ({sampling.min_new_tokens}) must not exceed "
            f"sampling.max_new_tokens ({sampling.max_new_tokens})"
        )
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocabulary)
    stop_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= limits.eos_ids
    if sampling.min_new_tokens and len(stop_ids) >= limits.vocabulary:
        raise RequestError("sampling.min_new_tokens bans every token: stop_token_ids cover the whole vocabulary")
    banned = tuple(sorted(stop_ids)) if sampling.min_new_tokens else ()
    return Bounds(
        budget=min(sampling.max_new_tokens, limits.context_length - len(body.input_ids)),
        min_tokens=sampling.min_new_tokens,
        stop_ids=stop_ids,
        banned=banned,
        changes_logits=bool(banned) or sampling.frequency_penalty != 0.0,
    )


def _check_ids(name: str, ids: Sequence[int], vocabulary: int) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise RequestError(f"{name} must lie in [0, {vocabulary}), the model's vocabulary; got {token}")


def _check_stop_strings(stops: Sequence[str], limits: RequestLimits) -> None:
    if any(not s for s in stops):
        raise RequestError("sampling.stop must not hold an empty string: it would end every answer at once")
    if limits.decoder is None:
        raise RequestError("sampling.stop needs a tokenizer, and the model folder has none; use stop_token_ids")
