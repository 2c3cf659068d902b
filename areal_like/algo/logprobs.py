"""Float32 log-probs and entropy of target tokens, without ever holding the full logits.

Legend: ``_T`` target tokens, ``_C`` tokens of one chunk, ``_D`` hidden size, ``_V`` vocabulary, ``_K`` banned ids.

The distribution is the one sampled from: logits / temperature, with banned ids removed. Products are taken in the
head's dtype, as the inference engines do; everything after the product is float32 (float64 for float64 inputs).
On CUDA, where Triton is installed, two kernels do what follows the product (:mod:`areal_like.algo.vocab_kernels`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: stands in for -inf: exp of it is exactly 0, and 0 times it is 0 rather than NaN
_BANNED_LOGIT = -1e30
#: tokens of one chunk: a GPU needs long products to be busy, and adds to the head's gradient once per chunk
_CHUNK_TOKENS = {"cuda": 4096}
_CHUNK_TOKENS_ELSEWHERE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StopBan:
    """Ids that could not be written at some positions (stop tokens before ``min_new_tokens``).

    Attributes:
        ids_K: int64 [K].
        active_T: bool [T], true for target tokens that were written under the ban.
    """

    ids_K: Tensor
    active_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """``logprob_T`` and ``entropy_T`` (nats) of the sampling distribution at every target token, float32 [T]."""

    logprob_T: Tensor
    entropy_T: Tensor


def stop_ban_positions(mask_T: Tensor, row_T: Tensor, min_new_tokens: int) -> Tensor:
    """True [T] for the first ``min_new_tokens`` tokens of every answer: a maximal run of written tokens of a row.

    ``mask_T`` must hold *all* target tokens of the rows, in order: environment text is what separates two answers.
    """
    if min_new_tokens <= 0 or mask_T.numel() == 0:
        return torch.zeros_like(mask_T)
    index_T = torch.arange(mask_T.numel(), device=mask_T.device)
    starts_T = mask_T.clone()
    starts_T[1:] &= ~mask_T[:-1] | (row_T[1:] != row_T[:-1])
    start_T = torch.cummax(torch.where(starts_T, index_T, -1), dim=0).values
    return mask_T & (index_T - start_T < min_new_tokens)


def logprobs_from_logits(
    logits_TV: Tensor, target_T: Tensor, *, temperature: float = 1.0, ban: StopBan | None = None
) -> LogProbs:
    """The same from logits that exist already. Differentiable by autograd; needs a few [T, V] buffers."""
    scaled_TV = _upcast(logits_TV) / _checked(temperature)
    if ban is not None:
        banned_TV = torch.zeros_like(scaled_TV, dtype=torch.bool)
        banned_TV[:, ban.ids_K] = ban.active_T[:, None]
        scaled_TV = scaled_TV.masked_fill(banned_TV, _BANNED_LOGIT)
    logp_TV = torch.log_softmax(scaled_TV, dim=-1)
    return LogProbs(
        logprob_T=logp_TV.gather(-1, target_T[:, None]).squeeze(-1), entropy_T=-(logp_TV.exp() * logp_TV).sum(-1)
    )


def chunked_logprobs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    target_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    ban: StopBan | None = None,
    chunk_tokens: int | None = None,
) -> LogProbs:
    """Log-probs and entropy of ``target_T`` under softmax((hidden · headᵀ + bias) / temperature).

    Forward and backward go over chunks of ``chunk_tokens``; the backward pass computes the logits of a chunk again.
    Peak extra memory is at most 2.5 float32 chunks [C, V] beside hidden states, head and their gradients.

    Args:
        hidden_TD: float [T, D], the last hidden state at the position that predicts each target.
        head_VD: float [V, D], a plain (unsharded) tensor of the same dtype.
        target_T: int64 [T].
        bias_V: float [V] or None.
        chunk_tokens: None takes what suits the device.
    """
    if chunk_tokens is None:
        chunk_tokens = _CHUNK_TOKENS.get(hidden_TD.device.type, _CHUNK_TOKENS_ELSEWHERE)
    if hidden_TD.shape[0] != target_T.shape[0]:
        raise ValueError(f"hidden states {tuple(hidden_TD.shape)} and targets {tuple(target_T.shape)} must agree in T")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    fused = hidden_TD.is_cuda and hidden_TD.dtype != torch.float64 and _has_triton()
    function = _FusedLogProbs if fused else _ChunkedLogProbs
    logprob_T, entropy_T = function.apply(  # type: ignore[no-untyped-call]
        hidden_TD, head_VD, bias_V, target_T, ban, _checked(temperature), chunk_tokens
    )
    return LogProbs(logprob_T=logprob_T, entropy_T=entropy_T)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _checked(temperature: float) -> float:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0 to have log-probs, got {temperature}")
    return temperature


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _ChunkedLogProbs(torch.autograd.Function):
    """d logp_y/d z = 1[y] − p and dH/dz = −p (log p + H), with z the scaled logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        target_T: Tensor,
        ban: StopBan | None,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        rows = hidden_TD.shape[0]
        dtype = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        logprob_T, entropy_T, lse_T = (torch.empty(rows, dtype=dtype, device=hidden_TD.device) for _ in range(3))
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            logits_CV = _chunk_logits(hidden_TD[part], head_VD, bias_V, temperature, ban, part)
            chosen_C = logits_CV.gather(1, target_T[part, None]).squeeze(1)
            lse_C = torch.logsumexp(logits_CV, dim=1)
            logprob_T[part], lse_T[part] = chosen_C - lse_C, lse_C
            entropy_T[part] = lse_C - _expected_logit(logits_CV, lse_C)
            del logits_CV
        ctx.save_for_backward(hidden_TD, head_VD, bias_V, target_T, lse_T, entropy_T)
        ctx.ban, ctx.temperature, ctx.chunk = ban, temperature, chunk
        ctx.set_materialize_grads(False)
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        """A gradient that is None was not asked for: the usual case of the entropy, and cheaper."""
        hidden_TD, head_VD, bias_V, target_T, lse_T, entropy_T = ctx.saved_tensors
        if grad_logprob_T is None:
            grad_logprob_T = torch.zeros_like(lse_T)
        grad_hidden_TD = torch.empty_like(hidden_TD)
        grad_head_VD = torch.zeros_like(head_VD)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        for start in range(0, hidden_TD.shape[0], ctx.chunk):
            part = slice(start, min(start + ctx.chunk, hidden_TD.shape[0]))
            logp_CV = _chunk_logits(hidden_TD[part], head_VD, bias_V, ctx.temperature, ctx.ban, part)
            logp_CV.sub_(lse_T[part, None])
            grad_CV = _logit_gradient(
                logp_CV,
                target_T[part],
                grad_logprob_T[part],
                None if grad_entropy_T is None else grad_entropy_T[part],
                entropy_T[part],
            )
            del logp_CV
            grad_CV = grad_CV.div_(ctx.temperature).to(head_VD.dtype)
            torch.mm(grad_CV, head_VD, out=grad_hidden_TD[part])
            grad_head_VD.addmm_(grad_CV.t(), hidden_TD[part])
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            del grad_CV
        return grad_hidden_TD, grad_head_VD, grad_bias_V, None, None, None, None


class _FusedLogProbs(torch.autograd.Function):
    """The same by two kernels, which hold one chunk of logits in the head's dtype and nothing else of that size."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        target_T: Tensor,
        ban: StopBan | None,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        from areal_like.algo.vocab_kernels import LogitChunk, softmax_figures

        rows = hidden_TD.shape[0]
        ban_V = _ban_mask(ban, head_VD)
        logprob_T, entropy_T, lse_T = (
            torch.empty(rows, dtype=torch.float32, device=hidden_TD.device) for _ in range(3)
        )
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            chunk_logits = LogitChunk(
                logits_CV=torch.mm(hidden_TD[part], head_VD.t()),
                target_C=target_T[part],
                temperature=temperature,
                bias_V=bias_V,
                ban_V=ban_V,
                active_C=None if ban is None else ban.active_T[part],
            )
            logprob_T[part], entropy_T[part], lse_T[part] = softmax_figures(chunk_logits)
            del chunk_logits
        ctx.save_for_backward(hidden_TD, head_VD, bias_V, target_T, lse_T, entropy_T)
        ctx.ban, ctx.ban_V, ctx.temperature, ctx.chunk = ban, ban_V, temperature, chunk
        ctx.set_materialize_grads(False)
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        from areal_like.algo.vocab_kernels import LogitChunk, softmax_gradient_

        hidden_TD, head_VD, bias_V, target_T, lse_T, entropy_T = ctx.saved_tensors
        grad_logprob_T = torch.zeros_like(lse_T) if grad_logprob_T is None else grad_logprob_T.contiguous()
        grad_entropy_T = None if grad_entropy_T is None else grad_entropy_T.contiguous()
        grad_hidden_TD = torch.empty_like(hidden_TD)
        grad_head_VD = torch.zeros_like(head_VD)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        for start in range(0, hidden_TD.shape[0], ctx.chunk):
            part = slice(start, min(start + ctx.chunk, hidden_TD.shape[0]))
            chunk_logits = LogitChunk(
                logits_CV=torch.mm(hidden_TD[part], head_VD.t()),
                target_C=target_T[part],
                temperature=ctx.temperature,
                bias_V=bias_V,
                ban_V=ctx.ban_V,
                active_C=None if ctx.ban is None else ctx.ban.active_T[part],
            )
            grad_entropy_C = None if grad_entropy_T is None else grad_entropy_T[part]
            grad_CV = softmax_gradient_(
                chunk_logits, lse_T[part], entropy_T[part], grad_logprob_T[part], grad_entropy_C
            )
            del chunk_logits
            torch.mm(grad_CV, head_VD, out=grad_hidden_TD[part])
            grad_head_VD.addmm_(grad_CV.t(), hidden_TD[part])
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            del grad_CV
        return grad_hidden_TD, grad_head_VD, grad_bias_V, None, None, None, None


def _ban_mask(ban: StopBan | None, head_VD: Tensor) -> Tensor | None:
    """uint8 [V], 1 at banned ids."""
    if ban is None:
        return None
    return torch.zeros(head_VD.shape[0], dtype=torch.uint8, device=head_VD.device).index_fill_(0, ban.ids_K, 1)


def _chunk_logits(
    hidden_CD: Tensor, head_VD: Tensor, bias_V: Tensor | None, temperature: float, ban: StopBan | None, part: slice
) -> Tensor:
    """Scaled logits of one chunk, float32 or float64 [C, V], owned by the caller."""
    logits_CV = torch.mm(hidden_CD, head_VD.t())
    if bias_V is not None:
        logits_CV += bias_V
    logits_CV = _upcast(logits_CV)
    if temperature != 1.0:
        logits_CV.div_(temperature)
    if ban is not None:  # without asking the device how many are banned: that would wait for it
        allowed_CK = logits_CV.index_select(1, ban.ids_K)
        logits_CV.index_copy_(1, ban.ids_K, allowed_CK.masked_fill_(ban.active_T[part, None], _BANNED_LOGIT))
    return logits_CV


def _expected_logit(logits_CV: Tensor, lse_C: Tensor) -> Tensor:
    """Σ_v p_v z_v [C], with one more chunk of memory."""
    prob_CV = torch.sub(logits_CV, lse_C[:, None]).exp_()
    return prob_CV.mul_(logits_CV).sum(1)


def _logit_gradient(
    logp_CV: Tensor, target_C: Tensor, grad_logprob_C: Tensor, grad_entropy_C: Tensor | None, entropy_C: Tensor
) -> Tensor:
    """Gradient with respect to the scaled logits [C, V]; uses up ``logp_CV``."""
    if grad_entropy_C is None:
        grad_CV = logp_CV.exp_().mul_(-grad_logprob_C[:, None])
    else:  # -p (g_logp + g_H (logp + H))
        prob_CV = logp_CV.exp()
        logp_CV.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None]).add_(grad_logprob_C[:, None])
        grad_CV = prob_CV.mul_(logp_CV).neg_()
    return grad_CV.scatter_add_(1, target_C[:, None], grad_logprob_C[:, None])
