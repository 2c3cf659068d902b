"""Chunked log-probs and entropy against float64 numpy and autograd through full logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_like.algo.logprobs import StopBan, chunked_logprobs, logprobs_from_logits, stop_ban_positions

T, D, V = 11, 6, 17


def problem(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head_VD = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    target_T = torch.randint(0, V - 3, (T,), generator=generator)
    return hidden_TD, head_VD, target_T


def ban() -> StopBan:
    active_T = torch.zeros(T, dtype=torch.bool)
    active_T[[0, 4, 5]] = True
    return StopBan(ids_K=torch.tensor([V - 1, V - 3]), active_T=active_T)


def by_numpy(
    hidden: torch.Tensor, head: torch.Tensor, target: torch.Tensor, temperature: float, banned: StopBan | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    logits = hidden.detach().double().numpy() @ head.detach().double().numpy().T / temperature
    logprobs, entropies = [], []
    for t, row in enumerate(logits):
        allowed = [v for v in range(V) if banned is None or not banned.active_T[t] or v not in banned.ids_K.tolist()]
        p = np.exp(row[allowed] - row[allowed].max())
        p /= p.sum()
        logprobs.append(np.log(p[allowed.index(int(target[t]))]))
        entropies.append(-(p * np.log(p)).sum())
    return np.array(logprobs), np.array(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("banned", [None, ban()], ids=["free", "ban"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_values_match_numpy(temperature: float, banned: StopBan | None, chunk: int) -> None:
    hidden_TD, head_VD, target_T = problem()
    want_logprob, want_entropy = by_numpy(hidden_TD, head_VD, target_T, temperature, banned)
    chunked = chunked_logprobs(hidden_TD, head_VD, target_T, temperature=temperature, ban=banned, chunk_tokens=chunk)
    direct = logprobs_from_logits(hidden_TD @ head_VD.t(), target_T, temperature=temperature, ban=banned)
    for got in (chunked, direct):
        np.testing.assert_allclose(got.logprob_T.detach().numpy(), want_logprob, rtol=1e-12)
        np.testing.assert_allclose(got.entropy_T.detach().numpy(), want_entropy, rtol=1e-12)


@pytest.mark.parametrize("banned", [None, ban()], ids=["free", "ban"])
@pytest.mark.parametrize("chunk", [3, 11])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_gradients_match_finite_differences(banned: StopBan | None, chunk: int, entropy: float) -> None:
    hidden_TD, head_VD, target_T = problem(seed=1)
    bias_V = torch.linspace(-0.5, 0.5, V, dtype=torch.float64).requires_grad_()
    weight_T = torch.linspace(-1.0, 2.0, T, dtype=torch.float64)

    def objective(hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = chunked_logprobs(hidden, head, target_T, bias_V=bias, temperature=0.8, ban=banned, chunk_tokens=chunk)
        return (weight_T * out.logprob_T + entropy * weight_T * out.entropy_T).sum()

    assert torch.autograd.gradcheck(objective, (hidden_TD, head_VD, bias_V), eps=1e-6, atol=1e-7)


def test_gradients_match_autograd_through_full_logits_in_float32() -> None:
    def gradients(chunked: bool) -> list[torch.Tensor]:
        hidden_TD, head_VD, target_T = problem(torch.float32, seed=2)
        if chunked:
            out = chunked_logprobs(hidden_TD, head_VD, target_T, temperature=0.9, ban=ban(), chunk_tokens=4)
        else:
            out = logprobs_from_logits(hidden_TD @ head_VD.t(), target_T, temperature=0.9, ban=ban())
        (out.logprob_T.sum() - 0.1 * out.entropy_T.sum()).backward()
        assert hidden_TD.grad is not None and head_VD.grad is not None
        return [hidden_TD.grad, head_VD.grad]

    for got, want in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_bfloat16_weights_give_float32_results_and_bfloat16_gradients() -> None:
    hidden_TD, head_VD, target_T = problem(torch.bfloat16)
    out = chunked_logprobs(hidden_TD, head_VD, target_T, chunk_tokens=4)
    assert out.logprob_T.dtype == out.entropy_T.dtype == torch.float32
    # the product is taken in bfloat16, as an inference engine does; everything after it is float32
    want = torch.log_softmax((hidden_TD @ head_VD.t()).float(), -1).gather(-1, target_T[:, None]).squeeze(-1)
    torch.testing.assert_close(out.logprob_T, want, rtol=1e-5, atol=1e-5)
    out.logprob_T.sum().backward()
    assert hidden_TD.grad is not None and hidden_TD.grad.dtype == torch.bfloat16
    want_gradient = torch.autograd.grad(
        logprobs_from_logits(hidden_TD.float() @ head_VD.float().t(), target_T).logprob_T.sum(), hidden_TD
    )[0]
    torch.testing.assert_close(hidden_TD.grad.float(), want_gradient.float(), rtol=0.05, atol=0.1)


def test_chunks_change_nothing() -> None:
    hidden_TD, head_VD, target_T = problem(torch.float32)
    one = chunked_logprobs(hidden_TD, head_VD, target_T, chunk_tokens=T)
    many = chunked_logprobs(hidden_TD, head_VD, target_T, chunk_tokens=2)
    torch.testing.assert_close(one.logprob_T, many.logprob_T, rtol=1e-6, atol=1e-6)


def test_no_rows_give_no_log_probs_and_zero_gradients() -> None:
    hidden_TD, head_VD, target_T = problem()
    out = chunked_logprobs(hidden_TD[:0], head_VD, target_T[:0])
    out.logprob_T.sum().backward()
    assert out.logprob_T.shape == (0,)
    assert head_VD.grad is not None and not head_VD.grad.any()


class LargestTensors(TorchDispatchMode):
    """Adds up the bytes of live outputs of at least ``least`` elements, and keeps the peak."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.live, self.peak = least, dict[int, int](), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        import weakref

        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.least:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.live:
                    self.live[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage.data_ptr(), None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_peak_memory_is_at_most_two_and_a_half_chunks(dtype: torch.dtype, entropy: bool) -> None:
    tokens, hidden, vocabulary, chunk = 64, 4, 5000, 16
    hidden_TD = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    head_VD = torch.randn(vocabulary, hidden).to(dtype).requires_grad_()
    with LargestTensors(least=chunk * vocabulary) as mode:
        out = chunked_logprobs(hidden_TD, head_VD, torch.arange(tokens), chunk_tokens=chunk)
        (out.logprob_T + (out.entropy_T if entropy else 0.0)).sum().backward()
    assert 0 < mode.peak <= 2.5 * 4 * chunk * vocabulary


def test_ban_positions_restart_with_every_answer_and_every_row() -> None:
    #                       row 0: two answers   row 1: answer starts at once   row 2: nothing written
    mask = [False, True, True, True, False, True, True, True, True, False, False]
    row = [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    got = stop_ban_positions(torch.tensor(mask), torch.tensor(row), 2)
    want = [False, True, True, False, False, True, True, True, False, False, False]
    assert got.tolist() == want
    assert not stop_ban_positions(torch.tensor(mask), torch.tensor(row), 0).any()
    assert stop_ban_positions(torch.tensor(mask), torch.tensor(row), 99).tolist() == mask


def test_bad_arguments_are_refused() -> None:
    hidden_TD, head_VD, target_T = problem()
    with pytest.raises(ValueError, match="temperature must be above 0"):
        chunked_logprobs(hidden_TD, head_VD, target_T, temperature=0.0)
    with pytest.raises(ValueError, match="must agree in T"):
        chunked_logprobs(hidden_TD, head_VD, target_T[:-1])
    with pytest.raises(ValueError, match="chunk_tokens"):
        chunked_logprobs(hidden_TD, head_VD, target_T, chunk_tokens=0)
