"""Stop strings across token borders, checked against decoding the whole answer again and again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from areal_like.inference.embedded.stops import StopWatcher


class Pieces:
    """A decoder whose tokens are byte strings, like a byte-level BPE."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        return b"".join(self.pieces[i] for i in token_ids).decode("utf-8", errors="replace")


def stopped_at(decoder: Any, stops: tuple[str, ...], ids: list[int], min_tokens: int = 0) -> int | None:
    """Index of the token that ended the answer."""
    watcher = StopWatcher(decoder, stops)
    return next((i for i, t in enumerate(ids) if watcher.push(t, may_end=i >= min_tokens)), None)


def test_inside_one_token() -> None:
    assert stopped_at(Pieces(b"hello END there"), ("END",), [0]) == 0


def test_across_many_tokens() -> None:
    assert stopped_at(Pieces(b"E", b"N", b"D", b"x"), ("END",), [3, 0, 1, 3, 0, 1, 2, 3]) == 6


def test_any_of_several_strings() -> None:
    assert stopped_at(Pieces(b"a", b"b", b"c"), ("cc", "ab"), [2, 0, 1]) == 2


def test_text_before_the_minimum_does_not_count_but_may_begin_a_match() -> None:
    decoder = Pieces(b"E", b"ND", b"x")
    assert stopped_at(decoder, ("END",), [0, 1, 2, 2, 0, 1], min_tokens=3) == 5
    assert stopped_at(decoder, ("END",), [2, 0, 1], min_tokens=2) == 2


def test_a_string_of_several_bytes_per_character() -> None:
    euro = "€".encode()
    decoder = Pieces(euro[:1], euro[1:2], euro[2:], b"a")
    assert stopped_at(decoder, ("a€",), [3, 0, 1, 2, 3]) == 3


def test_bytes_that_never_become_a_character_do_not_hide_what_follows() -> None:
    decoder = Pieces(b"\xff", b"E", b"ND")
    assert stopped_at(decoder, ("END",), [0] * 20 + [1, 2]) == 21
    assert stopped_at(decoder, ("END",), [1, 0, 2]) is None


def test_special_tokens_are_text(tokenizer: Any) -> None:
    assert stopped_at(tokenizer, ("w3<bos>",), [5, 3, 0, 7]) == 2


def test_a_long_answer_keeps_matching() -> None:
    decoder = Pieces(b"ab", b"c")
    assert stopped_at(decoder, ("bca",), [0] * 3000 + [1, 0]) == 3001


@pytest.mark.parametrize("seed", range(20))
def test_equals_searching_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = ["a", "b", "é", "€"]
    raw = [bytes([b]) for ch in alphabet for b in ch.encode()] + [b"ab", "bé".encode(), "€a".encode()]
    decoder = Pieces(*raw)
    text_ids = []
    for _ in range(60):
        piece = rng.choice([*alphabet, "ab", "bé", "€a"]).encode()
        whole = raw.index(piece) if piece in raw and rng.random() < 0.5 else None
        text_ids += [whole] if whole is not None else [raw.index(bytes([b])) for b in piece]
    stops = tuple("".join(rng.choices(alphabet, k=rng.randint(2, 4))) for _ in range(2))
    expected = next(
        (
            i
            for i in range(len(text_ids))
            if any(s in b"".join(raw[t] for t in text_ids[: i + 1]).decode(errors="ignore") for s in stops)
        ),
        None,
    )
    assert stopped_at(decoder, stops, text_ids) == expected
