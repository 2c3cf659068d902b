"""Supervised fine-tuning from the command line, on the engine that RL trains with: a warm start, say.

    python -m launcher.sft MODEL_DIR DATA.jsonl OUT_DIR --steps 200 --lr 1e-4
    torchrun --nproc-per-node 4 -m launcher.sft MODEL_DIR DATA.jsonl OUT_DIR ...

Rows of the data are ``{"prompt": text, "answer": text}`` (the answer and the end-of-sequence token are learned) or
``{"input_ids": [...], "loss_mask": [...]}``. Writes a Hugging Face folder, which must not be there yet.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from areal_like.api.trajectory import Trajectory
from areal_like.api.workflow import Tokenizer
from areal_like.config.actor import MicroBatchConfig, OptimizerConfig
from areal_like.config.faults import describe_faults
from areal_like.errors import ArealLikeError, ConfigError
from areal_like.rollout.datasets import read_jsonl
from areal_like.rollout.tokenizer import load_tokenizer
from launcher.checkpoints import check_target
from launcher.cli import EXIT_BAD_INPUT, EXIT_FAILED
from launcher.model_files import inspect_model, vocabulary_size

if TYPE_CHECKING:
    from areal_like.train.parallel import Parallel

#: seconds a collective may wait for the other ranks
_TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What can be read and checked before the ranks meet."""

    rows: Sequence[Trajectory]
    optimizer: OptimizerConfig
    mb_spec: MicroBatchConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, join the ranks, train, save.

    Returns:
        The exit status: 2 where arguments or files are wrong, and nothing was begun; 1 where it failed later.
    """
    given = _parser().parse_args(argv)
    try:
        _join_ranks(given, prepare(given))
    except ArealLikeError as error:
        print(f"sft: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError) else EXIT_FAILED
    return 0


def prepare(given: argparse.Namespace) -> Prepared:
    """Read the rows, and check everything that needs no training.

    Raises:
        ConfigError: an argument, the model's folder, the data or the target is wrong.
    """
    check_target(given.out)
    try:
        optimizer = OptimizerConfig(lr=given.lr, warmup_steps=given.warmup_steps, lr_scheduler_type=given.schedule)
    except ValidationError as error:
        faults = describe_faults(error, OptimizerConfig, {})
        raise ConfigError("; ".join(f"--{fault.replace('warmup_steps', 'warmup-steps')}" for fault in faults)) from None
    facts, vocabulary = inspect_model(given.model), vocabulary_size(given.model)
    tokenizer = load_tokenizer(str(given.model))
    rows = []
    for number, line in enumerate(read_jsonl(given.data), start=1):
        where = f"{given.data}: row {number}"
        row = learned_row(line, tokenizer, where)
        check_fits(row, vocabulary, facts.context_length, where)
        rows.append(row)
    packing: Literal["packed", "padded"] = "packed" if given.packed else "padded"
    return Prepared(
        rows=rows,
        optimizer=optimizer,
        mb_spec=MicroBatchConfig(max_tokens_per_mb=given.max_tokens_per_mb, packing=packing),
    )


def _join_ranks(given: argparse.Namespace, prepared: Prepared) -> None:
    import torch

    from areal_like.train.parallel import choose_device, process_group

    torch.manual_seed(given.seed)
    torch.set_num_threads(given.threads)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = "env://" if "RANK" in os.environ else f"file://{folder}/rendezvous"
        device = choose_device("auto", int(os.environ.get("LOCAL_RANK", str(rank))))
        with process_group(
            rank=rank, world_size=ranks, rendezvous=rendezvous, device=device, timeout=_TIMEOUT
        ) as parallel:
            fine_tune(given, prepared, parallel)


def fine_tune(given: argparse.Namespace, prepared: Prepared, parallel: Parallel) -> None:
    """Train ``given.model`` on the rows and write ``given.out``. Collective."""
    import torch

    from areal_like.train.checkpoint import write_checkpoint
    from areal_like.train.engine import TrainEngine
    from areal_like.train.model import PolicyModel, Sampling, load_language_model
    from areal_like.train.sft import SftUpdate

    model: Any = load_language_model(given.model, layout=prepared.mb_spec.packing).to(parallel.device)
    engine = TrainEngine(
        PolicyModel(model, Sampling()),
        parallel,
        prepared.optimizer,
        total_steps=given.steps,
        compute_dtype=getattr(torch, given.dtype),
    )
    update = SftUpdate(engine, prepared.mb_spec)
    for step, batch in enumerate(_batches(prepared.rows, given.batch_size, given.steps, given.seed), start=1):
        report = update.run(batch)
        if parallel.rank == 0 and (step % given.every == 0 or step == given.steps or report.skipped):
            skipped = "  left out: the gradient is not finite; lower --lr" if report.skipped else ""
            figures = f"loss {report.loss:.4f}  grad norm {report.grad_norm:.3f}"
            print(f"step {step}/{given.steps}  {figures}{skipped}", flush=True)
    tensors = engine.named_weights()
    if parallel.rank == 0:
        write_checkpoint(Path(given.out), tensors, config=model.config, source=Path(given.model))
    for _ in tensors:  # the other ranks help to gather
        pass


def learned_row(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Trajectory:
    """Raises: ConfigError: the row has neither of the two forms."""
    from areal_like.train.sft import supervised_row

    if "input_ids" in row and "loss_mask" in row:
        ids, mask = row["input_ids"], row["loss_mask"]
        if not (_is_list_of_integers(ids) and _is_list_of_integers(mask)) or not set(mask) <= {0, 1}:
            raise ConfigError(f"{where}: input_ids must be a list of token ids, and loss_mask one of 0 and 1")
        if len(ids) != len(mask) or not ids or mask[0]:
            raise ConfigError(f"{where}: input_ids and loss_mask must be equally long, and loss_mask begin with 0")
        if not any(mask):
            raise ConfigError(f"{where}: no token has loss_mask 1: it teaches nothing; mark what is to be learned")
        return supervised_row(ids, mask)
    if not isinstance(row.get("prompt"), str) or not isinstance(row.get("answer"), str):
        wanted = "texts prompt and answer, or lists input_ids and loss_mask"
        raise ConfigError(f"{where}: needs {wanted}; has {sorted(row)}")
    prompt = list(tokenizer.encode(row["prompt"]))
    answer = list(tokenizer.encode(row["answer"], add_special_tokens=False))
    if tokenizer.eos_token_id is not None:
        answer.append(tokenizer.eos_token_id)
    if not prompt:
        raise ConfigError(f"{where}: the prompt has no token; the first token of a row cannot be learned")
    return supervised_row(prompt + answer, [0] * len(prompt) + [1] * len(answer))


def _is_list_of_integers(value: object) -> bool:
    return isinstance(value, list) and all(type(entry) is int for entry in value)


def check_fits(row: Trajectory, vocabulary: int | None, context: int | None, where: str) -> None:
    """Raises: ConfigError: the model has no such token, or no room for the row (None: it does not say)."""
    low, high = int(row.token_ids.min()), int(row.token_ids.max())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        raise ConfigError(
            f"{where}: token {low if low < 0 else high} is none of the model's {vocabulary}; encode it with the "
            "tokenizer that lies beside the model"
        )
    if context is not None and len(row.token_ids) > context:
        raise ConfigError(f"{where}: {len(row.token_ids)} tokens exceed the model's context of {context}; shorten it")


def _positive(text: str) -> int:
    """An integer of at least 1, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def _batches(rows: Sequence[Trajectory], size: int, steps: int, seed: int) -> Iterator[list[Trajectory]]:
    """``steps`` batches of ``size`` rows; every epoch in another order, the same on all ranks."""
    rng, waiting = random.Random(seed), list[Trajectory]()
    for _ in range(steps):
        while len(waiting) < size:
            waiting += rng.sample(list(rows), len(rows))
        batch, waiting = waiting[:size], waiting[size:]
        yield batch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launcher.sft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder to begin with")
    parser.add_argument("data", help="JSONL file")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=_positive, required=True, help="optimiser steps")
    parser.add_argument("--lr", type=float, required=True, help="peak learning rate")
    parser.add_argument("--batch-size", type=_positive, default=32, help="rows a step, over all ranks")
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--schedule", choices=("constant", "linear", "cosine"), default="constant")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of forward and backward")
    parser.add_argument("--packed", action="store_true", help="rows end to end instead of padded")
    parser.add_argument("--max-tokens-per-mb", type=_positive, default=16384, help="of one micro-batch on one rank")
    parser.add_argument("--threads", type=_positive, default=1, help="CPU threads of one rank")
    parser.add_argument("--every", type=_positive, default=10, help="steps between two lines of progress")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
