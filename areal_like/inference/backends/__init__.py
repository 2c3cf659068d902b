"""One adapter per engine, behind one contract (``tests/contract``). Torch-free: the engines run in other processes.

An adapter is imported when its engine is asked for, so that nobody pays for engines they do not use.
"""

from __future__ import annotations

import importlib
from typing import cast

from areal_like.errors import ConfigError
from areal_like.inference.backends.base import Backend, EngineBackend

__all__ = ["ENGINES", "get_backend", "get_engine"]

#: engines that are started as a process of their own, with an interpreter of their own
ENGINES = ("vllm", "sglang")
_ADAPTERS = {
    "embedded": ("embedded", "EmbeddedBackend"),
    "vllm": ("vllm", "VllmBackend"),
    "sglang": ("sglang", "SglangBackend"),
}


def get_backend(name: str) -> Backend:
    """The adapter of an engine.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _ADAPTERS:
        raise ConfigError(f"rollout.backend: no engine is called {name!r}; known are {', '.join(_ADAPTERS)}")
    module, class_name = _ADAPTERS[name]
    return cast(Backend, getattr(importlib.import_module(f"{__name__}.{module}"), class_name)())


def get_engine(name: str) -> EngineBackend:
    """The adapter of an engine that is a program of its own.

    Raises:
        ConfigError: the embedded engine is not, or there is none of that name.
    """
    if name not in ENGINES:
        raise ConfigError(f"rollout.backend: {name!r} is no engine with a program of its own: {', '.join(ENGINES)}")
    return cast(EngineBackend, get_backend(name))
