"""The sums of :mod:`areal_like.weights.device_digest` in one pass over the bytes: one launch for many tensors.

Plain torch writes and reads again two products of eight bytes for each word of four, which costs ten times the bytes.
Here a program keeps both tables' sums of some rows of one tensor in registers; integer sums modulo 2^64 are the same
in any order, those of the programs among each other included. Imported only where Triton is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

#: rows of one program: 128 KiB, some thousand programs for a bucket
_LOOP = 16
_WARPS = 8
#: plans kept; each is some kilobytes on the device
_MOST_PLANS = 512
_WORD_BYTES = 4
#: bytes at whose multiples tensors must lie for wide loads
_WIDE = 16

# the kernel's arguments carry no annotations: Triton resolves every global name in them, and knows none but its own


@triton.jit  # type: ignore[untyped-decorator]
def _add_rows(
    plan, addresses, columns, rows, known, sums, ROW: tl.constexpr, LOOP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds sum_i R_k[i] * sum_j T_k[j] * word[i, j] of up to LOOP rows of one tensor to its two sums.

    ``plan``: which tensor, which of its rows comes first, how many words it has from there on (int64 [programs, 3]).
    """
    step = tl.program_id(0).to(tl.int64)
    which = tl.load(plan + 3 * step)
    first = tl.load(plan + 3 * step + 1)
    left = tl.load(plan + 3 * step + 2)
    words = tl.load(addresses + which).to(tl.pointer_type(tl.int32))
    if WIDE:
        words = tl.multiple_of(words, 16)
        left = tl.multiple_of(left, 4)
    words += first * ROW
    column = tl.arange(0, ROW)
    total_0 = tl.zeros((ROW,), tl.int64)
    total_1 = tl.zeros((ROW,), tl.int64)
    for row in range(LOOP):
        place = row * ROW + column
        word = tl.load(words + place, mask=place < left, other=0).to(tl.int64)
        there = row * ROW < left
        total_0 += word * tl.load(rows + first + row, mask=there, other=0)
        total_1 += word * tl.load(rows + known + first + row, mask=there, other=0)
    total_0 *= tl.load(columns + column)
    total_1 *= tl.load(columns + ROW + column)
    tl.atomic_add(sums + 2 * which, tl.sum(total_0, 0))
    tl.atomic_add(sums + 2 * which + 1, tl.sum(total_1, 0))


class RowSums:
    """Launches on one device. What is planned for some sizes is kept: versions of one model have the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plans: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, parts: Sequence[torch.Tensor], columns: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """int64 [len(parts), 2] of whole tensors of bytes.

        ``parts``: uint8, contiguous, none empty. They must live until the device is done with the current stream.
        ``columns``, ``rows``: the tables, int64 [2, words of a row] and [2, rows of the largest part or more].
        """
        row_words = columns.shape[1]
        whole = [_in_words(part) for part in parts]
        plan = self._plan(tuple(part.numel() // _WORD_BYTES for part in whole), row_words)
        sums = torch.zeros(len(whole), 2, dtype=torch.int64, device=self._device)
        wide = all(part.data_ptr() % _WIDE == 0 and part.numel() % _WIDE == 0 for part in whole)
        with self._current():
            _add_rows[(len(plan),)](
                plan, self._sent([part.data_ptr() for part in whole]), columns, rows, rows.shape[1], sums,
                ROW=row_words, LOOP=_LOOP, WIDE=wide, num_warps=_WARPS,
            )  # fmt: skip
        return sums

    def _current(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device, whatever the tensors lie on."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _sent(self, numbers: Sequence[int]) -> torch.Tensor:
        """On the device, without a wait."""
        here = torch.tensor(numbers, dtype=torch.int64)
        return here.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else here

    def _plan(self, words: tuple[int, ...], row_words: int) -> torch.Tensor:
        """int64 [programs, 3]. Waits for the stream where it is new: another stream may use it next."""
        found = self._plans.get(words)
        if found is None:
            if len(self._plans) >= _MOST_PLANS:
                torch.cuda.synchronize(self._device)
                self._plans.clear()
            steps = [
                (which, first, count - first * row_words)
                for which, count in enumerate(words)
                for first in range(0, -(-count // row_words), _LOOP)
            ]
            found = self._plans[words] = torch.tensor(steps, dtype=torch.int64).to(self._device)
        return found


def _in_words(part: torch.Tensor) -> torch.Tensor:
    """The bytes where words can be read; zeros at the end change no sum."""
    if part.data_ptr() % _WORD_BYTES == 0 and part.numel() % _WORD_BYTES == 0:
        return part
    padded = torch.zeros(-(-part.numel() // _WORD_BYTES) * _WORD_BYTES, dtype=torch.uint8, device=part.device)
    padded[: part.numel()] = part
    return padded
