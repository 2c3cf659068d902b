"""What a server has given away of its device memory, and which moves are legal. Pure.

    all there --released--> KV and weights out --WEIGHTS--> KV out --updated--> KV out --KV_CACHE--> all there
                                                      \\______ weights were kept ______/

Two rules are kept here: a server whose KV cache is out never runs, and weights that were given up are never served
before a whole update. Engines keep neither: one ends on the first, both serve garbage on the second.
"""

from __future__ import annotations

from collections.abc import Iterable

from areal_like.client.memory import MemoryPart
from areal_like.errors import RequestError, WeightUpdateError


class LentMemory:
    """Of one server, as its control knows it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.out: frozenset[MemoryPart] = frozenset()
        self._released: frozenset[MemoryPart] = frozenset()
        #: live weights are nobody's: a whole update must come
        self.lost = False

    @property
    def serves(self) -> bool:
        """It may run."""
        return not self.out and not self.lost

    def check_release(self) -> bool:
        """Whether there is something to do. Raises RequestError in the middle of taking back."""
        if not self.serves and self.out != self._released:
            raise RequestError(f"{self._name}: an earlier release is half undone; before another: {self._missing()}")
        return self.serves

    def released(self, parts: Iterable[MemoryPart], *, lost: bool) -> None:
        """What is out from here on, whether the server's answer came or not."""
        self.out = self._released = frozenset(parts)
        self.lost = lost

    def check_reclaim(self, part: MemoryPart) -> bool:
        """Whether ``part`` is out. Raises RequestError where its turn has not come."""
        if part is MemoryPart.KV_CACHE and part in self.out:
            if MemoryPart.WEIGHTS in self.out:
                raise RequestError(f"{self._name}: kv_cache is reclaimed last; reclaim weights first")
            if self.lost:
                raise RequestError(
                    f"{self._name}: its weights were given up; a whole update (stage, commit) must come before kv_cache"
                )
        return part in self.out

    def reclaimed(self, part: MemoryPart) -> None:
        self.out -= {part}

    def check_update(self) -> None:
        """Raises WeightUpdateError where there is no memory for weights."""
        if MemoryPart.WEIGHTS in self.out:
            raise WeightUpdateError(f"{self._name}: its memory for weights is released; reclaim weights first")

    def updated(self) -> None:
        """A whole version was loaded."""
        self.lost = False

    def check_resume(self) -> None:
        """Raises RequestError where it must not run."""
        if not self.serves:
            raise RequestError(f"{self._name}: its memory is released; before it runs: {self._missing()}")

    def _missing(self) -> str:
        """The steps until it serves, in words."""
        weights = [f"reclaim {MemoryPart.WEIGHTS}"] if MemoryPart.WEIGHTS in self.out else []
        return ", ".join([*weights, *(["a whole update"] if self.lost else []), f"reclaim {MemoryPart.KV_CACHE}"])
