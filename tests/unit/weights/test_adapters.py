"""Adapters among published tensors: the sum by hand, and manifests that make no sense."""

from __future__ import annotations

import pytest
import torch

from areal_like.api.weights import TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.adapters import add_adapter
from areal_like.weights.staging import StagedWeights
from areal_like.weights.transports.base import make_writer

BASE = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
A = torch.tensor([[1.0, 0.0, -1.0]])
B = torch.tensor([[2.0], [0.5]])
SUM = [[3.0, 2.0, 1.0], [4.5, 5.0, 5.5]]


def live():
    return {"layer.weight": BASE.clone(), "norm.weight": torch.ones(2)}


def staged_with(tensors, directory, weights=None, version=1):
    staged = StagedWeights(weights if weights is not None else live())
    manifest = make_writer(TransportKind.DISK, run_id="t", directory=directory).write(version, 0, tensors)
    staged.stage(manifest)
    return staged, manifest


def test_the_sum_by_hand():
    assert add_adapter(BASE, A, B).tolist() == SUM
    rounded = add_adapter(BASE.bfloat16(), A.bfloat16(), B.bfloat16())
    assert rounded.dtype == torch.bfloat16 and rounded.float().tolist() == SUM


def test_other_tensors_stay_and_a_second_adapter_replaces_the_first(tmp_path):
    weights = live()
    staged, manifest = staged_with([("layer.lora_A", A), ("layer.lora_B", B)], tmp_path, weights)
    assert weights["layer.weight"].equal(BASE)
    staged.commit(1)
    assert weights["layer.weight"].tolist() == SUM and weights["norm.weight"].tolist() == [1, 1]
    assert staged.digest() == manifest.digest
    second = make_writer(TransportKind.DISK, run_id="t", directory=tmp_path).write(
        2, 0, [("layer.lora_A", A), ("layer.lora_B", -B)]
    )
    staged.stage(second)
    staged.commit(2)
    assert torch.equal(weights["layer.weight"], BASE - B @ A)
    assert staged.digest() == second.digest


def test_whole_weights_after_adapters_are_the_new_base(tmp_path):
    weights = live()
    staged, _ = staged_with([("layer.lora_A", A), ("layer.lora_B", B)], tmp_path, weights)
    staged.commit(1)
    writer = make_writer(TransportKind.DISK, run_id="t", directory=tmp_path)
    staged.stage(writer.write(2, 0, [("layer.weight", 10 * BASE), ("norm.weight", torch.zeros(2))]))
    staged.commit(2)
    staged.stage(writer.write(3, 0, [("layer.lora_A", A), ("layer.lora_B", B)]))
    staged.commit(3)
    assert torch.equal(weights["layer.weight"], 10 * BASE + B @ A)
    assert weights["norm.weight"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("layer.lora_A", A)], "other half"),
        ([("layer.lora_A", A), ("layer.lora_B", B), ("norm.weight", torch.ones(2))], "lies among adapters"),
        ([("other.lora_A", A), ("other.lora_B", B)], r"no 'other\.weight'"),
        ([("layer.lora_A", A[:, :2]), ("layer.lora_B", B)], "do not make a change"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, tensors, message):
    with pytest.raises(WeightUpdateError, match=message):
        staged_with(tensors, tmp_path)


def test_a_layer_that_lost_its_adapter_is_refused(tmp_path):
    weights = live() | {"next.weight": BASE.clone()}
    both = [("layer.lora_A", A), ("layer.lora_B", B), ("next.lora_A", A), ("next.lora_B", B)]
    staged, _ = staged_with(both, tmp_path, weights)
    staged.commit(1)
    with pytest.raises(WeightUpdateError, match=r"'next\.weight' had an adapter"):
        staged.stage(make_writer(TransportKind.DISK, run_id="t", directory=tmp_path).write(2, 0, both[:2]))
