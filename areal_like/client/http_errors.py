"""Error answers: ``{"error": {"type", "message"}}``, or whatever else a server in trouble sends."""

from __future__ import annotations

import json

#: characters of a body that is no error of ours: enough to recognise it, not a page of HTML
_SHOWN = 300


def error_message(content: bytes) -> str:
    """The server's words."""
    try:
        error = json.loads(content)["error"]
        return f"{error['type']}: {error['message']}" if error.get("type") else str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return content[:_SHOWN].decode(errors="replace") or "(empty body)"


def error_type(content: bytes) -> str:
    """The name of the server's exception; empty if the body is no error of ours."""
    try:
        return str(json.loads(content)["error"]["type"])
    except (ValueError, KeyError, TypeError):
        return ""
