"""The slot cache's memory: contents survive growth, moves and shrinking; unused places are zero."""

from __future__ import annotations

from typing import Any

import torch

from areal_like.inference.embedded.kv_cache import CapturedPrompt, SlotCache

HEADS, DIM = 2, 4


def captured(*lengths: int) -> CapturedPrompt:
    """Keys of prompt j at its position p are 100 j + p; values are their negatives; padding on the left is -7."""
    prompt = CapturedPrompt(lengths)
    width = max(lengths)
    keys = torch.full((len(lengths), HEADS, width, DIM), -7.0)
    for j, length in enumerate(lengths):
        keys[j, :, width - length :] = (100.0 * j + torch.arange(length))[:, None]
    prompt.update(keys, -keys, 0)
    return prompt


def row(cache: SlotCache, index: int, length: int) -> list[float]:
    found = cache.layers[0].keys[index, :, :length]
    assert torch.equal(found, -cache.layers[0].values[index, :, :length])
    assert (found == found[:1, :, :1]).all()
    return found[0, :, 0].tolist()


def filled(prompt: CapturedPrompt, sources: list[int], rows: list[int], columns: int) -> SlotCache:
    cache = SlotCache()
    cache.adopt(prompt)
    cache.reserve(live_rows=0, rows=len(rows), columns=columns, max_rows=8)
    cache.insert(prompt, sources, rows)
    return cache


def test_prompts_of_different_lengths_are_left_aligned() -> None:
    cache = filled(captured(3, 1, 5), [2, 0, 1], [0, 1, 2], 6)
    assert row(cache, 0, 5) == [200, 201, 202, 203, 204]
    assert row(cache, 1, 3) == [0, 1, 2]
    assert row(cache, 2, 1) == [100]


def test_siblings_are_copies_of_one_prompt() -> None:
    cache = filled(captured(3, 2), [1, 1, 0], [2, 0, 1], 4)
    assert row(cache, 2, 2) == row(cache, 0, 2) == [100, 101]
    assert row(cache, 1, 3) == [0, 1, 2]


def test_only_the_longest_inserted_prompt_needs_room() -> None:
    cache = filled(captured(3, 500), [0], [0], 4)
    assert cache.layers[0].keys.shape[2] < 100


def test_contents_survive_growth_and_shrinking() -> None:
    cache = filled(captured(3, 2), [0, 1], [0, 1], 4)
    cache.reserve(live_rows=2, rows=5, columns=300, max_rows=8)
    assert cache.layers[0].keys.shape[:3:2][0] == 8 and cache.layers[0].keys.shape[2] >= 300
    assert row(cache, 0, 3) == [0, 1, 2]
    cache.reserve(live_rows=2, rows=5, columns=20, max_rows=8)
    assert cache.layers[0].keys.shape[2] < 100
    assert row(cache, 1, 2) == [100, 101]
    assert (cache.layers[0].keys[2:] == 0).all()


def test_a_step_writes_each_row_at_its_own_column() -> None:
    cache = filled(captured(3, 1), [0, 1], [0, 1], 4)
    cache.aim(torch.tensor([3, 1]), 4)
    new = torch.tensor([50.0, 60.0])[:, None, None, None].expand(2, HEADS, 1, DIM)
    keys, values = cache.update(new, -new, 0)
    assert keys.shape[0] == values.shape[0] == 2
    assert row(cache, 0, 4) == [0, 1, 2, 50]
    assert row(cache, 1, 2) == [100, 60]


def test_rows_move() -> None:
    cache = filled(captured(2, 2, 2, 2), [0, 1, 2, 3], [0, 1, 2, 3], 4)
    cache.move([(3, 0), (2, 1)], 2)
    assert row(cache, 0, 2) == [300, 301]
    assert row(cache, 1, 2) == [200, 201]


def test_cleared_rows_are_zero() -> None:
    cache = filled(captured(2, 2), [0, 1], [0, 1], 4)
    cache.layers[0].keys[1, 0, 0] = torch.nan
    cache.clear([1])
    assert row(cache, 1, 2) == [0, 0]
    assert row(cache, 0, 2) == [0, 1]


def test_an_idle_cache_does_not_keep_the_rows_of_a_large_batch(monkeypatch: Any) -> None:
    monkeypatch.setattr("areal_like.inference.embedded.kv_cache._KEEP_IDLE_BYTES", 0)
    cache = filled(captured(2), [0] * 8, list(range(8)), 40)
    cache.reserve(live_rows=0, rows=1, columns=40, max_rows=8)
    assert cache.layers[0].keys.shape[0] == 1
