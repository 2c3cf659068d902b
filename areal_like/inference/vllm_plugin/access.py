"""Every path of a vLLM server behind the run's bearer token; vLLM itself guards only some of them."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: holds the token; vLLM reads it too
TOKEN_VARIABLE = "VLLM_API_KEY"


class BearerToken:
    """ASGI middleware: pause, resume, updates and metrics ask for the token as well."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ.get(TOKEN_VARIABLE, '')}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = json.dumps({"error": {"type": "Unauthorized", "message": "the bearer token is missing or wrong"}})
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode()})

    def _allowed(self, scope: Scope) -> bool:
        given = next((value for name, value in scope.get("headers", ()) if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
