"""What benchmarks of weight updates publish: a header without bytes to start from, and weights unlike the others."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from broadcast_watch import Broadcasts
from step_shapes import Shape
from sync_policy import Policy, write_model_folder

from areal_like.weights.checkpoint import Expected

SHAPE = Shape(hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, vocabulary=300, tied=True)
LARGE = Shape(hidden=2048, intermediate=8192, layers=4, heads=16, kv_heads=4, vocabulary=32000, tied=False)


def test_a_folder_tells_every_tensor_and_takes_no_room(tmp_path):
    folder = write_model_folder(LARGE, tmp_path / "large")
    found = Expected.of(folder, tied=False)
    attention = 2048 * 2048 * 2 + 2 * 2048 * 512
    parameters = 4 * (attention + 3 * 2048 * 8192 + 2 * 2048) + 2 * 32000 * 2048 + 2048
    assert sum(torch.Size(shape).numel() for shape in found.shapes.values()) == parameters
    stored = (folder / "model.safetensors").stat()
    assert stored.st_size > 2 * parameters
    assert stored.st_blocks * 512 < 2**20


def test_the_trainers_weights_are_those_that_the_folder_tells(tmp_path):
    policy = Policy(SHAPE, torch.device("cpu"))
    expected = Expected.of(write_model_folder(SHAPE, tmp_path / "small"), tied=True)
    assert {name: tuple(tensor.shape) for name, tensor in policy.weights.items()} == dict(expected.shapes)


def test_a_version_is_always_the_same_and_unlike_any_other():
    policy, other = (Policy(SHAPE, torch.device("cpu")) for _ in range(2))
    prompt, answer = [5, 6, 7], [8, 9, 10, 11]
    policy.renew(1)
    other.renew(1)
    first = policy.logprobs(prompt, answer)
    assert first == other.logprobs(prompt, answer)
    other.renew(2)
    second = other.logprobs(prompt, answer)
    assert sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first) > 0.3
    other.renew(1)
    assert first == other.logprobs(prompt, answer)


def test_logprobs_are_those_of_the_answers_tokens():
    policy = Policy(SHAPE, torch.device("cpu"), dtype=torch.float32)
    policy.renew(3)
    tokens = [5, 6, 7, 8, 9]
    logits = policy.model(torch.tensor([tokens])).logits[0].detach().double()
    want = [float(logits[place].log_softmax(-1)[tokens[place + 1]]) for place in (2, 3)]
    torch.testing.assert_close(policy.logprobs(tokens[:3], tokens[3:]), want, rtol=1e-5, atol=1e-5)


def test_somebody_is_told_once_that_a_bucket_is_on_its_way():
    told = []
    seen = Broadcasts(on_fatal=lambda: told.append(seen.count))
    assert seen.seconds is None
    for _ in range(4):
        seen.leaving()
    seen.arrived()
    for thread in seen.timers:
        thread.join()
    assert len(told) == 1
    assert seen.seconds is not None
    seen.restart()
    assert seen.seconds is None
