"""The health socket answers while the process's one worker thread is deep in a call."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from areal_like.rpc.client import RpcClient
from areal_like.rpc.health import HealthServer
from areal_like.rpc.server import RpcServer


async def test_health_answers_during_a_long_call(socket_dir):
    started, go_on = threading.Event(), threading.Event()

    def long_step():
        started.set()
        assert go_on.wait(10)
        return "done"

    executor = ThreadPoolExecutor(max_workers=1)
    with HealthServer(f"ipc://{socket_dir}/h", lambda: {"busy": started.is_set()}) as health, executor:
        async with (
            RpcServer(f"ipc://{socket_dir}/s", {"step": long_step}, executor=executor, max_running=1) as server,
            RpcClient(server.address) as client,
            RpcClient(health.address) as probe,
        ):
            assert await probe.call("health", timeout=10) == {"busy": False}
            step = asyncio.create_task(client.call("step", timeout=10))
            await asyncio.to_thread(started.wait, 10)
            assert await probe.call("health", timeout=10) == {"busy": True}
            assert not step.done()
            go_on.set()
            assert await step == "done"
