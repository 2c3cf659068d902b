from __future__ import annotations

from areal_like.client.seeds import mix, segment_seed


def test_mix_follows_splitmix64() -> None:
    """SplitMix64 seeded with 0 starts with 0xE220A8397B1DCDAF (its reference implementation)."""
    assert mix(0) == 0xE220A8397B1DCDAF


def test_seeds_are_unsigned_64_bit_and_neighbours_differ() -> None:
    seeds = [mix(seed, written) for seed in range(64) for written in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_order_and_number_of_values_matter() -> None:
    assert len({mix(1), mix(1, 0), mix(1, 0, 0), mix(1, 2, 3), mix(1, 3, 2), mix(2, 1, 3)}) == 6


def test_any_integer_is_a_seed() -> None:
    assert mix(-1) == mix(2**64 - 1)
    assert mix(1, -1) != mix(1, 1)


def test_half_of_the_bits_flip_when_one_input_bit_does() -> None:
    flips = [(mix(7, 1 << bit) ^ mix(7, 0)).bit_count() for bit in range(64)]
    assert 24 < sum(flips) / len(flips) < 40


def test_a_resumed_segment_never_has_the_same_seed_again() -> None:
    assert segment_seed(5, 0) == 5
    assert segment_seed(None, 3) is None
    assert len({segment_seed(5, written) for written in range(1000)}) == 1000
