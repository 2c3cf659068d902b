"""One version that a host transport brought: verified tensors in host memory and, where there is room, on the GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from areal_like.api.weights import TensorEntry
from areal_like.inference.vllm_plugin.arena import ALIGNMENT, Lease
from areal_like.inference.vllm_plugin.device_memory import DeviceMemory
from areal_like.weights.digest import parse_dtype

#: bytes of the device that are allocated at a time: a few large blocks are given back faster than many small ones
_BLOCK_BYTES = 256 * 2**20
#: of the device's free memory, at most
_SHARE = 2


class StagedCopy:
    """Tensors by name, in the manifest's order once it is whole. Whoever has it releases it."""

    def __init__(self, lease: Lease | None = None, beside: Beside | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        #: those of ``tensors`` that lie on the device
        self.on_device: set[str] = set()
        self._parts: dict[str, tuple[tuple[int, int], ...]] = {}
        self._lease, self._beside = lease, beside

    def target(self, entry: TensorEntry) -> torch.Tensor:
        """Host memory for an entry's bytes."""
        if self._lease is not None and entry.nbytes:
            return self._lease.tensor(entry)
        return torch.empty(entry.shape, dtype=parse_dtype(entry.dtype))

    def add(self, entry: TensorEntry, verified: torch.Tensor) -> None:
        """``verified``: a target, filled. Several threads may call."""
        parts = self._lease.parts(entry) if self._lease is not None and entry.nbytes else ((0, entry.nbytes),)
        copied = self._beside.copy(entry, _bytes(verified), parts) if self._beside is not None else None
        if copied is not None:
            self.on_device.add(entry.name)
        elif len(parts) > 1:
            self._parts[entry.name] = parts
        self.tensors[entry.name] = verified if copied is None else copied

    def complete(self, entries: Sequence[TensorEntry]) -> None:
        """Every tensor was added: wait for the device."""
        self.tensors = {entry.name: self.tensors[entry.name] for entry in entries if entry.name in self.tensors}
        if self._beside is not None:
            self._beside.settle()

    def parts(self, name: str) -> tuple[tuple[int, int], ...]:
        """Ranges of bytes of a tensor that have to be copied one by one; empty where the whole may be copied."""
        return self._parts.get(name, ())

    def plain(self, held_back: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors but those held back, for whoever copies them as a whole."""
        for name, tensor in self.tensors.items():
            if name not in held_back:
                yield name, tensor.clone() if name in self._parts else tensor

    def release(self) -> None:
        """Give everything back, once nobody reads it any more, the device included. Idempotent."""
        self.tensors.clear()
        lease, self._lease = self._lease, None
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.free()
        if lease is not None:
            lease.release()


class Beside:
    """Blocks of device memory for as many of a version's tensors as fit into half of what is free now."""

    def __init__(self, memory: DeviceMemory, entries: Sequence[TensorEntry]) -> None:
        self._memory = memory
        self._sizes: list[int] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._blocks: dict[int, torch.Tensor] = {}
        self._full = False
        self._lock = threading.Lock()
        budget = memory.free() // _SHARE
        for entry in entries:
            size = -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
            if 0 < size <= budget:
                budget -= size
                self._places[entry.name] = self._place(size)

    def copy(
        self, entry: TensorEntry, source: torch.Tensor, parts: Sequence[tuple[int, int]]
    ) -> torch.Tensor | None:  # fmt: skip
        """``source`` (its bytes) on the device, soon; None where it has no place there. Several threads may call."""
        number, offset = self._places.get(entry.name, (-1, 0))
        block = self._block(number) if number >= 0 else None
        if block is None:
            return None
        target = block[offset : offset + entry.nbytes]
        for start, end in parts:
            self._memory.copy(target[start:end], source[start:end])
        return target.view(parse_dtype(entry.dtype)).view(entry.shape)

    def settle(self) -> None:
        """Wait for the copies."""
        if self._blocks:
            self._memory.settle()

    def free(self) -> None:
        """The blocks go, and their memory is anybody's."""
        if self._blocks:
            self._memory.settle()
            self._blocks.clear()
            self._memory.give_back()

    def _place(self, size: int) -> tuple[int, int]:
        """(block, offset) of the next tensor; one that is larger than a block has a block of its own."""
        if not self._sizes or self._sizes[-1] + size > _BLOCK_BYTES:
            self._sizes.append(0)
        offset = self._sizes[-1]
        self._sizes[-1] += size
        return len(self._sizes) - 1, offset

    def _block(self, number: int) -> torch.Tensor | None:
        """Allocated at its first tensor; after the first that finds no room, no more are."""
        with self._lock:
            if number not in self._blocks and not self._full:
                block = self._memory.empty(self._sizes[number])
                if block is None:
                    self._full = True
                else:
                    self._blocks[number] = block
            return self._blocks.get(number)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
