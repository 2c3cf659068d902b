"""``weights``: how a new version reaches the servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_like.api.weights import TransportKind
from areal_like.config.section import Section


class WeightsConfig(Section):
    transport: TransportKind = Field(
        TransportKind.SHM, description="disk | shm (same host) | collective | ipc (trainer and servers share one GPU)"
    )
    timeout: float = Field(300.0, gt=0, description="seconds one publication may take on one server")
    host: str = Field("127.0.0.1", description="address at which servers reach the trainer (collective)")
    group: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="how collective moves bytes; auto: nccl where the trainer is on a GPU, else gloo"
    )
    bucket_bytes: int | None = Field(
        None, ge=4096, description="size of one transfer bucket; null: 64 MiB, and 512 MiB from GPU to GPU"
    )
    stall_timeout: float = Field(
        10.0,
        gt=0,
        description="seconds without progress after which a member of a transfer over nccl counts as lost",
    )
