"""``actor.shaping``: what is done to rewards before advantages are taken."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from areal_like.config.section import Section


class ShapingConfig(Section):
    length_limit: int | None = Field(
        None,
        ge=1,
        description="written tokens of a row that the length options measure; default: gconfig.max_new_tokens",
    )
    overlong_margin: int | None = Field(
        None, ge=1, description="rows lose reward from this many tokens before the limit on; null: none"
    )
    overlong_penalty: float = Field(1.0, gt=0, description="reward lost at the limit")
    overlong_filter: bool = Field(False, description="rows at the limit teach nothing")
    length_reward: float = Field(0.0, ge=0, description="weight of the group-relative length reward; 0: off")
    bias: float = Field(0.0, description="added to rewards, after the length terms")
    scaling: float = Field(1.0, gt=0, description="then multiplies them")
    clip: float | None = Field(None, gt=0, description="then bounds them to ±clip; null: no bound")

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.overlong_penalty != 1.0 and self.overlong_margin is None:
            raise ValueError("overlong_penalty has no effect without overlong_margin; set one or remove the other")
        if self.length_limit is not None and self.overlong_margin is None and not self.overlong_filter:
            raise ValueError(
                "length_limit has no effect without overlong_margin or overlong_filter; set one or remove it"
            )
        return self
