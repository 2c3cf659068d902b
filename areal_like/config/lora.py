"""``actor.lora``: train small matrices beside frozen weights, and publish only those."""

from __future__ import annotations

from pydantic import Field

from areal_like.config.section import Section


class LoraConfig(Section):
    rank: int = Field(16, ge=1, description="r: rows of A, columns of B")
    alpha: float = Field(32.0, gt=0, description="the product B·A is scaled by alpha / rank")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="last names of the linear layers that get an adapter",
    )
