"""A small model's tensors, and writers that clean up after themselves."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from areal_like.api.weights import TransportKind
from areal_like.weights.segments import list_segments, remove_segments
from areal_like.weights.transports.base import WeightWriter, make_writer

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors() -> Tensors:
    """Several dtypes, a scalar, an empty tensor, and a tie."""
    generator = torch.Generator().manual_seed(7)
    embed = torch.randn(50, 33, generator=generator)
    return {
        "embed": embed,
        "norm": torch.randn(33, generator=generator).to(torch.bfloat16),
        "ids": torch.arange(17, dtype=torch.int64),
        "scale": torch.tensor(0.5),
        "nothing": torch.empty(0, 4),
        "head": embed,
    }


@pytest.fixture
def run_id() -> Iterator[str]:
    """A run id of the test's own; its segments are gone afterwards."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    remove_segments(name)
    assert list_segments(name) == ()


@pytest.fixture(params=[kind for kind in TransportKind if kind is not TransportKind.IPC])
def kind(request: pytest.FixtureRequest) -> TransportKind:
    return TransportKind(request.param)


@pytest.fixture
def new_writer(run_id: str, tmp_path: Path) -> Callable[..., WeightWriter]:
    def make(kind: TransportKind, bucket_bytes: int = 4096) -> WeightWriter:
        return make_writer(kind, run_id=run_id, directory=tmp_path / "weights", bucket_bytes=bucket_bytes)

    return make


@pytest.fixture
def zeros_like() -> Callable[[Tensors], Tensors]:
    """A model of the same shapes that holds zeros; ties are kept."""

    def make(tensors: Tensors) -> Tensors:
        made = {id(t): torch.zeros_like(t) for t in tensors.values()}
        return {name: made[id(t)] for name, t in tensors.items()}

    return make
