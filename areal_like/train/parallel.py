"""The ranks of the trainer: process group, device mesh, sharding, and reductions that every rank takes part in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from areal_like.errors import ConfigError
from areal_like.train.layers import decoder_layers

#: models with more parameters than this gather their weights layer by layer; below it one gather costs less
SHARD_LAYERS_ABOVE = 20_000_000
#: the same where every rank holds the whole model: then only the sums of gradients, in float32, are worth splitting,
#: and hooks around every layer cost the host about as long as a GPU needs for 8k tokens of a 0.5B model
SHARD_WHOLE_LAYERS_ABOVE = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """This process's place among the ranks. All reductions are collective: every rank must call them, in order.

    ``mesh`` has one dimension, ``shard``, or two: copies of the model (``replicate``) of ``shard`` ranks each (HSDP).
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the model."""
        return self.mesh.size(self.mesh.ndim - 1)

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sum over the ranks of one copy, whose parts make up the whole; the argument is left alone."""
        if self.shards == self.world_size:
            return self.sum(values)
        reduced = values.detach().clone()
        dist.all_reduce(reduced, group=self.mesh["shard"].get_group())
        return reduced

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, on every rank; the argument is left alone."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, on every rank; the argument is left alone."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        reduced = values.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(reduced, op=operation)
        return reduced


def choose_device(wanted: str, rank: int) -> torch.device:
    """``auto`` is CUDA where there is any; a host's ranks take its devices in turn.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("actor.device: cuda was asked for, but torch finds no CUDA device here; use cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


@contextmanager
def process_group(
    *,
    rank: int,
    world_size: int,
    rendezvous: str,
    device: torch.device,
    timeout: float,
    shard_size: int | None = None,
) -> Iterator[Parallel]:
    """Join the ranks: gloo on CPUs; on CUDA NCCL, with gloo beside it for tensors on the host.

    Args:
        rendezvous: init_method of torch.distributed.
        timeout: seconds after which a collective that a rank does not join is an error.
        shard_size: neighbouring ranks that share one copy of the model; None: all.

    Raises:
        ConfigError: ``shard_size`` does not divide ``world_size``.
    """
    size = shard_size or world_size
    if world_size % size:
        raise ConfigError(f"actor.shard_size: {size} does not divide the {world_size} ranks; choose a divisor")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        shape = (world_size,) if size == world_size else (world_size // size, size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        yield Parallel(rank=rank, world_size=world_size, device=device, mesh=mesh)
    finally:
        dist.destroy_process_group()


def shard(
    module: nn.Module, parallel: Parallel, compute_dtype: torch.dtype | None = None, *, offload: bool = False
) -> list[FSDPModule]:
    """Shard ``module`` over the ranks in place (FSDP2, for one rank too). Gradients are *summed* over ranks.

    Args:
        compute_dtype: dtype of the forward and backward pass where it differs from that of the parameters; gradients
            are then summed in float32.
        offload: keep the shards, their gradients and so the optimiser in (pinned) host memory.

    Returns:
        The sharded modules, the outermost first.
    """
    precision = MixedPrecisionPolicy()
    if compute_dtype is not None and compute_dtype != next(module.parameters()).dtype:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    policy = CPUOffloadPolicy(pin_memory=parallel.device.type == "cuda") if offload else OffloadPolicy()
    found: list[FSDPModule] = []
    bound = SHARD_LAYERS_ABOVE if parallel.shards > 1 else SHARD_WHOLE_LAYERS_ABOVE
    if sum(p.numel() for p in module.parameters()) > bound:
        for layer in decoder_layers(module):
            # one rank holds everything anyway: gathering again for the backward pass would only repeat a cast
            again = parallel.shards > 1
            sharded = fully_shard(
                layer, mesh=parallel.mesh, mp_policy=precision, offload_policy=policy, reshard_after_forward=again
            )
            found.append(_sum_gradients(sharded))
    outermost = fully_shard(module, mesh=parallel.mesh, mp_policy=precision, offload_policy=policy)
    return [_sum_gradients(outermost), *found]


def _sum_gradients(module: FSDPModule) -> FSDPModule:
    """FSDP averages by default; our losses already carry the global denominator. Plain SUM works on gloo as well."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    return module
