"""Which prompt comes next: seeded, resumable, and moved without generating anything."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from areal_like.api.trajectory import PromptId
from areal_like.rollout.seeds import mix64, mix64_each

#: keeps the shuffle's seeds apart from sampling seeds, which start from the same run seed
_SHUFFLE = 0x5EED_5AFF


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptVisit:
    """One try at one prompt of one epoch. ``prompt.index`` is the row of the dataset.

    Attributes:
        attempt: earlier tries at this prompt in this epoch, however they were cut short.
        expired: how many of those grew too old and were dropped.
    """

    prompt: PromptId
    attempt: int = 0
    expired: int = 0

    @property
    def group_id(self) -> str:
        """Unique along a run."""
        return f"e{self.prompt.epoch}-p{self.prompt.index}-a{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorState:
    """Everything needed to go on; ``n_prompts``, ``seed`` and ``shuffle`` name the order it belongs to."""

    n_prompts: int
    seed: int
    shuffle: bool
    epoch: int
    position: int
    returned: tuple[PromptVisit, ...]


class PromptCursor:
    """Walks the dataset epoch by epoch; prompts that were given back come first.

    The order of an epoch is a pure function of (seed, epoch, number of prompts).

    Args:
        n_prompts: rows of the dataset.
        seed: the run's seed.
        shuffle: False visits rows in their own order.
        epochs: passes over the dataset; None goes on for ever.
    """

    def __init__(self, *, n_prompts: int, seed: int, shuffle: bool = True, epochs: int | None = None) -> None:
        if n_prompts < 1:
            raise ValueError(f"PromptCursor: n_prompts must be at least 1, got {n_prompts}; the dataset is empty")
        if epochs is not None and epochs < 0:
            raise ValueError(f"PromptCursor: epochs must be 0 or more, or None for no end, got {epochs}")
        self._n_prompts = n_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._epoch = 0
        self._position = 0
        self._returned: deque[PromptVisit] = deque()
        self._order: tuple[int, npt.NDArray[np.intp]] | None = None

    @property
    def exhausted(self) -> bool:
        return not self._returned and self._epochs is not None and self._epoch >= self._epochs

    def advance(self) -> PromptVisit:
        """The next visit.

        Raises:
            LookupError: the cursor is exhausted.
        """
        if self._returned:
            return self._returned.popleft()
        if self.exhausted:
            raise LookupError(
                f"PromptCursor.advance: all {self._epochs} epochs of {self._n_prompts} prompts were handed out; "
                f"look at `exhausted` first"
            )
        prompt = PromptId(epoch=self._epoch, index=self._row(self._epoch, self._position))
        self._position += 1
        if self._position == self._n_prompts:
            self._epoch, self._position = self._epoch + 1, 0
        return PromptVisit(prompt=prompt)

    def give_back(self, visit: PromptVisit, *, expired: bool = False) -> None:
        """Put a prompt that was cut short at the front of the queue, for a next attempt under a new group id.

        Give several back last-first, so that they come out in their old order.
        """
        self._returned.appendleft(
            replace(visit, attempt=visit.attempt + 1, expired=visit.expired + (1 if expired else 0))
        )

    def state(self) -> CursorState:
        return CursorState(
            n_prompts=self._n_prompts,
            seed=self._seed,
            shuffle=self._shuffle,
            epoch=self._epoch,
            position=self._position,
            returned=tuple(self._returned),
        )

    def restore(self, state: CursorState) -> None:
        """Go on where ``state`` was taken.

        Raises:
            ValueError: the state belongs to another order of prompts (other dataset size, seed or shuffle).
        """
        for name in ("n_prompts", "seed", "shuffle"):
            theirs, ours = getattr(state, name), getattr(self, f"_{name}")
            if theirs != ours:
                raise ValueError(
                    f"PromptCursor.restore: the state was taken with {name}={theirs!r}, this run has {ours!r}; "
                    f"resume with the same dataset, seed and shuffle"
                )
        self._epoch, self._position = state.epoch, state.position
        self._returned = deque(state.returned)

    def _row(self, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        if self._order is None or self._order[0] != epoch:
            keys = mix64_each(mix64(self._seed, _SHUFFLE, epoch), self._n_prompts)
            self._order = (epoch, np.argsort(keys, kind="stable"))
        return int(self._order[1][position])
