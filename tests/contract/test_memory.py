"""What every engine promises about its device memory: it is lent and taken back, or the reason why not is told."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from subjects import HUNG, KV_CACHE, TEST, TRANSPORTS, ServerProcess

from areal_like.api.weights import TransportKind
from areal_like.client.memory import MemoryPart, memory_of
from areal_like.errors import RequestError
from areal_like.inference.backends import get_backend

if TYPE_CHECKING:
    from conftest import Line

pytestmark = pytest.mark.timeout(TEST)

PROMPT = [10, 200, 31, 77, 150, 42]


@pytest.mark.parametrize("transport", [kind for kind in TRANSPORTS if kind in (TransportKind.SHM, TransportKind.IPC)])
@pytest.mark.parametrize("keep_weights", [False, True], ids=["given up", "kept"])
async def test_memory_is_lent_and_taken_back_or_refused(
    open_line: Any, server: ServerProcess, transport: TransportKind, keep_weights: bool
) -> None:
    """On CPUs no engine lends any; asking then does no harm, and names the flag that it needs on GPUs."""
    async with open_line(server, transport=transport) as line:
        if line.subject.lends:
            await line.publish()  # the first may teach the server where its second is copied to
            for _ in range(2):
                await lend(line, keep_weights=keep_weights)
                await serves(line)
        else:
            await refuses(line, keep_weights=keep_weights)
            await serves(line)


async def lend(line: Line, *, keep_weights: bool) -> None:
    """Away and back; whoever looks at the device sees it."""
    control, lender, before = line.link.control, memory_of(line.link.control, line.server.name), free_bytes()
    await lender.release_memory(incarnation=0, keep_weights=keep_weights, timeout=HUNG)
    assert free_bytes() - before > 0.9 * KV_CACHE
    assert (await control.health(timeout=HUNG)).paused
    with pytest.raises(RequestError, match="reclaim weights"):
        await control.resume(incarnation=0, timeout=HUNG)
    with pytest.raises(RequestError, match="kv_cache is reclaimed last"):
        await lender.reclaim_memory(MemoryPart.KV_CACHE, incarnation=0, timeout=HUNG)
    await lender.reclaim_memory(MemoryPart.WEIGHTS, incarnation=0, timeout=HUNG)
    if not keep_weights:
        with pytest.raises(RequestError, match="a whole update"):
            await lender.reclaim_memory(MemoryPart.KV_CACHE, incarnation=0, timeout=HUNG)
        await line.publish()
    await lender.reclaim_memory(MemoryPart.KV_CACHE, incarnation=0, timeout=HUNG)
    assert not (await control.health(timeout=HUNG)).paused
    assert abs(free_bytes() - before) < 0.25 * KV_CACHE


async def refuses(line: Line, *, keep_weights: bool) -> None:
    needs = get_backend(line.subject.name).capabilities("0.32.0").memory
    with pytest.raises(RequestError, match=re.escape(needs or "cannot release memory")):
        await memory_of(line.link.control, line.server.name).release_memory(
            incarnation=0, keep_weights=keep_weights, timeout=HUNG
        )
    assert not (await line.link.control.health(timeout=HUNG)).paused


async def serves(line: Line) -> None:
    """What the trainer published last."""
    answer = await line.ask(PROMPT, max_new_tokens=32)
    assert set(answer.output_versions) == {line.version}
    assert line.distance(answer, line.version) < line.subject.noise


def free_bytes() -> int:
    """Of the GPU, whoever uses the rest."""
    free: int = torch.cuda.mem_get_info()[0]
    return free


async def test_memory_is_not_taken_from_running_requests(line: Line) -> None:
    """Nor is anything broken where it cannot be lent at all."""
    asked = asyncio.create_task(line.ask(PROMPT, max_new_tokens=line.subject.long))
    await line.in_hand()
    with pytest.raises(RequestError):
        await memory_of(line.link.control, line.server.name).release_memory(
            incarnation=0, keep_weights=True, timeout=HUNG
        )
    answer = await asked
    assert answer.output_len == line.subject.long
    assert line.distance(answer, line.version) < line.subject.noise
