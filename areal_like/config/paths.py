"""Where a run keeps what: ``runs/<experiment>/<trial>/`` and the files in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from areal_like.config.experiment import ExperimentConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """Every path of one run. Nothing is created here, except by :meth:`create`."""

    root: Path

    @classmethod
    def of(cls, config: ExperimentConfig) -> RunPaths:
        return cls(root=Path(os.path.realpath(config.runs_dir)) / config.experiment_name / config.trial_name)

    @property
    def lock(self) -> Path:
        """Beside the run's folder, so that the folder can be moved aside while the lock is held."""
        return self.root.parent / f".{self.root.name}.lock"

    @property
    def resolved_config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def trace(self) -> Path:
        return self.root / "trace.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def specs(self) -> Path:
        """What each child process was told, one JSON file a process."""
        return self.root / "specs"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Where the ``disk`` transport puts snapshots."""
        return self.root / "weights"

    @property
    def evaluations(self) -> Path:
        """Logs of ``areal-like eval``, one folder a call; they make no run."""
        return self.root / "evaluations"

    def checkpoint(self, version: int) -> Path:
        """The Hugging Face checkpoint of ``version``."""
        return self.checkpoints / f"version-{version:06d}"

    def create(self) -> None:
        for folder in (self.logs, self.specs, self.rollouts, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
