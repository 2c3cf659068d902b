"""Pydantic's validation errors in our words: the dotted key, the rule, and what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from areal_like.config.nearest import annotation_at, explain_unknown

#: longest value that is shown in a message
_SHOWN = 80

#: rule by pydantic error type; ``{}`` is filled from the error's context
_RULES: Mapping[str, str] = {
    "missing": "is required",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text (quote it)",
    "tuple_type": "must be a list",
    "too_short": "must have at least {min_length} entries",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a section (a mapping of keys to values)",
    "model_attributes_type": "must be a section (a mapping of keys to values)",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "enum": "must be one of {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
}

#: what a value is called when its own text would be unhelpful
_NO_VALUE = object()


def describe_faults(error: ValidationError, root: type[BaseModel], lines: Mapping[str, int]) -> list[str]:
    """One line per fault: ``actor.eps_clip (line 12): must be less than 1; got 1.5``."""
    described: dict[str, None] = {}
    for details in error.errors(include_url=False):
        described[_describe(details, root, lines)] = None
    return list(described)


def _describe(details: ErrorDetails, root: type[BaseModel], lines: Mapping[str, int]) -> str:
    path = ".".join(str(part) for part in details["loc"] if not _is_union_branch(part))
    where = f"{path}{_line(path, lines)}: " if path else ""
    if details["type"] == "extra_forbidden":
        return f"{where}{explain_unknown(root, path)}"
    if details["type"] == "value_error":  # our own validators: the sentence is complete, and names its keys
        return f"{where}{details.get('ctx', {}).get('error', details['msg'])}"
    context: dict[str, Any] = details.get("ctx", {})
    template = _RULES.get(details["type"])
    rule = template.format(**context) if template else _lower_first(details["msg"])
    if details["type"] == "literal_error":
        names = _names(annotation_at(root, path))
        rule = _one_of(names) if names else rule
    value = _NO_VALUE if details["type"] == "missing" else details["input"]
    return f"{where}{rule}" + ("" if value is _NO_VALUE else f"; got {_shown(value)}")


def _one_of(options: Sequence[Any]) -> str:
    names = ["null" if option is None else repr(option) for option in options]
    return f"must be one of {', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else f"must be {names[0]}"


def _names(annotation: Any) -> list[Any]:
    """What a key takes whose type is made of ``Literal`` and None: pydantic tells the options of one branch only."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if annotation is type(None):
        return [None]
    return [name for option in get_args(annotation) for name in _names(option)]


def _is_union_branch(part: int | str) -> bool:
    """Pydantic adds the branch of a union (``function-after[...]``, ``EvaluatorConfig``) to a location."""
    return isinstance(part, str) and (not part.isidentifier() or part[:1].isupper())


def _line(path: str, lines: Mapping[str, int]) -> str:
    return f" (line {lines[path]})" if path in lines else ""


def _shown(value: Any) -> str:
    text = repr(value)
    if isinstance(value, dict):
        text = f"a mapping with {', '.join(map(str, value)) or 'no keys'}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
