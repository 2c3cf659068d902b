"""Where a run stands: the step it is in and the version it has made."""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.api.trajectory import Batch


@dataclass(slots=True)
class RunState:
    """Mutable, owned by the loop alone. Version v exists after v steps of the loop, so both count alike."""

    step: int = 0
    version: int = 0
    trained_groups: int = 0

    def advance(self, batch: Batch) -> int:
        """Count one step that consumed ``batch``; returns the version it made."""
        self.step += 1
        self.version += 1
        self.trained_groups += len(batch.groups)
        return self.version
