"""Numbers as they go into JSON: few digits, and never a NaN, which JSON does not know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

#: significant digits kept: more than any figure of a run is worth, few enough to read
SIGNIFICANT_DIGITS = 6


def tidy(value: Any) -> Any:
    """``value`` with every float rounded to 6 significant digits and non-finite ones replaced by None.

    Numpy scalars become Python numbers; mappings and sequences are rebuilt.
    """
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): tidy(entry) for key, entry in value.items()}
    if isinstance(value, Sequence):
        return [tidy(entry) for entry in value]
    if hasattr(value, "item"):  # a numpy scalar
        return tidy(value.item())
    raise TypeError(f"a figure must be a number, text, list or mapping; got {type(value).__name__}")


def non_finite(figures: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Slash-joined names of the floats that are NaN or infinite."""
    found: list[str] = []
    for key, value in figures.items():
        if isinstance(value, Mapping):
            found += non_finite(value, f"{prefix}{key}/")
        elif isinstance(value, float) and not math.isfinite(value):
            found.append(f"{prefix}{key}")
    return found
