"""Stop strings over the joined text of an answer. Pure: ids and a decoder in, a cut out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Decode = Callable[[Sequence[int]], str]


def stop_cut(tokens: Sequence[int], stops: Sequence[str], decode: Decode, *, min_tokens: int = 0) -> int | None:
    """How many tokens remain of an answer that contains a stop string; None if it contains none.

    The answer ends with the first token that completes a match, as if it had never been interrupted; of the matches
    that are complete there, the one that begins first decides. Tokens that lie in or behind it go; the token in
    which it begins stays if it also carries text before it, since ids are trained as they were written. A match that
    is complete before ``min_tokens`` tokens are written does not count.
    """
    if not tokens or not stops:
        return None
    text = decode(tokens)
    if not any(stop in text for stop in stops):
        return None
    floor = _text_length(tokens, min_tokens - 1, text, decode) if min_tokens > 1 else 0
    ends = [end for _, end in _matches(text, stops, floor)]
    if not ends:
        return None
    ending = _tokens_covering(tokens, min(ends), text, decode)
    written = text[: _text_length(tokens, ending, text, decode)]
    start = min(start for start, _ in _matches(written, stops, floor))
    return _tokens_covering(tokens, start, text, decode)


def _matches(text: str, stops: Sequence[str], floor: int) -> Iterator[tuple[int, int]]:
    """Start and end of each stop string's first match that ends behind character ``floor``."""
    for stop in stops:
        start = text.find(stop, max(0, floor + 1 - len(stop)))
        if stop and start >= 0:
            yield start, start + len(stop)


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
