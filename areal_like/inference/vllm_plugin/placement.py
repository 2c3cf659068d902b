"""Where a model's own loader puts each tensor: found once, without bytes, and used for later versions.

vLLM's loader runs some Python for each tensor, and its layer-wise reload more: half a millisecond together, which is
most of the pause of a server whose weights come at the speed of NVLink. Where the loader only copies whole tensors into
(parts of) live parameters, all of that is a list of copies:

* :func:`trace` runs ``load_weights`` over tensors on the meta device and notes each ``copy_`` instead of doing it.
  A loader that does anything else with a tensor, or leaves a part of a parameter alone, has no :class:`Placement`.
* The caller loads one version as vLLM does, and sees by :meth:`Placement.digests` or :meth:`Placement.first_difference`
  that its bytes lie where the placement says. From then on :meth:`Placement.load_weights` may stand in for the loader.

Parameters that are made anew after loading (packed, quantised, absorbed) are not what the loader fills: whether a
model has such is for the caller to know (``reloading.copies_alone``). Free of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_like.api.weights import TensorEntry
from areal_like.weights.device_digest import DeviceDigests
from areal_like.weights.digest import parse_dtype

#: bytes that are compared at a time
_COMPARED_BYTES = 16 * 2**20
_COPY = torch.ops.aten.copy_.default
#: a constant is written where no tensor belongs, such as rows that fill a vocabulary up: it is there already
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


class NotPlaceable(Exception):
    """The loader does more than copy whole tensors: what, in words."""


class Placement:
    """Has ``load_weights`` as a model has: in place, and for the tensors that were traced alone."""

    def __init__(self, places: Mapping[str, torch.Tensor], loaded: Iterable[str]) -> None:
        """``places``: by name of a tensor, the view of a live parameter that holds it, of the tensor's shape and dtype.

        ``loaded``: the names of parameters that the model's own loader told; empty if it tells none.
        """
        self._places = dict(places)
        self._loaded = frozenset(loaded)

    def fits(self, entries: Iterable[TensorEntry]) -> bool:
        """These are the tensors that were traced, in any order."""
        forms = {entry.name: (entry.shape, parse_dtype(entry.dtype)) for entry in entries}
        return forms == {name: (tuple(place.shape), place.dtype) for name, place in self._places.items()}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Copy tensors into the live parameters, on the current stream. As a model's.

        Returns:
            Every name that the model's own loader told; None if it tells none.
        """
        came = dict(weights)
        if came:
            torch._foreach_copy_([self._places[name] for name in came], list(came.values()), non_blocking=True)
        return set(self._loaded) or None

    def load_parts(self, name: str, tensor: torch.Tensor, parts: Iterable[tuple[int, int]]) -> None:
        """Copy one tensor, range of bytes by range, on the current stream: for host memory that allows no other way."""
        place = self._places[name]
        if not place.is_contiguous():
            place.copy_(tensor.clone())
            return
        target, source = _bytes(place), _bytes(tensor)
        for start, end in parts:
            target[start:end].copy_(source[start:end], non_blocking=True)

    def first_difference(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        """The first of ``tensors`` (on any device) that is not, byte for byte, in its place; empty where all are.

        Waits for the device once, and needs the memory of three chunks there.
        """
        names: list[str] = []
        same: list[torch.Tensor] = []
        for name, tensor in tensors:
            live, sent = _bytes(self._places[name]), _bytes(tensor)
            for start in range(0, live.numel(), _COMPARED_BYTES):
                part = live[start : start + _COMPARED_BYTES]
                same.append((part == sent[start : start + _COMPARED_BYTES].to(part.device)).all())
                names.append(name)
        found = torch.stack(same).tolist() if same else []
        return next((name for name, equal in zip(names, found, strict=True) if not equal), "")

    def digests(self, digests: DeviceDigests) -> dict[str, str]:
        """Of each tensor, by name, as the live parameters hold it. Waits for the device."""
        digests.add(*self._places.values())
        return dict(zip(self._places, digests.read(), strict=True))


def trace(model: torch.nn.Module, entries: Sequence[TensorEntry]) -> Placement:
    """Where ``model.load_weights`` puts tensors like ``entries``. Nothing is copied, and no device is waited for.

    Raises:
        NotPlaceable: it does more than copy whole tensors, or writes less than the whole of every parameter.
    """
    sources = [
        (entry.name, torch.empty(entry.shape, dtype=parse_dtype(entry.dtype), device="meta")) for entry in entries
    ]
    tracer = _Tracer(sources, model)
    try:
        with torch.no_grad(), tracer:
            loaded = model.load_weights(iter(sources))  # type: ignore[operator]
    except NotPlaceable:
        raise
    except Exception as error:  # a loader may want anything of a tensor, and one without bytes has little to give
        raise NotPlaceable(f"its loader needs more than names and shapes ({type(error).__name__}: {error})") from error
    missed = [name for name, _ in sources if name not in tracer.places]
    if missed:
        raise NotPlaceable(f"its loader copies nothing of {missed[0]!r}")
    for name, parameter in model.named_parameters():
        written = tracer.written.get(_storage(parameter), 0)
        if written != parameter.numel():
            raise NotPlaceable(f"its loader writes {written} of the {parameter.numel()} elements of {name!r}")
    return Placement(tracer.places, loaded or ())


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies of whole tensors into live ones, lets views pass, and refuses whatever else writes."""

    def __init__(self, sources: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in sources}
        self._live = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        #: by name of a source, a live view; by storage, how many elements were written
        self.places: dict[str, torch.Tensor] = {}
        self.written: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY or func in _FILLS:
            target = args[0]
            if _storage(target) not in self._live:
                raise NotPlaceable("its loader writes into a tensor that is no parameter or buffer of the model")
            if func is _COPY:
                self._note(target, args[1])
            self.written[_storage(target)] = self.written.get(_storage(target), 0) + target.numel()
            return target
        if any(given.alias_info is not None and given.alias_info.is_write for given in func._schema.arguments):
            raise NotPlaceable(f"its loader does {func} to a tensor")
        return func(*args, **(kwargs or {}))

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if _storage(source) not in self._sources:
            raise NotPlaceable("its loader copies what it has computed, not what it was given")
        name, whole = self._sources[_storage(source)]
        same = (source.shape, source.stride()) == (whole.shape, whole.stride())
        if not same or (target.shape, target.dtype) != (whole.shape, whole.dtype):
            raise NotPlaceable(
                f"its loader copies {source.dtype} {list(source.shape)} of {name!r} ({whole.dtype} "
                f"{list(whole.shape)}) into {target.dtype} {list(target.shape)}"
            )
        if name in self.places:
            raise NotPlaceable(f"its loader copies {name!r} twice")
        self.places[name] = target.detach()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [nbytes]; a view where ``tensor`` is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _storage(tensor: torch.Tensor) -> int:
    """The same number for all views of one storage, and another for each that is alive, also without memory."""
    return int(tensor.untyped_storage()._cdata)
