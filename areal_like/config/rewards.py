"""``rewards``: the pool of processes that run the user's reward function."""

from __future__ import annotations

from pydantic import Field

from areal_like.config.section import Section


class RewardsConfig(Section):
    workers: int = Field(1, ge=0, description="processes; 0 runs the function in the controller (trusted code only)")
    timeout: float = Field(30.0, gt=0, description="seconds one call may take before its worker is killed and replaced")
    queue_size: int = Field(1024, ge=1, description="calls that may wait for a worker before callers are held back")
