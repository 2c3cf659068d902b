"""From logits to tokens and their log-probs, vectorised over the rows of a batch.

Order of the transformations, as in transformers and vLLM: frequency penalty and stop ban on the raw logits, then
temperature, top-k, top-p, min-p. The log-prob returned is that of the distribution after all of them: the one the
token was drawn from. A greedy row takes the most likely token after penalty and ban; its log-prob is that token's
under the softmax at temperature 1.

Suffixes: _R rows, _S the rows that top-k, top-p or min-p restrict, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_like.inference.embedded.seeds import U64Array, uniforms


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """Sampling parameters of R rows, one numpy array per parameter, each of length R.

    ``seed`` uint64, ``written`` int64 (tokens written so far: the position of the next), ``temperature`` float32 > 0
    (1 for greedy rows), ``greedy`` bool, ``top_k`` int64 (0 is off), ``top_p`` and ``min_p`` float32 (1 and 0 are off).
    """

    seed: U64Array
    written: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float32]
    greedy: npt.NDArray[np.bool_]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitChange:
    """What changes one row's raw logits before sampling: ``banned`` ids, and a penalty on tokens already written."""

    row: int
    banned: Sequence[int]
    frequency_penalty: float
    written_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """``tokens`` int64 [R] and ``logprobs`` float32 [R]; a log-prob that is not finite marks a broken distribution."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]


def draw(logits_RV: Tensor, columns: SamplingColumns, changes: Sequence[LogitChange] = ()) -> Drawn:
    """Draw one token per row by inverting its cumulative distribution at the uniform of (seed, position).

    Args:
        logits_RV: raw logits of any float dtype; float32 logits may be overwritten.
        columns: sampling parameters of the R rows.
        changes: rows whose raw logits are penalised or banned first.
    """
    scores_RV = logits_RV.float()
    if changes:
        scores_RV = _change_logits(scores_RV, changes)
    greedy_R = None
    if columns.greedy.any():
        greedy_R = scores_RV.argmax(dim=-1)
    if (columns.temperature != 1.0).any():
        # subtracting the maximum first keeps the quotient finite for any temperature above 0
        peak_R1 = scores_RV.amax(dim=-1, keepdim=True)
        scores_RV = (scores_RV - peak_R1) / _to_device(columns.temperature, scores_RV)[:, None]
    scores_RV = _restrict(scores_RV, columns)
    logprobs_RV = torch.log_softmax(scores_RV, dim=-1)
    tokens_R = _invert(logprobs_RV, uniforms(columns.seed, columns.written))
    if greedy_R is not None:
        tokens_R = torch.where(_to_device(columns.greedy, tokens_R), greedy_R, tokens_R)
    logprobs_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    return Drawn(tokens=tokens_R.cpu().numpy(), logprobs=logprobs_R.cpu().numpy())


def _invert(logprobs_RV: Tensor, uniforms_R: npt.NDArray[np.float64]) -> Tensor:
    """First token whose cumulative probability exceeds the uniform. In float64: a vocabulary's tail would drown in
    float32 rounding near 1. A token of probability 0 never exceeds its predecessor, so it is never drawn."""
    cumulative_RV = logprobs_RV.exp().cumsum(dim=-1, dtype=torch.float64)
    targets_R1 = (_to_device(uniforms_R, logprobs_RV) * cumulative_RV[:, -1])[:, None]
    found_R = torch.searchsorted(cumulative_RV, targets_R1, right=True)[:, 0]
    # only a row of NaN searches past the end; its log-prob says so
    return found_R.clamp_(max=logprobs_RV.shape[-1] - 1)


def _restrict(scores_RV: Tensor, columns: SamplingColumns) -> Tensor:
    """Set tokens outside top-k, then top-p, then min-p to -inf, in the rows that ask for it."""
    asks = ((columns.top_k > 0) | (columns.top_p < 1.0) | (columns.min_p > 0.0)) & ~columns.greedy
    if not asks.any():
        return scores_RV
    index = np.flatnonzero(asks)
    rows_S = _to_device(index, scores_RV)
    sorted_SV, order_SV = scores_RV[rows_S].sort(dim=-1, descending=True, stable=True)
    vocabulary = scores_RV.shape[-1]
    top_k = np.where(columns.top_k[index] > 0, columns.top_k[index], vocabulary)
    ranks_V = torch.arange(vocabulary, device=scores_RV.device)
    keep_SV = ranks_V < _to_device(top_k, scores_RV)[:, None]
    probs_SV = torch.softmax(sorted_SV.masked_fill(~keep_SV, -torch.inf), dim=-1)
    before_SV = probs_SV.cumsum(dim=-1) - probs_SV
    top_p = _to_device(columns.top_p[index], scores_RV)[:, None]
    keep_SV &= (before_SV < top_p) | (top_p >= 1.0)
    keep_SV &= probs_SV >= _to_device(columns.min_p[index], scores_RV)[:, None] * probs_SV[:, :1]
    kept_SV = sorted_SV.masked_fill(~keep_SV, -torch.inf)
    restricted_SV = torch.empty_like(kept_SV).scatter_(1, order_SV, kept_SV)
    return scores_RV.index_copy(0, rows_S, restricted_SV)


def _change_logits(scores_RV: Tensor, changes: Sequence[LogitChange]) -> Tensor:
    """A copy of ``scores_RV`` with ``frequency_penalty`` times the count of every written token subtracted, and banned
    ids at -inf."""
    scores_RV = scores_RV.clone()
    device = scores_RV.device
    penalised = [c for c in changes if c.frequency_penalty and c.written_ids]
    if penalised:
        rows = [c.row for c in penalised for _ in c.written_ids]
        ids = [token for c in penalised for token in c.written_ids]
        amounts = [-c.frequency_penalty for c in penalised for _ in c.written_ids]
        where = (torch.tensor(rows, device=device), torch.tensor(ids, device=device))
        scores_RV.index_put_(where, torch.tensor(amounts, device=device), accumulate=True)
    rows = [c.row for c in changes for _ in c.banned]
    if rows:
        ids = [token for c in changes for token in c.banned]
        scores_RV[torch.tensor(rows, device=device), torch.tensor(ids, device=device)] = -torch.inf
    return scores_RV


def _to_device(array: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)
