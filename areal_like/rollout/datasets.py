"""Prompts from JSONL files: one object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_like.errors import ConfigError

#: lists and objects within each other that a row may hold; what copies, sends and dumps rows goes down recursively
_DEEPEST = 100


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
    except ValueError as error:  # a path with a null character
        raise ConfigError(f"dataset {str(file)!r}: cannot be read: {error}") from error
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
    except ValueError as error:  # Python reads no number of more than 4300 digits
        raise ConfigError(f"{where}: a number is too long to be read; write it as text") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested deeper than {_DEEPEST} lists and objects; flatten it") from error
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: expected an object such as {{"prompt": ...}}, not {type(row).__name__}')
    if line.count(b"[") + line.count(b"{") > _DEEPEST and _depth(row) > _DEEPEST:
        raise ConfigError(f"{where}: nested deeper than {_DEEPEST} lists and objects; flatten it")
    if b"\\u" in line:
        _check_text(row, where)
    return row


def _depth(row: dict[str, Any]) -> int:
    """How many lists and objects are within each other; 1 for a flat row."""
    depth = 0
    level: list[dict[str, Any] | list[Any]] = [row]
    while level:
        depth += 1
        inside = [entry for outer in level for entry in (outer.values() if isinstance(outer, dict) else outer)]
        level = [entry for entry in inside if isinstance(entry, dict | list)]
    return depth


def _check_text(row: dict[str, Any], where: str) -> None:
    """JSON's escapes can spell half a character (``\\ud800`` alone), which no tokenizer and no file takes."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        raise ConfigError(f"{where}: {half} is half a character (a lone surrogate); write the whole one") from error
