"""Prompts from JSONL files: one object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_like.errors import ConfigError


def read_jsonl(path: str | Path, *, max_rows: int | None = None) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file in order; blank lines are skipped. Stops after ``max_rows``.

    Raises:
        ConfigError: the file is missing, unreadable or empty, or a line (named by its number) is not a JSON object.
    """
    file = Path(path)
    rows: list[dict[str, Any]] = []
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if max_rows is not None and len(rows) >= max_rows:
                    break
                if line.strip():
                    rows.append(_parse(line, f"{file}, line {number}"))
    except OSError as error:
        raise ConfigError(f"dataset {file}: cannot be read: {error.strerror or error}") from error
    if not rows:
        raise ConfigError(f"dataset {file}: it has no rows; write one JSON object per line")
    return rows


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: expected an object such as {{"prompt": ...}}, not {type(row).__name__}')
    return row
