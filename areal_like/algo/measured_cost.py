"""What rows cost, learnt from how long micro-batches took. Imports no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_like.algo.balance import CostModel
from areal_like.algo.packing import Layout, footprint

#: rounds that are remembered
_WINDOW = 512
#: times that the heaviest micro-batch of every round is looked for again, by the coefficients just found
_REPEATS = 4
#: weight of the counted operations' proportions against the readings': they decide what no reading tells apart
_TRUST = 1e-5
#: readings so many times the expected are of something else (a compilation, a stall)
_OUTLIER = 4.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of one micro-batch: tokens, and pairs of tokens that attend to each other (Σ of squared lengths)."""

    tokens: int
    pairs: int


def load_of(lengths: Sequence[int], layout: Layout) -> Load:
    """Padded rows are all as long as the longest."""
    seen = [max(lengths)] * len(lengths) if layout == "padded" and lengths else lengths
    return Load(tokens=footprint(lengths, layout), pairs=sum(length * length for length in seen))


class MeasuredCost:
    """seconds = a · tokens + b · pairs + c by least squares over the last rounds.

    In a round every rank runs one micro-batch, and all take as long as the heaviest: which one that was follows from
    the coefficients, and so is found together with them. Counted operations are where it starts, and their proportions
    stay where readings cannot tell a from b or c (ridge regression towards them); no coefficient is ever negative. A
    pure function of what it was given: ranks that learn from the same readings plan alike.
    """

    def __init__(self, counted: CostModel) -> None:
        self._counted = counted
        self._rounds: deque[tuple[Array, float]] = deque(maxlen=_WINDOW)
        self._updates = 0
        self._coefficients: Array | None = None

    @property
    def cost(self) -> CostModel:
        """In seconds; in operations, as counted, until two updates were seen."""
        if self._coefficients is None:
            return self._counted
        return CostModel(per_token=float(self._coefficients[0]), per_token_pair=float(self._coefficients[1]))

    def figures(self) -> dict[str, float]:
        """Coefficients in microseconds: a token, a thousand pairs of tokens, a micro-batch. Empty at first."""
        if self._coefficients is None:
            return {}
        scale = (1e6, 1e9, 1e6)
        names = ("us_per_token", "us_per_1k_token_pairs", "us_per_micro_batch")
        return {name: float(c * s) for name, c, s in zip(names, self._coefficients, scale, strict=True)}

    def learn(self, rounds: Sequence[Sequence[Load]], seconds: Sequence[float]) -> None:
        """The readings of one update: of every round, the loads of all ranks, and its seconds.

        Those of the first update are dropped: they hold compilations and first allocations.
        """
        self._updates += 1
        if self._updates == 1:
            return
        for loads, taken in zip(rounds, seconds, strict=True):
            features = np.array([[load.tokens, load.pairs, 1.0] for load in loads])
            known = self._coefficients
            if known is None or taken <= _OUTLIER * float((features @ known).max()):
                self._rounds.append((features, taken))
        for _ in range(_REPEATS):
            self._fit()

    def _fit(self) -> None:
        """In units in which the counted operations' own answer is (1, 1, 0)."""
        if not self._rounds:
            return
        by = self._coefficients
        if by is None:
            by = np.array([self._counted.per_token, self._counted.per_token_pair, 0.0])
        features = np.array([loads[int((loads @ by).argmax())] for loads, _ in self._rounds])
        taken = np.array([seconds for _, seconds in self._rounds])
        counted = np.array([self._counted.per_token, self._counted.per_token_pair, 0.0])
        operations = float((features @ counted).sum())
        if operations <= 0 or taken.sum() <= 0:
            return
        unit = counted * taken.sum() / operations
        unit[2] = taken.mean()
        products = (features * unit).T @ (features * unit)
        trust = _TRUST * np.trace(products)
        answers = (features * unit).T @ taken + trust * np.array([1.0, 1.0, 0.0])
        found = _not_negative(products + trust * np.eye(3), answers) * unit
        if found[0] > 0 or found[1] > 0:
            self._coefficients = found


def _not_negative(products: Array, answers: Array) -> Array:
    """argmin of wᵀPw / 2 − aᵀw over w ≥ 0, P positive definite: what would be most negative becomes 0, one by one."""
    free = list(range(len(answers)))
    while free:
        solved = np.linalg.solve(products[np.ix_(free, free)], answers[free])
        if (solved >= 0).all():
            found = np.zeros(len(answers))
            found[free] = solved
            return found
        free.pop(int(solved.argmin()))
    return np.zeros(len(answers))
