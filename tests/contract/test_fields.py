"""Engines ignore fields that they do not know: each one that we send must be one that the installed engine has."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from subjects import ROOT, python_of

from areal_like.api.wire import GenerateBody, SamplingBody
from areal_like.client.dialect import Dialect
from areal_like.inference.backends.epoch import ServerEpoch
from areal_like.inference.backends.sglang_dialect import SglangDialect
from areal_like.inference.backends.sglang_server import ServerFacts, ServerState
from areal_like.inference.backends.vllm_dialect import CutDialect, VllmDialect
from areal_like.weights.checkpoint import Expected

pytestmark = pytest.mark.engines

#: everything that can be asked for
EVERYTHING = SamplingBody(
    max_new_tokens=8, min_new_tokens=2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.5,
    stop=("x",), stop_token_ids=(3,), ignore_eos=True, seed=1,
)  # fmt: skip
#: our own path's: it is in this package, and in the engine's environment
VLLM_GENERATE = (str(ROOT / "areal_like/inference/vllm_plugin/token_route.py"), "_Asked")
VLLM_SAMPLING = ("vllm/sampling_params.py", "SamplingParams")
VLLM_ALLOCATION = ("vllm/device_allocator/__init__.py", "AllocationData")
SGLANG_GENERATE = ("sglang/srt/managers/io_struct.py", "GenerateReqInput")
SGLANG_SAMPLING = ("sglang/srt/sampling/sampling_params.py", "SamplingParams")


def sglang() -> SglangDialect:
    facts = ServerFacts(
        context_length=100, vocabulary=50, device="cpu", ranks=1, pipeline=1, dtype="float32", overlapped=False,
        filtered_tokens=4096, expected=Expected(shapes={}, optional={}),
    )  # fmt: skip
    return SglangDialect(ServerState(facts=facts))


def fields_of(engine: str, source: tuple[str, str]) -> set[str]:
    """Annotated attributes of a class and, in the same file, of the classes it is made of; read, not imported.

    ``source``: a file in the engine's packages, or anywhere by its whole path.
    """
    packages = next((python_of(engine).parent.parent / "lib").glob("python3*/site-packages"), Path("/nowhere"))
    if not (packages / source[0]).exists():
        pytest.skip(f"no {source[0]} in .venv-{engine}: make engines-{engine}")
    classes = {
        node.name: node
        for node in ast.walk(ast.parse((packages / source[0]).read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    wanted, found = [source[1]], set()
    while wanted:
        node = classes[wanted.pop()]
        wanted += [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        found |= {
            line.target.id for line in node.body if isinstance(line, ast.AnnAssign) and hasattr(line.target, "id")
        }
    return found


@pytest.mark.parametrize(
    ("engine", "dialect", "request_class", "sampling_class"),
    [
        ("vllm", VllmDialect(ServerEpoch()), VLLM_GENERATE, VLLM_SAMPLING),
        ("vllm", CutDialect(ServerEpoch()), VLLM_GENERATE, VLLM_SAMPLING),
        ("sglang", sglang(), SGLANG_GENERATE, SGLANG_SAMPLING),
    ],
)
def test_every_field_that_is_sent_is_known(
    engine: str, dialect: Dialect, request_class: tuple[str, str], sampling_class: tuple[str, str]
) -> None:
    body = GenerateBody(rid="r.1", input_ids=[5, 6], sampling=EVERYTHING)
    content = json.loads(dialect.generate(body).content)
    sampling = content.pop("sampling_params", {})
    assert content.keys() - fields_of(engine, request_class) == set()
    assert sampling.keys() - fields_of(engine, sampling_class) == set()


def test_what_the_allocator_is_asked_is_known() -> None:
    """By ``areal_like.inference.vllm_plugin.worker``, on GPUs."""
    assert fields_of("vllm", VLLM_ALLOCATION) >= {"tag", "is_asleep"}
