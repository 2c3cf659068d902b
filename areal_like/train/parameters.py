"""Where the weights of a model live while it is trained: whole on the only rank, or sharded over several (FSDP2).

Both compute in ``compute_dtype`` and keep what is learned, the sums of gradients included, in the dtype that the model
was loaded in. What is learned is the same: only the road of a gradient to its sum differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal_like.train.parallel import Parallel, shard


class Parameters(Protocol):
    """The weights of one module, which goes on being called as before. Every method is collective."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """What the optimiser steps on, in the order of ``module.parameters()``: this rank's part, a plain tensor or

        a DTensor. After ``backward`` with ``last``, ``grad`` holds the sum over micro-batches and ranks.
        """

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of ``loss``; ranks exchange them with the ``last`` micro-batch of a step."""

    def stepped(self) -> None:
        """``trained`` has changed."""

    def end_of_pass(self) -> None:
        """After passes without gradient: let go of what only those needed."""


def hold(
    module: nn.Module, parallel: Parallel, compute_dtype: torch.dtype | None = None, *, offload: bool = False
) -> Parameters:
    """Take ``module``'s weights over, in place.

    Args:
        compute_dtype: dtype of the forward and backward pass where it differs from that of the parameters.
        offload: keep what is learned, its gradients and so the optimiser in (pinned) host memory.
    """
    if parallel.world_size == 1 and not offload:
        return WholeParameters(module, compute_dtype)
    return ShardedParameters(module, parallel, compute_dtype, offload=offload)


class ShardedParameters:
    """FSDP2 over the ranks; on one rank where weights are offloaded."""

    def __init__(
        self, module: nn.Module, parallel: Parallel, compute_dtype: torch.dtype | None, *, offload: bool = False
    ) -> None:
        self._units: list[FSDPModule] = shard(module, parallel, compute_dtype, offload=offload)
        self._shards = parallel.shards
        self.trained = [p for p in module.parameters() if p.requires_grad]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        outermost = self._units[0]
        outermost.set_requires_gradient_sync(last)
        # one rank has no memory to win from letting go of weights that the next micro-batch reads again
        outermost.set_reshard_after_backward(last or self._shards > 1)
        torch.autograd.backward(loss)

    def stepped(self) -> None:
        """The next pass gathers."""

    def end_of_pass(self) -> None:
        for unit in self._units:
            unit.reshard()


class WholeParameters:
    """Plain tensors. Where the dtype computed in is another one, the module gets a copy in it, and every gradient is

    added to its float32 sum as soon as autograd has it, so that no second set of gradients is ever held. Bytes of a
    parameter under bfloat16: 4 master, 2 copy, 4 sum of gradients. Sharding over one rank would hold 8 more at times.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None) -> None:
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self._copies: list[Tensor] = []
        if compute_dtype is not None and any(p.dtype != compute_dtype for p in module.parameters()):
            self._copies = _replace_parameters(module, compute_dtype)
            for master, copy in zip(self.trained, self._copies, strict=True):
                copy.register_post_accumulate_grad_hook(_adds_to(master))  # type: ignore[no-untyped-call]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        torch.autograd.backward(loss)

    @torch.no_grad()
    def stepped(self) -> None:
        if self._copies:
            torch._foreach_copy_(self._copies, list[Tensor](self.trained))

    def end_of_pass(self) -> None:
        """Nothing was gathered."""


def _replace_parameters(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Put a copy in ``dtype`` in the place of every parameter; a tie stays one. Returns the copies that are trained."""
    copies = {p: nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad) for p in module.parameters()}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, copies[parameter])
    return [copy for copy in copies.values() if copy.requires_grad]


def _adds_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def add(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad += gradient

    return add


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
