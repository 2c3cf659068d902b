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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from areal_like.errors import ConfigError

#: models with more parameters than this gather their weights layer by layer; below it one gather costs less
SHARD_LAYERS_ABOVE = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """This process's place among the ranks. All reductions are collective: every rank must call them, in order."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

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
    *, rank: int, world_size: int, rendezvous: str, device: torch.device, timeout: float
) -> Iterator[Parallel]:
    """Join the ranks: gloo on CPUs; on CUDA NCCL, with gloo beside it for tensors on the host.

    Args:
        rendezvous: init_method of torch.distributed.
        timeout: seconds after which a collective that a rank does not join is an error.
    """
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
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("data",))
        yield Parallel(rank=rank, world_size=world_size, device=device, mesh=mesh)
    finally:
        dist.destroy_process_group()


def shard(module: nn.Module, parallel: Parallel, compute_dtype: torch.dtype | None = None) -> FSDPModule:
    """Shard ``module`` over all ranks in place (FSDP2, for one rank too). Gradients are *summed* over ranks.

    Args:
        compute_dtype: dtype of the forward and backward pass where it differs from that of the parameters; gradients
            are then summed in float32.
    """
    precision = MixedPrecisionPolicy()
    if compute_dtype is not None and compute_dtype != next(module.parameters()).dtype:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if sum(p.numel() for p in module.parameters()) > SHARD_LAYERS_ABOVE:
        for layer in _layers(module):
            _sum_gradients(fully_shard(layer, mesh=parallel.mesh, mp_policy=precision))
    return _sum_gradients(fully_shard(module, mesh=parallel.mesh, mp_policy=precision))


def _sum_gradients(module: FSDPModule) -> FSDPModule:
    """FSDP averages by default; our losses already carry the global denominator. Plain SUM works on gloo as well."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    return module


def _layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers: members of the longest module list."""
    lists = [list(m) for m in module.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])
