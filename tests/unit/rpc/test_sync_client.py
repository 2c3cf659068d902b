"""The blocking client against a server in another process: death, deadlines, resends."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from areal_like.errors import RemoteError, RpcError
from areal_like.rpc import sync_client as sync_client_module
from areal_like.rpc.server import RpcServer
from areal_like.rpc.sync_client import SyncRpcClient


def serve(bind):
    """What the server process does."""
    calls = 0

    async def bump():
        nonlocal calls
        calls += 1
        return calls

    async def fail():
        raise KeyError("absent")

    async def double(array):
        return array * 2

    async def die():
        os.kill(os.getpid(), signal.SIGKILL)

    async def slow():
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.2)
        return calls

    async def main():
        async with RpcServer(bind, {"bump": bump, "fail": fail, "double": double, "die": die, "slow": slow}):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await asyncio.Event().wait()

    asyncio.run(main())


@pytest.fixture
def server_process(socket_dir):
    bind = f"ipc://{socket_dir}/s"
    with subprocess.Popen([sys.executable, __file__, bind], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield bind
        process.kill()


def test_results_errors_resends_and_death(server_process, monkeypatch):
    with SyncRpcClient(server_process) as client:
        assert client.call("bump", timeout=10) == 1
        with pytest.raises(RemoteError, match="absent") as caught:
            client.call("fail", timeout=10)
        assert caught.value.remote_type == "KeyError"
        large = np.arange(30_000)
        np.testing.assert_array_equal(client.call("double", timeout=10, array=large), large * 2)

        monkeypatch.setattr(sync_client_module, "FIRST_RESEND", 0.02)
        assert client.call("slow", timeout=10) == 2  # resent several times meanwhile, run once
        assert client.statistics().resends >= 1

        with pytest.raises(RpcError, match="no answer"):
            client.call("bump", timeout=0.0)
        assert client.call("bump", timeout=10) == 3
        with pytest.raises(RpcError, match="no answer"):
            client.call("die", timeout=0.5)


def test_threads_take_turns(server_process):
    answers = []
    with SyncRpcClient(server_process) as client:
        threads = [threading.Thread(target=lambda: answers.append(client.call("bump", timeout=10))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == list(range(1, 9))


if __name__ == "__main__":
    serve(sys.argv[1])
