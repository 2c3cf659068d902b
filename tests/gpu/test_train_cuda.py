"""The trainer's CUDA paths: kernels against float64, packed attention against single rows, no waiting in the loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "train"))

from train_cases import build_model, random_batch, weights_of

import areal_like.train.engine as engine_module
from areal_like.algo.logprobs import StopBan, chunked_logprobs, logprobs_from_logits
from areal_like.config.actor import ActorConfig
from areal_like.train.attention import has_kernel, varlen_attention
from areal_like.train.batching import TrainRow, build_micro_batch
from areal_like.train.engine import TrainEngine
from areal_like.train.model import PolicyModel, Sampling, load_language_model
from areal_like.train.parallel import Parallel, process_group
from areal_like.train.parameters import ShardedParameters
from areal_like.train.ppo import PpoUpdate
from areal_like.train.stopwatch import Stopwatch
from areal_like.weights.adapters import ADAPTER_A, ADAPTER_B

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # read by the compiler
]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parallel]:
    rendezvous = f"file://{tmp_path_factory.mktemp('rendezvous') / 'file'}"
    device = torch.device("cuda", 0)
    with process_group(rank=0, world_size=1, rendezvous=rendezvous, device=device, timeout=60) as parallel:
        yield parallel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model") / "llama", tied=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("banned", [False, True])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_kernels_against_float64(dtype: torch.dtype, with_bias: bool, banned: bool, entropy: float) -> None:
    torch.manual_seed(0)
    tokens, size, vocabulary = 300, 64, 9001
    hidden = torch.randn(tokens, size, device="cuda", dtype=dtype).requires_grad_()
    head = (torch.randn(vocabulary, size, device="cuda") * 0.2).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, device="cuda", dtype=dtype).requires_grad_() if with_bias else None
    target = torch.randint(0, vocabulary - 5, (tokens,), device="cuda")
    ids = torch.tensor([vocabulary - 1, vocabulary - 3], device="cuda")
    ban = StopBan(ids_K=ids, active_T=torch.arange(tokens, device="cuda") % 3 == 0) if banned else None
    weight = torch.randn(tokens, device="cuda")
    inputs = [x for x in (hidden, head, bias) if x is not None]

    found = chunked_logprobs(hidden, head, target, bias_V=bias, temperature=0.8, ban=ban, chunk_tokens=128)
    got = torch.autograd.grad((weight * (found.logprob_T + entropy * found.entropy_T)).sum(), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    logits = exact[0] @ exact[1].t() + (exact[2] if with_bias else 0.0)
    want = logprobs_from_logits(logits, target, temperature=0.8, ban=ban)
    expected = torch.autograd.grad((weight * (want.logprob_T + entropy * want.entropy_T)).sum(), exact)
    near = 2e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.logprob_T.double(), want.logprob_T, rtol=near, atol=near)
    torch.testing.assert_close(found.entropy_T.double(), want.entropy_T, rtol=near, atol=near)
    for ours, theirs in zip(got, expected, strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < (1e-4 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_packed_attention_equals_row_after_row(kv_heads: int) -> None:
    torch.manual_seed(0)
    lengths = (5, 130, 1, 77)
    assert has_kernel("cuda", torch.bfloat16)
    shapes = [(1, 6, sum(lengths), 64), (1, kv_heads, sum(lengths), 64), (1, kv_heads, sum(lengths), 64)]
    packed = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in packed]
    starts = torch.tensor(np.cumsum((0, *lengths)), dtype=torch.int32, device="cuda")
    module = torch.nn.Identity()
    out, _ = varlen_attention(module, *packed, None, cu_seq_lens_q=starts, max_length_q=512)
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for q, k, v in zip(*(torch.split(x, lengths, dim=2) for x in exact), strict=True)
    ]
    want = torch.cat(parts, 2).transpose(1, 2)
    gradient = torch.randn(want.shape, device="cuda")
    got = torch.autograd.grad(out, packed, gradient.bfloat16())
    expected = torch.autograd.grad(want, exact, gradient.double())
    for ours, theirs in zip((out, *got), (want, *expected), strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 0.02


def _engine(folder: Path, parallel: Parallel, layout: Any, dtype: torch.dtype, **options: Any) -> TrainEngine:
    compiled, lora = options.pop("compiled", False), options.pop("lora", None)
    model = load_language_model(folder, layout=layout, compiled=compiled, lora=lora).to(parallel.device)
    optimizer = ActorConfig.model_validate({"optimizer": {"lr": 3e-3}}).optimizer
    policy = PolicyModel(model, Sampling(min_new_tokens=1, stop_token_ids=(2, 5)))
    return TrainEngine(policy, parallel, optimizer, total_steps=10, compute_dtype=dtype, **options)


def _updated(folder: Path, parallel: Parallel, layout: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    engine = _engine(folder, parallel, layout, dtype, **options)
    metrics = _run(engine, layout)
    return weights_of(engine), metrics


def _run(engine: TrainEngine, layout: str) -> dict[str, float]:
    actor = ActorConfig.model_validate(
        {"ppo_n_minibatches": 2, "mb_spec": {"packing": layout, "max_tokens_per_mb": 30}, "optimizer": {"lr": 3e-3}}
    )
    batch, rows = random_batch()
    return dict(PpoUpdate(engine, actor, lambda keys: [rows[key] for key in keys]).run(batch).metrics)


def test_float32_updates_agree_between_layouts_and_with_an_offloaded_optimiser(
    folder: Path, one_rank: Parallel
) -> None:
    plain, figures = _updated(folder, one_rank, "padded", torch.float32)
    for layout, options in (("packed", {}), ("padded", {"offload": True}), ("packed", {"offload": True})):
        other, found = _updated(folder, one_rank, layout, torch.float32, **options)
        assert found["train/grad_norm"] == pytest.approx(figures["train/grad_norm"], rel=1e-3)
        for name in plain:
            np.testing.assert_allclose(other[name], plain[name], atol=3e-4, err_msg=name)


@pytest.mark.parametrize("compiled", [False, True])
def test_bfloat16_updates_are_near_float32(folder: Path, one_rank: Parallel, compiled: bool) -> None:
    _, exact = _updated(folder, one_rank, "packed", torch.float32)
    _, found = _updated(folder, one_rank, "packed", torch.bfloat16, compiled=compiled)
    assert found["train/grad_norm"] == pytest.approx(exact["train/grad_norm"], rel=0.1)


def test_a_micro_batch_never_waits_for_the_device(folder: Path, one_rank: Parallel) -> None:
    engine = _engine(folder, one_rank, "packed", torch.bfloat16)
    _, rows = random_batch()
    train_rows = [TrainRow(trajectory=t, advantage=1.0) for t in rows.values()]

    def step(last: bool) -> None:
        batch = build_micro_batch(train_rows, layout="packed", min_new_tokens=1, device=one_rank.device)
        logprob_T, _ = engine.logprobs(batch)
        engine.backward(logprob_T.sum(), last=last)

    step(False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step(True)
    assert np.isfinite(engine.step().grad_norm)


def _whole_and_sharded(folder: Path, parallel: Parallel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    whole, figures = _updated(folder, parallel, "packed", torch.bfloat16, **options)
    monkeypatch.setattr(
        engine_module, "hold", lambda module, parallel, dtype, *, offload: ShardedParameters(module, parallel, dtype)
    )
    sharded, found = _updated(folder, parallel, "packed", torch.bfloat16, **options)
    assert found["train/grad_norm"] == pytest.approx(figures["train/grad_norm"], rel=0.02)
    for name in whole:  # attention's backward adds up in any order
        np.testing.assert_allclose(sharded[name], whole[name], atol=0.02, err_msg=name)


@pytest.mark.parametrize("compiled", [False, True])
def test_whole_weights_learn_what_sharded_ones_do(
    folder: Path, one_rank: Parallel, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    _whole_and_sharded(folder, one_rank, monkeypatch, compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_adapters_in_bfloat16_learn_as_in_float32_and_are_all_that_is_published(
    folder: Path, one_rank: Parallel, compiled: bool, offload: bool
) -> None:
    pytest.importorskip("peft")
    lora = ActorConfig.model_validate({"lora": {"rank": 3, "alpha": 6}}).lora
    base = dict(_engine(folder, one_rank, "packed", torch.bfloat16).named_weights())
    base = {name: tensor.clone() for name, tensor in base.items()}
    norms = []
    for dtype, options in ((torch.float32, {}), (torch.bfloat16, {"compiled": compiled, "offload": offload})):
        torch.manual_seed(2)
        engine = _engine(folder, one_rank, "packed", dtype, lora=lora, **options)
        report = _run(engine, "packed")
        norms.append(report["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
    published = {name: tensor.clone() for name, tensor in engine.published_weights()}
    assert all(".lora_" in name and tensor.dtype == torch.bfloat16 for name, tensor in published.items())
    assert {tensor.device.type for tensor in published.values()} == {"cuda"}
    merged = {name: tensor.clone() for name, tensor in engine.named_weights()}
    assert merged.keys() == base.keys()
    for name, tensor in merged.items():
        layer = name.removesuffix(".weight")
        if layer + ADAPTER_A in published:
            a, b = (published[layer + half].float() for half in (ADAPTER_A, ADAPTER_B))
            want = (base[name].float() + b @ a).bfloat16()
            torch.testing.assert_close(tensor, want, rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(tensor, base[name]), name
    assert any(published[name].any() for name in published if name.endswith(ADAPTER_B))


def test_rounds_are_timed_on_the_device(one_rank: Parallel) -> None:
    watch = Stopwatch(one_rank.device)
    matrix = torch.randn(4096, 4096, device="cuda")
    for products in (1, 60):
        with watch.round():
            for _ in range(products):
                matrix @ matrix
    short, long = watch.seconds()
    assert 0 < short < long and watch.seconds() == []
