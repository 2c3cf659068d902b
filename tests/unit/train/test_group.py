"""The controller's trainer against real endpoints that stand in for ranks."""

import asyncio
import shutil
from contextlib import AsyncExitStack, ExitStack

import pytest
from train_cases import random_batch

from areal_like.api.trajectory import UpdateReport
from areal_like.api.weights import Manifest, TransportKind
from areal_like.errors import InfrastructureError, RemoteError, RpcError
from areal_like.rpc.health import HealthServer
from areal_like.rpc.security import private_socket_dir
from areal_like.rpc.server import RpcServer
from areal_like.train.group import TrainerGroup
from areal_like.train.methods import Coordinates, method_forms


class Rank:
    """A rank without a model: answers what it is told to, and remembers what it was asked."""

    def __init__(self, rank, ranks, health_address):
        self.rank = rank
        self.where = Coordinates(
            rank=rank,
            world_size=ranks,
            data_rank=rank,
            data_size=ranks,
            device="cpu",
            host="here",
            pid=1,
            health_address=health_address,
        )
        self.asked = []
        self.fail = None
        self.hang = False

    async def coordinates(self):
        return method_forms()["coordinates"].result.dump_python(self.where)

    async def update(self, batch):
        batch = method_forms()["update"].load({"batch": batch})["batch"]
        self.asked.append(batch)
        if self.fail:
            raise self.fail
        if self.hang:
            await asyncio.Event().wait()
        report = UpdateReport(version=batch.version, seconds=float(self.rank), tokens=5, metrics={"train/loss": 0.5})
        return method_forms()["update"].result.dump_python(report)

    async def export_weights(self, version, incarnation):
        if self.rank != 0:
            return None
        manifest = Manifest(
            version=version,
            incarnation=incarnation,
            transport=TransportKind.SHM,
            location="x",
            tensors=(),
            digest="d",
        )
        return method_forms()["export_weights"].result.dump_python(manifest)

    async def save_hf(self, directory):
        return directory

    async def save_snapshot(self):
        return "/tmp/version-000003"

    async def finish_snapshot(self):
        return None

    async def load_snapshot(self, directory):
        return int(directory[-6:])


@pytest.fixture
async def ranks_of():
    """Starts stand-ins for the given (rank, ranks) and returns them with their addresses."""
    folder = private_socket_dir()
    async with AsyncExitStack() as servers:
        with ExitStack() as healths:

            async def start(*places):
                ranks, addresses = [], []
                for number, (rank, count) in enumerate(places):
                    activity = {"method": "update", "seconds": 2.5, "version": 7}
                    health = healths.enter_context(HealthServer(f"ipc://{folder}/h{number}", lambda a=activity: a))
                    ranks.append(Rank(rank, count, health.address))
                    methods = {name: getattr(ranks[-1], name) for name in method_forms()}
                    server = await servers.enter_async_context(RpcServer(f"ipc://{folder}/r{number}", methods))
                    addresses.append(server.address)
                return ranks, addresses

            yield start
    shutil.rmtree(folder)


async def test_every_rank_gets_the_batch_and_rank_0_reports(ranks_of):
    ranks, addresses = await ranks_of((1, 2), (0, 2))  # addresses in any order
    batch, _ = random_batch()
    async with TrainerGroup(addresses) as trainer:
        report = await trainer.update(batch)
        assert report == UpdateReport(version=3, seconds=0.0, tokens=5, metrics={"train/loss": 0.5})
        assert [rank.asked for rank in ranks] == [[batch], [batch]]
        assert [c.rank for c in await trainer.coordinates()] == [0, 1]
        manifest = await trainer.export_weights(4, 2)
        assert (manifest.version, manifest.incarnation, manifest.transport) == (4, 2, TransportKind.SHM)
        assert await trainer.save_hf("/tmp/x") == "/tmp/x"
        folder = await trainer.save_snapshot()
        await trainer.finish_snapshot()
        assert await trainer.load_snapshot(folder) == 3
        statistics = trainer.statistics()
        assert (statistics.updates, statistics.exports, statistics.saves, statistics.in_flight) == (1, 1, 1, "")


async def test_the_first_failing_rank_ends_the_call_although_another_hangs(ranks_of):
    ranks, addresses = await ranks_of((0, 2), (1, 2))
    ranks[0].hang, ranks[1].fail = True, FloatingPointError("rank 1 broke")
    async with TrainerGroup(addresses) as trainer:
        with pytest.raises(RemoteError, match="rank 1 broke") as caught:
            await trainer.update(random_batch()[0])
        assert caught.value.remote_type == "FloatingPointError"
        assert "rank 1 broke" in caught.value.remote_traceback


async def test_a_rank_that_does_not_answer_is_an_error_in_time(ranks_of):
    ranks, addresses = await ranks_of((0, 2), (1, 2))
    ranks[1].hang = True
    async with TrainerGroup(addresses, step_timeout=0.2) as trainer:
        with pytest.raises(RpcError, match=r"no answer within 0\.2 s.*raise actor\.step_timeout if it needs longer"):
            await trainer.update(random_batch()[0])


async def test_an_incomplete_group_is_refused(ranks_of):
    _, addresses = await ranks_of((0, 2), (0, 2))
    for given in (addresses, addresses[:1]):
        with pytest.raises(InfrastructureError, match="every rank exactly once"):
            async with TrainerGroup(given):
                pass


async def test_health_answers_and_names_the_dead(ranks_of):
    _, addresses = await ranks_of((0, 1))
    async with TrainerGroup(addresses) as trainer:
        (health,) = await trainer.health()
        assert (health.alive, health.method, health.seconds, health.version) == (True, "update", 2.5, 7)


async def test_health_of_a_rank_that_is_gone(ranks_of):
    ranks, addresses = await ranks_of((0, 1))
    ranks[0].where = Coordinates(
        rank=0, world_size=1, data_rank=0, data_size=1, device="cpu", host="", pid=1, health_address=addresses[0] + "x"
    )
    async with TrainerGroup(addresses) as trainer:
        (health,) = await trainer.health(timeout=0.05)
        assert not health.alive and "no answer" in health.reason
