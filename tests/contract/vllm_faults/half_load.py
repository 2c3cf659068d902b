"""A plugin for a vLLM server under test: while a certain file exists, loading weights fails half-way.

vLLM finds it as it finds ours, when this folder is in ``PYTHONPATH``. By its own way of loading, tensors are in the
model by then, and their parameters are on the way from the checkpoint's form to the kernels'; copied in place, as on
GPUs, half of them are new.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

#: environment variable: the file's path
VARIABLE = "AREAL_LIKE_HALF_LOAD"


def register() -> None:
    from vllm.model_executor.model_loader import reload

    from areal_like.inference.vllm_plugin.placement import Placement

    finalize, load_weights = reload.finalize_layerwise_reload, Placement.load_weights

    def failing(*arguments: Any, **named: Any) -> Any:
        fail()
        return finalize(*arguments, **named)

    def failing_in_place(self: Placement, weights: Iterable[tuple[str, Any]]) -> set[str] | None:
        came = list(weights)
        load_weights(self, islice(came, len(came) // 2))
        fail()
        return load_weights(self, islice(came, len(came) // 2, None))

    reload.finalize_layerwise_reload = failing
    Placement.load_weights = failing_in_place  # type: ignore[method-assign]


def fail() -> None:
    if Path(os.environ[VARIABLE]).exists():
        raise RuntimeError("told to fail half-way")
