"""Compiled layers: the same numbers, one compilation for all layers and sizes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from train_cases import build_model, random_batch

from areal_like.train.batching import TrainRow, build_micro_batch
from areal_like.train.layers import compile_layers, decoder_layers
from areal_like.train.model import PolicyModel, Sampling, load_language_model


def test_the_decoder_layers_are_found(model_dir):
    layers = decoder_layers(load_language_model(model_dir))
    assert [type(layer).__name__ for layer in layers] == ["LlamaDecoderLayer"] * 2
    assert decoder_layers(torch.nn.Linear(1, 1)) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # read by the compiler
def test_compiled_layers_share_one_compilation_and_change_nothing(tmp_path, monkeypatch):
    """Without a code generator, which is not ours to test."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    folder = build_model(tmp_path / "model", layers=3)
    plain, compiled = (PolicyModel(load_language_model(folder, dtype=torch.float64), Sampling()) for _ in range(2))
    names = [name for name, _ in compiled.named_parameters()]
    compile_layers(compiled)
    assert [name for name, _ in compiled.named_parameters()] == names
    counters.clear()
    for seed in (0, 1, 2):
        rows = [TrainRow(trajectory=t, advantage=0.0) for t in random_batch(seed=seed)[1].values()]
        batch = build_micro_batch(rows[seed:], layout="padded")
        found, want = compiled(batch)[0], plain(batch)[0]
        np.testing.assert_allclose(found.detach(), want.detach(), rtol=0, atol=1e-12)
        found.sum().backward()
        want.sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)


@pytest.fixture(autouse=True)
def forgotten():
    yield
    torch._dynamo.reset()
