"""The embedded engine on CUDA beside vLLM, same model: tokens/s at 1, 32 and 256 requests in flight, over HTTP.

    python benchmarks/gpu/embedded_decode.py [--seconds 150] [--out FILE]
    python benchmarks/gpu/embedded_decode.py --quick --device cpu [--parts embedded]      # vLLM is not needed for that

SmolLM2-135M, prompts of 64 tokens, answers of 128, temperature 1, through the same client. The embedded engine is for
laptops and tests: what is asked of it on a GPU is that it runs, and how far it is from vLLM is told.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.demo_runs import ROOT
from benchmarks.gpu.child_processes import Client
from benchmarks.gpu.live_runs import (
    ONE_GPU,
    Report,
    check_machine,
    engine_facts,
    engine_overrides,
    limit_time,
    served,
    vllm_flags,
)
from benchmarks.gpu.refusals import check_limits, check_model

#: requests by how many are in flight
FULL, QUICK = {1: 4, 32: 128, 256: 1024}, {1: 1, 4: 8}
_PROMPT, _ANSWER = 64, 128


def measure_engine(report: Report, engine: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens/s by requests in flight; the best of two turns, since the first ones capture and compile."""
    sizes = QUICK if given.quick else FULL
    answer = 8 if given.quick else _ANSWER
    overrides = [
        *engine_overrides(given.device, engine_facts(given.device, given.python, engine=engine), engine=engine),
        f"model.path={given.smollm2}",
        f"rollout.max_batch_size={max(sizes)}",
        "rollout.start_timeout=200",
    ]
    if engine == "vllm" and given.device != "cpu":
        overrides.append(vllm_flags(eager=given.eager, gpu_memory_utilization=0.5))
    found: dict[str, Any] = {}
    with served(ONE_GPU, overrides, log=folder / f"{engine}.log", timeout=210.0) as server:
        command = [sys.executable, str(Path(__file__).with_name("load_client.py"))]
        with Client(command, server.token, folder / f"{engine}-client.log") as client:
            for in_flight, requests in sizes.items():
                work = {
                    "what": "engine", "backend": engine, "url": server.url, "requests": requests,
                    "concurrency": in_flight, "prompt": _PROMPT, "answer": answer,
                }  # fmt: skip
                rates = [client.ask(work)["tokens_per_second"] for _ in range(1 if given.quick else 2)]
                found[str(in_flight)] = round(max(rates), 1)
                report.put(engine, found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["embedded", "vllm"], choices=["embedded", "vllm"])
    parser.add_argument("--smollm2", type=Path, default=ROOT / "models" / "smollm2", help="python -m launcher.smollm2")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--python", help="vLLM's interpreter; default: this one, on a CPU .venv-vllm's")
    parser.add_argument("--seconds", type=float, default=150.0, help="for everything; what runs then is cut")
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs")
    parser.add_argument("--quick", action="store_true", help="a few short answers")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    check_limits(parser, given)
    check_machine(parser, given, given.parts, instead="--parts embedded")
    check_model(parser, given.smollm2)
    limit_time(given.seconds + 30.0)
    report = Report(given.out, "embedded_decode_gpu", budget=given.seconds, device=given.device)
    with tempfile.TemporaryDirectory() as name:
        for engine in given.parts:
            report.part(engine, lambda e=engine: measure_engine(report, e, given, Path(name)))  # type: ignore[misc]
    rates = {engine: report.found.get(engine) for engine in ("embedded", "vllm")}
    if all(isinstance(found, dict) and "failed" not in found for found in rates.values()):
        ours, theirs = rates["embedded"] or {}, rates["vllm"] or {}
        report.put("embedded_to_vllm", {n: round(ours[n] / theirs[n], 3) for n in ours if n in theirs})
    return report.status


if __name__ == "__main__":
    sys.exit(main())
