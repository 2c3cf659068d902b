"""Snapshots: training goes on to the bit, also from one that was written while it went on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from train_cases import build_engine, build_model, random_batch, run_update, weights_of

from areal_like.config.actor import ActorConfig
from areal_like.errors import ConfigError
from areal_like.train.snapshot import SnapshotStore

ACTOR = ActorConfig.model_validate(
    {"ppo_n_minibatches": 2, "optimizer": {"lr": 3e-3, "lr_scheduler_type": "linear", "warmup_steps": 3}}
)


def trained(engine, steps):
    """Learning rates of ``steps`` updates."""
    return [run_update(engine, ACTOR, *random_batch(seed=seed)).metrics["train/lr"] for seed in steps]


@pytest.fixture
def engine(model_dir, one_rank):
    return build_engine(model_dir, one_rank, ACTOR)


@pytest.mark.parametrize("updates", [0, 2])
def test_training_goes_on_as_if_it_had_not_stopped(model_dir, one_rank, tmp_path, engine, updates):
    trained(engine, range(updates))
    store = SnapshotStore(tmp_path, {"policy": engine}, one_rank)
    torch.manual_seed(5)
    folder = store.save(updates)
    drawn = torch.rand(3)
    rates = trained(engine, (7, 8))  # while it is written
    store.finish()
    assert store.latest() == folder and store.statistics().saved == 1

    other = build_engine(model_dir, one_rank, ACTOR)
    trained(other, (1,))
    assert SnapshotStore(tmp_path, {"policy": other}, one_rank).load(folder) == updates
    assert torch.equal(torch.rand(3), drawn)
    assert trained(other, (7, 8)) == rates
    assert other.statistics() == engine.statistics()
    want, found = weights_of(engine), weights_of(other)
    assert all((want[name] == found[name]).all() for name in want)


def test_the_newest_are_kept_and_one_half_written_is_never_read(one_rank, tmp_path, engine):
    (tmp_path / ".version-000003").mkdir()
    (tmp_path / ".version-000003" / "left over").write_text("")
    (tmp_path / "version-000009").mkdir()  # no metadata: its writer died
    store = SnapshotStore(tmp_path, {"policy": engine}, one_rank, keep=2)
    assert store.latest() is None
    for version in (1, 2, 3):
        store.save(version)
    assert store.statistics().waiting == 3
    assert store.latest().name == "version-000002"
    store.finish()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["version-000002", "version-000003", "version-000009"]
    assert store.latest().name == "version-000003"


def test_what_does_not_fit_is_refused(one_rank, tmp_path, engine):
    store = SnapshotStore(tmp_path / "snapshots", {"policy": engine}, one_rank)
    folder = store.save(0)
    store.finish()
    with pytest.raises(ConfigError, match="no 'critic/"):
        SnapshotStore(tmp_path, {"policy": engine, "critic": engine}, one_rank).load(folder)
    deeper = build_engine(build_model(tmp_path / "deeper", layers=3), one_rank, ACTOR)
    with pytest.raises(ConfigError, match=r"layers\.2"):
        SnapshotStore(tmp_path, {"policy": deeper}, one_rank).load(folder)
    wider = build_engine(build_model(tmp_path / "wider", heads=2), one_rank, ACTOR)
    with pytest.raises(ConfigError, match="do not fit this model"):
        SnapshotStore(tmp_path, {"policy": wider}, one_rank).load(folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        store.load(tmp_path)
    with pytest.raises(ConfigError, match="keep=0"):
        SnapshotStore(tmp_path, {}, one_rank, keep=0)
    assert np.isfinite(next(iter(weights_of(engine).values()))).all()
