"""What one inference server is started with. Imports no torch: the launcher builds it, the server process reads it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from areal_like.api.weights import TransportKind


class InferenceServerSpec(BaseModel):
    """Everything the embedded server needs to know; the run's bearer token travels apart from it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str = Field(description="the server's name in receipts, logs and metrics")
    model_path: str = Field(description="folder with a Hugging Face model and, for stop strings, its tokenizer")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of weights and forward pass")
    attn_implementation: Literal["eager", "sdpa"] = Field("sdpa", description="attention kernel")
    device: str = Field("cpu", description="torch device: cpu, cuda, cuda:1")
    host: str = Field("127.0.0.1", description="address to bind to")
    port: int = Field(0, ge=0, le=65535, description="0 lets the system choose")
    threads: int = Field(1, ge=1, description="CPU threads of the decode loop")
    max_batch_size: int = Field(256, ge=1, description="answers decoded at once")
    context_length: int | None = Field(None, ge=2, description="longest sequence; default: the model's own limit")
    kv_cache_bytes: int | None = Field(None, ge=1, description="KV cache limit; default: a share of free memory")
    seed: int = Field(1, ge=0, description="seeds the requests that bring no seed of their own")


class EngineSpec(BaseModel):
    """What a server of an engine with a program of its own is started with.

    The run's bearer token travels apart from it, and the engine's own flags come last on its command line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    backend: Literal["vllm", "sglang"]
    name: str = Field(description="the server's name in receipts, logs and metrics")
    python: str = Field(description="interpreter of the environment that the engine is installed in")
    version: str = Field(description="the engine's version there")
    model_path: str = Field(description="folder with a Hugging Face model and its tokenizer")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="dtype of weights and forward pass")
    devices: tuple[str, ...] = Field(("cpu",), description="cpu, or the GPUs of this server as cuda:<number>")
    host: str = Field("127.0.0.1", description="address to bind to")
    port: int = Field(0, ge=0, le=65535, description="0 lets us choose a free one")
    threads: int = Field(1, ge=1, description="CPU threads")
    tensor: int = Field(1, ge=1, description="tensor-parallel size")
    pipeline: int = Field(1, ge=1, description="pipeline-parallel size")
    max_batch_size: int = Field(256, ge=1, description="answers decoded at once")
    context_length: int | None = Field(None, ge=2, description="longest sequence; default: the model's own limit")
    transport: TransportKind = Field(TransportKind.SHM, description="how weights will reach it")
    seed: int = Field(1, ge=0)
    start_timeout: float = Field(300.0, gt=0, description="seconds until it must be healthy")
    flags: dict[str, Any] = Field(default_factory=dict, description="the experiment's own flags, untouched")
    environment: dict[str, str] = Field(default_factory=dict, description="the experiment's own variables")
