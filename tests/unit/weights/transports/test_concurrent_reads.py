"""A server may read the tensors of a version in several threads at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from areal_like.api.weights import TensorEntry, TransportKind
from areal_like.weights.digest import parse_dtype, tensor_digest
from areal_like.weights.transports.base import WeightWriter, make_reader


@pytest.mark.parametrize("kind", [TransportKind.SHM, TransportKind.DISK])
def test_every_thread_gets_its_tensors_whole(kind: TransportKind, new_writer: Callable[..., WeightWriter]) -> None:
    tensors = [(str(n), torch.randn(n * 13 % 257, n % 7)) for n in range(1, 200)]
    writer = new_writer(kind)
    manifest = writer.write(1, 0, tensors)
    with make_reader(manifest) as reader, ThreadPoolExecutor(8) as pool:
        assert reader.concurrent

        def read(entry: TensorEntry) -> bool:
            target = torch.empty(entry.shape, dtype=parse_dtype(entry.dtype))
            reader.read_into(entry, target)
            return tensor_digest(target) == entry.digest

        assert all(pool.map(read, manifest.tensors * 3))
    writer.close()
