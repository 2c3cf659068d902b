"""Rows over ranks by cost, and the same number of micro-batches on every rank. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from areal_like.algo.packing import Layout, footprint, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds (in any unit) of a row of L tokens: ``per_token`` · L + ``per_token_pair`` · L²."""

    per_token: float = 1.0
    per_token_pair: float = 0.0

    def of(self, length: int) -> float:
        return self.per_token * length + self.per_token_pair * length * length


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """``ranks[r][i]``: rows of micro-batch i of rank r. Every rank has as many micro-batches; some may be empty."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def micro_batches(self) -> int:
        return len(self.ranks[0])


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices per part so that the parts' costs are nearly equal (largest differencing method).

    Karmarkar and Karp 1982: the two partial solutions with the largest spread are joined, heaviest with lightest, until
    one is left. Deterministic; parts may be empty when there are fewer rows than parts.
    """
    if parts < 1:
        raise ValueError(f"rows are divided over at least one part, got {parts}")
    # a partial solution: parts in falling order of cost, each (cost, indices); the counter makes ties deterministic
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, cost in enumerate(costs):
        heap.append((-float(cost), i, [(float(cost), [i]), *((0.0, list[int]()) for _ in range(parts - 1))]))
    heapq.heapify(heap)
    if not heap:
        return [[] for _ in range(parts)]
    counter = len(heap)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        joined = [(a + b, i + j) for (a, i), (b, j) in zip(left, reversed(right), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], counter, joined))
        counter += 1
    return [sorted(indices) for _, indices in heap[0][2]]


def plan_micro_batches(
    lengths: Sequence[int], *, ranks: int, budget: int, layout: Layout = "packed", cost: CostModel | None = None
) -> MicroBatchPlan:
    """Divide the rows of one minibatch over ranks by cost, then each rank's rows into micro-batches within ``budget``.

    Ranks with fewer micro-batches first divide the ones they have, largest first, and then run empty ones, so that
    collectives line up.
    """
    cost = cost or CostModel()
    shares = karmarkar_karp([cost.of(length) for length in lengths], ranks)
    packed: list[list[list[int]]] = []
    for share in shares:
        bins = pack([lengths[i] for i in share], budget, layout)
        packed.append([[share[j] for j in members] for members in bins])
    most = max(max(len(bins) for bins in packed), 1)
    for bins in packed:
        _even_out(bins, most, lengths, layout)
    return MicroBatchPlan(ranks=tuple(tuple(tuple(members) for members in bins) for bins in packed))


def _even_out(bins: list[list[int]], most: int, lengths: Sequence[int], layout: Layout) -> None:
    """Bring ``bins`` to ``most`` by halving the largest that has several rows, then adding empty ones."""
    while len(bins) < most:
        divisible = [members for members in bins if len(members) > 1]
        if not divisible:
            bins.append([])
            continue
        largest = max(divisible, key=lambda members: footprint([lengths[i] for i in members], layout))
        kept, moved = _halves(largest, lengths, layout)
        largest[:] = kept
        bins.append(moved)


def _halves(members: Sequence[int], lengths: Sequence[int], layout: Layout) -> tuple[list[int], list[int]]:
    """Two parts of nearly equal cost; padded: where the padding that falls away is most, the longer rows first."""
    if layout == "packed":
        first, second = karmarkar_karp([float(lengths[i]) for i in members], 2)
        return [members[i] for i in first], [members[i] for i in second]
    falling = sorted(members, key=lambda i: (-lengths[i], i))
    middle = (len(falling) + 1) // 2
    cut = min(range(1, len(falling)), key=lambda k: (_padded(falling, k, lengths), abs(k - middle)))
    return sorted(falling[:cut]), sorted(falling[cut:])


def _padded(falling: Sequence[int], cut: int, lengths: Sequence[int]) -> int:
    """Tokens that both parts take, ``falling`` in length and cut before index ``cut``."""
    return lengths[falling[0]] * cut + lengths[falling[cut]] * (len(falling) - cut)
