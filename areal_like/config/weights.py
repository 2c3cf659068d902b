"""``weights``: how a new version reaches the servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_like.api.weights import TransportKind
from areal_like.config.section import Section


class WeightsConfig(Section):
    transport: TransportKind = Field(TransportKind.SHM, description="disk | shm (same host) | collective")
    timeout: float = Field(300.0, gt=0, description="seconds one publication may take on one server")
    host: str = Field("127.0.0.1", description="address at which servers reach the trainer (collective)")
    group: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="how collective moves bytes; auto: nccl where the trainer is on a GPU, else gloo"
    )
    bucket_bytes: int = Field(64 * 2**20, ge=4096, description="size of one transfer bucket")
