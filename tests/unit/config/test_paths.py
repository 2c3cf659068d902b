from __future__ import annotations

from pathlib import Path

from areal_like.config.load import config_from_mapping
from areal_like.config.paths import RunPaths


def test_a_run_keeps_its_files_in_one_folder_and_its_lock_beside_it(tmp_path: Path) -> None:
    config = config_from_mapping(
        {
            "experiment_name": "sums",
            "trial_name": "cpu",
            "runs_dir": str(tmp_path),
            "model": {"path": "m"},
            "train_dataset": {"path": "d", "batch_size": 1},
            "workflow": "w.W",
            "total_train_steps": 1,
        }
    )
    paths = RunPaths.of(config)
    paths.create()
    assert paths.root == tmp_path / "sums" / "cpu"
    assert paths.lock == tmp_path / "sums" / ".cpu.lock"
    assert paths.checkpoint(12) == tmp_path / "sums" / "cpu" / "checkpoints" / "version-000012"
    assert sorted(p.name for p in paths.root.iterdir()) == ["checkpoints", "logs", "rollouts", "specs"]
