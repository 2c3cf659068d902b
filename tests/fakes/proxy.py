"""A proxy between us and a real server, which answers 500 where it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

#: largest request that passes
_LARGEST = 64 * 2**20


@dataclass(slots=True, kw_only=True)
class Proxy:
    """``failing``: the path that answers 500; ``late``: only after the server has done what it was asked.

    ``posted``: paths of every POST that came, in order.
    """

    target: str
    url: str = ""
    failing: str = ""
    late: bool = False
    posted: list[str] = field(default_factory=list)
    failures: int = 0

    async def forward(self, request: web.Request, http: aiohttp.ClientSession) -> web.Response:
        if request.method == "POST":
            self.posted.append(request.path)
        fails, content = request.path == self.failing, await request.read()
        self.failures += fails
        if fails and not self.late:
            return web.Response(status=500, text="told to fail")
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        url = f"{self.target}{request.path_qs}"
        try:
            async with http.request(request.method, url, data=content, headers=headers) as answer:
                body = await answer.read()
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=repr(error))
        if fails:
            return web.Response(status=500, text="told to fail, late")
        kind = {"Content-Type": answer.headers["Content-Type"]} if body else {}
        return web.Response(status=answer.status, body=body, headers=kind)


@asynccontextmanager
async def proxied(target: str) -> AsyncIterator[Proxy]:
    """A proxy on a port of its own, in this event loop."""
    proxy = Proxy(target=target)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as http:
        app = web.Application(client_max_size=_LARGEST)

        async def forward(request: web.Request) -> web.Response:
            return await proxy.forward(request, http)

        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            proxy.url = "http://{}:{}".format(*runner.addresses[0][:2])
            yield proxy
        finally:
            await runner.cleanup()
