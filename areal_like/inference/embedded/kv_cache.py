"""Keys and values of the running answers, behind transformers' public cache interface.

Two caches. ``CapturedPrompt`` takes what one prefill forward computes and copies nothing, so that a request which
ends right after its prompt costs no cache at all. ``SlotCache`` holds the rows of running answers, each at columns
0..length-1; a decode step writes every row at its own column and attends to the first R rows and L columns.

Shapes: keys and values [rows, heads, columns, head_dim], per layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from areal_like.inference.embedded.slots import rounded_up

#: an idle cache larger than this is released when the next batch needs less than a quarter of it
_KEEP_IDLE_BYTES = 64 * 2**20


class _CapturedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Remembers the keys and values of one prefill and hands them back unchanged."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class CapturedPrompt(Cache):  # type: ignore[misc]
    """Keys and values of J prompts, left-padded to P columns: prompt j occupies columns P - lengths[j] .. P - 1."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(layer_class_to_replicate=_CapturedLayer)
        self.lengths = tuple(lengths)

    @property
    def columns(self) -> int:
        return max(self.lengths)

    def left_aligned(self, sources: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Per layer, keys and values of prompts ``sources`` [S] moved to columns 0..length-1; the rest is padding.

        As many columns as the longest of these prompts has.
        """
        device = self.layers[0].keys.device
        chosen = torch.tensor(sources, device=device)
        shifts = [self.columns - self.lengths[s] for s in sources]
        width = self.columns - min(shifts)
        columns = torch.arange(width, device=device)
        index = (columns + torch.tensor(shifts, device=device)[:, None]).clamp_(max=self.columns - 1)[:, None, :, None]
        for layer in self.layers:
            keys, values = layer.keys[chosen], layer.values[chosen]
            if any(shifts):
                keys = keys.gather(2, index.expand(*keys.shape[:2], width, keys.shape[3]))
                values = values.gather(2, index.expand(*values.shape[:2], width, values.shape[3]))
            yield keys, values


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the running rows. ``update`` writes one token per row and returns views of the live part."""

    is_sliding = False

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()
        self._cursor = cursor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = _empty_like(key_states), _empty_like(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        at = self._cursor
        self.keys[at.rows, :, at.columns] = key_states[:, :, 0]
        self.values[at.rows, :, at.columns] = value_states[:, :, 0]
        return self.keys[: at.count, :, : at.width], self.values[: at.count, :, : at.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cursor.width, 0

    def get_seq_length(self) -> int:
        return self._cursor.width

    def get_max_length(self) -> int:
        return -1

    def grow(self, rows: int, columns: int, live_rows: int) -> None:
        self.keys = _grown(self.keys, rows, columns, live_rows)
        self.values = _grown(self.values, rows, columns, live_rows)


class Cursor:
    """Where the next decode step writes: row r at column ``columns[r]``; it attends to ``width`` columns."""

    __slots__ = ("columns", "count", "rows", "width")

    def __init__(self) -> None:
        self.rows = torch.empty(0, dtype=torch.long)
        self.columns = torch.empty(0, dtype=torch.long)
        self.count = 0
        self.width = 0


class SlotCache(Cache):  # type: ignore[misc]
    """The running rows of all layers. Grows by doubling and starts again small when it was idle.

    Unused memory is zero, never uninitialised: a masked column has attention weight 0, and 0 times NaN is NaN.
    """

    def __init__(self) -> None:
        self.cursor = Cursor()
        super().__init__(layers=[])
        self._rows = 0
        self._columns = 0

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.layers for t in (layer.keys, layer.values))

    def reserve(self, *, live_rows: int, rows: int, columns: int, max_rows: int, max_columns: int) -> None:
        """Make room for ``rows`` rows of ``columns`` tokens, keeping the first ``live_rows`` as they are."""
        if live_rows == 0 and self._rows * self._columns > 4 * rows * columns and self.nbytes > _KEEP_IDLE_BYTES:
            self._rows = self._columns = 0
        if rows <= self._rows and columns <= self._columns:
            return
        self._rows = max(self._rows, rounded_up(rows, max_rows))
        self._columns = max(self._columns, rounded_up(columns, max_columns), columns)
        for layer in self.layers:
            layer.grow(self._rows, self._columns, live_rows)

    def adopt(self, captured: CapturedPrompt) -> None:
        """Learn the shapes of the layers from the first prefill."""
        for layer in captured.layers[len(self.layers) :]:
            fresh = _SlotLayer(self.cursor)
            fresh.lazy_initialization(layer.keys, layer.values)
            self.layers.append(fresh)

    def insert(self, captured: CapturedPrompt, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Copy prompt ``sources[i]`` of a prefill into row ``rows[i]``; :meth:`reserve` has made room."""
        row_index = torch.tensor(rows, device=self.layers[0].keys.device)
        for layer, (keys, values) in zip(self.layers, captured.left_aligned(sources), strict=True):
            layer.keys[:, :, : keys.shape[2]].index_copy_(0, row_index, keys)
            layer.values[:, :, : values.shape[2]].index_copy_(0, row_index, values)

    def move(self, moves: Sequence[tuple[int, int]], columns: int) -> None:
        """Copy the first ``columns`` columns of rows (from, to)."""
        device = self.layers[0].keys.device
        source = torch.tensor([a for a, _ in moves], device=device)
        target = torch.tensor([b for _, b in moves], device=device)
        for layer in self.layers:
            for held in (layer.keys, layer.values):
                live = held[:, :, :columns]
                live.index_copy_(0, target, live.index_select(0, source))

    def clear(self, rows: Sequence[int]) -> None:
        """Zero rows that may hold values that are not finite."""
        for layer in self.layers:
            layer.keys[list(rows)] = 0
            layer.values[list(rows)] = 0


def _empty_like(states: Tensor) -> Tensor:
    return states.new_zeros((0, states.shape[1], 0, states.shape[3]))


def _grown(held: Tensor, rows: int, columns: int, live_rows: int) -> Tensor:
    larger = held.new_zeros((rows, held.shape[1], columns, held.shape[3]))
    if live_rows:
        larger[:live_rows, :, : held.shape[2]] = held[:live_rows]
    return larger
