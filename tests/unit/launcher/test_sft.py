"""Supervised fine-tuning from the command line: it learns an answer, and refuses rows that it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_like.errors import ConfigError
from areal_like.rollout.tokenizer import load_tokenizer
from launcher.sft import learned_row, main
from launcher.tiny_models import ArithmeticSettings, TinyLlama, build_arithmetic


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sft") / "arithmetic"
    size = TinyLlama(hidden=32, layers=1, heads=2)
    build_arithmetic(out, 1, ArithmeticSettings(size=size, clean_steps=1, noisy_steps=0, warm_rows=4))
    return out


def test_it_learns_and_saves(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "12+3=", "answer": "15"}) + "\n")
    arguments = [str(folder / "model"), str(data), str(tmp_path / "out"), "--steps", "60", "--lr", "0.01"]
    main([*arguments, "--batch-size", "2", "--every", "30"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["30/60", "60/60"]
    assert float(lines[-1].split()[3]) < 0.1

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    answer = [*tokenizer.encode("15", add_special_tokens=False), tokenizer.eos_token_id]
    ids = [*tokenizer.encode("12+3="), *answer]
    with torch.no_grad():
        best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
    assert best[-len(answer) - 1 : -1] == answer


def test_rows_are_text_or_ids(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "model"))
    row = learned_row({"prompt": "1+1=", "answer": "2"}, tokenizer, "row 1")
    assert row.loss_mask.tolist() == [0] * 4 + [1, 1]
    assert row.token_ids.tolist()[-1] == tokenizer.eos_token_id
    assert learned_row({"input_ids": [3, 4], "loss_mask": [0, 1]}, tokenizer, "row 1").loss_mask.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "row 7: needs texts prompt and answer"),
        ({"prompt": "1", "answer": 2}, "row 7: needs texts"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "row 7: input_ids and loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [0]}, "row 7: input_ids and loss_mask"),
        ({"prompt": "", "answer": "2"}, "row 7: the prompt has no token"),
    ],
)
def test_other_rows_are_refused(folder: Path, row: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        learned_row(row, load_tokenizer(str(folder / "model")), "row 7")
