"""One reading of TRL's GRPO step on the rows that ours trains on. Runs in TRL's own environment (make trl).

    .venv-trl/bin/python benchmarks/trl_step.py '{"shape": "tiny", "tokens": 2048, "micro_batches": 2, "scale": 0.1}'

The rows are given with their old log-probs and advantages, so that nothing is generated or scored: micro-batches of
equally many rows in the order in which they come, as TRL cuts them, each padded to its longest prompt and answer, then
one step of AdamW.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise SystemExit(f"{error}: this runs in TRL's own environment, which `make trl` installs") from None
from step_memory import memory_on_cpu, memory_on_cuda, resident
from step_shapes import SHAPES, flops, row_lengths, trajectories, written_tokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from areal_like.api.trajectory import Trajectory


def trainer_of(request: dict[str, Any], folder: str, rows: int) -> Any:
    shape = SHAPES[request["shape"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1, "<pad>": 2}, unk_token="a")),
        pad_token="<pad>",
        eos_token="b",
    )
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(0)
    on_cpu = request.get("device", "cpu") == "cpu"
    settings = GRPOConfig(
        output_dir=folder,
        use_cpu=on_cpu,
        bf16=not on_cpu,
        per_device_train_batch_size=rows,
        num_generations=rows,
        max_completion_length=32768,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=bool(request.get("checkpointing", False)),
        learning_rate=1e-6,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(config),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    return trainer


def padded(rows: Sequence[Trajectory], device: torch.device) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, answers on the right."""
    prompts = [row.token_ids[row.loss_mask == 0] for row in rows]
    answers = [row.token_ids[row.loss_mask == 1] for row in rows]
    old = [row.logprobs[row.loss_mask == 1] for row in rows]
    before, after = max(map(len, prompts)), max(map(len, answers))
    found = {
        "prompt_ids": torch.zeros(len(rows), before, dtype=torch.int64),
        "prompt_mask": torch.zeros(len(rows), before, dtype=torch.int64),
        "completion_ids": torch.zeros(len(rows), after, dtype=torch.int64),
        "completion_mask": torch.zeros(len(rows), after, dtype=torch.int64),
        "old_per_token_logps": torch.zeros(len(rows), after),
        "advantages": torch.tensor([2 * row.reward - 1 for row in rows]),
    }
    for i, (prompt, answer, logprobs) in enumerate(zip(prompts, answers, old, strict=True)):
        found["prompt_ids"][i, before - len(prompt) :] = torch.from_numpy(prompt)
        found["prompt_mask"][i, before - len(prompt) :] = 1
        found["completion_ids"][i, : len(answer)] = torch.from_numpy(answer)
        found["completion_mask"][i, : len(answer)] = 1
        found["old_per_token_logps"][i, : len(answer)] = torch.from_numpy(logprobs)
    return {name: tensor.to(device) for name, tensor in found.items()}


def step_of(trainer: Any, parts: Sequence[dict[str, torch.Tensor]]) -> Callable[[], None]:
    model, optimizer = trainer.model, trainer.optimizer
    trainer.current_gradient_accumulation_steps = len(parts)
    model.train()

    def step() -> None:
        for part in parts:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, part)
            (loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(request: dict[str, Any]) -> dict[str, Any]:
    shape, cuts = SHAPES[request["shape"]], request.get("micro_batches", 2)
    lengths = row_lengths(request.get("lengths", "mixed"), request["tokens"] * cuts, request.get("scale", 1.0))
    rows = trajectories(shape, lengths)
    size = -(-len(rows) // cuts)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(request, folder, size)
        device = next(trainer.model.parameters()).device
        step = step_of(trainer, [padded(rows[i : i + size], device) for i in range(0, len(rows), size)])
        readings = []
        for number in range(1 + request.get("repeats", 3)):
            if number == 1 and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            readings.append(time.perf_counter() - started)
        held = resident("hf-step", torch.bfloat16 if device.type == "cuda" else torch.float32, shape.parameters)
        memory = memory_on_cuda(held) if device.type == "cuda" else memory_on_cpu(held, step)
    seconds = sorted(readings[1:])[len(readings[1:]) // 2]
    return request | {
        "what": "trl",
        "versions": {name: version(name) for name in ("trl", "torch", "transformers")},
        "tokens_read": sum(lengths),
        "seconds": seconds,
        "readings": readings[1:],
        "first_seconds": readings[0],
        "tokens_per_second": sum(lengths) / seconds,
        "flops_per_second": flops(shape, lengths, written_tokens(rows), passes=3.0) / seconds,
        **memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", type=json.loads, help="a JSON object")
    print(json.dumps(measure(parser.parse_args().request)))


if __name__ == "__main__":
    main()
