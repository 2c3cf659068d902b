from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from areal_like.errors import ArealLikeError
from areal_like.observe.figures import tidy
from areal_like.observe.metrics import MetricsFile, read_metrics


def test_a_line_is_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write({"step": 1, "reward": 0.5})
        assert path.read_text() == '{"step": 1, "reward": 0.5}\n'
        metrics.write({"step": 2})
        assert metrics.statistics().lines == 2
        assert metrics.statistics().bytes == path.stat().st_size
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_a_second_writer_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with MetricsFile(tmp_path / "m.jsonl") as metrics:
            metrics.write({"step": step})
    assert len(list(read_metrics(tmp_path / "m.jsonl"))) == 2


def test_non_finite_figures_become_null_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write({"loss": math.nan, "ppo": {"kl": math.inf, "ess": 0.9}, "ok": 1.0})
    line = json.loads(path.read_text())
    assert line == {"loss": None, "ppo": {"kl": None, "ess": 0.9}, "ok": 1.0, "non_finite": ["loss", "ppo/kl"]}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1 / 3, 0.333333),
        (123456789.0, 123457000.0),
        (1.23456789e-12, 1.23457e-12),
        (123456789, 123456789),
        (True, True),
        (np.float32(0.1), 0.1),
        (np.int64(7), 7),
        ([1.00000001, None, "x"], [1.0, None, "x"]),
        ((math.nan,), [None]),
        ({1: 2.0}, {"1": 2.0}),
    ],
)
def test_figures_are_rounded_to_what_can_be_read(value: object, written: object) -> None:
    assert tidy(value) == written
    assert type(tidy(value)) is type(written)


def test_what_is_no_figure_is_refused() -> None:
    with pytest.raises(TypeError, match="got object"):
        tidy({"x": object()})


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert list(read_metrics(path)) == [{"step": 1}]


def test_a_full_disk_is_one_clear_error() -> None:
    said = r"/dev/full: cannot be written: No space left on device; free space on its disk, or set runs_dir"
    with pytest.raises(ArealLikeError, match=said), MetricsFile(Path("/dev/full")) as metrics:
        metrics.write({"step": 1})


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArealLikeError, match=r"m\.jsonl: cannot be written: .*; see to its disk"):
        MetricsFile(tmp_path / "file" / "m.jsonl")
