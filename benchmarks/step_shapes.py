"""What the train-step benchmarks train and ask: model shapes, rows of given lengths, the operations that they need.

Weights and tokens are random: speed does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_like.api.trajectory import Batch, GroupTag, PromptId, Trajectory, TrajectoryTag

#: rows of one prompt
GROUP_SIZE = 4
#: tokens of the even rows
EVEN_LENGTH = 2048
#: the mixed rows: log-normal, as lengths of answers are, cut at both ends
MIXED_MEDIAN, MIXED_SIGMA, MIXED_LEAST, MIXED_MOST = 700, 1.0, 64, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        """Of all decoder layers' products."""
        head_size = self.hidden // self.heads
        attention = self.hidden * head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """All that are multiplied with, and the embedding where it is not the head."""
        return self.layer_parameters + self.hidden * self.vocabulary * (1 if self.tied else 2)


SHAPES = {
    "tiny": Shape(hidden=128, intermediate=384, layers=4, heads=4, kv_heads=2, vocabulary=4096, tied=True),
    "small": Shape(hidden=256, intermediate=768, layers=6, heads=4, kv_heads=1, vocabulary=8192, tied=True),
    "0.5b": Shape(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, vocabulary=151936, tied=True),
    "1.5b": Shape(hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, vocabulary=151936, tied=True),
    "7b": Shape(hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, vocabulary=152064, tied=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure.

    Attributes:
        what: ``ours``: an update; ``profile``: ours, kernel by kernel. Transformers alone, same rows: ``hf``: forward
            and backward by weights in ``dtype``; ``hf-step``: with AdamW on float32 weights, under autocast if
            ``dtype`` is another; ``hf-masters``: with AdamW on float32 masters of weights in ``dtype``.
        tokens: of one micro-batch; ``micro_batches`` of them make the batch.
        lengths: ``even`` or ``mixed`` (step_shapes.py), times ``scale``.
        fused: the two log-prob kernels, where there are any.
        prox: ``behave`` has no extra pass, so its time is that of forward, backward and optimiser; ``recompute`` is
            the whole decoupled update.
        optimizer: false for shapes whose master weights and moments do not fit: gradients are made and dropped.
        minibatches: optimiser steps.
        budget: tokens that a micro-batch may hold; 0: a little over ``tokens``, since rows do not fill it exactly.
    """

    what: str = "ours"
    shape: str = "tiny"
    tokens: int = 2048
    micro_batches: int = 2
    minibatches: int = 1
    budget: int = 0
    lengths: str = "mixed"
    scale: float = 1.0
    layout: str = "packed"
    compile: bool = False
    checkpointing: bool = False
    offload: bool = False
    fused: bool = True
    prox: str = "behave"
    optimizer: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    repeats: int = 3


def row_lengths(kind: str, tokens: int, scale: float = 1.0, seed: int = 0) -> list[int]:
    """Positions read of every row, ``tokens`` in all: ``even`` rows, or ``mixed`` ones of very different lengths."""
    if kind == "even":
        length = max(2, int(EVEN_LENGTH * scale))
        return [length] * (tokens // length)
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = int(np.exp(rng.normal(np.log(MIXED_MEDIAN * scale), MIXED_SIGMA)))
        lengths.append(int(np.clip(drawn, max(2, MIXED_LEAST * scale), MIXED_MOST * scale)))
    lengths[-1] -= sum(lengths) - tokens
    return [length for length in lengths if length > 1]


def flops(shape: Shape, lengths: Sequence[int], written: Sequence[int], *, passes: float) -> float:
    """Operations that ``lengths`` need: 2 a parameter and token, and causal attention; ``passes`` is 3 for forward and
    backward, 1 for forward alone. The head counts for ``written`` tokens; what is recomputed does not count.
    """
    products = 2 * (shape.layer_parameters * sum(lengths) + shape.hidden * shape.vocabulary * sum(written))
    attention = 2 * shape.layers * shape.hidden * sum(length * length for length in lengths)
    return passes * (products + attention)


def trajectories(shape: Shape, lengths: Sequence[int], seed: int = 0) -> list[Trajectory]:
    """Rows of ``lengths`` positions read, so one token longer each; a prompt of up to 64 tokens, then one answer."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, length in enumerate(lengths):
        prompt = max(1, min(64, length // 4))
        written = np.arange(length + 1) >= prompt
        logprobs = rng.normal(-np.log(shape.vocabulary), 0.3, length + 1)
        rows.append(
            Trajectory(
                token_ids=rng.integers(0, shape.vocabulary, length + 1).astype(np.int32),
                loss_mask=written.astype(np.int32),
                logprobs=np.where(written, logprobs, 0).astype(np.float32),
                versions=np.where(written, 0, -1).astype(np.int32),
                reward=float(rng.integers(0, 2)),
                group_id=f"g{i // GROUP_SIZE}",
                episode_id=f"e{i}",
            )
        )
    return rows


def written_tokens(rows: Sequence[Trajectory]) -> list[int]:
    return [int(row.loss_mask.sum()) for row in rows]


def batch_of(rows: Sequence[Trajectory]) -> Batch:
    """Tags of ``rows``; a row's key is its episode id."""
    groups: dict[str, list[TrajectoryTag]] = {}
    for row in rows:
        tag = TrajectoryTag(
            key=row.episode_id,
            group_id=row.group_id,
            episode_id=row.episode_id,
            length=row.length,
            loss_tokens=int(row.loss_mask.sum()),
            reward=row.reward,
            oldest_version=0,
            newest_version=0,
        )
        groups.setdefault(row.group_id, []).append(tag)
    return Batch(
        version=0,
        groups=tuple(
            GroupTag(group_id=g, prompt=PromptId(epoch=0, index=i), attempt=0, stamp=0, trajectories=tuple(members))
            for i, (g, members) in enumerate(groups.items())
        ),
    )


def rows_of(request: Request) -> tuple[list[Trajectory], list[int]]:
    shape = SHAPES[request.shape]
    lengths = row_lengths(request.lengths, request.tokens * request.micro_batches, request.scale)
    return trajectories(shape, lengths), lengths
