"""Our client and controller against the same vLLM server driven by its own bench client: tokens/s at 256 and 1,024.

    python benchmarks/gpu/generation.py [--models 1.5b smollm2] [--seconds 300] [--out FILE]
    python benchmarks/gpu/generation.py --quick --device cpu        # a dry run: it shows that the roads work

For each model one server, and for each concurrency, in turns:

* ``bench``: ``vllm bench serve``, random prompts, answers of fixed length, unlimited rate; text comes back, streamed;
* ``bench, ids``: the same with log-probs and token ids in the answer, which training needs;
* ``engine``: our RemoteEngine, token ids in, ids with log-probs out;
* ``controller``: the rollout controller over it, one request an episode, a seed for each, trajectories stored;
* ``controller, unseeded``: the same without seeds.

Requests, lengths and concurrency are equal; both clients are processes of their own that live through all turns.
Tokens/s count from the first request to the last answer. Last a profile of our client. It needs vLLM; of the embedded
engine: embedded_decode.py. Exit status 1: something failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.demo_runs import ROOT, bound
from benchmarks.gpu.child_processes import Client
from benchmarks.gpu.gpu_meter import GpuMeter
from benchmarks.gpu.live_runs import (
    ONE_GPU,
    Report,
    Served,
    check_machine,
    engine_facts,
    engine_overrides,
    limit_time,
    served,
    vllm_flags,
)
from benchmarks.gpu.load_client import Load
from benchmarks.gpu.refusals import check_limits, check_model

#: vLLM's own command without its dispatcher, once for each line of arguments that comes in
_BENCH = """
import json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
print("@ready", flush=True)
for line in sys.stdin:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    try:
        found = main(parser.parse_args(json.loads(line)))
        print("@" + json.dumps({k: v for k, v in found.items() if isinstance(v, (int, float))}), flush=True)
    except BaseException as error:
        print("@" + json.dumps({"error": repr(error)}), flush=True)
"""
BENCH, BENCH_IDS = "bench", "bench, ids"
OURS = {"engine": Load(what="engine"), "controller": Load(what="controller", seeded=True)}
OURS |= {"controller, unseeded": Load(what="controller")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``requests`` by concurrency; ``prompt`` and ``answer`` in tokens; ``clients`` by name."""

    requests: Mapping[int, int]
    prompt: int = 128
    answer: int = 128
    repeats: int = 2
    clients: Sequence[str] = (BENCH, BENCH_IDS, *OURS)


QUICK = Plan(requests={4: 8}, prompt=16, answer=8, repeats=1)
FULL = Plan(requests={256: 768, 1024: 2048})


def bench_arguments(server: Served, model: str, plan: Plan, concurrency: int, *, ids: bool) -> list[str]:
    arguments = [
        "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions",
        "--model", model, "--tokenizer", model, "--served-model-name", "policy", "--dataset-name", "random",
        "--random-input-len", str(plan.prompt), "--random-output-len", str(plan.answer), "--ignore-eos",
        "--num-prompts", str(plan.requests[concurrency]), "--max-concurrency", str(concurrency),
        "--request-rate", "inf", "--temperature", "1.0", "--disable-tqdm",
    ]  # fmt: skip
    return [*arguments, "--logprobs", "0", "--extra-body", '{"return_token_ids": true}'] if ids else arguments


class Turns:
    """All clients of one server, and one turn of each."""

    def __init__(self, server: Served, model: str, plan: Plan, clients: Mapping[str, Client]) -> None:
        self._server, self._model, self._plan, self._clients = server, model, plan, clients

    def bench(self, concurrency: int, *, ids: bool) -> float:
        arguments = bench_arguments(self._server, self._model, self._plan, concurrency, ids=ids)
        found = self._clients["bench"].ask(arguments)
        expected = self._plan.requests[concurrency]
        if found["completed"] != expected:
            raise RuntimeError(f"vLLM's client completed {found['completed']} of {expected} requests")
        return float(found["output_throughput"])

    def ours(self, concurrency: int, load: Load, *, profiled: bool = False) -> dict[str, Any]:
        sizes = {"requests": self._plan.requests[concurrency], "concurrency": concurrency}
        work = asdict(load) | sizes | {"prompt": self._plan.prompt, "answer": self._plan.answer}
        return self._clients["ours"].ask(work | {"profiled": profiled, "url": self._server.url})

    def compare(self, concurrency: int, gpus: GpuMeter, report: Report) -> dict[str, Any]:
        """Every client ``repeats`` times, in turns; the order is turned round every time. No turn begins too late."""
        rates: dict[str, list[float]] = {name: [] for name in self._plan.clients}
        failures: dict[str, str] = {}
        busy: dict[str, Any] = {}
        for repeat in range(self._plan.repeats):
            for name in list(rates) if repeat % 2 == 0 else list(reversed(rates)):
                if report.left < 0:
                    break
                began = time.monotonic()
                try:
                    if name in OURS:
                        rate = float(self.ours(concurrency, OURS[name])["tokens_per_second"])
                    else:
                        rate = self.bench(concurrency, ids=name == BENCH_IDS)
                except RuntimeError as error:
                    failures[name] = str(error)[-1500:]
                    continue
                rates[name].append(round(rate, 1))
                busy[name] = gpus.busy(began, time.monotonic())
                print(f"  {concurrency:5} in flight  {name:24} {rate:10.0f} tokens/s", flush=True)
        middle = {name: median(found) for name, found in rates.items() if found}
        return {
            "tokens_per_second": rates,
            "to_bench": {n: round(r / middle[BENCH], 3) for n, r in middle.items() if BENCH in middle},
            "to_bench_ids": {n: round(r / middle[BENCH_IDS], 3) for n, r in middle.items() if BENCH_IDS in middle},
            "gpu_busy": busy,
            **({"failures": failures} if failures else {}),
        }


def measure_model(report: Report, name: str, plan: Plan, given: argparse.Namespace, folder: Path) -> str:
    """One server, and every concurrency against it; the readings go into ``report`` one by one."""
    facts = engine_facts(given.device, given.python)
    model = model_folder(name, folder, given)
    most = max(plan.requests)
    overrides = [*engine_overrides(given.device, facts), f"model.path={model}", f"rollout.max_batch_size={most}"]
    overrides += [f"rollout.context_length={plan.prompt + plan.answer + 64}", "rollout.start_timeout=240"]
    if given.device != "cpu":
        overrides.append(vllm_flags(eager=given.eager, gpu_memory_utilization=0.8))
    ours = [sys.executable, str(Path(__file__).with_name("load_client.py"))]
    with (
        GpuMeter() as gpus,
        served(ONE_GPU, overrides, log=folder / f"{name}.log", timeout=250.0) as server,
        Client([facts["python"], "-c", _BENCH], server.token, folder / "bench.log") as bench,
        Client(ours, server.token, folder / "ours.log") as own,
    ):
        turns = Turns(server, str(model), plan, {"bench": bench, "ours": own})
        report.put(f"{name}, server", {"seconds_to_start": round(server.seconds_to_start, 1), **facts})
        first = min(plan.requests)
        report.part(f"{name}, warm-up", lambda: turns.ours(first, OURS["engine"]))
        for concurrency in plan.requests:
            key = f"{name}, {concurrency} in flight"
            report.part(key, lambda c=concurrency: turns.compare(c, gpus, report), needs=0 if given.quick else 30)  # type: ignore[misc]
        for what, load in OURS.items():
            if not what.endswith("unseeded"):
                key = f"{name}, profile of {what} at {most}"
                report.part(key, lambda x=load: turns.ours(most, x, profiled=True), needs=0 if given.quick else 20)  # type: ignore[misc]
    return "done"


def model_folder(name: str, folder: Path, given: argparse.Namespace) -> Path:
    """SmolLM2, or random weights of another shape with its tokenizer (speed does not depend on the values)."""
    smollm2: Path = given.smollm2
    if name == "smollm2":
        return smollm2
    target = folder / name
    code = (
        "import sys, torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "config = LlamaConfig(vocab_size=49152, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,\n"
        "    num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=8192, tie_word_embeddings=True,\n"
        "    bos_token_id=1, eos_token_id=2, pad_token_id=2, dtype='bfloat16')\n"
        "torch.set_default_dtype(torch.bfloat16)\n"
        "with torch.device(device):\n    model = LlamaForCausalLM(config)\n"
        "model.save_pretrained(sys.argv[1])\n"
    )
    subprocess.run(bound([sys.executable, "-c", code, str(target)]), check=True, cwd=ROOT)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / file).write_bytes((smollm2 / file).read_bytes())
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["1.5b"], choices=["1.5b", "smollm2"])
    parser.add_argument("--smollm2", type=Path, default=ROOT / "models" / "smollm2", help="python -m launcher.smollm2")
    parser.add_argument("--concurrency", type=int, nargs="+", choices=list(FULL.requests), help="default: all")
    parser.add_argument("--clients", nargs="+", choices=list(FULL.clients), help="default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--python", help="vLLM's interpreter; default: this one, on a CPU .venv-vllm's")
    parser.add_argument("--seconds", type=float, default=400.0, help="no part begins later than this")
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    check_limits(parser, given)
    check_machine(parser, given, ["vllm"])
    check_model(parser, given.smollm2)
    limit_time(given.seconds + 60.0)
    plan = QUICK if given.quick else FULL
    if given.concurrency and not given.quick:
        plan = replace(plan, requests={n: plan.requests[n] for n in given.concurrency})
    plan = replace(plan, clients=given.clients or plan.clients)
    report = Report(given.out, "generation", budget=given.seconds, plan=asdict(plan), device=given.device)
    with tempfile.TemporaryDirectory() as name:
        for model in given.models:
            if report.part(model, lambda m=model: measure_model(report, m, plan, given, Path(name))) is None:  # type: ignore[misc]
                for log in sorted(Path(name).glob("*.log")):
                    print(f"-- {log.name}\n{log.read_text()[-4000:]}", flush=True)
                if f"{model}, server" not in report.found and not given.eager and given.device != "cpu":
                    given.eager = True  # it may have been the graphs
                    report.part(model, lambda m=model: measure_model(report, m, plan, given, Path(name)))  # type: ignore[misc]
    return report.status


if __name__ == "__main__":
    sys.exit(main())
