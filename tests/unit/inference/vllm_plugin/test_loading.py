"""From staged memory into a model: in place, layer by layer, and what proves that one may stand in for the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.inference.vllm_plugin import placement as placements
from areal_like.inference.vllm_plugin import reloading
from areal_like.inference.vllm_plugin.arena import Arena
from areal_like.inference.vllm_plugin.loading import load_copy
from areal_like.inference.vllm_plugin.parts import Parts
from areal_like.inference.vllm_plugin.placement import NotPlaceable, Placement, trace
from areal_like.inference.vllm_plugin.reloading import InPlace
from areal_like.inference.vllm_plugin.staged_copy import Beside, StagedCopy
from areal_like.weights.digest import tensor_entry
from areal_like.weights.manifest import make_manifest
from tests.unit.inference.vllm_plugin.host_memory import HostMemory
from tests.unit.inference.vllm_plugin.test_placement import Fused, checkpoint, held

PAGE = 4096
HEAD = frozenset({"lm_head.weight"})


class Wide(Fused):
    """Its embedding is larger than a slice of locked memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.full((5001, 4), 7.0), requires_grad=False)
        self.head = self.embed


def version(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {**checkpoint(seed), "embed": torch.randn((5000, 4), generator=generator)}


def entries(weights: dict[str, torch.Tensor]) -> list[TensorEntry]:
    return [tensor_entry(name, tensor) for name, tensor in weights.items()]


def manifest(weights: dict[str, torch.Tensor]) -> Manifest:
    return make_manifest(1, 0, TransportKind.SHM, "segment", entries(weights))


def staged(weights: dict[str, torch.Tensor], memory: HostMemory | None = None) -> StagedCopy:
    """As ``HostStaging`` fills it."""
    listed = entries(weights)
    if memory is None:
        copy = StagedCopy()
    else:
        lease = Arena(memory, slice_bytes=PAGE).lease(listed, lambda: False)
        copy = StagedCopy(lease, Beside(memory, listed))
    for entry in listed:
        target = copy.target(entry)
        target.copy_(weights[entry.name])
        copy.add(entry, target)
    copy.complete(listed)
    return copy


@contextmanager
def layer_by_layer(steps: list[str]) -> Iterator[None]:
    steps.append("begin")
    yield
    steps.append("finalize")


def load(model: torch.nn.Module, copy: StagedCopy, placement: Placement | None = None) -> list[str]:
    steps: list[str] = []
    load_copy(
        model, copy, held_back=HEAD, reloading=layer_by_layer(steps), wait=lambda: steps.append("wait"), parts=Parts(),
        placement=placement,
    )  # fmt: skip
    return steps


def wanted(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = Wide()
    model.load_weights(iter(weights.items()))
    return held(model)


@pytest.mark.parametrize("room", [None, 0, 2 * 300, 2**30])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_tensor_arrives_wherever_it_was_staged(room: int | None, in_place: bool) -> None:
    model = Wide()
    load(model, staged(version(0)))  # the first version comes this way
    placement = trace(model, entries(version(0))) if in_place else None
    for seed in (1, 2):
        memory = None if room is None else HostMemory(room)
        sent = version(seed)
        copy = staged({**sent, "lm_head.weight": torch.full((5000, 4), 3.0)}, memory)
        assert copy.parts("embed") == () or room in (0, 600)
        assert len(copy.parts("embed")) in ((0, 20, 21) if room in (0, 600) else (0,))
        steps = load(model, copy, placement)
        assert steps == (["wait"] if in_place else ["begin", "finalize", "wait"])
        assert all(torch.equal(tensor, held(model)[name]) for name, tensor in wanted(sent).items())


def test_what_has_to_be_copied_in_parts_is_handed_to_a_loader_as_a_copy_of_its_own() -> None:
    memory = HostMemory(0)
    copy = staged(version(1), memory)
    assert len(copy.parts("embed")) > 2
    given = dict(copy.plain(HEAD))
    assert memory.holds(given["embed"]) == "pageable"
    assert memory.holds(given["q"]) == "locked"
    assert all(torch.equal(given[name], tensor) for name, tensor in version(1).items())


def test_parts_reach_a_place_that_is_not_contiguous() -> None:
    whole = torch.zeros(40, 60)
    placement = Placement({"w": whole[:, 10:40]}, ())
    tensor = torch.randn(40, 30)
    placement.load_parts("w", tensor, [(0, 4096), (4096, 4800)])
    assert torch.equal(whole[:, 10:40], tensor)
    assert whole[:, :10].abs().sum() == whole[:, 40:].abs().sum() == 0


def test_a_tensor_that_did_not_arrive_is_named() -> None:
    model = Fused()
    copy = staged(checkpoint(1))
    model._load = lambda model, name, tensor: None if name == "norm" else Fused.copied(model, name, tensor)
    with pytest.raises(WeightUpdateError, match="'norm' was loaded, and the model's parameter differs"):
        load(model, copy)


def test_a_copy_that_fails_on_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Wide()
    placement = trace(model, entries(version(0)))

    def broken(*told: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(placement, "load_parts", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        load(model, staged(version(1), HostMemory(0)), placement)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> InPlace:
    """Of a model that has nothing against it."""
    monkeypatch.setattr(reloading, "_check_copies_alone", lambda model, config: None)
    return InPlace(Wide(), None)


def loaded(ours: InPlace, copy: StagedCopy) -> bool:
    """Load as vLLM does; is the next version loaded in place?"""
    sent = {name: tensor for name, tensor in copy.tensors.items() if name not in HEAD}
    load(ours._model, copy)
    ours.prove_by(manifest(sent), HEAD, copy)
    return ours.loader(entries(sent)) is not None


@pytest.mark.parametrize("room", [None, 0, 2**30])
def test_the_first_version_proves_the_placement(in_place: InPlace, room: int | None) -> None:
    in_place.prepare(entries(version(1)))
    assert in_place.loader(entries(version(1))) is None
    copy = staged({**version(1), "lm_head.weight": torch.zeros(2)}, None if room is None else HostMemory(room))
    assert loaded(in_place, copy)


@pytest.mark.parametrize("name", ["q", "embed", "norm"])
@pytest.mark.parametrize("damage", [lambda t: t.view(-1)[-1:].neg_(), lambda t: t.view(-1)[-1:].fill_(torch.nan)])
def test_one_element_that_lies_elsewhere_disproves_it(in_place: InPlace, name: str, damage: object) -> None:
    in_place.prepare(entries(version(1)))
    copy = staged(version(1))
    load(in_place._model, copy)
    damage(in_place._placement._places[name])  # type: ignore[operator, union-attr]
    in_place.prove_by(manifest(version(1)), HEAD, copy)
    assert in_place.loader(entries(version(1))) is None
    load(in_place._model, copy)
    in_place.prove_by(manifest(version(1)), HEAD, copy)
    assert in_place.loader(entries(version(1))) is None, "for ever"


def test_bytes_are_compared_not_numbers(in_place: InPlace) -> None:
    """NaN is what it is, and minus zero is not zero."""
    weights = version(1)
    weights["q"][0, 0] = torch.nan
    weights["k"][0, 0] = -0.0
    in_place.prepare(entries(weights))
    copy = staged(weights)
    in_place._model.load_weights(iter(weights.items()))  # type: ignore[operator]
    assert in_place._placement is not None
    assert in_place._placement.first_difference(weights.items()) == ""
    in_place._placement._places["k"][0, 0] = 0.0
    assert in_place._placement.first_difference(copy.plain(HEAD)) == "k"


def test_a_difference_in_any_chunk_is_found(monkeypatch: pytest.MonkeyPatch, in_place: InPlace) -> None:
    monkeypatch.setattr(placements, "_COMPARED_BYTES", 1000)
    in_place.prepare(entries(version(1)))
    assert in_place._placement is not None
    in_place._model.load_weights(iter(version(1).items()))  # type: ignore[operator]
    assert in_place._placement.first_difference(version(1).items()) == ""
    for row in (0, 62, 63, 4999):
        sent = version(1)
        sent["embed"][row, 3] += 1
        assert in_place._placement.first_difference(sent.items()) == "embed"


def test_no_room_to_compare_leaves_it_to_the_next_version(
    monkeypatch: pytest.MonkeyPatch, in_place: InPlace, caplog: pytest.LogCaptureFixture
) -> None:
    in_place.prepare(entries(version(1)))

    def full(*told: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Placement, "first_difference", full)
        assert not loaded(in_place, staged(version(1)))
    assert "the next version tells" in caplog.text
    assert loaded(in_place, staged(version(2)))


def test_a_loader_that_computes_is_never_stood_in_for(monkeypatch: pytest.MonkeyPatch, in_place: InPlace) -> None:
    def doubtful(model: object, weights: object) -> None:
        raise NotPlaceable("it computes")

    monkeypatch.setattr(reloading, "trace", doubtful)
    in_place.prepare(entries(version(1)))
    assert not loaded(in_place, staged(version(1)))
