from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.api.generation import GenerationHyperparameters, ModelRequest, StopReason
from areal_like.api.wire import GenerateOutput, SamplingBody, VersionSpan
from areal_like.client.seeds import mix
from areal_like.client.stitching import Draft, TextRules, expand_spans, extend_draft, start_draft
from areal_like.errors import RequestError, ServerUnavailable


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


RULES = TextRules(decode=decode, eos_token_ids=frozenset({0}))


def _start(prompt: Sequence[int] = (5, 6), context: int = 1000, **gconfig: object) -> Draft:
    asked = GenerationHyperparameters.model_validate({"max_new_tokens": 8, **gconfig})
    return start_draft(ModelRequest(input_ids=prompt, gconfig=asked, seed=3), context, RULES)


def _segment(text: str, reason: StopReason = StopReason.ABORT, version: int = 0) -> GenerateOutput:
    ids = list(map(ord, text))
    spans = [VersionSpan(version=version, start=0, end=len(ids))] if ids else []
    return GenerateOutput(token_ids=ids, logprobs=[-0.5] * len(ids), spans=spans, stop_reason=reason)


@pytest.mark.parametrize(
    ("gconfig", "context", "budget"),
    [
        ({}, 1000, 8),
        ({}, 7, 5),
        ({"max_tokens": 6}, 1000, 4),
        ({"max_tokens": 6}, 5, 3),
        ({"max_tokens": 100}, 1000, 8),
    ],
)
def test_budget_is_the_least_of_all_limits(gconfig: dict[str, int], context: int, budget: int) -> None:
    assert _start(context=context, **gconfig).budget == budget


def test_a_prompt_without_room_is_an_error_of_the_request() -> None:
    with pytest.raises(RequestError, match=r"2 tokens leaves no room .* context_length = 2"):
        _start(context=2)
    with pytest.raises(RequestError, match="max_tokens = 1"):
        _start(max_tokens=1)
    with pytest.raises(RequestError, match="prompt is empty"):
        _start(prompt=())


def test_stop_strings_need_a_tokenizer() -> None:
    request = ModelRequest(input_ids=[1], gconfig=GenerationHyperparameters(stop=("x",)))
    with pytest.raises(RequestError, match="stop_token_ids"):
        start_draft(request, 10, TextRules())


def test_what_was_asked_is_copied_for_each_segment() -> None:
    asked = {
        "min_new_tokens": 3,
        "greedy": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "stop": ("zz",),
        "stop_token_ids": (9,),
        "ignore_eos": True,
    }
    draft = _start(**asked)
    first = draft.sampling()
    assert first.model_dump() == {**asked, "max_new_tokens": 8, "seed": 3}
    second = extend_draft(draft, _segment("ab"), RULES).sampling()
    assert second.model_dump() == {**asked, "max_new_tokens": 6, "min_new_tokens": 1, "seed": mix(3, 2)}


def test_minimum_never_exceeds_what_the_context_leaves() -> None:
    assert _start(context=4, min_new_tokens=8).sampling().min_new_tokens == 2


def test_segments_join_with_one_version_per_token() -> None:
    draft = extend_draft(_start(), _segment("abc", version=4), RULES)
    assert draft.stop_reason is None
    assert draft.input_ids == [5, 6, *map(ord, "abc")]
    whole = extend_draft(draft, _segment("de", StopReason.STOP, version=5), RULES)
    assert (decode(whole.tokens), whole.versions) == ("abcde", (4, 4, 4, 5, 5))
    assert len(whole.logprobs) == 5
    assert (whole.stop_reason, whole.interruptions) == (StopReason.STOP, 1)


def test_spans_expand() -> None:
    spans = [VersionSpan(version=7, start=0, end=1), VersionSpan(version=8, start=1, end=3)]
    segment = GenerateOutput(token_ids=[1, 2, 3], logprobs=[0.0] * 3, spans=spans, stop_reason=StopReason.STOP)
    assert expand_spans(segment) == [7, 8, 8]


def test_a_budget_reached_at_the_cut_ends_the_answer() -> None:
    draft = extend_draft(_start(), _segment("abcdefgh"), RULES)
    assert draft.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(("ending", "gconfig"), [(0, {}), (9, {"stop_token_ids": (9,)})])
def test_a_stop_token_at_the_cut_ends_the_answer(ending: int, gconfig: dict[str, object]) -> None:
    draft = extend_draft(_start(**gconfig), _segment("ab" + chr(ending)), RULES)
    assert draft.stop_reason is StopReason.STOP
    assert draft.tokens[-1] == ending


def test_a_stop_token_at_the_cut_counts_only_if_it_may_end_the_answer() -> None:
    assert extend_draft(_start(ignore_eos=True), _segment("a\0"), RULES).stop_reason is None
    assert extend_draft(_start(min_new_tokens=3), _segment("a\0"), RULES).stop_reason is None


def test_a_stop_string_across_the_cut_is_found_and_trimmed() -> None:
    draft = extend_draft(_start(stop=("END",)), _segment("abE"), RULES)
    assert draft.stop_reason is None
    whole = extend_draft(draft, _segment("NDxyz", StopReason.LENGTH), RULES)
    assert (decode(whole.tokens), whole.stop_reason) == ("ab", StopReason.STOP)
    assert len(whole.tokens) == len(whole.logprobs) == len(whole.versions)


def test_a_stop_string_complete_at_the_cut_ends_the_answer() -> None:
    draft = extend_draft(_start(stop=("END",)), _segment("abEND"), RULES)
    assert (decode(draft.tokens), draft.stop_reason) == ("ab", StopReason.STOP)


def test_the_minimum_holds_for_stop_strings_across_the_cut() -> None:
    draft = extend_draft(_start(stop=("E",), min_new_tokens=4), _segment("aEb"), RULES)
    assert draft.stop_reason is None
    whole = extend_draft(draft, _segment("cEd", StopReason.LENGTH), RULES)
    assert (decode(whole.tokens), whole.stop_reason) == ("aEbc", StopReason.STOP)


def test_an_empty_segment_changes_nothing_but_the_count() -> None:
    draft = extend_draft(_start(), _segment(""), RULES)
    assert (draft.written, draft.interruptions, draft.stop_reason) == (0, 1, None)


def test_an_answer_may_stop_before_its_first_token() -> None:
    assert extend_draft(_start(), _segment("", StopReason.STOP), RULES).stop_reason is StopReason.STOP


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"logprobs": [0.0]}, "2 tokens but 1 log-probs"),
        ({"logprobs": [0.0, float("nan")]}, "not finite"),
        ({"logprobs": [0.0, float("-inf")]}, "not finite"),
        ({"spans": []}, "do not cover"),
        ({"spans": [VersionSpan(version=1, start=0, end=1)]}, "do not cover"),
        ({"spans": [VersionSpan(version=1, start=1, end=2)]}, "do not cover"),
        ({"spans": [VersionSpan(version=1, start=0, end=0), VersionSpan(version=1, start=0, end=2)]}, "do not cover"),
        ({"token_ids": [1] * 9, "logprobs": [0.0] * 9}, "9 tokens although 8 were asked for"),
        ({"token_ids": [], "logprobs": [], "spans": [], "stop_reason": StopReason.LENGTH}, "without a token"),
    ],
)
def test_a_malformed_segment_is_never_appended(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ServerUnavailable, match=complaint):
        extend_draft(_start(), _segment("ab").model_copy(update=change), RULES)


def _serve(stream: str, draft: Draft, limit: int) -> GenerateOutput:
    """A server that writes ``stream`` whatever the seed, looks at its own segment only, and is cut after ``limit``."""
    asked = draft.sampling()
    written = ""
    for token in stream[draft.written : draft.written + asked.max_new_tokens]:
        if len(written) == limit:
            return _segment(written, StopReason.ABORT, version=draft.interruptions)
        written += token
        may_end = len(written) >= asked.min_new_tokens
        if may_end and (token == chr(0) or any(stop in _news(written, stop, asked) for stop in asked.stop)):
            return _segment(written, StopReason.STOP, version=draft.interruptions)
    return _segment(written, StopReason.LENGTH, version=draft.interruptions)


def _news(written: str, stop: str, asked: SamplingBody) -> str:
    """The end of the text in which a match counts: it must not have been complete before the minimum."""
    return written[max(0, asked.min_new_tokens - len(stop)) :]


@given(
    stream=st.text(st.sampled_from("abE\0"), min_size=12, max_size=12),
    cuts=st.lists(st.integers(0, 5), max_size=8),
    minimum=st.integers(0, 6),
    budget=st.integers(6, 12),
)
def test_cuts_do_not_change_the_answer(stream: str, cuts: list[int], minimum: int, budget: int) -> None:
    """However an answer is cut, it has the tokens and the reason that it would have had in one piece."""
    start = _start(max_new_tokens=budget, min_new_tokens=minimum, stop=("ab", "bE", "Ea", "abE"))
    whole = extend_draft(start, _serve(stream, start, limit=100), RULES)
    draft = start
    for limit in cuts:
        if draft.stop_reason is None:
            draft = extend_draft(draft, _serve(stream, draft, limit), RULES)
    if draft.stop_reason is None:
        draft = extend_draft(draft, _serve(stream, draft, limit=100), RULES)
    assert (draft.tokens, draft.stop_reason) == (whole.tokens, whole.stop_reason)
    assert len(draft.tokens) == len(draft.logprobs) == len(draft.versions)
