"""What really arrived is digested on its way into the loader."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.inference.vllm_plugin.recorder import Recorder, comparable, first_difference
from areal_like.weights.device_digest import DeviceDigests, device_digest
from areal_like.weights.manifest import make_manifest

TENSORS = {"embed": torch.arange(12.0).reshape(3, 4), "norm": torch.ones(4), "head": torch.arange(12.0).reshape(3, 4)}


class Model(torch.nn.Module):
    """Takes whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(4))
        self.embed = torch.nn.Parameter(torch.zeros(3, 4))
        self.seen: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        given = dict(weights)
        self.seen |= given
        return set(given)


def manifest() -> Manifest:
    entries = [
        TensorEntry(name=name, dtype="float32", shape=tuple(t.shape), nbytes=t.nbytes, digest=device_digest(t))
        for name, t in TENSORS.items()
    ]
    return make_manifest(3, 0, TransportKind.COLLECTIVE, "tcp://h:1/k", entries)


def recorder(model: Model, *, kept: frozenset[str] = frozenset()) -> Recorder:
    return Recorder(model, DeviceDigests("cpu"), kept=kept, held_back=frozenset({"head"}))


def test_everything_is_verified_and_all_but_the_tied_head_is_passed_on() -> None:
    model = Model()
    found = recorder(model)
    listed = list(TENSORS.items())
    found.load_weights(listed[:1])
    found.load_weights(listed[1:])
    found.verify(manifest())
    assert model.seen.keys() == {"embed", "norm"}
    assert found.loaded == {"embed", "norm"}


def test_a_bit_that_changed_on_the_way_is_named() -> None:
    found = recorder(Model())
    changed = TENSORS["norm"].clone()
    changed.view(torch.int32)[2] ^= 1
    found.load_weights({**TENSORS, "norm": changed}.items())
    with pytest.raises(WeightUpdateError, match="'norm': its bytes have digest dev1:"):
        found.verify(manifest())


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"embed": TENSORS["embed"], "norm": TENSORS["norm"]}, "'head'"),
        ({**TENSORS, "more": torch.ones(1)}, "'more'"),
        ({**TENSORS, "norm": torch.ones(2, 2)}, "'norm'"),
        (dict(reversed(TENSORS.items())), "order"),
    ],
)
def test_other_tensors_than_those_told_are_refused(tensors: dict[str, torch.Tensor], said: str) -> None:
    found = recorder(Model())
    found.load_weights(tensors.items())
    with pytest.raises(WeightUpdateError, match=said):
        found.verify(manifest())


def test_small_tensors_are_kept_as_they_came_although_their_bucket_is_used_again() -> None:
    model = Model()
    assert comparable(model, 16) == {"norm"}
    bucket = torch.ones(4)
    found = recorder(model, kept=comparable(model, 16))
    found.load_weights([("norm", bucket)])
    bucket.zero_()
    assert torch.equal(found.copies["norm"], torch.ones(4))
    assert first_difference(dict(model.named_parameters()), found.copies) == "norm"
    model.norm.data.fill_(1.0)
    assert first_difference(dict(model.named_parameters()), found.copies) == ""
    assert first_difference({"norm": torch.ones(5)}, found.copies) == ""


def test_a_load_that_broke_leaves_nothing_for_the_next() -> None:
    digests = DeviceDigests("cpu")
    broken = Recorder(Model(), digests, kept=frozenset(), held_back=frozenset())
    broken.load_weights([("embed", TENSORS["embed"])])
    broken.drop()
    whole = Recorder(Model(), digests, kept=frozenset(), held_back=frozenset())
    whole.load_weights(TENSORS.items())
    whole.verify(manifest())
