"""A digest that a GPU computes at the speed of its memory: for weights that never touch the host.

The bytes, filled up with zeros, are rows of 2,048 words of 32 bits. A row's sum is that of its words times fixed odd
numbers of 64 bits; the tensor's is that of its rows' sums times odd numbers that depend on the row alone: all modulo
2^64. Two tables of numbers give 128 bits, and SHA-256 of dtype, shape and length is added at the end:

    digest_k = header_k + sum_i R_k[i] * sum_j T_k[j] * word[i, j]        k = 0, 1;  R, T odd

An odd factor is a bijection modulo 2^64, so a change of any one word always shows. Several changes cancel each other by
an accident of at most 2^-66: half a product's bits are at stake at least, since words have 32 bits. (With words of 64
bits, two flips of their highest bits would cancel always.) It is no cryptography: it guards against accidents, as
transports between processes of one run need it. CPU and CUDA give the same digests.

On CUDA one Triton kernel reads the bytes once (:mod:`areal_like.weights.digest_kernel`), after it gave the digests of
plain torch here, in this process and on this device; where it does not, plain torch does it.

Sums are gathered on the device and read once for many tensors: :class:`DeviceDigests` waits for the device only in
:meth:`~DeviceDigests.read`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice

import torch

_LOG = logging.getLogger(__name__)

#: how such a digest starts, so that a verifier can tell it from SHA-256
PREFIX = "dev1:"
#: words of one row
ROW_WORDS = 2048
#: bytes of one row
ROW_BYTES = 4 * ROW_WORDS
#: bytes digested at a time; the products take four times as much
CHUNK_BYTES = 32 * 2**20
_CHUNK_ROWS = CHUNK_BYTES // ROW_BYTES
_MASK = 2**64 - 1
#: where the streams of pseudo-random numbers start: columns and rows of the two tables (digits of pi)
_COLUMN_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
_ROW_SEEDS = (0xA4093822299F31D0, 0x082EFA98EC4E6C89)
#: bytes of the tensors that a kernel is tried on: no words, parts of a row, several programs' rows and a rest
_TRIED = (1, 6, ROW_BYTES - 4, 40 * ROW_BYTES, 53 * ROW_BYTES + 1234, 16 * ROW_BYTES + 3)

#: sums (int64 [n, 2]) of n tensors of bytes by the tables of columns and rows (``digest_kernel.RowSums``)
Kernel = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]


def is_device_digest(digest: str) -> bool:
    """It came from here, not from SHA-256."""
    return digest.startswith(PREFIX)


class DeviceDigests:
    """Digests of tensors of one device, in the order in which they were added. Work goes to the current stream.

    The tables stay: one object serves any number of versions (:meth:`read` starts anew).
    """

    def __init__(self, device: torch.device | str, *, kernel: Kernel | None = None, plain: bool = False) -> None:
        """``kernel``: instead of the device's own; ``plain``: none at all."""
        self._device = torch.device(device)
        self._kernel = kernel if kernel is not None or plain else tried_kernel(self._device)
        self._columns = _odd_numbers(_COLUMN_SEEDS, 0, ROW_WORDS, self._device)
        self._rows = torch.empty(2, 0, dtype=torch.int64, device=self._device)
        self._sums: list[torch.Tensor] = []
        self._heads: list[tuple[tuple[int, int], int]] = []

    def reserve(self, nbytes: int) -> None:
        """Make the tables for tensors of up to ``nbytes`` bytes now: streams may take turns afterwards. Waits."""
        self._grow(nbytes // ROW_BYTES + 1)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def add(self, *tensors: torch.Tensor) -> None:
        """Digest ``tensors`` (any dtype and shape, on the device). Returns at once: the device works on.

        Many at once are cheaper than one by one.
        """
        flats = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        for tensor, flat in zip(tensors, flats, strict=True):
            before = len(self._sums)
            if self._kernel is None:
                self._sum(flat)
            count = len(self._sums) - before if self._kernel is None else min(flat.numel(), 1)
            header = _header(str(tensor.dtype).removeprefix("torch."), tensor.shape, flat.numel())
            self._heads.append((header, count))
        there = [flat for flat in flats if flat.numel()]
        if self._kernel is not None and there:
            self._grow(max(flat.numel() for flat in there) // ROW_BYTES + 1)
            self._sums.append(self._kernel(there, self._columns, self._rows))

    def read(self) -> tuple[str, ...]:
        """The digests of all tensors since the last call. Waits for the device once."""
        heads, self._heads = self._heads, []
        sums, self._sums = self._sums, []
        found = iter(torch.cat(sums).cpu().tolist() if sums else ())
        digests = []
        for (first, second), count in heads:
            for parts in islice(found, count):
                first, second = first + parts[0], second + parts[1]
            digests.append(f"{PREFIX}{first & _MASK:016x}{second & _MASK:016x}")
        return tuple(digests)

    def _sum(self, flat: torch.Tensor) -> None:
        """Sums (int64 [1, 2]) of parts of uint8 [n]; they are added up on the host: fewer small steps."""
        rows = flat.numel() // ROW_BYTES
        self._grow(rows + 1)
        for start in range(0, rows, _CHUNK_ROWS):
            count = min(_CHUNK_ROWS, rows - start)
            self._sums.append(self._rows_sum(flat[start * ROW_BYTES : (start + count) * ROW_BYTES], start))
        rest = flat[rows * ROW_BYTES :]
        if rest.numel():
            padded = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=self._device)
            padded[: rest.numel()] = rest
            self._sums.append(self._rows_sum(padded, rows))

    def _rows_sum(self, part: torch.Tensor, first: int) -> torch.Tensor:
        """int64 [1, 2] of whole rows, the first of which is row ``first`` of its tensor."""
        if part.data_ptr() % 4 or part.storage_offset() % 4:
            part = part.clone()  # words must lie at multiples of their size
        words = part.view(torch.int32).view(-1, 1, ROW_WORDS)
        sums = (words * self._columns).sum(dim=2)  # [rows, 2]
        return (sums * self._rows[:, first : first + len(sums)].t()).sum(dim=0, keepdim=True)

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


@cache
def tried_kernel(device: torch.device) -> Kernel | None:
    """The kernel of ``device``, if it gave the digests of plain torch there; tried once in a process. Waits."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None

    def make() -> Kernel:
        from areal_like.weights.digest_kernel import RowSums

        return RowSums(device)

    return tried(make, device)


def tried(make: Callable[[], Kernel], device: torch.device) -> Kernel | None:
    """What ``make`` makes, unless that fails or :func:`agrees` says no: then None, and a line in the log."""
    try:
        kernel = make()
        if agrees(kernel, device):
            return kernel
        trouble = "its digests differ"
    except Exception as error:  # compilers fail in many ways; plain torch does the same, only slower
        trouble = f"{type(error).__name__}: {error}"
    _LOG.warning("weights on %s are digested by plain torch, since the fused kernel fails: %s", device, trouble)
    return None


def agrees(kernel: Kernel, device: torch.device) -> bool:
    """``kernel`` gives the digests of plain torch for random tensors of awkward lengths and places. Waits."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 256, (sum(_TRIED) + len(_TRIED),), dtype=torch.uint8, generator=generator).to(device)
    tensors = [part[1:] for part in torch.split(drawn, [1 + nbytes for nbytes in _TRIED])]
    tensors += [torch.full((3 * ROW_WORDS,), -(2**31), dtype=torch.int32, device=device)]
    ours, plain = DeviceDigests(device, kernel=kernel), DeviceDigests(device, plain=True)
    for digests in (ours, plain):
        digests.add(*tensors)
        digests.add(tensors[-1])
    return ours.read() == plain.read()


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
