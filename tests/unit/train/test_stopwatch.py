"""Rounds are timed in order, and forgotten once read."""

from __future__ import annotations

import time

import torch

from areal_like.train.stopwatch import Stopwatch


def test_rounds_are_read_once() -> None:
    watch = Stopwatch(torch.device("cpu"))
    assert watch.seconds() == []
    lengths = []
    for turns in (1, 20_000):
        started = time.perf_counter()
        with watch.round():
            sum(range(turns))
        lengths.append(time.perf_counter() - started)
    found = watch.seconds()
    assert len(found) == 2
    assert all(0 < inner <= outer for inner, outer in zip(found, lengths, strict=True))
    assert watch.seconds() == []
