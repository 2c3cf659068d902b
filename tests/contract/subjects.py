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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from areal_like.inference.backends import get_backend, get_engine
from areal_like.inference.backends.base import Capabilities
from areal_like.inference.spec import EngineSpec, InferenceServerSpec
from launcher.environments import installed_version

ROOT = Path(__file__).parents[2]
TOKEN = "contract-token"
CONTEXT = 640
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
        noise: mean |log-prob − float32 reference| per token that its arithmetic explains.
        apart: the same distance between two of the test's versions is at least this.
        moment: seconds in which a long answer is not finished, and a control call is.
        long: tokens of an answer that an update meets half written.
        update: seconds after which an update is given up whose trainer hangs.
        seeds: a seed repeats an answer.
        staged: whatever the transport, bytes arrive beside the live weights.
    """

    name: str
    dtype: str
    noise: float
    apart: float
    moment: float = 4.0
    long: int = 160
    update: float = 30.0
    seeds: bool = True
    staged: bool = True


EMBEDDED = Subject(name="embedded", dtype="float32", noise=1e-4, apart=0.1, moment=0.05, long=400, update=12.0)
VLLM = Subject(name="vllm", dtype="bfloat16", noise=0.1, apart=0.15, long=240)
#: in float32, where it agrees closely; on a CPU it honours no seeds
SGLANG = Subject(
    name="sglang", dtype="float32", noise=1e-3, apart=0.05, moment=1.5, long=300, seeds=False, staged=False
)
SUBJECTS = {subject.name: subject for subject in (EMBEDDED, VLLM, SGLANG)}


#: environment variable: another interpreter for vLLM's part, such as that of another version's environment
VLLM_PYTHON = "AREAL_LIKE_VLLM_PYTHON"


def python_of(name: str) -> Path:
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
    command = [sys.executable, "-c", _PLAY, subject.name, _spec(subject, model, name), TOKEN]
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
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})},
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


def _spec(subject: Subject, model: Path, name: str) -> str:
    if subject.name == "embedded":
        return InferenceServerSpec(
            name=name, model_path=str(model), dtype="float32", max_batch_size=BATCH, context_length=CONTEXT
        ).model_dump_json()
    python = python_of(subject.name)
    return EngineSpec(
        backend="vllm" if subject.name == "vllm" else "sglang",
        name=name,
        python=str(python),
        version=_version_of(subject),
        model_path=str(model),
        dtype="float32" if subject.dtype == "float32" else "bfloat16",
        max_batch_size=BATCH,
        context_length=CONTEXT,
        start_timeout=START,
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
        max_position_embeddings=2 * CONTEXT,
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
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)])).logits[0, -written - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, -1)
    if top_p < 1.0:
        ordered, order = logprobs.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        kept = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, order, before < top_p)
        logprobs = torch.log_softmax(logprobs.masked_fill(~kept, -torch.inf), -1)
    found: list[float] = logprobs.gather(-1, torch.tensor(list(tokens[-written:]))[:, None])[:, 0].tolist()
    return found
