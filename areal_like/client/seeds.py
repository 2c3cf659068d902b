"""Sampling seeds as pure functions: the same numbers give the same seed in every process and on every platform."""

from __future__ import annotations

_MASK = 2**64 - 1
#: 2^64 divided by the golden ratio, the increment of SplitMix64
_GAMMA = 0x9E3779B97F4A7C15


def mix(seed: int, *values: int) -> int:
    """An unsigned 64-bit seed from ``seed`` and ``values``; their order and number matter.

    SplitMix64's finaliser (Steele, Lea and Flood 2014) absorbs one number after another, so that neighbouring
    inputs give unrelated outputs.
    """
    state = _finalise((seed + _GAMMA) & _MASK)
    for value in values:
        state = _finalise((state + _GAMMA + _finalise(value & _MASK)) & _MASK)
    return state


def segment_seed(seed: int | None, written: int) -> int | None:
    """The seed of the segment that starts after ``written`` tokens: the request's own at 0, never the same again.

    A segment that restarted with the request's seed would draw the random numbers of the first one once more.
    """
    if seed is None or written == 0:
        return seed
    return mix(seed, written)


def _finalise(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
