"""One answer out of several segments. Pure: what was asked and what came back in, the next segment or the end out.

Budget, minimum and stop strings mean the same whether or not the answer was interrupted (DESIGN.md, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal_like.api.generation import GenerationHyperparameters, ModelRequest, StopReason
from areal_like.api.wire import GenerateOutput, SamplingBody
from areal_like.client.seeds import segment_seed
from areal_like.client.stops import Decode, stop_cut
from areal_like.errors import RequestError, ServerUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What the client knows of the tokenizer: how ids read, and which end a sequence."""

    decode: Decode | None = None
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An answer while it is written. ``stop_reason`` is None until it is finished; the lists have equal length."""

    prompt: tuple[int, ...]
    gconfig: GenerationHyperparameters
    budget: int
    seed: int | None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    interruptions: int = 0
    stop_reason: StopReason | None = None

    @property
    def written(self) -> int:
        return len(self.tokens)

    @property
    def input_ids(self) -> list[int]:
        """What the next segment continues."""
        return [*self.prompt, *self.tokens]

    def sampling(self) -> SamplingBody:
        """Parameters of the next segment: a copy of its own, for what is still to be written."""
        asked = self.gconfig
        left = self.budget - self.written
        return SamplingBody(
            max_new_tokens=left,
            min_new_tokens=min(max(asked.min_new_tokens - self.written, 0), left),
            greedy=asked.greedy,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            frequency_penalty=asked.frequency_penalty,
            stop=asked.stop,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=asked.ignore_eos,
            seed=segment_seed(self.seed, self.written),
        )


def start_draft(request: ModelRequest, context_length: int, rules: TextRules) -> Draft:
    """Check a request and fix its budget: the least of its own limits and the room in the context.

    Raises:
        RequestError: empty prompt, no room for one token, or stop strings without a tokenizer.
    """
    prompt = tuple(request.input_ids)
    asked = request.gconfig
    if not prompt:
        raise RequestError("the prompt is empty: a request needs at least one token id")
    if asked.stop and rules.decode is None:
        raise RequestError(
            f"stop strings {asked.stop} need a tokenizer: give the engine `decode`, or use stop_token_ids"
        )
    limits = {"context_length": context_length}
    if asked.max_tokens is not None:
        limits["max_tokens"] = asked.max_tokens
    narrowest = min(limits, key=lambda name: limits[name])
    room = limits[narrowest] - len(prompt)
    if room < 1:
        raise RequestError(
            f"a prompt of {len(prompt)} tokens leaves no room for an answer within {narrowest} = {limits[narrowest]}; "
            "shorten the prompt or raise the limit"
        )
    return Draft(prompt=prompt, gconfig=asked, budget=min(asked.max_new_tokens, room), seed=request.seed)


def extend_draft(draft: Draft, output: GenerateOutput, rules: TextRules) -> Draft:
    """The draft with a segment appended, finished if the segment, a stop string or the budget ends it.

    Raises:
        ServerUnavailable: the segment breaks the wire contract; nothing of it may be trained.
    """
    fault = _fault(output, draft.budget - draft.written)
    if fault:
        raise ServerUnavailable(f"the server's answer is malformed: {fault}")
    cut = output.stop_reason is StopReason.ABORT
    longer = replace(
        draft,
        tokens=(*draft.tokens, *output.token_ids),
        logprobs=(*draft.logprobs, *output.logprobs),
        versions=(*draft.versions, *expand_spans(output)),
        interruptions=draft.interruptions + cut,
    )
    return _finish(longer, output.stop_reason, rules)


def expand_spans(output: GenerateOutput) -> list[int]:
    """One version per token."""
    return [span.version for span in output.spans for _ in range(span.start, span.end)]


def _finish(draft: Draft, reported: StopReason, rules: TextRules) -> Draft:
    asked = draft.gconfig
    if asked.stop and rules.decode is not None:
        kept = stop_cut(draft.tokens, asked.stop, rules.decode, min_tokens=asked.min_new_tokens)
        if kept is not None:
            return _trimmed(draft, kept)
    if reported is not StopReason.ABORT:
        return replace(draft, stop_reason=reported)
    if draft.written >= max(asked.min_new_tokens, 1) and draft.tokens[-1] in _ending_ids(asked, rules):
        return replace(draft, stop_reason=StopReason.STOP)
    if draft.written >= draft.budget:
        return replace(draft, stop_reason=StopReason.LENGTH)
    return draft


def _trimmed(draft: Draft, kept: int) -> Draft:
    return replace(
        draft,
        tokens=draft.tokens[:kept],
        logprobs=draft.logprobs[:kept],
        versions=draft.versions[:kept],
        stop_reason=StopReason.STOP,
    )


def _ending_ids(asked: GenerationHyperparameters, rules: TextRules) -> frozenset[int]:
    return frozenset(asked.stop_token_ids) | (frozenset() if asked.ignore_eos else rules.eos_token_ids)


def _fault(output: GenerateOutput, budget: int) -> str | None:
    """How a segment breaks the wire contract, or None."""
    count = len(output.token_ids)
    if len(output.logprobs) != count:
        return f"{count} tokens but {len(output.logprobs)} log-probs"
    if count > budget:
        return f"{count} tokens although {budget} were asked for"
    if not all(map(math.isfinite, output.logprobs)):
        return "a log-prob is not finite"
    if not _covers(output, count):
        return f"version spans {[(s.start, s.end) for s in output.spans]} do not cover {count} tokens"
    if count == 0 and output.stop_reason is StopReason.LENGTH:
        return "it ended by length without a token"
    return None


def _covers(output: GenerateOutput, count: int) -> bool:
    ends: Sequence[int] = [0, *(span.end for span in output.spans)]
    starts = [span.start for span in output.spans]
    return starts == list(ends[:-1]) and ends[-1] == count and all(s.start < s.end for s in output.spans)
