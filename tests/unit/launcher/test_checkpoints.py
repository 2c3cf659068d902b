from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from areal_like.config.paths import RunPaths
from areal_like.errors import ConfigError
from launcher.checkpoints import checkpoint_of, copy_checkpoint, list_checkpoints, newest_checkpoint


@pytest.fixture
def run_folder(tmp_path: Path, model_folder: Path) -> Path:
    paths = RunPaths(root=tmp_path / "run")
    for version in (2, 10):
        shutil.copytree(model_folder, paths.checkpoint(version))
    (paths.checkpoints / "version-000011.part").mkdir()
    return paths.root


def test_checkpoints_are_found_by_version(run_folder: Path) -> None:
    assert list(list_checkpoints(run_folder)) == [2, 10]
    assert newest_checkpoint(run_folder).name == "version-000010"
    assert checkpoint_of(run_folder, 2).name == "version-000002"
    with pytest.raises(ConfigError, match="has no checkpoint of version 3; it has 2, 10"):
        checkpoint_of(run_folder, 3)
    with pytest.raises(ConfigError, match="has no checkpoints"):
        newest_checkpoint(run_folder / "nowhere")


def test_a_copy_appears_whole_and_overwrites_nothing(run_folder: Path, tmp_path: Path) -> None:
    source, target = newest_checkpoint(run_folder), tmp_path / "out" / "model"
    target.mkdir(parents=True)
    size = copy_checkpoint(source, target)
    assert size == sum(file.stat().st_size for file in source.iterdir())
    assert {p.name for p in target.iterdir()} == {p.name for p in source.iterdir()}
    assert [p.name for p in target.parent.iterdir()] == ["model"]
    with pytest.raises(ConfigError, match="is not an empty folder"):
        copy_checkpoint(source, target)


def test_an_incomplete_checkpoint_is_not_copied(run_folder: Path, tmp_path: Path) -> None:
    (newest_checkpoint(run_folder) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        copy_checkpoint(newest_checkpoint(run_folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_that_cannot_be_written_leaves_nothing(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        copy_checkpoint(newest_checkpoint(run_folder), tmp_path / "file" / "model")
