"""Triton kernels over one chunk of logits: each reads the chunk once, in the head's dtype, and keeps float32 to itself.

Plain torch makes a float32 copy of the chunk and passes over it a dozen times, which at a vocabulary of 150k costs a
0.5B model a fifth of its step. Imported only where a CUDA chunk is at hand; :mod:`areal_like.algo.logprobs` holds the
same arithmetic in torch, for every other device and as the reference of the tests.

Legend: ``_C`` tokens of a chunk, ``_V`` vocabulary. z: scaled logits, p = softmax(z), H = -Σ p log p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: logits per step of a program's loop over the vocabulary
_BLOCK = 4096
_WARPS = 8
_BANNED = tl.constexpr(-1e30)

# the kernels' arguments carry no annotations: Triton resolves every global name in them, and knows none but its own


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(logits, bias, ban, banned, column, inside, inverse, FLAGS: tl.constexpr):
    """z of one block of one token, float32; -inf outside of the vocabulary."""
    z = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    if FLAGS & 1:
        z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    z *= inverse
    if FLAGS & 2:
        hit = tl.load(ban + column, mask=inside, other=0) != 0
        z = tl.where(hit & (banned != 0) & inside, _BANNED, z)
    return z


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_forward(
    logits, bias, ban, active, target, logprob, entropy, lse,
    inverse, stride, V, FLAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token: online softmax with Σ z exp(z) beside Σ exp(z) (Milakov and Gimelshein 2018)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    banned = tl.load(active + row).to(tl.int32) if FLAGS & 2 else 0
    peak = float("-inf")
    total = 0.0
    moment = 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        z = _scaled(logits, bias, ban, banned, column, inside, inverse, FLAGS)
        new_peak = tl.maximum(peak, tl.max(z, 0))
        shrink = tl.exp(peak - new_peak)
        e = tl.exp(z - new_peak)
        total = total * shrink + tl.sum(e, 0)
        moment = moment * shrink + tl.sum(tl.where(e > 0.0, e * z, 0.0), 0)
        peak = new_peak
    wanted = tl.load(target + row)
    chosen = tl.load(logits + wanted).to(tl.float32)
    if FLAGS & 1:
        chosen += tl.load(bias + wanted).to(tl.float32)
    chosen *= inverse
    if FLAGS & 2:
        chosen = tl.where((banned != 0) & (tl.load(ban + wanted) != 0), _BANNED, chosen)
    log_total = peak + tl.log(total)
    tl.store(logprob + row, chosen - log_total)
    tl.store(lse + row, log_total)
    tl.store(entropy + row, log_total - moment / total)


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_backward(
    logits, bias, ban, active, target, lse, entropy,
    grad_logprob, grad_entropy, inverse, stride, V, FLAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the logits over them: (g (1[y] - p) - g_H p (log p + H)) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    banned = tl.load(active + row).to(tl.int32) if FLAGS & 2 else 0
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    log_p = _scaled(logits, bias, ban, banned, column, inside, inverse, FLAGS) - tl.load(lse + row)
    p = tl.exp(log_p)
    g = tl.load(grad_logprob + row)
    grad = tl.where(column == tl.load(target + row), g, 0.0) - g * p
    if FLAGS & 4:
        grad -= tl.load(grad_entropy + row) * tl.where(p > 0.0, p * (log_p + tl.load(entropy + row)), 0.0)
    tl.store(logits + column, (grad * inverse).to(logits.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitChunk:
    """Raw logits of a chunk, and what turns them into the distribution that was sampled from.

    Attributes:
        logits_CV: any float dtype, rows contiguous.
        target_C: int64 [C].
        temperature: above 0.
        bias_V: float [V] or None.
        ban_V: uint8 [V], 1 at banned ids, and ``active_C``: bool [C], where they are banned; or None, None.
    """

    logits_CV: Tensor
    target_C: Tensor
    temperature: float
    bias_V: Tensor | None = None
    ban_V: Tensor | None = None
    active_C: Tensor | None = None

    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Logits, bias, ban, active, target; the logits again where there is none of them, which is never read."""
        absent = self.logits_CV
        optional = (absent if x is None else x for x in (self.bias_V, self.ban_V, self.active_C))
        return (self.logits_CV, *optional, self.target_C)  # type: ignore[return-value]

    def settings(self, *, entropy: bool) -> dict[str, Any]:
        flags = (self.bias_V is not None) + 2 * (self.ban_V is not None) + 4 * entropy
        return {
            "inverse": 1.0 / self.temperature,
            "stride": self.logits_CV.stride(0),
            "V": self.logits_CV.shape[1],
            "FLAGS": flags,
            "BLOCK": _BLOCK,
            "num_warps": _WARPS,
        }


def softmax_figures(chunk: LogitChunk) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy and log-sum-exp of the scaled logits, float32 [C] each."""
    tokens = chunk.logits_CV.shape[0]
    found = torch.empty(3, tokens, dtype=torch.float32, device=chunk.logits_CV.device)
    logprob_C, entropy_C, lse_C = found.unbind()
    _softmax_forward[(tokens,)](*chunk.pointers(), logprob_C, entropy_C, lse_C, **chunk.settings(entropy=False))
    return logprob_C, entropy_C, lse_C


def softmax_gradient_(
    chunk: LogitChunk, lse_C: Tensor, entropy_C: Tensor, grad_logprob_C: Tensor, grad_entropy_C: Tensor | None
) -> Tensor:
    """The gradient with respect to the raw logits, written over them; float32 [C] arguments, contiguous."""
    tokens, vocabulary = chunk.logits_CV.shape
    _softmax_backward[(tokens, triton.cdiv(vocabulary, _BLOCK))](
        *chunk.pointers(),
        lse_C,
        entropy_C,
        grad_logprob_C,
        grad_logprob_C if grad_entropy_C is None else grad_entropy_C,
        **chunk.settings(entropy=grad_entropy_C is not None),
    )
    return chunk.logits_CV
