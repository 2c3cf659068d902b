import numpy as np

from areal_like.rollout.seeds import _splitmix64, mix64, mix64_each


def test_splitmix_matches_the_reference_generator() -> None:
    # first outputs of Vigna's splitmix64.c started at 0: the state advances by the golden gamma
    gamma = 0x9E3779B97F4A7C15
    assert [_splitmix64(k * gamma % 2**64) for k in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_every_part_and_their_order_and_number_matter() -> None:
    words = {mix64(), mix64(0), mix64(0, 0), mix64(1), mix64(1, 2), mix64(2, 1), mix64(-1)}
    assert len(words) == 7
    assert all(0 <= word < 2**64 for word in words)


def test_bits_of_consecutive_seeds_are_balanced() -> None:
    words = [mix64(7, request) for request in range(4096)]
    for bit in range(64):
        ones = sum(word >> bit & 1 for word in words)
        assert abs(ones - 2048) < 5 * 32  # five standard deviations of a fair coin


def test_each_agrees_with_single_steps() -> None:
    prefix = mix64(3, 1)
    each = mix64_each(prefix, 5)
    assert each.dtype == np.uint64
    assert [int(word) for word in each] == [_splitmix64(prefix ^ i) for i in range(5)]
