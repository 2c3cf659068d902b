"""``docs/configuration.md`` out of the config models: ``python -m launcher.reference > docs/configuration.md``."""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from areal_like.config.experiment import ExperimentConfig

_HEAD = """\
# Every key of the experiment file

Any of them can be set on the command line, as in `areal-like run exp.yaml actor.optimizer.lr=1e-4`. Made from the
config models by `python -m launcher.reference`; a test keeps it true.
"""


def reference() -> str:
    """The page: one table a section, in the order in which the models name their keys."""
    return "\n".join([_HEAD, *_section("", ExperimentConfig)]) + "\n"


def _section(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    rows, sections = [], []
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            sections.append((f"{prefix}{name}", inner, field.default is None))
            continue
        default = "required" if field.is_required() else _shown(field.get_default(call_default_factory=True))
        rows.append(f"| `{prefix}{name}` | {_kind(field.annotation)} | {default} | {_cell(field.description or '')} |")
    yield f"\n## `{prefix.rstrip('.')}`\n" if prefix else "\n## The top level\n"
    yield "| key | value | default | meaning |\n| --- | --- | --- | --- |"
    yield from rows
    for path, _inner, absent in sections:
        if absent:
            yield f"| `{path}` | section | none | see below |"
    for path, inner, _ in sections:
        yield from _section(f"{path}.", inner)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also where it may be absent."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        parts = [_kind(part) for part in get_args(annotation) if part is not type(None)]
        return ", ".join(parts) + (", `null`" if type(None) in get_args(annotation) else "")
    if origin is not None:
        return {tuple: "list", list: "list", dict: "mapping"}.get(origin, str(origin.__name__))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    return {str: "text", int: "integer", float: "number", bool: "true, false"}.get(annotation, "value")


def _shown(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    plain = value.value if isinstance(value, Enum) else value
    return f"`{json.dumps(plain, ensure_ascii=False)}`" if not isinstance(plain, str) else f"`{plain}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
