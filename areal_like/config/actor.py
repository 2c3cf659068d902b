"""``actor``: the trained policy, its optimiser and its objective."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_like.algo.norms import ADVANTAGES, AdvantageName, NormSettings, norm_settings
from areal_like.config.backend import BackendSpec, parse_backend
from areal_like.config.lora import LoraConfig
from areal_like.config.section import Section
from areal_like.config.shaping import ShapingConfig

TRAIN_BACKENDS = ("fsdp",)

#: keys that only some objectives read
_OBJECTIVES_WITH: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "c_clip": ("decoupled_ppo", "ppo", "gspo", "gspo_token"),
        "tau_positive": ("sapo",),
        "tau_negative": ("sapo",),
        "m2_limit": ("m2po",),
    }
)


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
    balance: Literal["counted", "measured"] = Field(
        "counted",
        description="rows are spread over ranks by counted operations, alike in every run; or by measured seconds",
    )


class NormConfig(Section):
    mean_level: Literal["group", "batch"] | None = "group"
    std_level: Literal["group", "batch"] | None = "group"
    mean_leave1out: bool = Field(False, description="the baseline leaves the episode's own reward out")
    std_of: Literal["rewards", "centred"] = Field(
        "rewards", description="deviation of the rewards, or of what is left after the baseline"
    )


class ActorConfig(Section):
    backend: str = Field("fsdp:d1", description="fsdp:d<ranks>")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    mb_spec: MicroBatchConfig = Field(default_factory=MicroBatchConfig)
    objective: Literal["decoupled_ppo", "ppo", "gspo", "gspo_token", "cispo", "sapo", "topr", "m2po"] = Field(
        "decoupled_ppo", description="policy objective (docs/algorithms.md)"
    )
    ppo_n_minibatches: int = Field(1, ge=1, description="optimiser steps per step of the loop")
    eps_clip: float = Field(0.2, gt=0, lt=1, description="ε: the ratio theta/prox is clipped below at 1 - ε")
    tau_positive: float = Field(1.0, gt=0, description="SAPO: temperature of the gate for positive advantages")
    tau_negative: float = Field(1.05, gt=0, description="SAPO: temperature for negative advantages")
    m2_limit: float = Field(0.04, gt=0, description="M2PO: largest mean of log²(prox/behave) of the tokens that stay")
    eps_clip_higher: float | None = Field(None, gt=0, description="ε above; default: eps_clip")
    c_clip: float | None = Field(None, gt=1, description="dual clip for negative advantages")
    prox: Literal["recompute", "interpolate", "behave"] = "recompute"
    behave_cap: float | None = Field(5.0, gt=1, description="cap of exp(prox - behave); null: none")
    behave_mode: Literal["truncate", "mask", "ignore"] = Field(
        "truncate", description="what happens to weights over the cap; ignore: no weight at all, for comparison"
    )
    behave_floor: float | None = Field(
        None, gt=0, lt=1, description="tokens with a smaller weight are dropped; null: none"
    )
    behave_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="weight of the token, of the whole sequence (product), or its geometric mean"
    )
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    aggregation_constant: float | None = Field(
        None, gt=0, description="divisor of seq_mean_token_sum, such as gconfig.max_new_tokens"
    )
    advantage: AdvantageName | Literal["gae"] | None = Field(
        None, description="a named method; null: as adv_norm says; gae: from the values of a critic"
    )
    adv_norm: NormConfig = Field(default_factory=NormConfig)
    discount: float = Field(1.0, gt=0, le=1, description="γ of gae, per written token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="λ of gae")
    shaping: ShapingConfig = Field(default_factory=ShapingConfig)
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    gradient_checkpointing: bool = Field(
        False, description="layers keep only their input and compute the rest again backwards: less memory, more time"
    )
    compile: bool = Field(False, description="decoder layers through torch.compile")
    offload_optimizer: bool = Field(
        False, description="master weights, gradients and moments in host memory; the optimiser steps there"
    )
    shard_size: int | None = Field(
        None, ge=1, description="neighbouring ranks that share one copy of the model (HSDP); null: all"
    )
    keep_snapshots: int = Field(2, ge=1, description="training states kept on disk (docs/training.md)")
    lora: LoraConfig | None = Field(None, description="train and publish adapters only; null: every weight")
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

    @model_validator(mode="after")
    def _copies_are_whole(self) -> Self:
        ranks = self.spec.data
        if self.shard_size is not None and ranks % self.shard_size:
            divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
            raise ValueError(
                f"shard_size ({self.shard_size}) must divide the ranks of backend {self.backend} ({ranks}): "
                f"choose one of {', '.join(map(str, divisors))}"
            )
        return self

    @model_validator(mode="after")
    def _objective_fits(self) -> Self:
        if self.aggregation == "seq_mean_token_sum" and self.aggregation_constant is None:
            raise ValueError(
                "aggregation seq_mean_token_sum divides by aggregation_constant, which is missing; "
                "set it to gconfig.max_new_tokens"
            )
        if self.aggregation != "seq_mean_token_sum" and self.aggregation_constant is not None:
            raise ValueError(
                f"aggregation_constant ({self.aggregation_constant:g}) has no effect with aggregation "
                f"{self.aggregation}; remove it or set aggregation: seq_mean_token_sum"
            )
        if self.objective in ("gspo", "gspo_token") and self.behave_level != "token":
            raise ValueError(
                f"objective {self.objective} takes its weight at its own level (the row's geometric mean); "
                f"remove behave_level: {self.behave_level}"
            )
        return self

    @model_validator(mode="after")
    def _keys_of_objectives_have_an_effect(self) -> Self:
        for key, objectives in _OBJECTIVES_WITH.items():
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default and self.objective not in objectives:
                raise ValueError(
                    f"{key} ({value:g}) has no effect with objective {self.objective}; remove it or set objective: "
                    f"{' | '.join(objectives)}"
                )
        if self.behave_mode == "mask" and self.behave_cap is None:
            raise ValueError(
                "behave_mode: mask has no effect without behave_cap, over which it drops; set one or remove the other "
                "(behave_floor drops under truncate, too)"
            )
        if self.behave_mode == "ignore" and self.behave_floor is not None:
            raise ValueError(
                f"behave_floor ({self.behave_floor:g}) has no effect with behave_mode: ignore, which takes no weight; "
                "remove one"
            )
        return self

    @model_validator(mode="after")
    def _advantage_fits(self) -> Self:
        if self.advantage is not None and norm_settings(self.adv_norm) not in (NormSettings(), self.normalisation):
            raise ValueError(
                f"advantage: {self.advantage} and adv_norm say different things; remove one (adv_norm is for methods "
                "without a name)"
            )
        if self.advantage != "gae" and (self.discount, self.gae_lambda) != (1.0, 1.0):
            raise ValueError("discount and gae_lambda have no effect without advantage: gae; remove them")
        if self.objective == "m2po" and self.prox != "recompute":
            raise ValueError(f"objective m2po bounds log(prox/behave), which needs prox: recompute, not {self.prox}")
        return self

    @property
    def normalisation(self) -> NormSettings:
        """How rewards become advantages; ``gae`` compares them with nothing."""
        if self.advantage == "gae":
            return NormSettings(mean_level=None, std_level=None)
        return norm_settings(self.adv_norm) if self.advantage is None else ADVANTAGES[self.advantage]

    @property
    def spec(self) -> BackendSpec:
        return parse_backend(self.backend, TRAIN_BACKENDS)
