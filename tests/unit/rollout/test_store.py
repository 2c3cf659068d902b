"""The trajectory store: bounded, counted, and readable over a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from areal_like.api.trajectory import Trajectory
from areal_like.api.trajectory_wire import from_wire
from areal_like.errors import InfrastructureError, RemoteError
from areal_like.rollout.store import StoreFull, TrajectoryStore, UnknownTrajectory
from areal_like.rpc.client import RpcClient
from areal_like.rpc.sync_client import SyncRpcClient


def row(length: int = 4, *, reward: float = 1.0, returns: bool = False) -> Trajectory:
    versions = np.full(length, -1, np.int32)
    versions[1:] = np.arange(7, 6 + length)
    return Trajectory(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=(versions >= 0).astype(np.int32),
        logprobs=np.where(versions >= 0, -0.5, 0).astype(np.float32),
        versions=versions,
        reward=reward,
        returns=np.ones(length, np.float32) if returns else None,
        group_id="g",
        episode_id="e",
    )


def test_a_tag_says_what_the_controller_needs_to_know() -> None:
    tag = TrajectoryStore().put(row(5, reward=0.25))
    assert (tag.group_id, tag.episode_id, tag.length, tag.loss_tokens, tag.reward) == ("g", "e", 5, 4, 0.25)
    assert (tag.oldest_version, tag.newest_version) == (7, 10)


def test_get_keeps_the_order_of_the_keys() -> None:
    store = TrajectoryStore()
    tags = [store.put(row(reward=float(i))) for i in range(3)]
    assert [t.reward for t in store.get([tags[2].key, tags[0].key])] == [2.0, 0.0]


def test_deleting_twice_does_no_harm_and_keys_are_never_used_again() -> None:
    store = TrajectoryStore()
    tag = store.put(row())
    assert store.delete([tag.key]) == 1
    assert store.delete([tag.key]) == 0
    assert store.put(row()).key != tag.key
    with pytest.raises(UnknownTrajectory, match=f"no trajectory '{tag.key}'"):
        store.get([tag.key])


def test_the_limit_in_bytes_is_kept_and_named() -> None:
    one = 1024 + 4 * 4 * 4  # overhead, and four arrays of four 4-byte numbers
    store = TrajectoryStore(max_bytes=2 * one)
    first = store.put(row())
    store.put(row())
    with pytest.raises(StoreFull, match=f"2 trajectories already hold {2 * one} of {2 * one} bytes") as raised:
        store.put(row())
    assert isinstance(raised.value, InfrastructureError)  # never a reward, never a fault of the workflow
    store.delete([first.key])
    store.put(row())


def test_statistics_balance_over_many_steps() -> None:
    store = TrajectoryStore()
    for _ in range(50):
        keys = [store.put(row(returns=True)).key for _ in range(4)]
        store.get(keys)
        store.delete(keys)
    figures = store.statistics()
    assert (figures.puts, figures.gets, figures.deletes) == (200, 200, 200)
    assert (figures.trajectories, figures.bytes) == (0, 0)
    assert figures.peak_bytes == 4 * (1024 + 5 * 4 * 4)


async def test_another_process_reads_rows_by_key_over_ipc(tmp_path: Path) -> None:
    store = TrajectoryStore()
    short, long = store.put(row(3, returns=True)), store.put(row(5000))
    async with store.serve(f"ipc://{tmp_path}/store") as server:

        def fetch() -> list[dict[str, object]]:
            with SyncRpcClient(server.address) as client:
                answer: list[dict[str, object]] = client.call("get", timeout=5, keys=[long.key, short.key])
                return answer

        wires = await asyncio.to_thread(fetch)
    assert [wire["key"] for wire in wires] == [long.key, short.key]
    first, second = map(from_wire, wires)
    assert first.token_ids.tolist() == list(range(5000))
    assert first.returns is None
    assert second.returns is not None
    assert second.returns.tolist() == [1, 1, 1]
    assert second.versions.tolist() == [-1, 7, 8]
    assert (second.reward, second.group_id, second.episode_id) == (1.0, "g", "e")


async def test_deleting_and_asking_for_what_is_gone_over_ipc(tmp_path: Path) -> None:
    store = TrajectoryStore()
    tag = store.put(row())
    async with store.serve(f"ipc://{tmp_path}/store") as server, RpcClient(server.address) as client:
        assert await client.call("delete", timeout=5, keys=[tag.key]) == 1
        with pytest.raises(RemoteError) as raised:
            await client.call("get", timeout=5, keys=[tag.key])
    assert raised.value.remote_type == "UnknownTrajectory"
