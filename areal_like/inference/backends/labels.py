"""How a version is written where an engine wants a text: ``i0.v12`` is version 12 of incarnation 0. Pure."""

from __future__ import annotations

import re

_LABEL = re.compile(r"i(\d+)\.v(\d+)")


def version_label(incarnation: int, version: int) -> str:
    return f"i{incarnation}.v{version}"


def parse_label(label: str) -> tuple[int, int] | None:
    """(incarnation, version), or None for a label that is not ours, such as the one an engine boots with."""
    found = _LABEL.fullmatch(label)
    return (int(found[1]), int(found[2])) if found else None
