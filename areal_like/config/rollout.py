"""``rollout``: inference servers, admission, and how episodes run."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_like.api.weights import InterruptMode
from areal_like.config.backend import BackendSpec, parse_backend
from areal_like.config.section import Section

ROLLOUT_BACKENDS = ("embedded", "vllm", "sglang")
_URL = re.compile(r"https?://[^/\s]+")


class RolloutConfig(Section):
    backend: str = Field("embedded:d1", description="embedded|vllm|sglang, then d<servers>t<tensor>p<pipeline>")
    max_concurrent_rollouts: int = Field(128, ge=1, description="groups that may run at once")
    max_head_offpolicyness: int = Field(2, ge=0, description="η, the largest lag allowed; 0 is synchronous")
    on_stale: Literal["wait", "drop", "train"] = Field("wait", description="what happens when a group gets too old")
    interrupt: InterruptMode = Field(InterruptMode.KEEP, description="what a commit does to requests in flight")
    request_timeout: float = Field(600.0, gt=0, description="seconds one generation request may take, retries included")
    request_retries: int = Field(3, ge=0, description="tries after the first, on another server where there is one")
    episode_timeout: float = Field(1800.0, gt=0, description="seconds one episode may take")
    episode_retries: int = Field(2, ge=0, description="tries after the first before its group counts as failed")
    breaker_failures: int = Field(32, ge=1, description="failed episodes in a row that end the run")
    breaker_groups: int = Field(1024, ge=1, description="groups in a row, none of them kept, that end the run")
    accept_fn: str | None = Field(None, description="dotted path: (list of trajectories) -> bool, per finished group")
    drop_equal_rewards: bool = Field(False, description="filter groups whose rewards are all equal")
    dump: bool = Field(True, description="write rollouts/<version>.jsonl")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the servers compute; auto: GPUs if any")
    record_batches: bool = Field(False, description="keep every training batch in batches/, for replay and debugging")
    max_batch_size: int = Field(256, ge=1, description="requests one embedded server decodes at once")
    context_length: int | None = Field(None, ge=2, description="longest sequence; default: the model's own limit")
    python: str | None = Field(None, description="interpreter of the engine's own environment; vllm, sglang need one")
    environment: dict[str, str] = Field(default_factory=dict, description="extra variables of the servers' processes")
    servers: tuple[str, ...] = Field(
        (), description="URLs of servers that somebody else started; none are started then"
    )
    port: int = Field(0, ge=0, le=65535, description="first port of the servers; 0 lets the system choose")
    host: str = Field("127.0.0.1", description="address the servers bind to")
    threads: int = Field(1, ge=1, description="CPU threads of one server")
    start_timeout: float = Field(300.0, gt=0, description="seconds a server may take to become healthy")
    control_timeout: float = Field(10.0, gt=0, description="seconds a server may take to answer a control call")

    @field_validator("backend")
    @classmethod
    def _backend_parses(cls, text: str) -> str:
        parse_backend(text, ROLLOUT_BACKENDS)
        return text

    @field_validator("servers")
    @classmethod
    def _servers_are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [url for url in urls if not _URL.fullmatch(url)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no server's URL; write http://host:port without a path")
        if len(set(urls)) != len(urls):
            raise ValueError("names a server twice")
        return urls

    @model_validator(mode="after")
    def _as_many_servers_as_the_backend_says(self) -> Self:
        if self.servers and len(self.servers) != self.spec.data:
            raise ValueError(
                f"servers lists {len(self.servers)} URLs, and backend {self.backend!r} says {self.spec.data} servers; "
                f"write d{len(self.servers)}"
            )
        return self

    @property
    def spec(self) -> BackendSpec:
        return parse_backend(self.backend, ROLLOUT_BACKENDS)
