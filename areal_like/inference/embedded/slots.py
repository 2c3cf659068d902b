"""Which rows a batch has and in what order prompts join: pure decisions, no tensors.

Running answers occupy the rows 0..R-1 of the cache, so that the decode batch never pays for empty slots. An answer
that ends leaves a hole; joining answers fill holes first, and the last rows move into those that remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: prompts of at most this length share one prefill whatever their lengths: a forward pass costs more than the padding
_SHORT_PROMPT = 64
#: tokens, padding included, of one prefill forward; a longer prompt has one of its own
PREFILL_AREA = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Rows and columns of a cache, and the bytes it may take. ``token_bytes`` is the size of one token of one row."""

    max_rows: int
    token_bytes: int
    max_bytes: int

    def fits(self, rows: int, columns: int) -> bool:
        """``rows`` answers of up to ``columns`` tokens fit; one answer alone always does."""
        return rows <= 1 or rounded_up(rows, self.max_rows) * columns * self.token_bytes <= self.max_bytes


def rounded_up(count: int, limit: int) -> int:
    """The next power of two, but at most ``limit``: doubling copies every element a constant number of times."""
    return min(limit, 1 << max(0, count - 1).bit_length())


def moves_to_close(rows: int, holes: Sequence[int]) -> list[tuple[int, int]]:
    """(from, to) moves after which the ``rows`` - len(``holes``) survivors occupy the first rows."""
    survivors = rows - len(holes)
    empty = set(holes)
    last = [row for row in range(survivors, rows) if row not in empty]
    first = sorted(hole for hole in holes if hole < survivors)
    return list(zip(last, first, strict=True))


def plan_prefill(lengths: Sequence[int], area: int = PREFILL_AREA) -> list[list[int]]:
    """Indices of prompts that are prefilled together: similar lengths, at most ``area`` tokens with padding."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        length = lengths[index]
        similar = longest <= _SHORT_PROMPT or 2 * length >= longest
        if groups and similar and (len(groups[-1]) + 1) * longest <= area:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = length
    return groups
