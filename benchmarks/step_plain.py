"""Train steps by transformers and torch alone, on the rows that ours trains on: what a careful user would write.

Rows of like length are padded together; the log-prob loss goes over chunks in float32, recomputed backwards, so that no
one holds the logits of all tokens; layers are compiled and recomputed as ours are, where that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from step_models import random_model
from step_shapes import SHAPES, Request, rows_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_like.algo.packing import pack
from areal_like.api.trajectory import Trajectory
from areal_like.train.layers import compile_layers

#: rows of a chunk of the loss, as in the anchors that we compare with
CHUNK = 4096
CLIP = 1.0


@contextmanager
def plain_update(request: Request) -> Iterator[Callable[[], Any]]:
    """A function that makes forward and backward of the rows, and the step where ``request.what`` has one."""
    dtype = getattr(torch, request.dtype)
    rows, lengths = rows_of(request)
    weights = torch.float32 if request.what == "hf-step" else dtype
    model: Any = random_model(SHAPES[request.shape], device=request.device, dtype=weights, attention="sdpa")
    model.train()
    if request.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if request.compile:
        compile_layers(model)
    plan = pack(lengths, max(request.tokens, max(lengths)), "padded")
    parts = [_padded([rows[i] for i in members], request.device) for members in plan]
    finish = _step_of(model, request)

    def around() -> AbstractContextManager[Any]:
        return nullcontext() if weights == dtype else torch.autocast(request.device, dtype=dtype)

    def update() -> None:
        for ids, targets, mask in parts:
            with around():
                loss = _loss(model, ids, targets, mask)
            loss.backward()
        finish()
        model.zero_grad(set_to_none=True)

    yield update


def _step_of(model: Any, request: Request) -> Callable[[], None]:
    if request.what == "hf":
        return lambda: None
    parameters = list(model.parameters())
    if request.what == "hf-step":
        adamw = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            adamw.step()

        return step
    masters = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    masters_adamw = torch.optim.AdamW(masters, lr=1e-6, fused=True)

    def step_masters() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        masters_adamw.step()
        masters_adamw.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)

    return step_masters


def _loss(model: Any, ids: Tensor, targets: Tensor, at: Tensor) -> Tensor:
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[at]
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, len(targets), CHUNK):
        part = slice(start, start + CHUNK)
        chunk: Any = checkpoint(_chunk_logprob, hidden[part], model.lm_head.weight, targets[part], use_reentrant=False)
        total = total + chunk
    return -total / len(targets)


def _chunk_logprob(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    logits = (hidden @ head.t()).float()
    return torch.log_softmax(logits, -1).gather(1, target[:, None]).sum()


def _padded(rows: Sequence[Trajectory], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [rows, longest], targets [T], and indices [T] of the positions that predict them."""
    longest = max(row.length for row in rows) - 1
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    at, targets = [], []
    for i, row in enumerate(rows):
        tokens = torch.from_numpy(row.token_ids).long()
        ids[i, : row.length - 1] = tokens[:-1]
        written = torch.from_numpy(row.loss_mask).nonzero().squeeze(1)
        at.append(i * longest + written - 1)
        targets.append(tokens[written])
    return ids.to(device), torch.cat(targets).to(device), torch.cat(at).to(device)
