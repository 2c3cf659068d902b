"""Counter-based randomness: the uniform of a token is a hash of (seed, position) and of nothing else.

No generator state exists, so a token's draw cannot depend on which other requests share the batch, on the order
of their arrival, or on how many steps ran before. The hash is the finaliser of SplitMix64 (Steele, Lea & Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), applied to seed and position separately first, so
that neighbouring seeds do not share a shifted stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64Array = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1
#: 52 bits: the largest uniform times any float64 total stays below that total, so an inverse CDF always hits
_UNIFORM_BITS = 52


def mix64(x: U64Array) -> U64Array:
    """SplitMix64's finaliser, elementwise; a bijection on 64-bit integers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: U64Array, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1), float64 [R], for token ``positions[r]`` of the answer seeded ``seeds[r]``."""
    seed_bits = mix64(seeds + np.uint64(_GOLDEN))
    position_bits = mix64((positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    bits = mix64(seed_bits ^ position_bits)
    return (bits >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * 2.0**-_UNIFORM_BITS


def sibling_seed(seed: int, index: int) -> int:
    """Seed of sibling ``index`` of a request with several answers; differs from ``seed`` itself for every index."""
    pair = np.array([seed & _MASK, (index + 1) & _MASK], dtype=np.uint64)
    mixed = mix64(pair + np.uint64(_GOLDEN))
    return int(mix64(mixed[:1] ^ (mixed[1:] << np.uint64(1)))[0])


def as_uint64(seed: int) -> int:
    """A seed as the unsigned 64-bit number it is hashed as (-1 and 2**64 - 1 are the same seed)."""
    return seed & _MASK
