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

#: an idle cache larger than this gives up rows that the next batch does not need
_KEEP_IDLE_BYTES = 64 * 2**20
#: columns are added in steps of at least so many
_COLUMN_STEP = 16
#: a cache of so few columns never shrinks: copying it costs more than reading it
_FEW_COLUMNS = 64


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


class Cursor:
    """Where a decode step writes: row r of the first ``len(columns)`` rows at column ``columns[r]``."""

    def __init__(self) -> None:
        self.count = 0
        self._columns = torch.empty(0, dtype=torch.long)
        self._flat: dict[tuple[int, int], Tensor] = {}

    def point_at(self, columns: Tensor) -> None:
        self.count = columns.shape[0]
        self._columns = columns
        self._flat = {}

    def flat(self, heads: int, capacity: int) -> Tensor:
        """Index [R * heads] of these places in a cache seen as [rows * heads * capacity, head_dim]; the layers of a
        model share it."""
        if (heads, capacity) not in self._flat:
            first = torch.arange(self.count * heads, device=self._columns.device) * capacity
            self._flat[heads, capacity] = first + self._columns.repeat_interleave(heads)
        return self._flat[heads, capacity]


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the running rows. ``update`` writes one token per row and returns views of the live rows."""

    is_sliding = False

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()
        self._cursor = cursor
        self.width = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = _empty_like(key_states), _empty_like(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        count, heads = self._cursor.count, key_states.shape[1]
        places = self._cursor.flat(heads, self.keys.shape[2])
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            held.view(-1, held.shape[3]).index_copy_(0, places, states.reshape(count * heads, held.shape[3]))
        return self.keys[:count, :, : self.width], self.values[:count, :, : self.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_seq_length(self) -> int:
        return self.width

    def get_max_length(self) -> int:
        return -1

    def resize(self, rows: int, columns: int, live_rows: int) -> None:
        self.keys = _resized(self.keys, rows, columns, live_rows)
        self.values = _resized(self.values, rows, columns, live_rows)


class SlotCache(Cache):  # type: ignore[misc]
    """The running rows of all layers. Rows grow by doubling; columns stay close to the longest running answer.

    Attention reads all of it at every step, and twice as fast if that is one contiguous piece (measured at 256 rows:
    2.2 ms a layer against 3.9 over half-empty rows). Hence columns grow by an eighth, shrink by halves, and a step
    attends to the whole capacity unless most of it is empty.

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

    def reserve(self, *, live_rows: int, rows: int, columns: int, max_rows: int) -> None:
        """Make room for ``rows`` rows of ``columns`` tokens, keeping what the first ``live_rows`` have there."""
        too_small = rows > self._rows or columns > self._columns
        too_large = 2 * columns < self._columns > _FEW_COLUMNS or (
            live_rows == 0 and 2 * rows < self._rows and self.nbytes > _KEEP_IDLE_BYTES
        )
        if not too_small and not too_large:
            return
        if live_rows == 0 or rows > self._rows:
            self._rows = rounded_up(rows, max_rows)
        if columns > self._columns or 2 * columns < self._columns:
            step = max(_COLUMN_STEP, columns // 8)
            self._columns = -(-columns // step) * step
        for layer in self.layers:
            layer.resize(self._rows, self._columns, live_rows)

    def aim(self, positions: Tensor, longest: int) -> int:
        """Point the next step at one column per row, none past ``longest``; the number of columns it attends to."""
        self.cursor.point_at(positions)
        width = self._columns if 4 * longest > 3 * self._columns else longest
        for layer in self.layers:
            layer.width = width
        return width

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


def _resized(held: Tensor, rows: int, columns: int, live_rows: int) -> Tensor:
    fresh = held.new_zeros((rows, held.shape[1], columns, held.shape[3]))
    kept = min(columns, held.shape[2])
    if live_rows:
        fresh[:live_rows, :, :kept] = held[:live_rows, :, :kept]
    return fresh
