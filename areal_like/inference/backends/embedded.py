"""The embedded engine: our own server, started as a role of the run, speaking ``areal_like.api.wire``."""

from __future__ import annotations

import areal_like
from areal_like.api.weights import InterruptMode, TransportKind
from areal_like.client.control import EmbeddedControl
from areal_like.client.dialect import EMBEDDED
from areal_like.inference.backends.base import Capabilities, LinkSettings, ServerLink


class EmbeddedBackend:
    """:class:`Backend`; the reference."""

    name = "embedded"

    def capabilities(self, version: str) -> Capabilities:
        return Capabilities(
            engine="embedded",
            version=version,
            interrupts=frozenset(InterruptMode),
            transports=frozenset(TransportKind),
            spans=True,
            seeds="repeats exactly",
        )

    async def version(self, url: str, *, token: str, timeout: float) -> str:
        """Server and controller are the same package."""
        del url, token, timeout
        return areal_like.__version__

    def connect(self, name: str, url: str, settings: LinkSettings) -> ServerLink:
        control = EmbeddedControl(name, url, token=settings.token, named_by_us=not settings.attached)
        return ServerLink(control=control, dialect=EMBEDDED)
