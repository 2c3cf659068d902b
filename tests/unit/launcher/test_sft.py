"""Supervised fine-tuning from the command line: it learns an answer, and refuses rows that it cannot read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
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
    assert main([*arguments, "--batch-size", "2", "--every", "30"]) == 0
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
        ({"input_ids": [1, "a"], "loss_mask": [0, 1]}, "row 7: input_ids must be a list of token ids"),
        ({"input_ids": "12", "loss_mask": [0, 1]}, "row 7: input_ids must be a list of token ids"),
        ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "row 7: input_ids must be a list of token ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 5]}, "loss_mask one of 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "row 7: no token has loss_mask 1"),
    ],
)
def test_other_rows_are_refused(folder: Path, row: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        learned_row(row, load_tokenizer(str(folder / "model")), "row 7")


@dataclass(frozen=True)
class Call:
    """A call of the command whose data are two good rows, and what it said."""

    folder: Path
    tmp_path: Path
    capsys: pytest.CaptureFixture[str]

    def fails(self, *more: str, data: str = "", out: str = "out") -> str:
        """What it says on standard error; nothing was trained or written."""
        (self.tmp_path / "data.jsonl").write_text(data or '{"prompt": "1+1=", "answer": "2"}\n')
        before = sorted(self.tmp_path.rglob("*"))
        model, rows, target = self.folder / "model", self.tmp_path / "data.jsonl", self.tmp_path / out
        try:
            status = main([str(model), str(rows), str(target), "--steps", "1", "--lr", "0.01", *more])
        except SystemExit as left:
            status = int(left.code or 0)
        said = self.capsys.readouterr()
        assert (status, said.out, sorted(self.tmp_path.rglob("*"))) == (2, "", before)
        return said.err


@pytest.fixture
def call(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(folder, tmp_path, capsys)


@pytest.mark.parametrize("option", ["--steps", "--batch-size", "--max-tokens-per-mb", "--threads", "--every"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "nan", ""])
def test_counts_are_at_least_one(call: Call, option: str, value: str) -> None:
    assert f"{option}: must be a whole number of at least 1; got {value!r}" in call.fails(f"{option}={value}")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--lr=nan", "sft: error: --lr: must be a finite number; got nan"),
        ("--lr=-1", "sft: error: --lr: must be greater than 0.0; got -1.0"),
        ("--warmup-steps=-1", "sft: error: --warmup-steps: must be at least 0; got -1"),
    ],
)
def test_a_learning_rate_is_checked_as_in_an_experiment(call: Call, more: str, said: str) -> None:
    assert said in call.fails(more)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("\n", "data.jsonl: it has no rows"),
        ("{}\n", "data.jsonl: row 1: needs texts prompt and answer"),
        ("nothing\n", "data.jsonl, line 1: not JSON"),
        ('{"input_ids": [1, 99], "loss_mask": [0, 1]}\n', "row 1: token 99 is none of the model's 15"),
        ('{"input_ids": [1, -2], "loss_mask": [0, 1]}\n', "row 1: token -2 is none of the model's 15"),
        (json.dumps({"input_ids": [1] * 65, "loss_mask": [0] + [1] * 64}), "row 1: 65 tokens exceed .* context of 64"),
    ],
)
def test_data_that_the_model_cannot_learn_are_refused_before_training(call: Call, data: str, said: str) -> None:
    assert re.search(said, call.fails(data=data))


def test_what_is_there_is_not_written_over(call: Call) -> None:
    (call.tmp_path / "full").mkdir()
    (call.tmp_path / "full" / "model.safetensors").write_text("precious")
    (call.tmp_path / "file.yaml").write_text("precious")
    for out in ("full", "file.yaml"):
        assert f"{call.tmp_path / out}: exists and is not an empty folder" in call.fails(out=out)
    assert (call.tmp_path / "file.yaml").read_text() == "precious"


def test_a_step_that_was_left_out_is_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    arguments = [str(folder / "model"), str(data), str(tmp_path / "out"), "--steps", "3", "--lr", "1e30"]
    main([*arguments, "--batch-size", "1", "--every", "100"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["2/3", "3/3"]
    assert all("left out: the gradient is not finite; lower --lr" in line for line in lines)
