"""When things happen beside training: ``evaluator``, ``saver`` and ``recover``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_like.config.section import Section


class EvaluatorConfig(Section):
    freq_steps: int | None = Field(None, ge=1, description="evaluate every so many steps; null: first and last only")
    at_start: bool = Field(True, description="evaluate version 0")
    at_end: bool = Field(True, description="evaluate the last version, after rollouts have stopped")
    max_concurrent: int = Field(64, ge=1, description="evaluation episodes at once; they hold no rollout slots")
    n_samples: int = Field(1, ge=1, description="episodes per prompt")


class SaverConfig(Section):
    freq_steps: int | None = Field(None, ge=1, description="write an HF checkpoint every so many steps")
    at_end: bool = Field(True, description="write an HF checkpoint of the last version")


class RecoverConfig(Section):
    mode: Literal["disabled"] = Field("disabled", description="recovery is not built yet")
