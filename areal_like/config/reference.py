"""``ref``: a frozen model on the trainer's own ranks, and how strongly the policy is held to it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from areal_like.config.section import Section


class ReferenceConfig(Section):
    path: str | None = Field(None, description="Hugging Face folder; default: model.path")
    kl_coef: float = Field(1e-3, ge=0, description="β: weight of KL(theta || ref); 0 only measures it")
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="docs/algorithms.md; in the reward only k1 is right"
    )

    @model_validator(mode="after")
    def _estimator_fits(self) -> Self:
        if self.kl_in == "reward" and self.kl_estimator != "k1":
            raise ValueError(
                f"kl_in: reward with kl_estimator: {self.kl_estimator} does not have the KL's gradient (there, only k1 "
                "does); set kl_estimator: k1, or kl_in: loss"
            )
        return self
