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


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rb'{"prompt": "a \ud800 b"}', r"line 2: \\ud800 is half a character \(a lone surrogate\)"),
        (rb'{"\udfff": 1}', r"line 2: \\udfff is half a character"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 2: nested deeper than 100"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "line 2: nested deeper than 100"),
        (b'{"a": ' + b"7" * 5000 + b"}", "line 2: a number is too long to be read"),
    ],
)
def test_a_row_that_would_break_what_reads_it_is_named(tmp_path: Path, bad: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.jsonl, {message}"):
        read_jsonl(write(tmp_path, b'{"a": 1}\n' + bad + b"\n"))


def test_whole_characters_in_escapes_and_some_depth_are_no_fault(tmp_path: Path) -> None:
    deep = b'{"a": "\\ud83d\\ude00", "b": ' + b"[" * 99 + b"]" * 99 + b', "c": [' + b"{}," * 200 + b"{}]}"
    assert read_jsonl(write(tmp_path, deep))[0]["a"] == "\U0001f600"


def test_a_path_with_a_null_character_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: embedded null"):
        read_jsonl(f"{tmp_path}/a\0b")
