"""Two real worker processes under the controller's trainer: train, export, save, report health, stop, die."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from train_cases import batch_of, build_engine, random_batch, run_update, weights_of
from transformers import AutoModelForCausalLM

from areal_like.api.generation import GenerationHyperparameters
from areal_like.config.actor import ActorConfig
from areal_like.config.model import ModelConfig
from areal_like.config.weights import WeightsConfig
from areal_like.errors import ConfigError, InfrastructureError, RemoteError
from areal_like.rollout.store import TrajectoryStore
from areal_like.rpc.security import RunKeys, private_socket_dir
from areal_like.rpc.sync_client import SyncRpcClient
from areal_like.train.group import TrainerGroup
from areal_like.train.spec import TrainWorkerSpec
from areal_like.train.worker import run_worker
from areal_like.weights.staging import StagedWeights

pytestmark = pytest.mark.timeout(110)

ACTOR = ActorConfig.model_validate({"optimizer": {"lr": 1e-3}, "ppo_n_minibatches": 2, "backend": "fsdp:d2"})


def launch(spec, *, grace=5.0):
    process = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "worker_program.py", str(grace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
    )
    process.stdin.write(spec.model_dump_json())
    process.stdin.close()
    process.stdin = None
    return process


def start(specs):
    """Launch every rank, then read the address that each one announces (empty if it ended)."""
    processes = [launch(spec) for spec in specs]
    return processes, [process.stdout.readline().strip() for process in processes]


def spec_of(rank, ranks, *, model_dir, run_dir, store_address, bind, keys=None):
    return TrainWorkerSpec(
        rank=rank,
        world_size=ranks,
        rendezvous=f"file://{run_dir}/rendezvous",
        model=ModelConfig(path=str(model_dir)),
        actor=ACTOR,
        gconfig=GenerationHyperparameters(),
        weights=WeightsConfig(),
        store_address=store_address,
        bind=bind,
        run_dir=run_dir,
        run_id=f"test{os.getpid()}",
        total_train_steps=4,
        version=3,
        keys=keys,
    )


@pytest.fixture
def sockets():
    folder = private_socket_dir()
    yield folder
    shutil.rmtree(folder)


def segments():
    return {path.name for path in Path("/dev/shm").iterdir() if f"test{os.getpid()}" in path.name}


async def test_two_ranks_from_start_to_stop(model_dir, one_rank, tmp_path, sockets):
    _, rows = random_batch()
    store = TrajectoryStore()
    stored = {store.put(row).key: row for row in rows.values()}
    batch = batch_of(stored, 3)
    async with store.serve(f"ipc://{sockets}/store") as server:
        specs = [
            spec_of(
                rank,
                2,
                model_dir=model_dir,
                run_dir=tmp_path,
                store_address=server.address,
                bind=f"ipc://{sockets}/train-{rank}",
            )
            for rank in range(2)
        ]
        processes, addresses = await asyncio.to_thread(start, specs)
        try:
            async with TrainerGroup(addresses, step_timeout=60) as trainer:
                assert [c.pid for c in await trainer.coordinates()] == [p.pid for p in processes]
                snapshot = await trainer.save_snapshot()
                report = await trainer.update(batch)
                assert report.metrics["train/optimizer_steps"] == 2
                await trainer.finish_snapshot()
                assert await trainer.load_snapshot(snapshot) == 3  # and make the same version again
                report = await trainer.update(batch)
                with pytest.raises(RemoteError, match="holds version 4") as refused:
                    await trainer.update(batch)
                assert refused.value.remote_type == "ValueError"

                # the version that is exported is what one rank alone makes of the same batch
                engine = build_engine(model_dir, one_rank, ACTOR, dtype=torch.float32, total_steps=8)
                run_update(engine, ACTOR, batch, stored)
                expected = weights_of(engine)
                manifest = await trainer.export_weights(4, 0)
                live = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
                staged = StagedWeights(dict(live.named_parameters(remove_duplicate=False)))
                staged.stage(manifest)
                staged.commit(4)
                assert staged.digest() == manifest.digest
                for name, tensor in live.state_dict().items():
                    np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=0, atol=2e-5, err_msg=name)

                await trainer.save_hf(str(tmp_path / "checkpoint"))
                saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
                assert all(torch.equal(saved[name], tensor) for name, tensor in live.state_dict().items())
                assert [(h.alive, h.method, h.version) for h in await trainer.health()] == [(True, "", 4)] * 2
            assert segments()
        finally:
            for process in processes:
                process.terminate()
            errors = [process.communicate(timeout=20)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert not segments()


async def test_a_killed_rank_is_an_error_and_not_a_hang(model_dir, tmp_path, sockets):
    """Over tcp with keys. The survivor's collective breaks; told to stop, it leaves."""
    _, rows = random_batch()
    store, keys = TrajectoryStore(), RunKeys.generate()
    batch = batch_of({store.put(row).key: row for row in rows.values()}, 3)
    async with store.serve("tcp://127.0.0.1:*", keys=keys) as server:
        specs = [
            spec_of(
                rank,
                2,
                model_dir=model_dir,
                run_dir=tmp_path,
                store_address=server.address,
                bind="tcp://127.0.0.1:*",
                keys=keys,
            )
            for rank in range(2)
        ]
        processes, addresses = await asyncio.to_thread(start, specs)
        try:
            async with TrainerGroup(addresses, keys=keys, step_timeout=30) as trainer:
                processes[1].send_signal(signal.SIGKILL)
                processes[1].wait(10)
                started = time.monotonic()
                with pytest.raises((RemoteError, InfrastructureError)):
                    await trainer.update(batch)
                assert time.monotonic() - started < 20
                first, second = await trainer.health(timeout=1.0)
                assert (first.alive, second.alive) == (True, False)
        finally:
            for process in processes:
                process.terminate()
                process.communicate(timeout=20)


def test_a_worker_that_cannot_start_says_why(tmp_path, sockets):
    spec = spec_of(
        0,
        1,
        model_dir=tmp_path / "absent",
        run_dir=tmp_path,
        store_address=f"ipc://{sockets}/store",
        bind=f"ipc://{sockets}/train",
    )
    told = []
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(ConfigError, match=r"model\.path: .*absent"):
            run_worker(spec, told.append)
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == []


def test_a_worker_that_waits_for_another_can_be_stopped(model_dir, tmp_path, sockets):
    """The other rank never comes: nothing but the end of the process gets out of the rendezvous."""
    spec = spec_of(
        0,
        2,
        model_dir=model_dir,
        run_dir=tmp_path,
        store_address=f"ipc://{sockets}/store",
        bind=f"ipc://{sockets}/train",
    )
    process = launch(spec, grace=0.2)
    with SyncRpcClient(spec.health_address) as probe:
        assert probe.call("health", timeout=60)["method"] == "start"
    process.terminate()
    _, errors = process.communicate(timeout=15)
    assert process.returncode == 1, errors
    assert "leaving without it" in errors
