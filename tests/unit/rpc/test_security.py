"""Only our own user, or holders of the run's keys, reach a socket."""

import asyncio
import os
import stat

import pytest
import zmq

from areal_like.errors import ConfigError, RpcError
from areal_like.rpc.client import RpcClient
from areal_like.rpc.health import HealthServer
from areal_like.rpc.security import MAX_IPC_PATH_BYTES, RunKeys
from areal_like.rpc.server import RpcServer
from areal_like.rpc.sync_client import SyncRpcClient


async def _ping():
    return "pong"


async def test_ipc_socket_and_its_folder_are_private(socket_dir):
    folder = socket_dir / "made"
    async with RpcServer(f"ipc://{folder}/s", {}):
        assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_folder_that_others_can_enter_is_refused(socket_dir):
    socket_dir.chmod(0o755)
    with pytest.raises(ConfigError, match="0755"):
        async with RpcServer(f"ipc://{socket_dir}/s", {}):
            pass


async def test_a_path_too_long_for_a_socket_is_refused(socket_dir):
    path = f"{socket_dir}/" + "x" * (MAX_IPC_PATH_BYTES + 1 - len(os.fsencode(socket_dir)) - 1)
    with pytest.raises(ConfigError, match="108 bytes"):
        async with RpcServer(f"ipc://{path}", {}):
            pass


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "inproc://x", "udp://1.2.3.4:1"])
async def test_addresses_without_protection_are_refused(address):
    with pytest.raises(ConfigError, match="cannot bind"):
        async with RpcServer(address, {}):
            pass
    with pytest.raises(ConfigError, match="cannot connect"):
        RpcClient(address)
    with pytest.raises(ConfigError, match="cannot connect"):
        SyncRpcClient(address)


async def test_a_taken_port_is_named():
    keys = RunKeys.generate()
    async with RpcServer("tcp://127.0.0.1:*", {}, keys=keys) as server:
        with pytest.raises(ConfigError, match="choose another address"):
            async with RpcServer(server.address, {}, keys=keys):
                pass


async def test_holders_of_the_keys_are_served_and_others_are_not():
    keys, others = RunKeys.generate(), RunKeys.generate()
    async with RpcServer("tcp://127.0.0.1:*", {"ping": _ping}, keys=keys) as server:
        async with RpcClient(server.address, keys=keys) as client:
            assert await client.call("ping", timeout=10) == "pong"
        # knows the server's public key, yet has no client key of this run
        intruder = RunKeys(
            server_public=keys.server_public,
            server_secret="",
            client_public=others.client_public,
            client_secret=others.client_secret,
        )
        async with RpcClient(server.address, keys=intruder) as client:
            with pytest.raises(RpcError, match="no answer"):
                await client.call("ping", timeout=0.3)


def test_health_over_tcp_needs_the_keys_too():
    keys = RunKeys.generate()
    with (
        HealthServer("tcp://127.0.0.1:*", lambda: {"step": 3}, keys=keys) as server,
        SyncRpcClient(server.address, keys=keys) as client,
    ):
        assert client.call("health", timeout=10) == {"step": 3}


async def test_a_plain_tcp_peer_gets_nothing():
    keys = RunKeys.generate()
    async with RpcServer("tcp://127.0.0.1:*", {"ping": _ping}, keys=keys) as server:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(server.address)
        dealer.send(b"hello")
        answered = await asyncio.to_thread(dealer.poll, 300)
        context.destroy(linger=0)
        assert not answered
        assert server.statistics().malformed == 0


def test_secrets_stay_out_of_the_repr():
    keys = RunKeys.generate()
    assert keys.server_secret not in repr(keys) and keys.client_secret not in repr(keys)
    assert RunKeys.generate() != keys
