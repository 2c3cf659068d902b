"""What one inference server is started with. Imports no torch: the launcher builds it, the server process reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
