"""Seeds that are pure functions of what they are for: never of a rank, a server, a clock or an order of events.

The mixer is splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): a bijection on
64-bit words whose outputs pass for independent. It is spelled out here, rather than taken from a library's generator,
because a run that is resumed under another version of that library must draw the same seeds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB


def _splitmix64(word: int) -> int:
    word = (word + _GAMMA) & _WORD
    word = ((word ^ (word >> 30)) * _MULTIPLY_1) & _WORD
    word = ((word ^ (word >> 27)) * _MULTIPLY_2) & _WORD
    return word ^ (word >> 31)


def mix64(*parts: int) -> int:
    """A 64-bit word in [0, 2**64) that depends on every part and on their order and number."""
    word = _splitmix64(len(parts))
    for part in parts:
        word = _splitmix64(word ^ (part & _WORD))
    return word


def mix64_each(prefix: int, count: int) -> npt.NDArray[np.uint64]:
    """uint64 [count]: element i is one splitmix64 step of ``prefix ^ i``, for ``prefix`` in [0, 2**64)."""
    word = np.arange(count, dtype=np.uint64) ^ np.uint64(prefix)
    word = word + np.uint64(_GAMMA)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(_MULTIPLY_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(_MULTIPLY_2)
    return word ^ (word >> np.uint64(31))
