"""Per-row state of the running answers as numpy columns, so that a step needs no Python per parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from areal_like.inference.embedded.requests import Answer
from areal_like.inference.embedded.sampling import LogitChange, SamplingColumns

#: smaller temperatures are not representable in float32; the distribution is a point long before
_SMALLEST_TEMPERATURE = 1e-37


class RowTable:
    """One entry per row of the cache.

    ``token`` is the next input, ``length`` the tokens the cache holds (so also the position of the next input);
    the others are the sampling parameters of :class:`SamplingColumns`, plus what bans or penalises tokens.
    """

    def __init__(self, rows: int) -> None:
        self.token = np.zeros(rows, np.int64)
        self.length = np.zeros(rows, np.int64)
        self._written = np.zeros(rows, np.int64)
        self._min_tokens = np.zeros(rows, np.int64)
        self._penalty = np.zeros(rows, np.float32)
        self._seed = np.zeros(rows, np.uint64)
        self._temperature = np.ones(rows, np.float32)
        self._greedy = np.zeros(rows, np.bool_)
        self._top_k = np.zeros(rows, np.int64)
        self._top_p = np.ones(rows, np.float32)
        self._min_p = np.zeros(rows, np.float32)

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> RowTable:
        """A table of just these answers, in order."""
        table = cls(len(answers))
        for row, answer in enumerate(answers):
            table.put(row, answer)
        return table

    def put(self, row: int, answer: Answer) -> None:
        sampling = answer.request.body.sampling
        greedy = sampling.greedy or sampling.temperature == 0.0
        written = len(answer.tokens)
        self.token[row] = answer.tokens[-1] if written else 0
        self.length[row] = len(answer.request.prompt) + max(0, written - 1)
        self._written[row] = written
        self._min_tokens[row] = answer.bounds.min_tokens if answer.bounds.banned else 0
        self._penalty[row] = sampling.frequency_penalty
        self._seed[row] = answer.seed
        self._temperature[row] = 1.0 if greedy else max(sampling.temperature, _SMALLEST_TEMPERATURE)
        self._greedy[row] = greedy
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        source, target = [a for a, _ in moves], [b for _, b in moves]
        for column in self._all_columns():
            column[target] = column[source]

    def advance(self, count: int, tokens: npt.NDArray[np.int64]) -> None:
        """The first ``count`` rows have one more token in the cache and ``tokens`` as next inputs."""
        self.token[:count] = tokens
        self.length[:count] += 1
        self._written[:count] += 1

    def longest(self, count: int) -> int:
        """Columns that the longest of the first ``count`` rows has once the next step has written its token."""
        return int(self.length[:count].max()) + 1

    def changing(self, count: int) -> bool:
        """Some row bans or penalises tokens at the next step."""
        return bool((self._written[:count] < self._min_tokens[:count]).any() or self._penalty[:count].any())

    def columns(self, count: int | None = None) -> SamplingColumns:
        """Views of the first ``count`` rows."""
        return SamplingColumns(
            seed=self._seed[:count],
            written=self._written[:count],
            temperature=self._temperature[:count],
            greedy=self._greedy[:count],
            top_k=self._top_k[:count],
            top_p=self._top_p[:count],
            min_p=self._min_p[:count],
        )

    def _all_columns(self) -> tuple[npt.NDArray[np.generic], ...]:
        given = self.columns()
        sampling = (given.seed, given.written, given.temperature, given.greedy, given.top_k, given.top_p, given.min_p)
        return (self.token, self.length, self._min_tokens, self._penalty, *sampling)


def logit_changes(answers: Sequence[Answer]) -> list[LogitChange]:
    """Bans (stop ids before the minimum) and penalties of the next token of each answer."""
    return [
        LogitChange(
            row=row,
            banned=answer.bounds.banned if len(answer.tokens) < answer.bounds.min_tokens else (),
            frequency_penalty=answer.request.body.sampling.frequency_penalty,
            written_ids=answer.tokens,
        )
        for row, answer in enumerate(answers)
        if answer.bounds.changes_logits
    ]
