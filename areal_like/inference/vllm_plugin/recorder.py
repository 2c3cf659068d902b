"""Stands between a receiver and the model's loader: digests what really arrived, on the GPU, and passes it on.

Free of vLLM: the model is whatever has ``load_weights``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from areal_like.api.weights import Manifest
from areal_like.errors import WeightUpdateError
from areal_like.weights.device_digest import DeviceDigests
from areal_like.weights.digest import dtype_name


class Recorder:
    """One load. ``load_weights`` may be called many times, each with some of the tensors, on any stream."""

    def __init__(self, model: Any, digests: DeviceDigests, *, kept: frozenset[str], held_back: frozenset[str]) -> None:
        """``kept``: tensors to compare later; ``held_back``: those that the loader must not see (a tied head)."""
        self._model, self._digests = model, digests
        self._kept, self._held_back = kept, held_back
        self._heads: list[tuple[str, str, tuple[int, ...]]] = []
        self.loaded: set[str] | None = set()
        self.copies: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """As a model's."""
        came = list(weights)
        self._digests.add(*(tensor for _, tensor in came))
        passed: list[tuple[str, torch.Tensor]] = []
        for name, tensor in came:
            self._heads.append((name, dtype_name(tensor.dtype), tuple(tensor.shape)))
            if name in self._kept:
                self.copies[name] = tensor.clone()  # what arrived lies in a bucket that is used again
            if name not in self._held_back:
                passed.append((name, tensor))
        loaded: set[str] | None = self._model.load_weights(iter(passed)) if passed else set()
        self.loaded = None if self.loaded is None or loaded is None else self.loaded | loaded
        return loaded

    def verify(self, manifest: Manifest) -> None:
        """Raise unless exactly the manifest's tensors arrived, byte for byte. Waits for the device once.

        Raises:
            WeightUpdateError: one is missing, unknown, of another form, or damaged (it is named).
        """
        digests = self._digests.read()
        wanted = [(entry.name, entry.dtype, entry.shape) for entry in manifest.tensors]
        if wanted != self._heads:
            odd = next(iter(set(wanted) ^ set(self._heads)), ("(order)", "", ()))
            raise WeightUpdateError(
                f"version {manifest.version}: tensor {odd[0]!r} {odd[1:]} did not come as announced"
            )
        _compare(manifest, digests)

    def drop(self) -> None:
        """What was digested of a load that broke."""
        self._digests.read()


def comparable(model: torch.nn.Module, largest: int) -> frozenset[str]:
    """Parameters of at most ``largest`` bytes: they are compared with what arrived, if they keep its form."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.nbytes <= largest)


def first_difference(live: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> str:
    """The first name under which both have tensors of one shape that differ; empty where none does. Waits."""
    pairs = {
        name: (live[name].detach().reshape(-1), tensor.to(live[name].device, live[name].dtype).reshape(-1))
        for name, tensor in sent.items()
        if name in live and live[name].shape == tensor.shape
    }
    same = True
    for dtype in {
        ours.dtype for ours, _ in pairs.values()
    }:  # two long tensors cost the device less than many short ones
        ours, theirs = zip(*(pair for pair in pairs.values() if pair[0].dtype == dtype), strict=True)
        same = torch.equal(torch.cat(ours), torch.cat(theirs)) and same
    return "" if same else next(name for name, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs))


def _compare(manifest: Manifest, digests: Sequence[str]) -> None:
    for entry, found in zip(manifest.tensors, digests, strict=True):
        if found != entry.digest:
            raise WeightUpdateError(
                f"tensor {entry.name!r}: its bytes have digest {found}, the manifest says {entry.digest}; they were "
                "damaged or overwritten on the way"
            )
