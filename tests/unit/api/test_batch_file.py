from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_like.api.batch_file import BatchFileError, batch_path, read_batch, recorded_batches, write_batch
from areal_like.api.trajectory import Trajectory


def trajectory(length: int, reward: float, *, returns: bool = False, group: str = "g") -> Trajectory:
    return Trajectory(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.array([0, *[1] * (length - 1)], np.int32),
        logprobs=np.linspace(-2, 0, length, dtype=np.float32),
        versions=np.array([-1, *[3] * (length - 1)], np.int32),
        reward=reward,
        returns=np.linspace(0, 1, length, dtype=np.float32) if returns else None,
        group_id=group,
        episode_id=f"{group}/é0",
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = [trajectory(3, 0.1), trajectory(5, 1 / 3, returns=True, group="longer"), trajectory(2, -1.0)]
    path = write_batch(tmp_path, 12, rows)
    assert path == batch_path(tmp_path, 12)
    version, got = read_batch(path)
    assert version == 12
    assert len(got) == 3
    for read, wrote in zip(got, rows, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "versions", "returns"):
            a, b = getattr(read, name), getattr(wrote, name)
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)
        assert (read.reward, read.group_id, read.episode_id) == (wrote.reward, wrote.group_id, wrote.episode_id)


def test_batches_are_listed_in_the_order_of_training_and_leave_nothing_else(tmp_path: Path) -> None:
    for version in (10, 9, 100):
        write_batch(tmp_path, version, [trajectory(2, 0.0)])
    write_batch(tmp_path, 9, [])  # written again: replaced
    assert [read_batch(path)[0] for path in recorded_batches(tmp_path)] == [9, 10, 100]
    assert read_batch(recorded_batches(tmp_path)[0]) == (9, [])
    assert len(list((tmp_path / "batches").iterdir())) == 3


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = write_batch(tmp_path, 1, [trajectory(4, 1.0)])
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"\x80\x04N."):
        path.write_bytes(content)
        with pytest.raises(BatchFileError, match=r"00000001\.npz: not a recorded batch"):
            read_batch(path)
    with pytest.raises(BatchFileError, match="not a recorded batch"):
        read_batch(tmp_path / "absent.npz")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    path = write_batch(tmp_path, 1, [trajectory(2, 0.0)])
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez(path, **(arrays | {"group_ids": np.array([{"a": 1}], dtype=object)}))
    with pytest.raises(BatchFileError, match="not a recorded batch"):
        read_batch(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = write_batch(tmp_path, 1, [replace(trajectory(2, 0.0), reward=2.0)])
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez(path, **(arrays | {"format": np.int64(2)}))
    with pytest.raises(BatchFileError, match="format 2"):
        read_batch(path)
