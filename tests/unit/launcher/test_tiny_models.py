"""Tiny models: what a warm start teaches, what lies in the folder, and that a half-built one never looks finished."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from launcher import tiny_models
from launcher.tiny_models import (
    BOS,
    EOS,
    ArithmeticSettings,
    GuessSettings,
    TinyLlama,
    TinyModelError,
    build_arithmetic,
    build_guess,
    split_sums,
)

SMALL = TinyLlama(hidden=32, layers=1, heads=2, weight_std=0.08)
GAME = GuessSettings(size=SMALL, numbers=4, turns=2, warm_steps=60, warm_lr=1e-2, warm_rows=64)
UNTAUGHT = GuessSettings(size=SMALL, warm_steps=1, warm_rows=4)
SUMS = ArithmeticSettings(size=SMALL, clean_steps=1, noisy_steps=1, warm_rows=4)
HIGHER, LOWER, ZERO = 3, 4, 6


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def next_token(model: LlamaForCausalLM, *ids: int) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, -1]
        return logits.softmax(-1)


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "guess"
    build_guess(folder, 1, GAME)
    return folder


@pytest.mark.parametrize("history", [[], [ZERO, EOS, HIGHER], [ZERO + 3, EOS, LOWER]])
def test_the_warm_start_teaches_the_format_and_no_play(game: Path, history: list[int]) -> None:
    """Every number is about as likely, also those that the replies so far rule out; after any number comes <eos>."""
    model = LlamaForCausalLM.from_pretrained(game / "model")
    number = next_token(model, BOS, *history)[ZERO : ZERO + 4]
    assert number.sum() > 0.97
    torch.testing.assert_close(number, torch.full((4,), 0.25), atol=0.08, rtol=0.0)
    for guess in range(4):
        assert next_token(model, BOS, *history, ZERO + guess)[EOS] > 0.97


def test_random_play_at_the_defaults_hits_less_than_half_the_time() -> None:
    settings = GuessSettings()
    assert 1 - (1 - 1 / settings.numbers) ** settings.turns == pytest.approx(0.4602, abs=1e-4)
    assert 2**settings.turns - 1 >= settings.numbers, "a binary search must be able to hit every secret"


def test_every_secret_comes_equally_often(tmp_path: Path) -> None:
    build_guess(tmp_path / "guess", 1, UNTAUGHT)
    for name, copies in (("train", 2), ("test", 96)):
        secrets = Counter(row["secret"] for row in rows(tmp_path / "guess" / f"{name}.jsonl"))
        assert secrets == dict.fromkeys(range(7), copies)


def test_a_seed_gives_the_same_weights_whatever_the_threads(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    for name, seed, threads in (("a", 1, 1), ("b", 1, 2), ("c", 2, 1)):
        torch.set_num_threads(threads)
        try:
            build_guess(tmp_path / name, seed, UNTAUGHT)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    a, b, c = (load_file(tmp_path / name / "model" / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


def test_building_draws_nothing_from_the_global_generator(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    build_guess(tmp_path / "guess", 1, UNTAUGHT)
    assert torch.equal(torch.rand(1), expected)


def test_sums_held_out_are_not_trained_on() -> None:
    train, test = split_sums(3, 180)
    assert (len(train), len(test)) == (720, 180)
    assert {*train, *test} == {(x, y) for x in range(10, 100) for y in range(10)}
    assert split_sums(3, 180) == (train, test)
    assert split_sums(4, 180) != (train, test)


@pytest.mark.parametrize("held_out", [0, 900])
def test_both_parts_of_the_split_hold_something(held_out: int) -> None:
    with pytest.raises(TinyModelError, match=f"must be in 1..899, got {held_out}"):
        split_sums(1, held_out)


def test_the_sums_in_the_files_are_right(tmp_path: Path) -> None:
    build_arithmetic(tmp_path / "sums", 1, SUMS)
    train, test = (rows(tmp_path / "sums" / f"{name}.jsonl") for name in ("train", "test"))
    assert (len(train), len(test)) == (720, 180)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    for row in train + test:
        x, y = row["prompt"].removesuffix("=").split("+")
        assert row["answer"] == str(int(x) + int(y))


def test_a_finished_folder_is_left_as_it_is(tmp_path: Path) -> None:
    build_guess(tmp_path / "guess", 1, UNTAUGHT)
    weights = tmp_path / "guess" / "model" / "model.safetensors"
    before = weights.stat()
    build_guess(tmp_path / "guess", 1, UNTAUGHT)
    assert weights.stat() == before


@pytest.mark.parametrize("seed", [1, 2])
def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path, seed: int) -> None:
    build_arithmetic(tmp_path / "there", 1, SUMS)
    with pytest.raises(TinyModelError, match=r"is not empty and its manifest\.json is missing or holds other settings"):
        build_guess(tmp_path / "there", seed, UNTAUGHT)
    (tmp_path / "there" / "manifest.json").unlink()
    with pytest.raises(TinyModelError, match="remove the folder, choose another one"):
        build_arithmetic(tmp_path / "there", 1, SUMS)
    assert len(rows(tmp_path / "there" / "train.jsonl")) == 720


def test_replacing_takes_only_what_was_built_here(tmp_path: Path) -> None:
    folder = tmp_path / "guess"
    build_guess(folder, 1, UNTAUGHT)
    build_guess(folder, 2, UNTAUGHT, replace=True)
    assert json.loads((folder / "manifest.json").read_text())["seed"] == 2
    assert list(tmp_path.iterdir()) == [folder]
    (folder / "manifest.json").unlink()
    with pytest.raises(TinyModelError, match="is not empty"):
        build_guess(folder, 1, UNTAUGHT, replace=True)
    assert (folder / "model" / "model.safetensors").is_file()


def test_a_build_cut_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_models, "_write_jsonl", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_guess(tmp_path / "guess", 1, UNTAUGHT)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "guess").mkdir()
    build_guess(tmp_path / "guess", 1, UNTAUGHT)
    assert {path.name for path in (tmp_path / "guess").iterdir()} == {
        "manifest.json",
        "model",
        "test.jsonl",
        "train.jsonl",
    }


@pytest.mark.parametrize("numbers", [1, 11])
def test_numbers_are_one_digit_each(tmp_path: Path, numbers: int) -> None:
    with pytest.raises(TinyModelError, match=rf"must be in 2..10 .*, got {numbers}"):
        build_guess(tmp_path / "guess", 1, GuessSettings(numbers=numbers))
