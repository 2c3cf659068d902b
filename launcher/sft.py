"""Supervised fine-tuning from the command line, on the engine that RL trains with: a warm start, say.

    python -m launcher.sft MODEL_DIR DATA.jsonl OUT_DIR --steps 200 --lr 1e-4
    torchrun --nproc-per-node 4 -m launcher.sft MODEL_DIR DATA.jsonl OUT_DIR ...

Rows of the data are ``{"prompt": text, "answer": text}`` (the answer and the end-of-sequence token are learned) or
``{"input_ids": [...], "loss_mask": [...]}``. Writes a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from areal_like.api.trajectory import Trajectory
from areal_like.api.workflow import Tokenizer
from areal_like.config.actor import MicroBatchConfig, OptimizerConfig
from areal_like.errors import ConfigError
from areal_like.rollout.datasets import read_jsonl
from areal_like.rollout.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from areal_like.train.parallel import Parallel

#: seconds a collective may wait for the other ranks
_TIMEOUT = 1800.0


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, join the ranks, train, save."""
    given = _parser().parse_args(argv)
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
            fine_tune(given, parallel)


def fine_tune(given: argparse.Namespace, parallel: Parallel) -> None:
    """Train ``given.model`` on ``given.data`` and write ``given.out``. Collective."""
    import torch

    from areal_like.train.checkpoint import write_checkpoint
    from areal_like.train.engine import TrainEngine
    from areal_like.train.model import PolicyModel, Sampling, load_language_model
    from areal_like.train.sft import SftUpdate

    tokenizer = load_tokenizer(str(given.model))
    rows = [learned_row(row, tokenizer, f"{given.data}: row {i}") for i, row in enumerate(read_jsonl(given.data), 1)]
    layout: Literal["packed", "padded"] = "packed" if given.packed else "padded"
    model: Any = load_language_model(given.model, layout=layout).to(parallel.device)
    optimizer = OptimizerConfig(lr=given.lr, warmup_steps=given.warmup_steps, lr_scheduler_type=given.schedule)
    engine = TrainEngine(
        PolicyModel(model, Sampling()),
        parallel,
        optimizer,
        total_steps=given.steps,
        compute_dtype=getattr(torch, given.dtype),
    )
    update = SftUpdate(engine, MicroBatchConfig(max_tokens_per_mb=given.max_tokens_per_mb, packing=layout))
    for step, batch in enumerate(_batches(rows, given.batch_size, given.steps, given.seed), start=1):
        report = update.run(batch)
        if parallel.rank == 0 and (step % given.every == 0 or step == given.steps):
            print(f"step {step}/{given.steps}  loss {report.loss:.4f}  grad norm {report.grad_norm:.3f}", flush=True)
    tensors = engine.named_weights()
    if parallel.rank == 0:
        write_checkpoint(Path(given.out), tensors, config=model.config, source=Path(given.model))
    for _ in tensors:  # the other ranks help to gather
        pass


def learned_row(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Trajectory:
    """Raises: ConfigError: the row has neither of the two forms."""
    from areal_like.train.sft import supervised_row

    if "input_ids" in row and "loss_mask" in row:
        ids, mask = list(row["input_ids"]), list(row["loss_mask"])
        if len(ids) != len(mask) or not ids or mask[0]:
            raise ConfigError(f"{where}: input_ids and loss_mask must be equally long, and loss_mask begin with 0")
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
    parser.add_argument("--steps", type=int, required=True, help="optimiser steps")
    parser.add_argument("--lr", type=float, required=True, help="peak learning rate")
    parser.add_argument("--batch-size", type=int, default=32, help="rows a step, over all ranks")
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--schedule", choices=("constant", "linear", "cosine"), default="constant")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of forward and backward")
    parser.add_argument("--packed", action="store_true", help="rows end to end instead of padded")
    parser.add_argument("--max-tokens-per-mb", type=int, default=16384, help="of one micro-batch on one rank")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one rank")
    parser.add_argument("--every", type=int, default=10, help="steps between two lines of progress")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
