"""What every call to a vLLM server of ours meets first."""

from __future__ import annotations

from areal_like.inference.vllm_plugin.access import App, BearerToken, Receive, Scope, Send
from areal_like.inference.vllm_plugin.token_route import TokenRoute


class FrontDoor:
    """ASGI middleware for vLLM's ``--middleware``: the token is asked for, then our own path answers, or vLLM."""

    def __init__(self, app: App) -> None:
        self._app = BearerToken(TokenRoute(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
