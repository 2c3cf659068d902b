"""Calls over a real socket: results, typed errors, deadlines, at most once."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zmq
import zmq.asyncio

from areal_like.errors import RemoteError, RpcError
from areal_like.rpc import client as client_module
from areal_like.rpc.client import RpcClient
from areal_like.rpc.codec import encode
from areal_like.rpc.protocol import Answer, Ask, Request, decode_reply, encode_request
from areal_like.rpc.server import RpcServer

pytestmark = pytest.mark.timeout(30)


class Counter:
    """A method with an effect one can count."""

    def __init__(self):
        self.calls = 0
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()

    async def bump(self):
        self.calls += 1
        return self.calls

    async def bump_slowly(self):
        self.calls += 1
        self.started.set()
        await self.go_on.wait()
        return self.calls


class RawPeer:
    """A client that speaks the protocol by hand, to resend and to misbehave."""

    def __init__(self, address):
        self.context = zmq.asyncio.Context()
        self.address = address
        self.socket = None
        self.reconnect()

    def reconnect(self):
        """A new connection: the server sees a new route."""
        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(self.address)

    async def send(self, ask, number, instance="", method="", seconds_left=10.0, client="peer"):
        request = Request(
            ask=ask, client=client, number=number, instance=instance, method=method, seconds_left=seconds_left
        )
        await self.socket.send_multipart(encode_request(request))

    async def receive(self):
        return decode_reply(await self.socket.recv_multipart())

    async def greet(self):
        await self.send(Ask.HELLO, 0)
        return (await self.receive()).instance

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
async def peer_of():
    peers = []

    def make(address):
        peers.append(RawPeer(address))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


async def test_arguments_and_arrays_go_there_and_back(socket_dir):
    async def scale(array, by):
        return {"array": array * by, "by": by}

    async with RpcServer(f"ipc://{socket_dir}/s", {"scale": scale}) as server, RpcClient(server.address) as client:
        large = np.arange(50_000, dtype=np.float32)
        answer = await client.call("scale", timeout=10, array=large, by=2)
        np.testing.assert_array_equal(answer["array"], large * 2)
        assert answer["by"] == 2
        # the large reply was acknowledged, and a later call works
        assert (await client.call("scale", timeout=10, array=np.ones(2), by=3))["by"] == 3


async def test_an_exception_comes_back_with_its_type_and_traceback(socket_dir):
    async def fail():
        raise ZeroDivisionError("seven over nothing")

    async with RpcServer(f"ipc://{socket_dir}/s", {"fail": fail}) as server, RpcClient(server.address) as client:
        with pytest.raises(RemoteError, match="seven over nothing") as caught:
            await client.call("fail", timeout=10)
        assert caught.value.remote_type == "ZeroDivisionError"
        assert 'raise ZeroDivisionError("seven over nothing")' in caught.value.remote_traceback
        assert server.statistics().raised == 1


async def test_wrong_names_arguments_and_results_are_errors_of_the_call(socket_dir):
    async def strange():
        return object()

    async with RpcServer(f"ipc://{socket_dir}/s", {"strange": strange}) as server, RpcClient(server.address) as client:
        with pytest.raises(RemoteError, match="known: strange"):
            await client.call("stange", timeout=10)
        with pytest.raises(RemoteError, match="unexpected keyword argument"):
            await client.call("strange", timeout=10, extra=1)
        with pytest.raises(RemoteError, match="cannot encode object"):
            await client.call("strange", timeout=10)
        with pytest.raises(TypeError, match="cannot encode"):
            await client.call("strange", timeout=10, extra=object())


async def test_a_dead_address_is_an_rpc_error_in_time(socket_dir):
    async with RpcClient(f"ipc://{socket_dir}/nobody") as client:
        with pytest.raises(RpcError, match=r"no answer within 0\.05 s"):
            await client.call("x", timeout=0.05)


async def test_the_deadline_cuts_a_coroutine_and_the_next_call_goes_on(socket_dir):
    counter, cancelled = Counter(), asyncio.Event()

    async def stall():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    methods = {"stall": stall, "bump": counter.bump}
    async with (
        RpcServer(f"ipc://{socket_dir}/s", methods, max_running=1) as server,
        RpcClient(server.address) as client,
    ):
        with pytest.raises(RpcError):
            await client.call("stall", timeout=0.1)
        assert await client.call("bump", timeout=10) == 1
        assert cancelled.is_set()


async def test_a_timeout_error_of_the_method_is_not_our_deadline(socket_dir):
    async def own_timeout():
        raise TimeoutError("mine")

    methods = {"own": own_timeout}
    async with RpcServer(f"ipc://{socket_dir}/s", methods) as server, RpcClient(server.address) as client:
        with pytest.raises(RemoteError, match="mine"):
            await client.call("own", timeout=10)


async def test_a_call_that_waited_past_its_deadline_is_never_run(socket_dir, peer_of):
    counter = Counter()
    methods = {"slow": counter.bump_slowly, "bump": counter.bump}
    async with RpcServer(f"ipc://{socket_dir}/s", methods, max_running=1) as server:
        first, second = peer_of(server.address), peer_of(server.address)
        instance = await first.greet()
        await first.send(Ask.CALL, 1, instance, "slow", client="first")
        await counter.started.wait()
        await second.send(Ask.CALL, 1, instance, "bump", seconds_left=0.05, client="second")
        refused = await second.receive()
        assert refused.answer is Answer.REFUSED and "deadline" in refused.message
        counter.go_on.set()
        assert (await first.receive()).value == 1
        assert counter.calls == 1


async def test_a_resend_while_it_runs_and_one_afterwards_run_nothing(socket_dir, peer_of):
    counter = Counter()
    async with RpcServer(f"ipc://{socket_dir}/s", {"slow": counter.bump_slowly}) as server:
        peer = peer_of(server.address)
        instance = await peer.greet()
        await peer.send(Ask.CALL, 1, instance, "slow")
        await counter.started.wait()
        peer.reconnect()
        await peer.send(Ask.CALL, 1, instance, "slow")
        await peer.send(Ask.HELLO, 0)
        await peer.receive()  # the server has seen the resend
        counter.go_on.set()
        assert (await peer.receive()).value == 1  # answered on the new connection
        await peer.send(Ask.CALL, 1, instance, "slow")
        assert (await peer.receive()).value == 1
        assert counter.calls == 1
        assert server.statistics().resends == 2


async def test_old_numbers_and_acknowledged_calls_are_refused(socket_dir, peer_of):
    counter = Counter()
    async with RpcServer(f"ipc://{socket_dir}/s", {"bump": counter.bump}) as server:
        peer = peer_of(server.address)
        instance = await peer.greet()
        for number in (1, 2):
            await peer.send(Ask.CALL, number, instance, "bump")
            await peer.receive()
        await peer.send(Ask.CALL, 1, instance, "bump")
        assert (await peer.receive()).answer is Answer.REFUSED
        await peer.send(Ask.ACKNOWLEDGE, 2, instance)
        await peer.send(Ask.CALL, 2, instance, "bump")
        assert (await peer.receive()).answer is Answer.REFUSED
        assert counter.calls == 2


async def test_a_restarted_server_refuses_what_its_predecessor_may_have_run(socket_dir):
    counter = Counter()
    bind = f"ipc://{socket_dir}/s"
    async with RpcClient(bind) as client:
        async with RpcServer(bind, {"bump": counter.bump}):
            await client.call("bump", timeout=10)
        async with RpcServer(bind, {"bump": counter.bump}):
            with pytest.raises(RpcError, match="restarted"):
                await client.call("bump", timeout=10)
    assert counter.calls == 1


async def test_the_client_resends_until_the_server_is_there(socket_dir, monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_RESEND", 0.02)
    counter = Counter()
    bind = f"ipc://{socket_dir}/s"
    async with RpcClient(bind) as client:
        call = asyncio.create_task(client.call("slow", timeout=10))
        while client.statistics().resends < 2:  # noqa: ASYNC110 - counted, not slept
            await asyncio.sleep(0)
        async with RpcServer(bind, {"slow": counter.bump_slowly}) as server:
            await counter.started.wait()
            while server.statistics().resends < 2:  # noqa: ASYNC110 - counted, not slept
                await asyncio.sleep(0)
            counter.go_on.set()
            assert await call == 1


async def test_a_cancelled_call_leaves_the_client_usable(socket_dir):
    counter = Counter()
    methods = {"slow": counter.bump_slowly, "bump": counter.bump}
    async with RpcServer(f"ipc://{socket_dir}/s", methods) as server, RpcClient(server.address) as client:
        call = asyncio.create_task(client.call("slow", timeout=10))
        await counter.started.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        counter.go_on.set()  # its late reply is dropped
        assert await client.call("bump", timeout=10) == 2


async def test_plain_functions_run_on_the_executor_one_at_a_time(socket_dir):
    names, running, most = set(), 0, 0
    lock = threading.Lock()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        names.add(threading.current_thread().name)
        with lock:
            running -= 1

    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="worker") as executor:
        bind = f"ipc://{socket_dir}/s"
        async with RpcServer(bind, {"work": work}, executor=executor, max_running=1) as server:
            clients = [RpcClient(server.address) for _ in range(8)]
            await asyncio.gather(*(client.call("work", timeout=10) for client in clients))
            for client in clients:
                client.close()
    assert most == 1
    assert all(name.startswith("worker") for name in names)


async def test_garbage_is_counted_and_harms_nobody(socket_dir, peer_of):
    counter = Counter()
    async with RpcServer(f"ipc://{socket_dir}/s", {"bump": counter.bump}) as server:
        peer = peer_of(server.address)
        await peer.socket.send(b"\xc1garbage")
        await peer.socket.send_multipart([b"\x80", b"x"])
        for wrong in ({"number": "1"}, {"client": 1}, {"arguments": [1]}, {"seconds_left": "5"}, {"extra": 1}):
            await peer.socket.send_multipart(encode({"ask": "call", "client": "c", "number": 1} | wrong))
        async with RpcClient(server.address) as client:
            assert await client.call("bump", timeout=10) == 1
        assert server.statistics().malformed == 7


async def test_many_clients_at_once(socket_dir):
    async def square(x):
        return x * x

    async with RpcServer(f"ipc://{socket_dir}/s", {"square": square}) as server:
        clients = [RpcClient(server.address) for _ in range(32)]
        answers = await asyncio.gather(*(c.call("square", timeout=10, x=i) for i, c in enumerate(clients)))
        assert answers == [i * i for i in range(32)]
        for client in clients:
            client.close()
