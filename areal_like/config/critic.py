"""``critic``: a value model on the trainer's own ranks, which ``actor.advantage: gae`` learns from."""

from __future__ import annotations

from pydantic import Field

from areal_like.config.actor import OptimizerConfig
from areal_like.config.section import Section


class CriticConfig(Section):
    path: str | None = Field(None, description="Hugging Face folder of its backbone; default: model.path")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    value_clip: float | None = Field(
        None, gt=0, description="a step may move a value this far from where the update found it; null: any distance"
    )
    whiten: bool = Field(True, description="advantages to mean 0 and deviation 1 over the batch's tokens")
