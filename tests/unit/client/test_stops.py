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


def test_the_match_that_is_complete_first_ends_the_answer() -> None:
    """Uncut, the server would have stopped after "ab": that "abEND" follows cannot matter."""
    assert stop_cut(_ids("a", "b", "E", "ND"), ["abEND", "b"], decode) == 1
    assert stop_cut(_ids("a", "b", "E", "ND"), ["abEND", "ND"], decode) == 0


STOPS = ["END", "ab", "bEN"]


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=12), st.integers(0, 6))
def test_agrees_with_a_search_token_by_token(ids: list[int], min_tokens: int) -> None:
    """Reference: what a server sees that looks at the text after every token."""
    expected = None
    for count in range(1, len(ids) + 1):
        text, before = decode(ids[:count]), len(decode(ids[: max(min_tokens - 1, 0)]))
        starts = [
            start
            for stop in STOPS
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if count >= min_tokens and starts:
            expected = next(k for k in range(count + 1) if len(decode(ids[:k])) >= min(starts))
            break
    assert stop_cut(ids, STOPS, decode, min_tokens=min_tokens) == expected
