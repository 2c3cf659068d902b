"""An experiment that passes every check, with a model folder made by hand: nothing here loads torch."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from areal_like.config.experiment import ExperimentConfig
from areal_like.config.load import config_from_mapping

#: one float32 tensor of two numbers
TENSOR = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
}
WORKFLOW = """\
import asyncio

from areal_like.api import RolloutWorkflow


class Words(RolloutWorkflow):
    def __init__(self, gconfig, turns: int = 1):
        asyncio.get_running_loop()
        if turns < 1:
            raise ValueError(f"at least one turn, not {turns}")
        self.turns = turns

    async def arun_episode(self, engine, data):
        return None


def accept(trajectories):
    return True


NOTHING = 3
"""


def write_safetensors(path: Path, header: dict[str, Any], body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_model(folder: Path, *, context: int = 64) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": context}))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    write_safetensors(folder / "model.safetensors", TENSOR, bytes(8))
    return folder


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The controller runs on uvloop, which starts and watches children in its own way: every test runs on both."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def tree(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The experiment as a mapping; its workflow is importable."""
    train = tmp_path / "train.jsonl"
    train.write_text('{"prompt": "a a a"}\n' * 8)
    (tmp_path / "words_for_checks.py").write_text(WORKFLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {
        "experiment_name": "words",
        "trial_name": "cpu",
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(model_folder)},
        "train_dataset": {"path": str(train), "batch_size": 8},
        "workflow": "words_for_checks.Words",
        "gconfig": {"n_samples": 4, "max_new_tokens": 8},
        "total_train_steps": 10,
    }


@pytest.fixture
def experiment(tree: dict[str, Any]) -> Callable[..., ExperimentConfig]:
    """The experiment with changes: ``experiment(rollout={"port": 1})``."""

    def changed(**sections: Any) -> ExperimentConfig:
        merged = dict(tree)
        for name, value in sections.items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
        return config_from_mapping(merged)

    return changed
