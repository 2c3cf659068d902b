"""Stop strings over the joined text of an answer. Pure: ids and a decoder in, a cut out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def stop_cut(tokens: Sequence[int], stops: Sequence[str], decode: Decode, *, min_tokens: int = 0) -> int | None:
    """How many tokens remain of an answer that contains a stop string; None if it contains none.

    The first match decides (the longest stop string of those that begin there). Tokens that lie in or behind it go;
    the token in which it begins stays if it also carries text before it, since ids are trained as they were
    written. A match that is complete before ``min_tokens`` tokens are written does not count.
    """
    if not tokens or not stops:
        return None
    text = decode(tokens)
    if not any(stop in text for stop in stops):
        return None
    floor = _text_length(tokens, min_tokens - 1, text, decode) if min_tokens > 1 else 0
    start = _first_match(text, stops, floor)
    if start is None:
        return None
    return _tokens_covering(tokens, start, text, decode)


def _first_match(text: str, stops: Sequence[str], floor: int) -> int | None:
    """Where the first match that ends behind character ``floor`` begins."""
    starts: list[int] = []
    for stop in stops:
        start = text.find(stop, max(0, floor + 1 - len(stop)))
        if stop and start >= 0:
            starts.append(start)
    return min(starts, default=None)


def _tokens_covering(tokens: Sequence[int], characters: int, text: str, decode: Decode) -> int:
    """The fewest leading tokens whose text covers ``text[:characters]``; bisection, so few decodings."""
    low, high = 0, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if _text_length(tokens, middle, text, decode) >= characters:
            high = middle
        else:
            low = middle + 1
    return low


def _text_length(tokens: Sequence[int], count: int, text: str, decode: Decode) -> int:
    """Characters of ``text`` that ``count`` tokens have settled; half a character (a replacement sign) is none."""
    begun = decode(tokens[:count])
    if text.startswith(begun):
        return len(begun)
    pairs = enumerate(zip(begun, text, strict=False))
    return next((i for i, (ours, whole) in pairs if ours != whole), len(text))
