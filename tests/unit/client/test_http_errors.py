from __future__ import annotations

import pytest

from areal_like.client.http_errors import error_message, error_type


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error": {"type": "RequestError", "message": "too long"}}', "RequestError: too long"),
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "x"}', '{"error": "x"}'),
        (b"[1]", "[1]"),
        (b"<html>", "<html>"),
        (b"", "(empty body)"),
        (b"\xff", "\ufffd"),
    ],
)
def test_the_servers_words_whatever_they_are(content: bytes, message: str) -> None:
    assert error_message(content) == message


def test_a_page_is_cut() -> None:
    assert len(error_message(b"x" * 10_000)) == 300


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"error": {"type": "StaleCommand", "message": "x"}}', "StaleCommand"),
        (b'{"error": 1}', ""),
        (b"[]", ""),
        (b"", ""),
    ],
)
def test_the_type_of_an_error(content: bytes, kind: str) -> None:
    assert error_type(content) == kind
