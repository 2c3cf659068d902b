from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.client.stops import stop_cut

WORDS = ["a", "b", "ab", "END", "E", "ND", " EN", "D.", ""]


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def _ids(*words: str) -> list[int]:
    return [WORDS.index(w) for w in words]


@pytest.mark.parametrize(
    ("words", "stops", "kept"),
    [
        (["a", "b", "END"], ["END"], 2),
        (["a", "END", "b"], ["END"], 1),
        (["END"], ["END"], 0),
        (["a", "E", "ND", "b"], ["END"], 1),
        (["a", " EN", "D.", "b"], ["END"], 2),
        (["a", "b"], ["END"], None),
        (["a", "E"], ["END"], None),
        (["a", "END", "END"], ["END"], 1),
        (["ab", "END"], ["END", "b"], 1),
        (["", "a", "", "END"], ["END"], 2),
        (["a"], [], None),
        ([], ["END"], None),
        (["a"], [""], None),
    ],
)
def test_tokens_before_the_first_match_remain(words: list[str], stops: list[str], kept: int | None) -> None:
    assert stop_cut(_ids(*words), stops, decode) == kept


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, 1), (1, 1), (2, 1), (3, 3), (4, 3), (5, None)])
def test_a_match_complete_before_the_minimum_does_not_count(min_tokens: int, kept: int | None) -> None:
    assert stop_cut(_ids("a", "END", "b", "END"), ["END"], decode, min_tokens=min_tokens) == kept


def test_a_match_that_begins_before_the_minimum_counts_if_it_ends_behind_it() -> None:
    assert stop_cut(_ids("a", "E", "ND"), ["END"], decode, min_tokens=3) == 1
    assert stop_cut(_ids("a", "E", "ND"), ["END"], decode, min_tokens=4) is None


def test_characters_of_several_tokens_are_not_counted_before_they_are_whole() -> None:
    ids = list("grün|".encode())
    assert stop_cut(ids, ["|"], decode_bytes) == 5
    assert stop_cut(ids, ["ü"], decode_bytes) == 2


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=12), st.integers(0, 6))
def test_agrees_with_a_search_token_by_token(ids: list[int], min_tokens: int) -> None:
    """Reference: the earliest match whose last character lies in token number ``min_tokens`` or later."""
    text, ends = decode(ids), [len(decode(ids[: i + 1])) for i in range(len(ids))]
    matches = [
        (start, start + len(stop))
        for stop in ("END", "ab")
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    legal = [start for start, end in matches if next(i for i, e in enumerate(ends) if e >= end) + 1 >= min_tokens]
    expected = None
    if legal:
        expected = next(k for k in range(len(ids) + 1) if len(decode(ids[:k])) >= min(legal))
    assert stop_cut(ids, ["END", "ab"], decode, min_tokens=min_tokens) == expected
