"""Rows fetched from a real store in chunks, in order."""

import asyncio
import shutil

import numpy as np
import pytest
from train_cases import random_batch

from areal_like.errors import RemoteError
from areal_like.rollout.store import TrajectoryStore
from areal_like.rpc.security import private_socket_dir
from areal_like.train import store_client
from areal_like.train.store_client import StoreClient


async def test_rows_come_in_the_order_of_their_keys(monkeypatch):
    monkeypatch.setattr(store_client, "ROWS_PER_CALL", 3)
    store = TrajectoryStore()
    _, rows = random_batch()
    tags = [store.put(row) for row in rows.values()]
    keys = [tag.key for tag in tags][::-1]
    folder = private_socket_dir()

    def fetch():
        with StoreClient(server.address) as client:
            with pytest.raises(RemoteError, match="no trajectory"):
                client.fetch(["absent"])
            assert client.fetch([]) == []
            return client.fetch(keys)

    async with store.serve(f"ipc://{folder}/s") as server:
        found = await asyncio.to_thread(fetch)
    shutil.rmtree(folder)
    assert len(found) == len(keys) > 3
    for key, row in zip(keys, found, strict=True):
        (expected,) = store.get([key])
        np.testing.assert_array_equal(row.token_ids, expected.token_ids)
        np.testing.assert_array_equal(row.logprobs, expected.logprobs)
        assert (row.group_id, row.episode_id, row.reward) == (expected.group_id, expected.episode_id, expected.reward)
