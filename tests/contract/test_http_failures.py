"""What every engine promises when its server answers 500: an error by name and in time, and no harm once it is well."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fakes.proxy import Proxy, proxied
from subjects import HUNG, TEST, ServerProcess

from areal_like.api.wire import GenerateBody, SamplingBody
from areal_like.errors import InfrastructureError, WeightUpdateError

if TYPE_CHECKING:
    from conftest import Line

pytestmark = pytest.mark.timeout(TEST)

PROMPT = [10, 200, 31, 77, 150, 42]


async def test_failed_requests_end_in_time(open_line: Any, server: ServerProcess) -> None:
    async with proxied(server.url) as proxy, open_line(replace(server, url=proxy.url)) as line:
        await line.ask(PROMPT, max_new_tokens=1)
        proxy.failing = path_of_a_request(line)
        assert proxy.failing in proxy.posted
        with pytest.raises(InfrastructureError, match="500: told to fail"):
            async with asyncio.timeout(HUNG):
                await line.ask(PROMPT, max_new_tokens=4)
        assert proxy.failures > 1  # it was tried again
        proxy.failing = ""
        assert (await line.ask(PROMPT, max_new_tokens=4)).output_versions == [line.version] * 4


def path_of_a_request(line: Line) -> str:
    """Where this version of the engine is asked for an answer."""
    return line.link.dialect.generate(
        GenerateBody(rid="r.1", input_ids=PROMPT, sampling=SamplingBody(max_new_tokens=1))
    ).path


@pytest.mark.parametrize("late", [False, True], ids=["not done", "done all the same"])
async def test_an_update_that_fails_at_any_call_ends_in_time_and_can_be_mended(
    open_line: Any, server: ServerProcess, late: bool
) -> None:
    """Every call that an update makes fails once. The server leaves the rotation, and comes back whole."""
    async with proxied(server.url) as proxy, open_line(replace(server, url=proxy.url)) as line:
        proxy.late = late
        for path in await calls_of_an_update(line, proxy):
            version, failures = line.prepare(), proxy.failures
            proxy.failing = path
            with pytest.raises(WeightUpdateError, match=r"500: told to fail|none was in rotation"):
                async with asyncio.timeout(HUNG):
                    await line.publish(version)
            assert proxy.failures > failures
            assert line.pool.statistics().in_rotation == 0
            proxy.failing = ""
            async with asyncio.timeout(HUNG):
                assert (await line.channel.readmit(server.name)).version == version
                answer = await line.ask(PROMPT, max_new_tokens=32)  # a mean over few tokens strays
            assert set(answer.output_versions) == {version}
            assert line.distance(answer, version) < line.subject.noise


async def calls_of_an_update(line: Line, proxy: Proxy) -> list[str]:
    """The paths that one posts to, each once, in order."""
    proxy.posted.clear()
    await line.publish()
    return list(dict.fromkeys(proxy.posted))
