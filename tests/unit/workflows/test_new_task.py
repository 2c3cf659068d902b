"""The new task of the README: short, and every word of it works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from areal_like.api import Tokenizer
from areal_like.config.load import load_config
from areal_like.rollout.convert import to_trajectories
from areal_like.rollout.datasets import read_jsonl
from areal_like.rollout.plugins import build_workflow
from areal_like.rollout.rewards import open_rewards
from areal_like.rollout.tokenizer import load_tokenizer

DOCUMENT = Path(__file__).parents[3] / "README.md"
#: a file's name in backquotes, then its text in a fence
_FILE = re.compile(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The document's files, written to a folder that is the working directory."""
    files = dict(_FILE.findall(DOCUMENT.read_text(encoding="utf-8")))
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return files


@pytest.fixture
def digits(tmp_path: Path) -> Tokenizer:
    """One token a character, as in the arithmetic demo."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    words = ["<pad>", "<bos>", "<eos>", *"0123456789+="]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(words[:3])
    folder = tmp_path / "model"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return load_tokenizer(folder)


def test_it_is_short_and_complete(task: dict[str, str]) -> None:
    assert list(task) == ["my_task.py", "my_task.jsonl", "my_task.yaml"]
    assert sum(len(text.splitlines()) for text in task.values()) < 40


async def test_it_plays_an_episode(task: dict[str, str], digits: Tokenizer, scripted: Any) -> None:
    config = load_config("my_task.yaml")
    rows = read_jsonl(config.train_dataset.path)
    assert config.reward_fn is not None
    async with open_rewards(config.reward_fn, config.rewards) as reward_fn:
        workflow = build_workflow(
            config.workflow,
            reward_fn=reward_fn,
            gconfig=config.gconfig,
            tokenizer=digits,
            workflow_args=config.workflow_args,
        )
        engine = scripted([digits.encode("14<eos>"), digits.encode("15<eos>")])
        (row,) = to_trajectories(await workflow.arun_episode(engine, rows[0]), group_id="g", episode_id="e")
    assert digits.decode(row.token_ids.tolist()) == "12+3=14<eos>12+3=15<eos>"
    assert row.loss_mask.tolist() == [0] * 5 + [1] * 3 + [0] * 5 + [1] * 3
    assert row.reward == 1.0
