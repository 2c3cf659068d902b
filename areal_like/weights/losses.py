"""Telling a trainer that a server was lost: it need not wait until it misses its signs of life. Torch-free.

Only the transport between GPUs waits for its receivers together; its manifest names the trainer's door
(``weights.transports.door``), which also hears this.
"""

from __future__ import annotations

import asyncio
import json
import logging
from urllib.parse import parse_qs, urlsplit

from areal_like.api.weights import Manifest, TransportKind

_LOG = logging.getLogger(__name__)
#: seconds that it may take; the trainer finds out for itself, only later
_TIMEOUT = 2.0


async def tell_lost(manifest: Manifest, server: str) -> None:
    """``server`` will not receive ``manifest``: whoever receives it with that server may meet again without it.

    Nothing where the transport waits for nobody. Never raises: a trainer that does not hear it misses the server later.
    """
    if manifest.transport is not TransportKind.COLLECTIVE:
        return
    where = urlsplit(manifest.location)
    query = parse_qs(where.query)
    port = int(query.get("door", ["0"])[0])
    if query.get("backend") != ["nccl"] or not port:
        return
    asked = {"key": where.path.lstrip("/"), "op": "lost", "server": server}
    try:
        async with asyncio.timeout(_TIMEOUT):
            reader, writer = await asyncio.open_connection(where.hostname, port)
            try:
                writer.write(json.dumps(asked).encode() + b"\n")
                await writer.drain()
                await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        _LOG.info("the trainer was not told that %s is lost: %s", server, error)
