"""Checks of a request, and an answer as it grows."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.api.generation import StopReason
from areal_like.api.wire import GenerateAnswer, GenerateOutput, VersionSpan
from areal_like.errors import RequestError
from areal_like.inference.embedded.seeds import sibling_seed


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ([], {}, "at least one token"),
        ([3, 48], {}, r"input_ids\[1\] must lie in \[0, 48\).*got 48"),
        ([-1], {}, r"input_ids\[0\].*got -1"),
        ([3] * 64, {}, "leave room.*at most 63.*got 64"),
        ([3], {"min_new_tokens": 9}, r"min_new_tokens \(9\) must not exceed"),
        ([3], {"stop_token_ids": (48,)}, "stop_token_ids"),
        ([3], {"stop_token_ids": tuple(range(48)), "min_new_tokens": 1}, "bans every token"),
        ([3], {"stop": ("a", "")}, "empty string"),
        ([3], {"seed": 2**64}, "64-bit"),
        ([3], {"n": 5000}, "n must be at most"),
    ],
)
def test_a_request_that_can_never_succeed_says_why(
    make: Any, prompt: list[int], sampling: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        make(prompt, **sampling)


def test_the_budget_is_what_the_context_has_left(make: Any) -> None:
    assert make([3] * 60, max_new_tokens=100).bounds.budget == 4
    assert make([3] * 60, max_new_tokens=2).bounds.budget == 2


def test_one_answer_samples_with_the_seed_itself_and_siblings_with_derived_ones(make: Any) -> None:
    assert make([3], seed=9).answers[0].seed == 9
    assert [a.seed for a in make([3], n=3, seed=9).answers] == [sibling_seed(9, i) for i in range(3)]
    assert make([3]).answers[0].seed == 5  # the server's own


def test_spans_follow_the_versions(make: Any) -> None:
    answer = make([3], max_new_tokens=5).answers[0]
    ended = [answer.write(7, -0.5, version) for version in (2, 2, 3, 5, 5)]
    assert ended == [False] * 4 + [True]
    output = GenerateOutput.model_validate(answer.output())
    assert output.spans == [
        VersionSpan(version=2, start=0, end=2),
        VersionSpan(version=3, start=2, end=3),
        VersionSpan(version=5, start=3, end=5),
    ]
    assert output.stop_reason is StopReason.LENGTH


def test_an_answer_that_was_cut_is_an_abort(make: Any) -> None:
    request = make([3])
    answer = GenerateAnswer.model_validate(request.answer())
    assert answer.outputs[0].stop_reason is StopReason.ABORT
    assert answer.outputs[0].spans == []


def test_eos_ends_an_answer_unless_ignored(make: Any) -> None:
    assert make([3], ignore_eos=False).answers[0].write(1, -1.0, 0)
    assert not make([3]).answers[0].write(1, -1.0, 0)


def test_a_stop_string_is_found_over_tokens(make: Any) -> None:
    answer = make([3], stop=("w4w5",)).answers[0]
    assert [answer.write(t, -1.0, 0) for t in (5, 4, 5)] == [False, False, True]
    assert answer.stop_reason is StopReason.STOP
    assert answer.tokens == [5, 4, 5]
