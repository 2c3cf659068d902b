"""Optimiser steps on a sharded policy: accumulate, clip by global norm, step or skip on every rank alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_like.algo.schedule import LearningRate
from areal_like.config.actor import OptimizerConfig
from areal_like.train.batching import MicroBatch
from areal_like.train.lora import adapted_layers, adapter_weights, merged_weights
from areal_like.train.model import PolicyModel, counted_cost
from areal_like.train.parallel import Parallel
from areal_like.train.parameters import hold, local_part


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One optimiser step. ``grad_norm`` is global, before clipping; ``skipped`` where it was not finite."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    optimizer_steps: int
    skipped_steps: int


class TrainEngine:
    """A sharded policy and its AdamW. Every method is collective."""

    def __init__(
        self,
        policy: PolicyModel,
        parallel: Parallel,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        compute_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        """``total_steps``: optimiser steps of the whole run, for the LR schedule. ``offload``: see :func:`hold`."""
        self.parallel = parallel
        self.sampling = policy.sampling
        self.dtype = next(policy.parameters()).dtype
        self._export_dtype = compute_dtype or self.dtype
        self.cost = counted_cost(policy.language_model)
        self._policy = policy
        self._names = [name for name, p in policy.language_model.named_parameters() if p.requires_grad]
        self._parameters = hold(policy, parallel, compute_dtype, offload=offload)
        self._clipping = optimizer.gradient_clipping
        self._schedule = LearningRate(
            peak=optimizer.lr,
            kind=optimizer.lr_scheduler_type,
            warmup_steps=optimizer.warmup_steps,
            total_steps=total_steps,
            min_ratio=optimizer.min_lr_ratio,
        )
        self._shards = _local_shards(self._parameters.trained)
        self._adamw = torch.optim.AdamW(
            [local for _, local in self._shards],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._steps = self._skipped = 0

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(optimizer_steps=self._steps, skipped_steps=self._skipped)

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of the written tokens of ``batch``, [T] each; differentiable."""
        found: tuple[Tensor, Tensor] = self._policy(batch)
        return found

    def logprobs_without_gradient(self, batch: MicroBatch) -> Tensor:
        """Log-probs [T]."""
        with torch.no_grad():
            return self.logprobs(batch)[0]

    def end_of_pass(self) -> None:
        """After passes without gradient: let go of the gathered weights, which no backward pass will do."""
        self._parameters.end_of_pass()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of ``loss``; ranks exchange them with the ``last`` micro-batch of a step."""
        self._parameters.backward(loss, last=last)

    def step(self) -> StepOutcome:
        """Clip and step. A gradient that is not finite anywhere skips the step on every rank, and is counted."""
        gradients = [local_part(p.grad) for p, _ in self._shards if p.grad is not None]
        norm = self._global_norm(gradients)
        lr = self._schedule.at(self._steps)
        skipped = not bool(torch.isfinite(norm))
        if skipped:
            self._skipped += 1
        else:
            if norm > self._clipping:
                torch._foreach_mul_(gradients, float(self._clipping / (norm + 1e-6)))
            for parameter, local in self._shards:
                local.grad = None if parameter.grad is None else local_part(parameter.grad)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._parameters.stepped()
            self._steps += 1
        for parameter, local in self._shards:
            parameter.grad = local.grad = None
        return StepOutcome(grad_norm=float(norm), lr=lr, skipped=skipped)

    def _global_norm(self, gradients: list[Tensor]) -> Tensor:
        """float64 scalar; NaN or infinite on all ranks if it is on any."""
        local = [g for g in gradients if g.numel()]
        # every rank's scalar must lie on the same kind of device, also where a rank has no part of any tensor
        norms = torch.stack(torch._foreach_norm(local)) if local else torch.zeros(1, device=self._shards[0][1].device)
        return self.parallel.sum_over_shards(norms.double().square().sum()).sqrt()

    def state(self) -> dict[str, Tensor]:
        """What training needs to go on, by name: ``weight/...``, ``mean/...``, ``square/...`` (AdamW's moments), which
        share this engine's memory, and ``steps`` (taken, skipped), a copy.
        """
        found: dict[str, Tensor] = {"steps": torch.tensor([self._steps, self._skipped])}
        for name, (parameter, local) in zip(self._names, self._shards, strict=True):
            found[f"weight/{name}"] = parameter.detach()
            moments = self._moments(local)
            found[f"mean/{name}"] = _like(parameter, moments["exp_avg"])
            found[f"square/{name}"] = _like(parameter, moments["exp_avg_sq"])
        return found

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state``: :meth:`state` of this engine, its tensors filled in place since."""
        self._steps, self._skipped = (int(n) for n in state["steps"])
        for _, local in self._shards:
            self._moments(local)["step"].fill_(float(self._steps))
        self._parameters.stepped()

    def _moments(self, local: torch.nn.Parameter) -> dict[str, Tensor]:
        """AdamW's state of one shard, zeros where it has not stepped yet, as AdamW would make it."""
        state: dict[str, Tensor] = self._adamw.state[local]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(local), torch.zeros_like(local)
        return state

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model by its Hugging Face name, whole, one at a time; a tied tensor once; adapters added.

        Collective: each step gathers one tensor from all ranks, so every rank must iterate to the end. A tensor may
        share the model's memory: it is what it says until the next optimiser step.
        """
        model = self._policy.language_model
        kept = set(model.state_dict().keys())
        yield from merged_weights(model, self._whole)
        for name, buffer in model.named_buffers():
            if name in kept:  # buffers that are not saved are derived from the config
                yield name, buffer

    def published_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What servers need of a new version: the adapters where the policy has any, else every tensor. Collective."""
        model = self._policy.language_model
        return adapter_weights(model, self._whole) if adapted_layers(model) else self.named_weights()

    def _whole(self, parameter: Tensor) -> Tensor:
        """Gathered, in the dtype that is served."""
        if not isinstance(parameter, DTensor):
            return parameter.to(self._export_dtype)
        local = parameter.to_local().to(self.parallel.device, self._export_dtype)  # offloaded shards lie on the host
        placed = _like(parameter, local)
        assert isinstance(placed, DTensor)
        whole: Tensor = placed.full_tensor()
        return whole


def _local_shards(trained: Sequence[torch.nn.Parameter]) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Every parameter that is trained beside a plain one that shares the memory of this rank's part of it.

    The optimiser works on the plain ones: the same numbers, without a DTensor's cost per operation.
    """
    pairs = []
    for parameter in trained:
        local = torch.nn.Parameter(local_part(parameter.detach()))
        assert local.data_ptr() == local_part(parameter.detach()).data_ptr()
        pairs.append((parameter, local))
    return pairs


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """``local`` as this rank's shard of a tensor that is split as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
