from __future__ import annotations

import asyncio

import pytest

from areal_like.control.registry import Registry
from areal_like.errors import InfrastructureError


async def test_waits_until_all_of_a_role_are_there_and_hands_them_out_in_order() -> None:
    registry = Registry()
    waiting = asyncio.create_task(registry.expect("train", 2, timeout=5))
    for role, index in (("train", 1), ("inference", 0)):
        registry.methods["register"](role=role, index=index, address=f"ipc://{role}{index}", pid=index)
        await asyncio.sleep(0)
        assert not waiting.done()
    registry.register("train", 0, "ipc://train0", 7)
    assert [r.address for r in await waiting] == ["ipc://train0", "ipc://train1"]
    assert [r.pid for r in registry.present("inference")] == [0]


async def test_registering_again_replaces_the_address() -> None:
    registry = Registry()
    for address in ("old", "new"):
        registry.register("train", 0, address, 1)
    (found,) = await registry.expect("train", 1, timeout=5)
    assert found.address == "new"


async def test_names_who_is_missing_and_which_log_to_read() -> None:
    registry = Registry()
    registry.register("train", 0, "a", 1)
    with pytest.raises(InfrastructureError, match=r"train \[1, 2\] did not become ready within 0 s; see logs/train-1"):
        await registry.expect("train", 3, timeout=0.01)
