"""User code by dotted path."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from difflib import get_close_matches
from typing import Any

from areal_like.errors import ConfigError


def import_object(path: str, kind: str) -> Any:
    """Import what ``package.module.Name`` names. Modules in the current working directory are found.

    Args:
        path: dotted path of an attribute of a module.
        kind: what it is for, as the message should call it ("workflow", "reward function").

    Raises:
        ConfigError: the path is malformed, its module is missing or raises, or it has no such attribute.
    """
    if "." not in path or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{kind} {path!r}: expected a dotted path such as package.module.Name")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    parts = path.split(".")
    found: Any = _import_module(parts[0], path, kind)
    if found is None:
        raise ConfigError(f"{kind} {path!r}: no module named {parts[0]!r}; it must be installed or lie under {here}")
    for number, name in enumerate(parts[1:], start=2):
        is_package = hasattr(found, "__path__")
        inside = getattr(found, name, None)
        if inside is None and is_package:
            inside = _import_module(".".join(parts[:number]), path, kind)
        if inside is None and not hasattr(found, name):
            where = getattr(found, "__name__", type(found).__name__)
            raise ConfigError(f"{kind} {path!r}: {where} has no {name!r}{_nearest(name, dir(found))}")
        found = inside
    if inspect.ismodule(found):
        raise ConfigError(f"{kind} {path!r} is a module; name something inside it")
    return found


def _import_module(name: str, path: str, kind: str) -> Any:
    """The module ``name``, or None if there is none; an import that fails inside it is that module's fault."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise ConfigError(f"{kind} {path!r}: importing {name} failed: {error}") from error
    except Exception as error:  # user code runs at import: whatever it raises is a fault of the experiment
        raise ConfigError(f"{kind} {path!r}: importing {name} raised {type(error).__name__}: {error}") from error


def _nearest(name: str, known: list[str]) -> str:
    near = get_close_matches(name, [k for k in known if not k.startswith("_")], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
