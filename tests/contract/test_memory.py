"""What every engine promises about its device memory: it is lent and taken back, or the reason why not is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from subjects import HUNG, TEST

from areal_like.client.memory import MemoryPart, memory_of
from areal_like.errors import RequestError
from areal_like.inference.backends import get_backend

if TYPE_CHECKING:
    from conftest import Line

pytestmark = pytest.mark.timeout(TEST)

PROMPT = [10, 200, 31, 77, 150, 42]


async def test_memory_is_lent_and_taken_back_or_refused(line: Line) -> None:
    """On CPUs no engine lends any; asking then does no harm, and names the flag that it needs on GPUs."""
    control = line.link.control
    try:
        await memory_of(control, line.server.name).release_memory(incarnation=0, keep_weights=False, timeout=HUNG)
    except RequestError as refusal:
        needs = get_backend(line.subject.name).capabilities("0.32.0").memory
        assert needs in str(refusal) if needs else "cannot release memory" in str(refusal)
        assert not (await control.health(timeout=HUNG)).paused
    else:
        lender = memory_of(control, line.server.name)
        await lender.reclaim_memory(MemoryPart.WEIGHTS, incarnation=0, timeout=HUNG)
        await line.publish()
        await lender.reclaim_memory(MemoryPart.KV_CACHE, incarnation=0, timeout=HUNG)
    answer = await line.ask(PROMPT, max_new_tokens=32)
    assert set(answer.output_versions) == {line.version}
    assert line.distance(answer, line.version) < line.subject.noise


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
