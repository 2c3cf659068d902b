"""The critic and the reference of a train rank, from its spec."""

from __future__ import annotations

from typing import Any

import torch

from areal_like.train.critic import Critic, ValueModel, load_value_model
from areal_like.train.engine import TrainEngine
from areal_like.train.model import PolicyModel, load_language_model, replayed_sampling
from areal_like.train.parallel import Parallel
from areal_like.train.ppo import Companions
from areal_like.train.reference import Reference
from areal_like.train.spec import TrainWorkerSpec


def build_companions(spec: TrainWorkerSpec, parallel: Parallel) -> Companions:
    """Load and shard what the experiment names. Collective.

    Raises:
        ConfigError: a folder does not hold a model that fits.
    """
    return Companions(
        critic=_critic(spec, parallel),
        reference=_reference(spec, parallel),
        ref=spec.ref,
        whiten=spec.critic is None or spec.critic.whiten,
        max_new_tokens=spec.gconfig.max_new_tokens,
    )


def _critic(spec: TrainWorkerSpec, parallel: Parallel) -> Critic | None:
    if spec.critic is None:
        return None
    model = load_value_model(
        spec.critic.path or spec.model.path,
        attention=spec.model.attn_implementation,
        layout=spec.actor.mb_spec.packing,
        gradient_checkpointing=spec.actor.gradient_checkpointing,
        compiled=spec.actor.compile,
    )
    engine = TrainEngine(
        ValueModel(model.to(parallel.device)),
        parallel,
        spec.critic.optimizer,
        total_steps=spec.total_train_steps * spec.actor.ppo_n_minibatches,
        compute_dtype=_compute_dtype(spec),
        offload=spec.actor.offload_optimizer,
    )
    return Critic(engine, spec.critic, model.config)


def _reference(spec: TrainWorkerSpec, parallel: Parallel) -> Reference | None:
    """Frozen, so it is held in the dtype that is computed in: half the memory under bfloat16."""
    if spec.ref is None:
        return None
    path = spec.ref.path or spec.model.path
    model = load_language_model(
        path,
        dtype=_compute_dtype(spec),
        attention=spec.model.attn_implementation,
        layout=spec.actor.mb_spec.packing,
        compiled=spec.actor.compile,
    )
    policy = PolicyModel(model.to(parallel.device), replayed_sampling(spec.gconfig, model))
    return Reference(policy, parallel, offload=spec.actor.offload_optimizer)


def _compute_dtype(spec: TrainWorkerSpec) -> torch.dtype:
    found: Any = getattr(torch, spec.model.dtype)
    assert isinstance(found, torch.dtype)
    return found
