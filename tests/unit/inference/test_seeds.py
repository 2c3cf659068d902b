"""Counter-based seeds."""

from __future__ import annotations

import numpy as np

from areal_like.inference.embedded.seeds import as_uint64, mix64, sibling_seed, uniforms


def _splitmix64(x: int) -> int:
    """The finaliser in Python's own integers."""
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_mix_is_splitmix64() -> None:
    values = [0, 1, 12345, 2**63, 2**64 - 1]
    assert mix64(np.array(values, np.uint64)).tolist() == [_splitmix64(v) for v in values]


def test_first_output_of_splitmix64_with_seed_zero() -> None:
    # published test vector: next() of the generator seeded 0
    assert int(mix64(np.array([0x9E3779B97F4A7C15], np.uint64))[0]) == 0xE220A8397B1DCDAF


def test_a_draw_depends_on_its_own_seed_and_position_only() -> None:
    alone = uniforms(np.array([9], np.uint64), np.array([4]))
    together = uniforms(np.array([1, 9, 9], np.uint64), np.array([4, 4, 5]))
    assert together[1] == alone[0]
    assert len(set(together.tolist())) == 3


def test_uniforms_are_uniform_along_positions_and_along_seeds() -> None:
    count = 20_000
    zeros = np.zeros(count, np.int64)
    for drawn in (
        uniforms(np.full(count, 7, np.uint64), np.arange(count)),
        uniforms(np.arange(count, dtype=np.uint64), zeros),
    ):
        assert drawn.min() >= 0.0 and drawn.max() < 1.0
        observed, _ = np.histogram(drawn, bins=50, range=(0, 1))
        chi_square = float(((observed - count / 50) ** 2 / (count / 50)).sum())
        assert chi_square < 86.0  # 0.999 quantile of chi-square with 49 degrees of freedom is 85.4


def test_neighbouring_seeds_are_not_correlated() -> None:
    positions = np.arange(20_000)
    a = uniforms(np.full(20_000, 3, np.uint64), positions)
    b = uniforms(np.full(20_000, 4, np.uint64), positions)
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 0.03
    assert abs(float(np.corrcoef(a[1:], a[:-1])[0, 1])) < 0.03


def test_largest_uniform_times_any_total_stays_below_it() -> None:
    largest = 1.0 - 2.0**-52
    for total in (1.0, np.nextafter(1.0, 2.0), np.nextafter(1.0, 0.0), 0.5, 1.5):
        assert largest * total < total


def test_siblings_differ_from_each_other_and_from_the_seed() -> None:
    seeds = {sibling_seed(11, i) for i in range(1000)}
    assert len(seeds) == 1000
    assert 11 not in seeds
    assert sibling_seed(11, 0) != sibling_seed(12, 0)


def test_negative_seeds_are_their_64_bit_pattern() -> None:
    assert as_uint64(-1) == 2**64 - 1
    assert sibling_seed(-1, 0) == sibling_seed(2**64 - 1, 0)
