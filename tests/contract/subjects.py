"""The engines that the contract is tested on: how each is started, with which model, and how closely it computes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from areal_like.api.weights import TransportKind
from areal_like.inference.backends import get_backend, get_engine
from areal_like.inference.backends.base import Capabilities
from areal_like.inference.spec import EngineSpec, InferenceServerSpec
from launcher.environments import installed_version

ROOT = Path(__file__).parents[2]
TOKEN = "contract-token"
BATCH = 128
#: seconds a server may take to start on a machine that does other things too
START = 900.0
#: seconds after which a call hangs: no machine that can run the suite at all is as slow as that
HUNG = 300.0
#: seconds for a test and the server that it starts, far more than it needs
TEST = 1200

_PLAY = """
import signal, sys
from areal_like.inference.spec import EngineSpec, InferenceServerSpec
from launcher.child import die_with_parent
die_with_parent(signal.SIGTERM)
kind, spec, token, line = sys.argv[1:]
def ready(url):
    with open(int(line), "w") as file:
        file.write(url)
if kind == "embedded":
    from areal_like.inference.embedded.server import run_server
    run_server(InferenceServerSpec.model_validate_json(spec), token, ready)
else:
    from launcher.engine_process import run_engine
    run_engine(EngineSpec.model_validate_json(spec), token, ready)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One engine.

    Attributes:
        device: where its servers compute; the trainer's tensors lie on the CPU whatever it is.
        context: tokens of the longest sequence.
        noise: mean |log-prob − float32 reference| per token that its arithmetic explains.
        apart: the same distance between two of the test's versions is at least this.
        moment: seconds in which a long answer is not finished, and a control call is.
        long: tokens of an answer that an update meets half written.
        longest: those of one that many moments do not finish.
        beside: those of one that is still written when an update has passed.
        update: seconds after which an update is given up whose trainer hangs.
        seeds: a seed repeats an answer.
        staged: whatever the transport that goes through host memory, bytes arrive beside the live weights.
        lends: its device memory, as it was started here.
    """

    name: str
    dtype: str
    noise: float
    apart: float
    device: str = "cpu"
    context: int = 640
    moment: float = 4.0
    long: int = 160
    longest: int = 600
    beside: int = 160
    update: float = 30.0
    seeds: bool = True
    staged: bool = True
    lends: bool = False


EMBEDDED = Subject(name="embedded", dtype="float32", noise=1e-4, apart=0.1, moment=0.05, long=400, update=12.0)
VLLM = Subject(name="vllm", dtype="bfloat16", noise=0.1, apart=0.15, long=240)
#: in float32, where it agrees closely; on a CPU it honours no seeds
SGLANG = Subject(
    name="sglang", dtype="float32", noise=1e-3, apart=0.05, moment=1.5, long=300, seeds=False, staged=False
)
#: environment variable: ``cuda`` starts the servers on the first GPU that is visible
DEVICE = "AREAL_LIKE_CONTRACT_DEVICE"
#: what a GPU changes: one answer is written at 100 tokens/s to 500
ON_GPU: Mapping[str, Mapping[str, Any]] = {
    "embedded": {},
    "vllm": {
        "context": 4096, "moment": 0.5, "long": 1500, "longest": 3500, "beside": 1500, "update": 12.0,
    },
}  # fmt: skip
#: bytes of a server's KV cache on a GPU, so many that one sees them come and go
KV_CACHE = 4 * 2**30
#: three servers and the test's own process share one GPU
GPU_FLAGS: Mapping[str, Any] = {
    "enforce_eager": True,
    "enable_sleep_mode": True,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": KV_CACHE,
}
#: environment variable: JSON, vLLM's flags on a GPU that are other ones there, such as ``{"enable_sleep_mode": false}``
FLAGS = "AREAL_LIKE_CONTRACT_FLAGS"


def gpu_flags() -> dict[str, Any]:
    """vLLM's, on a GPU."""
    return {**GPU_FLAGS, **json.loads(os.environ.get(FLAGS) or "{}")}


def chosen_device() -> str:
    """As the environment says: ``cpu`` or ``cuda``."""
    found = os.environ.get(DEVICE) or "cpu"
    if found not in ("cpu", "cuda"):
        raise ValueError(f"{DEVICE}={found!r}: must be cpu or cuda")
    return found


def subjects_on(device: str) -> dict[str, Subject]:
    """Every engine that the suite can start on ``device``."""
    everywhere = (EMBEDDED, VLLM, SGLANG)
    if device == "cpu":
        return {subject.name: subject for subject in everywhere}
    lends = {"vllm": bool(gpu_flags().get("enable_sleep_mode"))}
    return {
        subject.name: replace(
            subject, device=device, lends=lends.get(subject.name, False), **ON_GPU[subject.name]
        )
        for subject in everywhere
        if subject.name in ON_GPU
    }  # fmt: skip


SUBJECTS = subjects_on(chosen_device())
#: ipc copies from GPU memory to GPU memory
TRANSPORTS = tuple(kind for kind in TransportKind if kind is not TransportKind.IPC or chosen_device() == "cuda")

#: environment variable: another interpreter for vLLM's part, such as that of another version's environment
VLLM_PYTHON = "AREAL_LIKE_VLLM_PYTHON"


def python_of(name: str) -> Path:
    """The interpreter of an engine's environment. What :data:`VLLM_PYTHON` names counts from here, or is absolute."""
    chosen = os.environ.get(VLLM_PYTHON, "") if name == "vllm" else ""
    return ROOT / chosen if chosen else ROOT / f".venv-{name}" / "bin" / "python"


def capabilities_of(subject: Subject) -> Capabilities:
    """What the version that is installed can do: what it cannot is not asked of it."""
    return get_backend(subject.name).capabilities(_version_of(subject))


def _version_of(subject: Subject) -> str:
    if subject.name == "embedded":
        return ""
    return installed_version(str(python_of(subject.name)), get_engine(subject.name).package)


@dataclass(slots=True, kw_only=True)
class ServerProcess:
    """A server in a process of its own, and everything that process starts."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.time)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        """The process that answers HTTP."""
        children = psutil.Process(self.process.pid).children()
        return children[0] if children else psutil.Process(self.process.pid)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)


@contextmanager
def running(
    subject: Subject, model: Path, folder: Path, name: str = "s0", environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Start a server and wait until it serves; it is gone afterwards, and nothing of it is left.

    ``environment``: variables of its own.
    """
    command = [sys.executable, "-c", _PLAY, subject.name, spec_of(subject, model, name), TOKEN]
    with started(command, folder, name, environment) as server:
        yield server


@contextmanager
def started(
    command: Sequence[str], folder: Path, name: str, environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Run ``command``, and wait until it has written its address into the descriptor whose number is its last argument.

    What it prints goes into a file: a pipe that nobody reads is full after 64 KiB, and who prints then stands still.
    """
    log = folder / f"{name}-{secrets.token_hex(3)}.log"
    ours, theirs = os.pipe()
    with log.open("wb") as output, open(ours) as line:
        try:
            process = subprocess.Popen(
                [*command, str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(folder), **(environment or {})},
                pass_fds=(theirs,),
                start_new_session=True,
                cwd=ROOT,
            )
        finally:
            os.close(theirs)
        server = ServerProcess(name=name, url="", process=process, log=log)
        try:
            server.url = line.read()  # empty when it ended before
            assert server.url, f"{name} did not start:\n{server.said()}"
            yield server
        finally:
            server.end()


def python_path(folder: Path, *more: Path) -> str:
    """``PYTHONPATH`` of a server: ``more``, this checkout, and what ours has.

    An environment that this package is not installed in gets vLLM's entry point from ``folder``.
    """
    plugin = folder / "plugin" / "areal_like_checkout-0.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-like-checkout\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nareal_like = areal_like.inference.vllm_plugin:register\n"
    )
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, [*map(str, more), str(ROOT), str(plugin.parent), inherited]))


def spec_of(subject: Subject, model: Path, name: str) -> str:
    """What a server of ``subject`` is started with, as JSON."""
    on_gpu = subject.device != "cpu"
    if subject.name == "embedded":
        return InferenceServerSpec(
            name=name,
            model_path=str(model),
            dtype="float32",
            device=subject.device,
            max_batch_size=BATCH,
            context_length=subject.context,
        ).model_dump_json()
    python = python_of(subject.name)
    return EngineSpec(
        backend="vllm" if subject.name == "vllm" else "sglang",
        name=name,
        python=str(python),
        version=_version_of(subject),
        model_path=str(model),
        dtype="float32" if subject.dtype == "float32" else "bfloat16",
        devices=(f"{subject.device}:0" if on_gpu else "cpu",),
        max_batch_size=BATCH,
        context_length=subject.context,
        start_timeout=START,
        flags=gpu_flags() if on_gpu else {},
    ).model_dump_json()


def build_tiny(folder: Path) -> Path:
    """A random Llama with tied embeddings and SmolLM2's tokenizer cut to bytes: enough for an engine of our own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 each: vLLM has no kernels for smaller ones
        num_key_value_heads=1,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(_letters()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "</s>"})
    )
    return folder


def _letters() -> dict[str, Any]:
    """Every id is one or two letters, so that stop strings can lie across tokens."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    words = ["<unk>", "<s>", "</s>", *alphabet, *(a + b for a in alphabet for b in alphabet)][:320]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": words[i], "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
            for i in range(3)
        ],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }  # fmt: skip


def bucket_bytes_of(folder: Path) -> int:
    """So small that a version of the model takes a dozen buckets and more."""
    return 2**14 if (folder / "model.safetensors").stat().st_size < 2**20 else 2**24


def load_model(folder: Path, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def load_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def perturbed(model: Any, version: int) -> dict[str, torch.Tensor]:
    """The weights of version ``version``: the model's own at 0, else moved by a seeded amount. Tied tensors once."""
    generator = torch.Generator().manual_seed(version)
    moved = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if version:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 0.03
            tensor = (tensor.float() + noise).to(tensor.dtype)
        moved[name] = tensor
    return moved


def reference_logprobs(
    model: Any,
    weights: dict[str, torch.Tensor],
    tokens: Sequence[int],
    written: int,
    *,
    temperature: float,
    top_p: float = 1.0,
) -> list[float]:
    """Log-probs of the last ``written`` tokens by a float32 forward pass of Hugging Face's own code.

    ``top_p`` keeps the fewest most likely tokens whose probabilities reach it, and renormalises.
    """
    device = next(model.parameters()).device
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)], device=device)).logits[0, -written - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, -1)
    if top_p < 1.0:
        ordered, order = logprobs.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        kept = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, order, before < top_p)
        logprobs = torch.log_softmax(logprobs.masked_fill(~kept, -torch.inf), -1)
    chosen = torch.tensor(list(tokens[-written:]), device=device)[:, None]
    found: list[float] = logprobs.gather(-1, chosen)[:, 0].tolist()
    return found
