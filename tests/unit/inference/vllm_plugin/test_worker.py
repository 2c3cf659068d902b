"""Our extension of vLLM's worker, over a real receiver and a worker that keeps sessions as vLLM's does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.inference.backends.vllm_workers import WorkerStatus, common_status
from areal_like.inference.vllm_plugin.receiver import Receiver
from areal_like.inference.vllm_plugin.worker import UpdateExtension
from areal_like.weights.checkpoint import Expected
from areal_like.weights.device_digest import PREFIX
from areal_like.weights.manifest import make_manifest
from areal_like.weights.transports.base import make_writer

WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3)}


class Engine:
    """As ours, without a model."""

    def __init__(self, deliver: Callable[[Manifest], Any] | None = None) -> None:
        self.receiver = Receiver(None, deliver)
        self.loaded: Manifest | None = None

    def status(self) -> dict[str, Any]:
        pending, loaded = self.receiver.manifest, self.loaded
        state = self.receiver.state
        return {
            "state": "applied" if state == "idle" and loaded else state,
            "error": self.receiver.error,
            "incarnation": loaded.incarnation if loaded else -1,
            "version": loaded.version if loaded else -1,
            "digest": loaded.digest if loaded else "",
            "staged_incarnation": pending.incarnation if pending else -1,
            "staged_version": pending.version if pending else -1,
            "bytes": 24,
            "seconds": 0.0,
            "damaged": False,
        }


class Worker(UpdateExtension):
    """vLLM's part of it, as 0.26 and 0.32 have it (``vllm/v1/worker/gpu_worker.py``)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._weight_update_active = False
        self.device = torch.device("cpu")
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
            model_config=SimpleNamespace(logprobs_mode="processed_logprobs", enable_sleep_mode=False),
        )

    def _areal_like_engine(self) -> Any:
        return self.engine

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._weight_update_active = True

    def update_weights(self, update_info: Mapping[str, str]) -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        assert update_info["server"] == "s0"
        manifest, loaded = Manifest.model_validate_json(update_info["manifest"]), self.engine.loaded
        expected = Expected(shapes={"w": (2, 3)}, optional={})
        newest = (loaded.incarnation, loaded.version) if loaded else (-1, -1)
        try:
            self.engine.receiver.stage(manifest, expected, newest=newest)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.engine.loaded = self.engine.receiver.take().manifest
        self._weight_update_active = False

    def stage(self, manifest: Manifest) -> WorkerStatus:
        return WorkerStatus.model_validate(self.areal_like_stage(manifest.model_dump_json(), "s0"))

    def begin(self, version: int, incarnation: int = 0) -> WorkerStatus:
        return WorkerStatus.model_validate(self.areal_like_begin(str(incarnation), str(version)))

    def until_staged(self) -> WorkerStatus:
        while (status := WorkerStatus.model_validate(self.areal_like_status())).state == "staging":
            pass
        return status


@pytest.fixture
def worker() -> Worker:
    return Worker(Engine())


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., Manifest]]:
    writer = make_writer(TransportKind.DISK, run_id="r", directory=tmp_path)

    def written(version: int, incarnation: int = 0, tensors: Mapping[str, torch.Tensor] = WEIGHTS) -> Manifest:
        return writer.write(version, incarnation, iter(tensors.items()))

    yield written
    writer.close()


def test_an_update_is_staged_begun_and_finished(worker: Worker, write: Any) -> None:
    assert not worker.stage(write(3)).refused
    assert worker.until_staged().staged == (0, 3)
    assert not worker.begin(3).refused
    worker.finish_weight_update()
    assert WorkerStatus.model_validate(worker.areal_like_status()).loaded == (0, 3)


def test_nothing_is_loaded_that_no_commit_has_named(worker: Worker, write: Any) -> None:
    worker.stage(write(3))
    worker.until_staged()
    with pytest.raises(RuntimeError, match="without a matching start_weight_update"):
        worker.finish_weight_update()
    assert worker.engine.loaded is None


def test_a_staging_ends_the_permission_to_load(worker: Worker, write: Any) -> None:
    worker.stage(write(3))
    worker.until_staged()
    worker.begin(3)
    worker.stage(write(4))
    worker.until_staged()
    with pytest.raises(RuntimeError, match="without a matching start_weight_update"):
        worker.finish_weight_update()
    assert worker.engine.loaded is None


def test_a_staging_that_is_refused_ends_no_permission_where_it_is_old(worker: Worker, write: Any) -> None:
    for version in (3, 5):
        worker.stage(write(version))
        worker.until_staged()
        worker.begin(version)
        if version == 3:
            worker.finish_weight_update()
    assert "version 3 of 0 is loaded" in worker.stage(write(2)).refused
    worker.finish_weight_update()
    assert WorkerStatus.model_validate(worker.areal_like_status()).loaded == (0, 5)


@pytest.mark.parametrize(("version", "incarnation"), [(2, 0), (3, 1)])
def test_another_version_is_not_begun(worker: Worker, write: Any, version: int, incarnation: int) -> None:
    worker.stage(write(3))
    worker.until_staged()
    assert "is not staged" in worker.begin(version, incarnation).refused
    assert not worker._weight_update_active


def test_memory_that_was_given_away_is_told(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the allocator itself: vLLM's server calls a sleeping engine paused."""
    held = [("weights", True), ("weights", True), ("kv_cache", False), ("default", False)]
    allocations = {address: SimpleNamespace(tag=tag, is_asleep=away) for address, (tag, away) in enumerate(held)}
    allocator = SimpleNamespace(pointer_to_data=allocations)
    module = SimpleNamespace(get_mem_allocator_instance=lambda: allocator)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(device_allocator=module))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", module)
    assert WorkerStatus.model_validate(worker.areal_like_status()).asleep == ()  # it has no such allocator
    worker.device = torch.device("cuda")
    worker.vllm_config.model_config.enable_sleep_mode = True
    assert WorkerStatus.model_validate(worker.areal_like_status()).asleep == ("weights",)


def test_what_is_still_on_its_way_is_not_begun() -> None:
    late, come = Delivery(), threading.Event()
    late.prepare = come.wait  # type: ignore[assignment, method-assign]
    worker = Worker(Engine(lambda manifest: late))
    assert "is not staged" in worker.begin(1).refused
    worker.stage(from_gpu_to_gpu())
    assert "is not staged" in worker.begin(1).refused
    come.set()
    worker.until_staged()
    assert not worker.begin(1).refused


def test_a_commit_that_was_broken_off_is_begun_again(worker: Worker, write: Any) -> None:
    worker.stage(write(3))
    worker.until_staged()
    assert not worker.begin(3).refused
    assert not worker.begin(3).refused
    worker.finish_weight_update()


def test_what_is_loaded_is_not_refused_and_opens_nothing(worker: Worker, write: Any) -> None:
    test_an_update_is_staged_begun_and_finished(worker, write)
    assert not worker.begin(3).refused
    assert not worker._weight_update_active


def test_a_manifest_that_does_not_fit_is_refused_in_words(worker: Worker, write: Any) -> None:
    """As data: an exception in one of several workers leaves the others' answers in vLLM's queue."""
    status = worker.stage(write(3, tensors={"v": torch.zeros(1)}))
    assert "'w'" in status.refused or "'v'" in status.refused
    assert not worker._weight_update_active
    assert not worker.stage(write(4)).refused


class Delivery:
    """From GPU to GPU: nothing to do before the pause."""

    def prepare(self) -> None:
        return

    def leave(self) -> None:
        return


def test_where_nothing_travels_before_the_pause_the_stage_call_itself_tells_that_it_is_done() -> None:
    worker = Worker(Engine(lambda manifest: Delivery()))
    assert worker.stage(from_gpu_to_gpu()).state == "staged"


def test_a_stage_call_waits_a_moment_and_no_longer() -> None:
    """The others may be late; meanwhile the engine generates."""
    late = Delivery()
    worker = Worker(Engine(lambda manifest: late))
    come = threading.Event()
    late.prepare = come.wait  # type: ignore[assignment, method-assign]
    assert worker.stage(from_gpu_to_gpu()).state == "staging"
    come.set()
    assert worker.until_staged().state == "staged"


def from_gpu_to_gpu() -> Manifest:
    entry = TensorEntry(name="w", dtype="float32", shape=(2, 3), nbytes=24, digest=f"{PREFIX}{0:032x}")
    return make_manifest(1, 0, TransportKind.IPC, "{}", [entry])


def status(**changed: Any) -> WorkerStatus:
    engine = Engine()
    return WorkerStatus.model_validate({**Worker(engine).areal_like_status(), **changed})


@pytest.mark.parametrize(
    "worst",
    [
        {"refused": "no"},
        {"state": "failed", "error": "damaged on the way"},
        {"state": "staged", "damaged": True},
        {"state": "staging"},
        {"state": "staged", "version": 2},
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_worker_that_is_worst_off_speaks_for_all(worst: dict[str, Any], place: int) -> None:
    found = [status(state="staged", incarnation=0, version=3) for _ in range(3)]
    found[place] = status(**{"incarnation": 0, "version": 3, **worst})
    assert common_status(found) == found[place]


def test_a_refusal_counts_more_than_what_else_is_wrong() -> None:
    found = [status(state="failed"), status(state="staging"), status(refused="old")]
    assert common_status(found).refused == "old"


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("worst", [{}, {"refused": "no"}, {"state": "failed"}, {"state": "staging"}, {"version": 2}])
def test_what_any_worker_has_given_away_is_told(worst: dict[str, Any], place: int) -> None:
    """vLLM's sleep may fail in one worker, or wake all but one: whoever is worst off otherwise need not be that one."""
    loaded = {"state": "applied", "incarnation": 0, "version": 3}
    found = [status(**{**loaded, "asleep": ["kv_cache"] if number == place else []}) for number in range(3)]
    found[1] = status(**{**loaded, **worst, "asleep": found[1].asleep})
    assert common_status(found).asleep == ("kv_cache",)
    found[(place + 1) % 3] = found[place].model_copy(update={"asleep": ("weights",)})
    assert common_status(found).asleep == ("kv_cache", "weights")


def test_a_delivery_that_fails_is_told() -> None:
    failing = Delivery()

    def fails() -> None:
        raise WeightUpdateError("the trainer is gone")

    failing.prepare = fails  # type: ignore[method-assign]
    worker = Worker(Engine(lambda manifest: failing))
    worker.stage(from_gpu_to_gpu())
    assert "the trainer is gone" in worker.until_staged().error
