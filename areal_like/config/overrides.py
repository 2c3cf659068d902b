"""Dotted overrides of the command line: ``actor.optimizer.lr=1e-4``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from areal_like.config.nearest import annotation_at, explain_unknown, section_of
from areal_like.config.yaml_text import parse_scalar
from areal_like.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One ``path=value``; ``value`` is typed as in YAML, except where the key wants text."""

    path: str
    value: Any


def parse_override(text: str, root: type[BaseModel]) -> Override:
    """Parse ``a.b.c=value`` against the keys of ``root``.

    Raises:
        ConfigError: there is no ``=``, the path is malformed or no such key exists, or the value is no YAML.
    """
    path, equals, raw = text.partition("=")
    path = path.strip().lstrip("+")
    source = f"override {text!r:.120}"
    if not equals:
        raise ConfigError(f"{source}: expected key=value with a dotted key, as in actor.optimizer.lr=1e-4")
    if not path or any(not part for part in path.split(".")):
        raise ConfigError(f"{source}: {path!r} is no dotted key, as in actor.optimizer.lr=1e-4")
    annotation = annotation_at(root, path)
    if annotation is None and not _inside_free_mapping(root, path):
        raise ConfigError(f"{source}: {path}: {explain_unknown(root, path)}")
    raw = raw.strip()
    try:
        return Override(path=path, value=_typed(raw, annotation, source))
    except ConfigError as error:
        if raw.startswith(("{", "[")) and not raw.endswith(("}", "]")):  # a shell splits what is not quoted
            raise ConfigError(f"{error}; where a value has spaces, quote the whole: '{path}={raw} ...'") from None
        raise


def apply_overrides(tree: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """A copy of ``tree`` with every override set, later ones last; missing sections are made.

    Raises:
        ConfigError: an override reaches below a plain value.
    """
    changed = copy.deepcopy(tree)
    for override in overrides:
        *parents, name = override.path.split(".")
        section = changed
        for depth, parent in enumerate(parents, start=1):
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
            if not isinstance(section, dict):
                place = ".".join(parents[:depth])
                raise ConfigError(f"override {override.path}: {place} is {section!r}, which has no keys")
        section[name] = override.value
    return changed


def _typed(raw: str, annotation: Any, source: str) -> Any:
    """``trial_name=001`` and ``model.path=1e5`` stay text: the key wants text, and a shell drops YAML's quotes."""
    is_union = get_origin(annotation) in (Union, UnionType)
    options = get_args(annotation) if is_union else (annotation,)
    if str in options:
        if type(None) in options and raw in ("null", "~", "None"):
            return None
        if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"":
            return raw[1:-1]
        return raw
    return parse_scalar(raw, source=source)


def _inside_free_mapping(root: type[BaseModel], path: str) -> bool:
    """True for ``workflow_args.anything``: keys below a plain mapping are the user's own."""
    parts = path.split(".")
    for depth in range(1, len(parts)):
        annotation = annotation_at(root, ".".join(parts[:depth]))
        if annotation is None:
            return False
        if section_of(annotation) is None:
            return getattr(annotation, "__origin__", annotation) is dict
    return False
