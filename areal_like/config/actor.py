"""``actor``: the trained policy, its optimiser and its objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from areal_like.config.backend import BackendSpec, parse_backend
from areal_like.config.section import Section

TRAIN_BACKENDS = ("fsdp",)


class OptimizerConfig(Section):
    type: Literal["adamw"] = "adamw"
    lr: float = Field(1e-5, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="optimiser steps of linear warm-up")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="last learning rate over the peak")
    gradient_clipping: float = Field(1.0, gt=0, description="largest global gradient norm")


class MicroBatchConfig(Section):
    max_tokens_per_mb: int = Field(16384, ge=1, description="token budget of one micro-batch on one rank")
    packing: Literal["packed", "padded"] = Field("padded", description="rows end to end, or padded side by side")


class NormConfig(Section):
    mean_level: Literal["group", "batch"] | None = "group"
    std_level: Literal["group", "batch"] | None = "group"
    mean_leave1out: bool = False


class ActorConfig(Section):
    backend: str = Field("fsdp:d1", description="fsdp:d<ranks>")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    mb_spec: MicroBatchConfig = Field(default_factory=MicroBatchConfig)
    ppo_n_minibatches: int = Field(1, ge=1, description="optimiser steps per step of the loop")
    eps_clip: float = Field(0.2, gt=0, lt=1, description="ε: the ratio theta/prox is clipped below at 1 - ε")
    eps_clip_higher: float | None = Field(None, gt=0, description="ε above; default: eps_clip")
    c_clip: float | None = Field(None, gt=1, description="dual clip for negative advantages")
    prox: Literal["recompute", "interpolate", "behave"] = "recompute"
    behave_cap: float | None = Field(5.0, gt=1, description="cap of exp(prox - behave); null: none")
    behave_mode: Literal["truncate", "mask"] = Field("truncate", description="what happens to weights over the cap")
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    adv_norm: NormConfig = Field(default_factory=NormConfig)
    gradient_checkpointing: bool = False
    threads: int = Field(1, ge=1, description="CPU threads of one rank")
    start_timeout: float = Field(180.0, gt=0, description="seconds the ranks may take to become ready")
    step_timeout: float = Field(1800.0, gt=0, description="seconds one training call may take")

    @field_validator("backend")
    @classmethod
    def _backend_parses(cls, text: str) -> str:
        spec = parse_backend(text, TRAIN_BACKENDS)
        if spec.world_size != spec.data or spec.expert != 1:
            raise ValueError(f"{text!r}: only data parallelism (d) is supported; use fsdp:d{spec.world_size}")
        return text

    @property
    def spec(self) -> BackendSpec:
        return parse_backend(self.backend, TRAIN_BACKENDS)
