"""What lets SGLang's packages be imported on a machine without a GPU, and no more.

* torchvision's compiled operators do not load beside a CPU build of torch, yet importing it registers fakes for two
  of them: their schemas are defined here.
* ``sgl_kernel`` has no build for every CPU: a placeholder, of which everything raises when it is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

_KERNELS = "sgl_kernel"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Missing:
    """What stands for a kernel, or for something that has attributes: calling it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        del arguments, named
        raise RuntimeError(f"{self._name}: this kernel does not exist on a CPU")


class _Placeholder(types.ModuleType):
    """A module in which every public name is missing."""

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``sgl_kernel`` and whatever is asked for below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != _KERNELS and not fullname.startswith(f"{_KERNELS}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        del module


def install() -> None:
    """Before anything of SGLang is imported. Does nothing where the real kernels are installed."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.append(_Finder())  # last: a real package wins
    import torch

    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)
    sys.modules[__name__].__dict__["_library"] = library  # its operators vanish with it
