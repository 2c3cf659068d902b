"""Tiny models and datasets that learn on one CPU core: a guessing game and a sum.

    python -m launcher.tiny_models guess OUT_DIR --seed 1
    python -m launcher.tiny_models arithmetic OUT_DIR --seed 1

Each call writes OUT_DIR/model (a Hugging Face folder), OUT_DIR/train.jsonl, OUT_DIR/test.jsonl and
OUT_DIR/manifest.json. A folder whose manifest holds the same settings is left as it is; one that was built with
other settings is rebuilt with --replace, and refused without. The folder is built aside and renamed into place, so a
killed build leaves nothing that looks finished.

Legend: B rows, T tokens, K turns, V vocabulary.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ("<pad>", "<bos>", "<eos>")
REPLIES = ("higher", "lower", "correct")
GUESS_PROMPT = "<bos>"
FORMAT_VERSION = 3  # part of the manifest: raise it when the files' layout or the recipe changes


class TinyModelError(RuntimeError):
    """The folder cannot be built or is not what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyLlama:
    """Shape of the model. ``weight_std``: deviation of the first weights; near hidden**-0.5 a new model listens to its
    context from the start, while at the usual 0.02 it takes RL most of a short run to get there.
    """

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    max_positions: int = 64
    weight_std: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessSettings:
    """Game: a secret in [0, numbers), ``turns`` guesses, each a number and <eos>.

    The warm start teaches that format on uniformly random guesses, nothing else. Random play hits with
    1 - (1 - 1/numbers)**turns = 0.460 at the defaults. The best play always hits, and there are many ways of it: six
    numbers in three turns have few, and some runs settle for a play that misses one.
    ``train_copies`` rows of every secret: with a batch of one epoch's rows every batch holds each secret equally often.
    """

    size: TinyLlama = TinyLlama(weight_std=0.08)
    numbers: int = 7
    turns: int = 4
    warm_steps: int = 80
    warm_lr: float = 2e-3
    warm_rows: int = 256
    train_copies: int = 2
    test_copies: int = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSettings:
    """Task: ``x+y=`` with x in 10..99 and y in 0..9, ``test_pairs`` of the 900 held out of warm start and RL.

    Warm start: ``clean_steps`` on right answers teach the sum, then ``noisy_steps`` with a wrong digit in
    ``noise`` of the answers blur the policy. The greedy answer is then often right already (0.82 to 1.00 of the
    held-out sums, seeds 1-5) while a sampled one seldom is (0.26 to 0.40): RL mostly sharpens here, it does not
    discover sums.
    """

    size: TinyLlama = TinyLlama()
    clean_steps: int = 120
    clean_lr: float = 1.5e-3
    noisy_steps: int = 60
    noisy_lr: float = 5e-4
    noise: float = 0.65
    warm_rows: int = 128
    test_pairs: int = 180


def build_guess(out_dir: Path, seed: int, settings: GuessSettings | None = None, *, replace: bool = False) -> None:
    """Build the guessing game's model and datasets in ``out_dir`` unless they are there already."""
    chosen = settings or GuessSettings()
    if not 2 <= chosen.numbers <= 10:
        raise TinyModelError(f"GuessSettings.numbers must be in 2..10 (one token '0'..'9' each), got {chosen.numbers}")
    manifest: dict[str, object] = {
        "format": FORMAT_VERSION,
        "task": "guess",
        "seed": seed,
        "settings": asdict(chosen),
    }

    def fill(folder: Path) -> None:
        vocab = [*SPECIAL, *REPLIES, *(str(n) for n in range(chosen.numbers))]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocab)}))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        model = _new_model(len(vocab), chosen.size, seed)
        _warm_guess(model, chosen, seed)
        _save_model(folder / "model", model, tokenizer)
        secrets = list(range(chosen.numbers))
        _write_jsonl(folder / "train.jsonl", [{"secret": s} for s in secrets * chosen.train_copies])
        _write_jsonl(folder / "test.jsonl", [{"secret": s} for s in secrets * chosen.test_copies])

    _build_once(out_dir, manifest, fill, replace)


def build_arithmetic(
    out_dir: Path, seed: int, settings: ArithmeticSettings | None = None, *, replace: bool = False
) -> None:
    """Build the sum's model and datasets in ``out_dir`` unless they are there already."""
    chosen = settings or ArithmeticSettings()
    manifest: dict[str, object] = {
        "format": FORMAT_VERSION,
        "task": "arithmetic",
        "seed": seed,
        "settings": asdict(chosen),
    }

    def fill(folder: Path) -> None:
        vocab = [*SPECIAL, *"0123456789+="]
        tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(vocab)}))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
        train, test = split_sums(seed, chosen.test_pairs)
        model = _new_model(len(vocab), chosen.size, seed)
        _warm_arithmetic(model, chosen, train, {char: i for i, char in enumerate(vocab)}, seed)
        _save_model(folder / "model", model, tokenizer)
        for name, pairs in (("train", train), ("test", test)):
            _write_jsonl(folder / f"{name}.jsonl", [{"prompt": f"{x}+{y}=", "answer": str(x + y)} for x, y in pairs])

    _build_once(out_dir, manifest, fill, replace)


def split_sums(seed: int, test_pairs: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All 900 pairs, shuffled by ``seed`` and cut into disjoint train and test lists."""
    pairs = [(x, y) for x in range(10, 100) for y in range(10)]
    if not 0 < test_pairs < len(pairs):
        raise TinyModelError(f"ArithmeticSettings.test_pairs must be in 1..{len(pairs) - 1}, got {test_pairs}")
    random.Random(seed).shuffle(pairs)
    return pairs[test_pairs:], pairs[:test_pairs]


def _new_model(vocab_size: int, size: TinyLlama, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.max_positions,
        initializer_range=size.weight_std,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def _warm_guess(model: LlamaForCausalLM, settings: GuessSettings, seed: int) -> None:
    """Supervised steps on random play. Only the model's turns (number, <eos>) carry loss, up to the hit."""
    first = len(SPECIAL) + len(REPLIES)  # id of '0'
    higher, lower, correct = (len(SPECIAL) + i for i in range(len(REPLIES)))
    generator = torch.Generator().manual_seed(seed)
    rows, turns = settings.warm_rows, settings.turns
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.warm_lr, weight_decay=0.0)
    for step in range(settings.warm_steps):
        secret = torch.randint(settings.numbers, (rows, 1), generator=generator)  # [B, 1]
        guess = torch.randint(settings.numbers, (rows, turns), generator=generator)  # [B, K]
        reply = torch.where(guess < secret, higher, torch.where(guess > secret, lower, correct))  # [B, K]
        turn = torch.stack([guess + first, torch.full_like(guess, EOS), reply], -1)  # [B, K, 3]
        tokens = torch.cat([torch.full((rows, 1), BOS), turn.flatten(1)], 1)  # [B, 1 + 3K]
        hit = (guess == secret).long()
        over = hit.cumsum(1) > hit  # [B, K]: hit before this turn
        turn[:, :, 2] = -100
        turn[over] = -100
        _step(model, optimizer, tokens[:, :-1], turn.flatten(1), settings.warm_lr * (1 - step / settings.warm_steps))


def _warm_arithmetic(
    model: LlamaForCausalLM,
    settings: ArithmeticSettings,
    pairs: list[tuple[int, int]],
    ids: dict[str, int],
    seed: int,
) -> None:
    """Supervised steps on the train pairs: right answers first, then answers with a wrong digit in most."""
    rng = random.Random(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.clean_lr, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(settings.clean_steps + settings.noisy_steps):
        noisy = step >= settings.clean_steps
        inputs: list[list[int]] = []
        labels: list[list[int]] = []
        for x, y in rng.choices(pairs, k=settings.warm_rows):
            answer = list(str(x + y))
            if noisy and rng.random() < settings.noise:
                place = rng.randrange(len(answer))
                answer[place] = rng.choice([d for d in "0123456789" if d != answer[place]])
            prompt = [ids[c] for c in f"{x}+{y}="]
            written = [ids[c] for c in answer] + [EOS]
            spare = 4 - len(written)  # the longest answer has three digits and <eos>
            inputs.append(prompt + written[:-1] + [PAD] * spare)
            labels.append([-100] * (len(prompt) - 1) + written + [-100] * spare)
        rate = settings.noisy_lr if noisy else settings.clean_lr * min(1.0, (step + 1) / 20)
        _step(model, optimizer, torch.tensor(inputs), torch.tensor(labels), rate)


def _step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    rate: float,
) -> None:
    """One optimiser step. inputs, labels: [B, T]; labels are already shifted, -100 is not counted."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    logits = model(input_ids=inputs, use_cache=False).logits  # [B, T, V]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _save_model(folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(list(SPECIAL))
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, do_sample=True)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _build_once(out_dir: Path, manifest: dict[str, object], fill: Callable[[Path], None], replace: bool) -> None:
    """Run ``fill`` in a folder beside ``out_dir`` and rename it into place, unless it is built already."""
    text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    if _manifest_text(out_dir) == text:
        return
    if out_dir.exists() and any(out_dir.iterdir()) and not (replace and _manifest_text(out_dir)):
        raise TinyModelError(
            f"{out_dir} is not empty and its manifest.json is missing or holds other settings; "
            f"remove the folder, choose another one, or pass --replace if it was built by this command"
        )
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        new = aside / "new"
        new.mkdir()
        with _one_thread():
            fill(new)
        (new / "manifest.json").write_text(text, encoding="utf-8")
        if replace and _manifest_text(out_dir):
            os.rename(out_dir, aside / "old")
        try:
            os.rename(new, out_dir)  # replaces an empty folder
        except OSError:  # another process may have finished the same folder first
            if _manifest_text(out_dir) != text:
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _manifest_text(folder: Path) -> str | None:
    path = folder / "manifest.json"
    return path.read_text(encoding="utf-8") if path.is_file() else None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Float sums depend on the number of threads; one thread makes a seed give the same weights everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """Command line: build one task's folder and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m launcher.tiny_models", description=__doc__)
    parser.add_argument("task", choices=("guess", "arithmetic"))
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replace", action="store_true", help="rebuild a folder that was built with other settings")
    arguments = parser.parse_args()
    build = build_guess if arguments.task == "guess" else build_arithmetic
    build(arguments.out_dir, arguments.seed, replace=arguments.replace)
    print(arguments.out_dir)


if __name__ == "__main__":
    main()
