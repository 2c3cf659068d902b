"""One train rank: its process, its RPC endpoint, and the methods that the controller calls."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from areal_like.api.trajectory import Batch, UpdateReport
from areal_like.api.weights import Manifest
from areal_like.rpc.health import HealthServer
from areal_like.rpc.server import RpcServer
from areal_like.train.checkpoint import write_checkpoint
from areal_like.train.companions import build_companions
from areal_like.train.engine import EngineStatistics, TrainEngine
from areal_like.train.methods import Coordinates, MethodForm, TrainMethods, method_forms
from areal_like.train.model import PolicyModel, load_language_model, replayed_sampling
from areal_like.train.parallel import choose_device, process_group
from areal_like.train.ppo import PpoUpdate
from areal_like.train.snapshot import SnapshotStore
from areal_like.train.spec import TrainWorkerSpec
from areal_like.train.store_client import StoreClient
from areal_like.weights.transports.base import WeightWriter, make_writer

_LOG = logging.getLogger(__name__)

#: seconds that a call under way gets to finish once the worker is told to stop
STOP_GRACE = 5.0


@dataclass(slots=True, kw_only=True)
class Activity:
    """What the rank is at; written by the compute thread, read by the health thread."""

    method: str = "start"
    since: float = 0.0
    version: int = -1

    @contextmanager
    def during(self, method: str) -> Iterator[None]:
        self.method, self.since = method, time.monotonic()
        try:
            yield
        finally:
            self.method, self.since = "", time.monotonic()

    def snapshot(self) -> dict[str, Any]:
        return {"method": self.method, "seconds": time.monotonic() - self.since, "version": self.version}


class TrainWorker(TrainMethods):
    """One rank. Constructed and called on one thread, in step with the other ranks."""

    def __init__(self, spec: TrainWorkerSpec, health_address: str, activity: Activity, stack: ExitStack) -> None:
        """Joins the other ranks; everything that must be closed is put on ``stack``."""
        actor = spec.actor
        torch.set_num_threads(actor.threads)
        torch.manual_seed(spec.seed)
        self._spec = spec
        self._activity = activity
        self._health_address = health_address
        self._version = activity.version = spec.version
        device = choose_device(actor.device, spec.rank) if spec.device is None else torch.device(spec.device)
        model = load_language_model(
            spec.model.path,
            attention=spec.model.attn_implementation,
            layout=actor.mb_spec.packing,
            gradient_checkpointing=actor.gradient_checkpointing,
            compiled=actor.compile,
            lora=actor.lora,
        ).to(device)
        self._model_config: Any = model.config
        self._parallel = stack.enter_context(
            process_group(
                rank=spec.rank,
                world_size=spec.world_size,
                rendezvous=spec.rendezvous,
                device=device,
                timeout=actor.step_timeout,
                shard_size=actor.shard_size,
            )
        )
        self._engine = TrainEngine(
            PolicyModel(model, replayed_sampling(spec.gconfig, model)),
            self._parallel,
            actor.optimizer,
            total_steps=spec.total_train_steps * actor.ppo_n_minibatches,
            compute_dtype=getattr(torch, spec.model.dtype),
            offload=actor.offload_optimizer,
        )
        store = stack.enter_context(StoreClient(spec.store_address, keys=spec.keys))
        self._companions = build_companions(spec, self._parallel)
        self._ppo = PpoUpdate(self._engine, actor, store.fetch, self._companions)
        self._snapshots = self._make_snapshots()
        self._writer = self._make_writer(stack)

    @classmethod
    def start(cls, spec: TrainWorkerSpec, health_address: str, activity: Activity, stack: ExitStack) -> Self:
        """The constructor, watched by the health socket."""
        with activity.during("start"):
            return cls(spec, health_address, activity, stack)

    def _make_snapshots(self) -> SnapshotStore:
        engines = {"policy": self._engine}
        if self._companions.critic is not None:
            engines["critic"] = self._companions.critic.engine
        keep = self._spec.actor.keep_snapshots
        return SnapshotStore(self._spec.run_dir / "snapshots", engines, self._parallel, keep=keep)

    def _make_writer(self, stack: ExitStack) -> WeightWriter | None:
        if self._parallel.rank != 0:
            return None
        writer = make_writer(
            self._spec.weights.transport,
            run_id=self._spec.run_id,
            directory=self._spec.run_dir / "weights",
            bucket_bytes=self._spec.weights.bucket_bytes,
            host=self._spec.weights.host,
            group=self._weights_group(),
            stall=self._spec.weights.stall_timeout,
        )
        stack.callback(writer.close)
        return writer

    def _weights_group(self) -> str:
        """Over NCCL where this rank is on a GPU, unless the experiment says otherwise."""
        asked = self._spec.weights.group
        return ("nccl" if self._parallel.device.type == "cuda" else "gloo") if asked == "auto" else asked

    def statistics(self) -> EngineStatistics:
        return self._engine.statistics()

    def coordinates(self) -> Coordinates:
        return Coordinates(
            rank=self._parallel.rank,
            world_size=self._parallel.world_size,
            data_rank=self._parallel.rank,
            data_size=self._parallel.world_size,
            device=str(self._parallel.device),
            host=socket.gethostname(),
            pid=os.getpid(),
            health_address=self._health_address,
        )

    def update(self, batch: Batch) -> UpdateReport:
        self._check_version("update", batch.version)
        report = self._ppo.run(batch)
        self._version = self._activity.version = batch.version + 1
        return report

    def export_weights(self, version: int, incarnation: int) -> Manifest | None:  # type: ignore[override]
        """None on ranks other than 0, which only help to gather."""
        self._check_version("export_weights", version)
        with _gathered(self._engine.published_weights()) as (tensors,):
            return self._writer.write(version, incarnation, tensors) if self._writer is not None else None

    def save_hf(self, directory: str) -> str:
        """With a critic, its own checkpoint lies in ``directory``/critic."""
        critic = self._companions.critic
        engines = [self._engine] if critic is None else [self._engine, critic.engine]
        with _gathered(*(engine.named_weights() for engine in engines)) as (tensors, *values):
            if self._parallel.rank == 0:
                source = Path(self._spec.model.path)
                write_checkpoint(
                    Path(directory),
                    tensors,
                    config=self._model_config,
                    source=source,
                    also=None if critic is None else partial(critic.write, tensors=values[0], source=source),
                )
        return directory

    def save_snapshot(self) -> str:
        return str(self._snapshots.save(self._version))

    def finish_snapshot(self) -> None:
        self._snapshots.finish()

    def load_snapshot(self, directory: str) -> int:
        self._version = self._activity.version = self._snapshots.load(Path(directory))
        return self._version

    def _check_version(self, method: str, version: int) -> None:
        if version != self._version:
            raise ValueError(f"{method}: asked for version {version}, but this trainer holds version {self._version}")


@contextmanager
def _gathered(*iterators: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Sequence[Iterator[tuple[str, torch.Tensor]]]]:
    """Whole tensors of each engine, for rank 0 to use in this order.

    Always taken to the end, so that no rank waits for one that gave up.
    """
    try:
        yield iterators
    finally:
        for tensors in iterators:
            for _ in tensors:
                pass


def run_worker(spec: TrainWorkerSpec, on_ready: Callable[[str], None]) -> None:
    """Be one train rank until SIGTERM. Blocks.

    Args:
        on_ready: called once, off the event loop, with the RPC address when this rank answers there. The other ranks
            have joined then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the controller decides
    asyncio.run(_serve(spec, on_ready))


async def _serve(spec: TrainWorkerSpec, on_ready: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    activity = Activity(since=time.monotonic())
    # all torch work happens on this one thread: collectives keep their order, the loop stays free
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train")
    stack = ExitStack()
    try:
        with HealthServer(spec.health_address, activity.snapshot, keys=spec.keys) as health:
            starting = loop.run_in_executor(executor, TrainWorker.start, spec, health.address, activity, stack)
            worker = await _unless_stopped(starting, stop)
            if worker is not None:
                methods = _callable_methods(worker, activity)
                async with RpcServer(spec.bind, methods, keys=spec.keys, executor=executor, max_running=1) as server:
                    await asyncio.to_thread(on_ready, server.address)
                    await stop.wait()
    finally:
        await _close(loop, executor, stack)


async def _unless_stopped(work: asyncio.Future[TrainWorker], stop: asyncio.Event) -> TrainWorker | None:
    """The worker, or None where the process was told to stop before it had joined the others."""
    stopped = asyncio.ensure_future(stop.wait())
    try:
        waiting: list[asyncio.Future[Any]] = [work, stopped]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    return work.result() if work.done() else None


async def _close(loop: asyncio.AbstractEventLoop, executor: ThreadPoolExecutor, stack: ExitStack) -> None:
    """Close on the compute thread, behind the call that it may be at.

    A collective that a dead rank never joins cannot be left by any other means than the end of the process.
    """
    try:
        async with asyncio.timeout(STOP_GRACE):
            await loop.run_in_executor(executor, stack.close)
    except TimeoutError:
        _LOG.error("a call did not end within %.0f s of being told to stop; leaving without it", STOP_GRACE)
        logging.shutdown()
        os._exit(1)
    executor.shutdown()


def _callable_methods(worker: TrainWorker, activity: Activity) -> Mapping[str, Callable[..., Any]]:
    """The declared methods with plain arguments and results, as RPC needs them."""
    return {name: partial(_answer, worker, activity, form) for name, form in method_forms().items()}


def _answer(worker: TrainWorker, activity: Activity, form: MethodForm, /, **arguments: Any) -> Any:
    with activity.during(form.name):
        result = getattr(worker, form.name)(**form.load(arguments))
        return None if result is None else form.result.dump_python(result)
