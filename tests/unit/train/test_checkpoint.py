"""Checkpoints load with transformers, and are there whole or not at all."""

import json
import resource
from contextlib import contextmanager

import pytest
import torch
from train_cases import build_engine
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.config.actor import ActorConfig
from areal_like.errors import ArealLikeError
from areal_like.train.checkpoint import write_checkpoint


def saved(folder, one_rank, target, **kwargs):
    engine = build_engine(folder, one_rank, ActorConfig(), dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder)
    return write_checkpoint(target, engine.named_weights(), config=config, source=folder, **kwargs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [2**30, 2000])
def test_it_loads_as_what_was_saved(model_dir, tied_model_dir, one_rank, tmp_path, tied, shard_bytes):
    folder = tied_model_dir if tied else model_dir
    written = saved(folder, one_rank, tmp_path / "deep" / "checkpoint", shard_bytes=shard_bytes)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    model = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert json.loads((written / "tokenizer.json").read_text()) == {"note": "copied as it is"}
    assert json.loads((written / "config.json").read_text())["dtype"] == "float32"
    assert (written / "generation_config.json").exists()
    assert len(list(written.glob("*.safetensors"))) == (1 if shard_bytes > 2000 else len(_index(written)))
    assert [path.name for path in written.parent.iterdir()] == ["checkpoint"]


def _index(folder):
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())


def test_it_replaces_an_older_one(model_dir, one_rank, tmp_path):
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / "stale").write_text("old")
    saved(model_dir, one_rank, target)
    assert not (target / "stale").exists() and (target / "model.safetensors").exists()


def test_a_failure_leaves_the_older_one_and_no_debris(model_dir, tmp_path):
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / "good").write_text("old")

    def breaks():
        yield "a", torch.zeros(2)
        raise OSError("disk full")

    with pytest.raises(ArealLikeError, match="checkpoint: no checkpoint could be written: disk full"):
        write_checkpoint(target, breaks(), config=AutoConfig.from_pretrained(model_dir), source=model_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert (target / "good").read_text() == "old"


@contextmanager
def files_of_at_most(size):
    """A disk that is full after ``size`` bytes of a file, as far as this process can tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [20, 300])
def test_a_disk_without_room_for_weights_or_config_is_told_with_its_folder(model_dir, tmp_path, room):
    """20 bytes do not hold the weights; 300 do, and then not config.json."""
    target = tmp_path / "checkpoint"
    with (
        files_of_at_most(room),
        pytest.raises(ArealLikeError, match=r"/checkpoint: no checkpoint .*; it needs .* room"),
    ):
        write_checkpoint(
            target, [("a", torch.zeros(8))], config=AutoConfig.from_pretrained(model_dir), source=model_dir
        )
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_no_folder_is_told(model_dir, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArealLikeError, match="file/checkpoint: no checkpoint could be written"):
        write_checkpoint(
            tmp_path / "file" / "checkpoint", [], config=AutoConfig.from_pretrained(model_dir), source=model_dir
        )
