"""The start of an SGLang server, in processes that have no SGLang: what comes before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import areal_like

PLUGIN = Path(areal_like.__file__).parent / "inference" / "sglang_plugin"

_SHIMS = """
import sys
sys.path.insert(0, sys.argv[1])
import cpu_shims
for _ in range(2):
    cpu_shims.install()
import sgl_kernel, sgl_kernel.mamba, torch
from sgl_kernel import some_kernel
from sgl_kernel.mamba import causal
sgl_kernel.scalar_types.uint4b8
for kernel in (some_kernel, causal, sgl_kernel.scalar_types.uint4b8):
    try:
        kernel(1, n=2)
    except RuntimeError as error:
        print(error)
print(torch.ops.torchvision.nms.default._schema)
"""

_LOGGED = """
import logging, sys
sys.path.insert(0, sys.argv[1])
import serve
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
logging.info("args %s", {"api_key": "s3cret"})
logging.info("nothing to hide")
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_shims_stand_in_for_what_a_cpu_lacks_and_do_nothing() -> None:
    ended = run("-c", _SHIMS, str(PLUGIN))
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        "sgl_kernel.some_kernel: this kernel does not exist on a CPU",
        "sgl_kernel.mamba.causal: this kernel does not exist on a CPU",
        "sgl_kernel.scalar_types.uint4b8: this kernel does not exist on a CPU",
        "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ]


def test_the_token_is_not_logged() -> None:
    ended = run("-c", _LOGGED, str(PLUGIN), SGLANG_API_KEY="s3cret")
    assert ended.stdout == "args {'api_key': '<token>'}\nnothing to hide\n"


def test_no_server_without_a_token() -> None:
    ended = run(str(PLUGIN / "serve.py"), SGLANG_API_KEY="")
    assert ended.returncode == 1
    assert "SGLANG_API_KEY is not set" in ended.stderr
