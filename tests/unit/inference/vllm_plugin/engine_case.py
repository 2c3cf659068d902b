"""Run by ``test_engine.py`` in an engine's environment: our engine as on a GPU, around a model of vLLM in host memory.

The device is ``host_memory``; what is asked of CUDA itself is nothing. Receiver, reload, proof and copies are real.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from areal_like.api.weights import Manifest, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.inference.vllm_plugin import engine as engines
from areal_like.inference.vllm_plugin import reloading
from areal_like.inference.vllm_plugin.engine import StagedTransferEngine, UpdateInfo
from areal_like.weights.transports.base import make_writer
from tests.unit.inference.vllm_plugin.host_memory import HostMemory
from tests.unit.inference.vllm_plugin.placement_case import DENSE, built, checkpoint, held


class Lending(HostMemory):
    lent = False


def until_staged(engine: StagedTransferEngine) -> None:
    deadline = time.monotonic() + 60
    while engine.status()["state"] == "staging":
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert engine.status()["state"] == "staged", engine.status()["error"]


def update(engine: StagedTransferEngine, manifest: Manifest) -> dict[str, float]:
    """As the worker's extension does; where the pause went."""
    engine.start_weight_update()
    engine.receive_weights(UpdateInfo(manifest=manifest.model_dump_json(), server="s0"))
    until_staged(engine)
    engine.finish_weight_update()
    found = engine.status()
    assert (found["state"], found["version"], found["damaged"]) == ("applied", manifest.version, False)
    parts: dict[str, float] = found["parts"]
    return parts


def check(folder: Path, name: str, room: int) -> None:
    architecture, kind, tied = DENSE[name]
    model, config = built(folder / name, architecture, kind, tied)
    save_file(checkpoint(tied, kind, 0), folder / name / "model.safetensors")
    memory = Lending(room)
    patch(memory)
    engine = StagedTransferEngine(None, config, torch.device("cuda", 0), model)  # type: ignore[arg-type]
    writer = make_writer(TransportKind.DISK, run_id="none", directory=folder / "versions", bucket_bytes=2**16)
    places = {key: tensor.data_ptr() for key, tensor in model.named_parameters()}
    with set_current_vllm_config(config), closing(writer):
        for version in (1, 2, 3):
            sent = checkpoint(tied, kind, version)
            manifest = writer.write(version, 0, sent.items())
            if version == 3:
                breaks(engine, manifest)
            parts = update(engine, manifest)
            assert ("finalize" in parts) == (version == 1), f"version {version}: {sorted(parts)}"
            assert {"load", "device", "check", "release"} <= parts.keys()
            assert not memory.blocks
            found = held(model)
            model.load_weights(iter(sent.items()))
            wanted = held(model)
            assert all(torch.equal(found[key], wanted[key]) for key in wanted), "loaded otherwise than vLLM does"
    assert places == {key: tensor.data_ptr() for key, tensor in model.named_parameters()}
    assert memory.given_back == (4 if room else 0)
    assert memory.locked
    engine.shutdown()
    assert not memory.locked


def breaks(engine: StagedTransferEngine, manifest: Manifest) -> None:
    """A copy that fails on the way leaves the model damaged, and gives back what was staged."""
    placement: Any = engine._in_place._placement  # type: ignore[union-attr]
    whole = placement.load_weights

    def half(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        came = list(weights)
        whole(came[: len(came) // 2])
        if came:
            raise RuntimeError("CUDA error: unspecified launch failure")

    placement.load_weights = half
    try:
        update(engine, manifest)
    except RuntimeError:
        assert engine.status()["damaged"]
    else:
        raise AssertionError("a copy that failed went well")
    placement.load_weights = whole
    try:
        engine.finish_weight_update()
    except WeightUpdateError:
        return
    raise AssertionError("what failed to load was loaded again")


def patch(memory: HostMemory) -> None:
    """Everything that is asked of CUDA; and a CPU's layers pack their weights after loading, as a GPU's do not."""
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.process_weights_after_loading = lambda self, layer: None
    engines.CudaMemory = lambda device: memory  # type: ignore[assignment, misc]
    engines.host_threads = lambda: 3  # type: ignore[assignment]
    reloading._check_copies_alone = lambda model, config: reloading.check_modules(model)  # type: ignore[assignment]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: memory.settle()  # type: ignore[assignment]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), sys.argv[1], int(sys.argv[2]))
    sys.stdout.write("whole\n")
