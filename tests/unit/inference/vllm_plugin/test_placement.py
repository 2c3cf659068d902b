"""A loader that only copies is traced, and what stands in for it puts every byte where the loader would."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_like.api.weights import TensorEntry
from areal_like.inference.vllm_plugin.placement import NotPlaceable, Placement, trace
from areal_like.weights.device_digest import DeviceDigests, device_digest

ROOT = Path(__file__).parents[4]
Weights = Iterable[tuple[str, torch.Tensor]]


class Fused(torch.nn.Module):
    """q, k and v in one parameter, a vocabulary filled up to eight rows, a norm, and a head that is the embedding."""

    def __init__(self, load: Callable[[Fused, str, torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.full((6, 4), 7.0), requires_grad=False)
        self.embed = torch.nn.Parameter(torch.full((8, 4), 7.0), requires_grad=False)
        self.head = self.embed
        self.norm = torch.nn.Parameter(torch.full((4,), 7.0), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(4))
        self._load = load or Fused.copied

    def copied(self, name: str, tensor: torch.Tensor) -> None:
        if name == "embed":
            self.embed[: len(tensor)].data.copy_(tensor)
            self.embed[len(tensor) :].data.fill_(0)
        elif name == "norm":
            self.norm.data.copy_(tensor)
        else:
            self.qkv.data.narrow(0, 2 * "qkv".index(name), 2).copy_(tensor)

    def load_weights(self, weights: Weights) -> set[str]:
        names = set()
        for name, tensor in weights:
            self._load(self, name, tensor)
            names.add("qkv" if name in "qkv" else name)
        return names


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (7, 4), "q": (2, 4), "k": (2, 4), "v": (2, 4), "norm": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def entries(weights: dict[str, torch.Tensor]) -> list[TensorEntry]:
    return [
        TensorEntry(
            name=name, dtype=str(t.dtype)[6:], shape=tuple(t.shape), nbytes=t.nbytes, digest=device_digest(t)
        )
        for name, t in weights.items()
    ]  # fmt: skip


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_tracing_writes_nothing() -> None:
    model = Fused()
    trace(model, entries(checkpoint(1)))
    assert all(torch.equal(t, torch.full_like(t, 7.0)) for name, t in held(model).items() if name != "scratch")


def test_it_loads_what_the_loader_loads() -> None:
    ours, theirs = Fused(), Fused()
    ours.load_weights(checkpoint(1).items())  # the first version comes this way
    placement = trace(ours, entries(checkpoint(1)))
    for seed in (2, 3):
        came = list(checkpoint(seed).items())
        told = theirs.load_weights(came)
        assert placement.load_weights(came[:2]) == placement.load_weights(came[2:]) == told
        assert all(torch.equal(t, held(theirs)[name]) for name, t in held(ours).items())


def test_it_loads_views_of_a_bucket() -> None:
    model, came = Fused(), checkpoint(4)
    placement = trace(model, entries(came))
    bucket = torch.cat([torch.zeros(3), *(t.reshape(-1) for t in came.values())])
    parts = bucket[3:].split([t.numel() for t in came.values()])
    placement.load_weights((name, part.view(t.shape)) for (name, t), part in zip(came.items(), parts, strict=True))
    assert torch.equal(model.qkv, torch.cat([came["q"], came["k"], came["v"]]))


def test_digests_are_those_of_what_lies_there() -> None:
    model, came = Fused(), checkpoint(5)
    placement = trace(model, entries(came))
    model.load_weights(came.items())
    expected = {name: device_digest(tensor) for name, tensor in came.items()}
    assert placement.digests(DeviceDigests("cpu")) == expected
    model.qkv.data[3, 1] += 1
    changed = placement.digests(DeviceDigests("cpu"))
    assert {name for name in expected if changed[name] != expected[name]} == {"k"}


def test_no_tensors_are_no_copies() -> None:
    placement = trace(Fused(), entries(checkpoint(1)))
    assert placement.load_weights([]) == {"qkv", "embed", "norm"}


def test_it_is_for_the_tensors_that_were_traced() -> None:
    placement = trace(Fused(), entries(checkpoint(1)))
    same = entries(checkpoint(2))
    assert placement.fits(same) and placement.fits(same[::-1])
    assert not placement.fits(same[1:])
    assert not placement.fits([*same[1:], same[0].model_copy(update={"dtype": "bfloat16"})])
    assert not placement.fits([*same[1:], same[0].model_copy(update={"shape": (4, 7)})])


def _through(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Fused, str, torch.Tensor], None]:
    return lambda model, name, tensor: model.copied(name, change(tensor) if name == "norm" else tensor)


def _instead(act: Callable[[Fused, torch.Tensor], Any]) -> Callable[[Fused, str, torch.Tensor], None]:
    return lambda model, name, tensor: act(model, tensor) if name == "norm" else model.copied(name, tensor)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (_through(lambda t: t + 1), "computed"),
        (_through(lambda t: t.float().clone()), "computed"),
        (_through(lambda t: t.flip(0)), "computed"),
        (_through(lambda t: t[:2].repeat(2)), "computed"),
        (_through(lambda t: torch.as_strided(t, (4,), (0,))), "into"),
        (_instead(lambda m, t: m.norm.data[:2].copy_(t[:2])), "into"),
        (_instead(lambda m, t: m.norm.data.fill_(t[0].item())), "more than names and shapes"),
        (_instead(lambda m, t: m.norm.data.add_(t)), "add_"),
        (_instead(lambda m, t: torch.zeros(4).copy_(t)), "no parameter or buffer"),
        (_instead(lambda m, t: m.scratch.copy_(t)), "writes 0 of the 4 elements of 'norm'"),
        (_instead(lambda m, t: None), "copies nothing of 'norm'"),
        (_instead(lambda m, t: (m.norm.data.copy_(t), m.scratch.copy_(t))), "'norm' twice"),
        (_instead(lambda m, t: m.nothing), "AttributeError"),
    ],
)  # fmt: skip
def test_a_loader_that_does_more_is_left_alone(load: Any, reason: str) -> None:
    model = Fused(load)
    with pytest.raises(NotPlaceable, match=reason):
        trace(model, entries(checkpoint(1)))
    assert torch.equal(model.qkv, torch.full((6, 4), 7.0))


def test_a_square_matrix_that_is_turned_is_not_taken_for_one_that_is_copied() -> None:
    """Its shape is the same, and so is its dtype."""

    class Square(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for _, tensor in weights:
                self.weight.data.copy_(tensor.t())

    with pytest.raises(NotPlaceable, match="into"):
        trace(Square(), entries({"weight": torch.zeros(3, 3)}))


def test_a_tensor_in_another_dtype_is_left_to_the_loader() -> None:
    weights = checkpoint(1) | {"norm": torch.ones(4, dtype=torch.bfloat16)}
    with pytest.raises(NotPlaceable, match=r"bfloat16 .* into torch.float32"):
        trace(Fused(), entries(weights))


def test_a_loader_that_tells_no_names_goes_on_telling_none() -> None:
    placement = Placement({"norm": torch.zeros(4)}, ())
    assert placement.load_weights([("norm", torch.ones(4))]) is None


@pytest.mark.engines
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "experts"])
@pytest.mark.parametrize("environment", [".venv-vllm", ".venv-vllm-0.26"])
def test_vllms_own_models(environment: str, model: str) -> None:
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {environment}")
    command = [str(python), "-m", "tests.unit.inference.vllm_plugin.placement_case", model]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ended.stdout.splitlines()[-1:] == ["whole"], ended.stderr[-3000:]
