"""A plugin for a vLLM server under test: while a certain file exists, loading weights fails half-way.

vLLM finds it as it finds ours, when this folder is in ``PYTHONPATH``. The tensors of the first layers are in the model
by then, and their parameters are on the way from the checkpoint's form to the kernels'.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

#: environment variable: the file's path
VARIABLE = "AREAL_LIKE_HALF_LOAD"


def register() -> None:
    from vllm.model_executor.model_loader import reload

    finalize = reload.finalize_layerwise_reload

    def failing(*arguments: Any, **named: Any) -> Any:
        if Path(os.environ[VARIABLE]).exists():
            raise RuntimeError("told to fail half-way")
        return finalize(*arguments, **named)

    reload.finalize_layerwise_reload = failing
