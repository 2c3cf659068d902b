"""JSONL files: good ones, and bad lines named by number."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.errors import ConfigError
from areal_like.rollout.datasets import read_jsonl


def write(folder: Path, content: bytes) -> Path:
    file = folder / "data.jsonl"
    file.write_bytes(content)
    return file


def test_rows_come_in_order_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    file = write(tmp_path, '{"prompt": "größer?"}\n\n{"prompt": "b", "n": 1}\r\n   \n{"n": 3}'.encode())
    assert read_jsonl(file) == [{"prompt": "größer?"}, {"prompt": "b", "n": 1}, {"n": 3}]


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    assert read_jsonl(write(tmp_path, b'\xef\xbb\xbf{"a": 1}\n')) == [{"a": 1}]


def test_max_rows_reads_no_further(tmp_path: Path) -> None:
    assert read_jsonl(write(tmp_path, b'{"a": 1}\n{"a": 2}\nbroken\n'), max_rows=2) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\n{"a": }\n', r"data\.jsonl, line 3: not JSON: Expecting value \(column 7\)"),
        (b'{"a": 1}\n[1, 2]\n', r"data\.jsonl, line 2: expected an object .* not list"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"data\.jsonl, line 2: not UTF-8"),
        (b"", "has no rows"),
        (b"\n \n", "has no rows"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_jsonl(write(tmp_path, content))


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        read_jsonl(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_jsonl(tmp_path)
