"""Rows into micro-batches under a token budget, and groups into minibatches. Imports no torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence
from typing import Literal

Layout = Literal["packed", "padded"]

#: tokens of padding that a padded micro-batch may hold: about what one more forward and backward pass costs
MAX_PADDING = 2048


def footprint(lengths: Sequence[int], layout: Layout) -> int:
    """Tokens that rows of ``lengths`` take in one micro-batch: end to end, or padded to the longest."""
    if not lengths:
        return 0
    return sum(lengths) if layout == "packed" else max(lengths) * len(lengths)


def pack(lengths: Sequence[int], budget: int, layout: Layout = "packed") -> list[list[int]]:
    """Indices of rows per micro-batch, each within ``budget`` tokens; a longer row has a micro-batch of its own.

    First-fit decreasing: at most 11/9 of the fewest possible plus one (packed). Padded rows are sorted into bins of
    like length, so that short rows never pay for long ones beyond :data:`MAX_PADDING` tokens a bin. Rows keep their
    order inside a micro-batch; the result depends on nothing but the arguments.
    """
    if budget < 1:
        raise ValueError(f"the token budget of a micro-batch must be at least 1, got {budget}")
    bins: list[list[int]] = []
    used: list[int] = []
    padding: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for i, members in enumerate(bins):
            # rows come in falling length, so a bin's first row is its longest and sets the padding
            extra = lengths[row] if layout == "packed" else lengths[members[0]]
            waste = padding[i] + extra - lengths[row]
            if used[i] + extra <= budget and waste <= MAX_PADDING:
                members.append(row)
                used[i] += extra
                padding[i] = waste
                break
        else:
            bins.append([row])
            used.append(lengths[row])
            padding.append(0)
    return [sorted(members) for members in bins]


def cut_minibatches(group_ids: Sequence[Hashable], parts: int, seed: int | None = None) -> list[list[int]]:
    """Rows of every minibatch: whole groups, whose numbers differ by at most one.

    A batch that lost groups gives smaller minibatches, and fewer when there are fewer groups than ``parts``.

    Args:
        seed: shuffles the groups over the minibatches; None keeps their order. A function of (run seed, step), never
            of a rank.
    """
    if parts < 1:
        raise ValueError(f"a batch is cut into at least one minibatch, got {parts}")
    rows_of: dict[Hashable, list[int]] = {}
    for row, group in enumerate(group_ids):
        rows_of.setdefault(group, []).append(row)
    groups = list(rows_of.values())
    if seed is not None:
        random.Random(seed).shuffle(groups)
    cuts = [len(groups) * i // parts for i in range(parts + 1)]
    minibatches = [sorted(row for group in groups[lo:hi] for row in group) for lo, hi in itertools.pairwise(cuts)]
    return [rows for rows in minibatches if rows]
