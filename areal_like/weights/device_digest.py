"""A digest that a GPU computes at the speed of its memory: for weights that never touch the host.

The bytes, filled up with zeros, are rows of 1,024 words of 64 bits. A row's sum is that of its words times fixed odd
numbers; the tensor's is that of its rows' sums times odd numbers that depend on the row alone: all modulo 2^64. Two
tables of numbers give 128 bits, and SHA-256 of dtype, shape and length is added at the end:

    digest_k = header_k + sum_i R_k[i] * sum_j T_k[j] * word[i, j]        k = 0, 1;  R, T odd

An odd factor is a bijection modulo 2^64, so a change of any one word always shows; words that changed places, zeros
that were never written and rows of another tensor do, except by an accident of 2^-64. It is no cryptography: it guards
against accidents, as transports between processes of one run need it. CPU and CUDA give the same digests.

Sums are gathered on the device and read once for many tensors: :class:`DeviceDigests` waits for the device only in
:meth:`~DeviceDigests.read`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

#: how such a digest starts, so that a verifier can tell it from SHA-256
PREFIX = "dev1:"
#: words of one row
ROW_WORDS = 1024
#: bytes of one row
ROW_BYTES = 8 * ROW_WORDS
#: bytes digested at a time; the products take twice as much
CHUNK_BYTES = 64 * 2**20
_CHUNK_ROWS = CHUNK_BYTES // ROW_BYTES
_MASK = 2**64 - 1
#: where the streams of pseudo-random numbers start: columns and rows of the two tables (digits of pi)
_COLUMN_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
_ROW_SEEDS = (0xA4093822299F31D0, 0x082EFA98EC4E6C89)


def is_device_digest(digest: str) -> bool:
    """It came from here, not from SHA-256."""
    return digest.startswith(PREFIX)


class DeviceDigests:
    """Digests of tensors of one device, in the order in which they were added. Work goes to the current stream.

    The tables stay: one object serves any number of versions (:meth:`read` starts anew).
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._columns = _odd_numbers(_COLUMN_SEEDS, 0, ROW_WORDS, self._device)
        self._rows = torch.empty(2, 0, dtype=torch.int64, device=self._device)
        self._sums: list[torch.Tensor] = []
        self._headers: list[tuple[int, int]] = []

    def reserve(self, nbytes: int) -> None:
        """Make the tables for tensors of up to ``nbytes`` bytes now: streams may take turns afterwards. Waits."""
        self._grow(nbytes // ROW_BYTES + 1)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def add(self, tensor: torch.Tensor) -> None:
        """Digest ``tensor`` (any dtype and shape, on the device). Returns at once: the device works on."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._headers.append(_header(str(tensor.dtype).removeprefix("torch."), tensor.shape, flat.numel()))
        self._sums.append(self._sum(flat))

    def read(self) -> tuple[str, ...]:
        """The digests of all tensors since the last call. Waits for the device once."""
        headers, self._headers = self._headers, []
        sums, self._sums = self._sums, []
        found = torch.stack(sums).cpu().tolist() if sums else []
        return tuple(
            PREFIX + "".join(f"{(header + part) & _MASK:016x}" for header, part in zip(pair, parts, strict=True))
            for pair, parts in zip(headers, found, strict=True)
        )

    def _sum(self, flat: torch.Tensor) -> torch.Tensor:
        """int64 [2] of uint8 [n]."""
        rows = flat.numel() // ROW_BYTES
        total = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._grow(rows + 1)
        for start in range(0, rows, _CHUNK_ROWS):
            count = min(_CHUNK_ROWS, rows - start)
            total += self._rows_sum(flat[start * ROW_BYTES : (start + count) * ROW_BYTES], start)
        rest = flat[rows * ROW_BYTES :]
        if rest.numel():
            padded = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=self._device)
            padded[: rest.numel()] = rest
            total += self._rows_sum(padded, rows)
        return total

    def _rows_sum(self, part: torch.Tensor, first: int) -> torch.Tensor:
        """int64 [2] of whole rows, the first of which is row ``first`` of its tensor."""
        if part.data_ptr() % 8 or part.storage_offset() % 8:
            part = part.clone()  # words must lie at multiples of their size
        words = part.view(torch.int64).view(-1, 1, ROW_WORDS)
        sums = (words * self._columns).sum(dim=2)  # [rows, 2]
        return (sums * self._rows[:, first : first + len(sums)].t()).sum(dim=0)

    def _grow(self, rows: int) -> None:
        known = self._rows.shape[1]
        if known < rows:
            more = _odd_numbers(_ROW_SEEDS, known, max(rows - known, known, 1024), self._device)
            self._rows = torch.cat([self._rows, more], dim=1)


def device_digest(tensor: torch.Tensor) -> str:
    """Of one tensor, where it is. Waits for its device."""
    digests = DeviceDigests(tensor.device)
    digests.add(tensor)
    return digests.read()[0]


def _header(dtype: str, shape: Sequence[int], nbytes: int) -> tuple[int, int]:
    """128 bits of what the words do not tell."""
    state = hashlib.sha256(f"{dtype}{list(shape)}|{nbytes}".encode()).digest()
    return int.from_bytes(state[:8], "big"), int.from_bytes(state[8:16], "big")


def _odd_numbers(seeds: Sequence[int], start: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 [len(seeds), count]: the last bit set of numbers ``start``.. of splitmix64 from each seed.

    https://prng.di.unimi.it/splitmix64.c; made on the CPU, so that every device has the same.
    """
    index = torch.arange(start + 1, start + count + 1, dtype=torch.int64)
    streams = []
    for seed in seeds:
        state = index * _signed(0x9E3779B97F4A7C15) + _signed(seed)
        state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
        state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
        streams.append((state ^ _shifted(state, 31)) | 1)
    return torch.stack(streams).to(device)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """``value`` >> ``bits`` as of an unsigned number."""
    return torch.bitwise_and(value >> bits, 2 ** (64 - bits) - 1)


def _signed(number: int) -> int:
    """The signed number of the same 64 bits."""
    return number - 2**64 if number >= 2**63 else number
