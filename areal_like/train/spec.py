"""What one train worker is told when it starts. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from areal_like.api.generation import GenerationHyperparameters
from areal_like.config.actor import ActorConfig
from areal_like.config.critic import CriticConfig
from areal_like.config.model import ModelConfig
from areal_like.config.reference import ReferenceConfig
from areal_like.config.weights import WeightsConfig
from areal_like.rpc.security import RunKeys


class TrainWorkerSpec(BaseModel):
    """One rank of the trainer."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    device: str | None = Field(None, description="torch device the plan gave this rank; default: actor.device by rank")
    rendezvous: str = Field(
        description="init_method of torch.distributed: file:///path (one host; a path never used before) or tcp://host:port"
    )
    model: ModelConfig
    actor: ActorConfig
    critic: CriticConfig | None = None
    ref: ReferenceConfig | None = None
    gconfig: GenerationHyperparameters = Field(description="how the training data is sampled; replayed for log-probs")
    weights: WeightsConfig
    store_address: str = Field(description="where trajectories are fetched by key")
    bind: str = Field(
        description="RPC address to answer at: ipc:///private/dir/name or tcp://host:port (port * for any)"
    )
    health_bind: str | None = Field(None, description="health address; default: bind with .health, or any port of tcp")
    run_dir: Path
    run_id: str = Field(description="names the run's shared memory segments")
    seed: int = Field(1, ge=0)
    total_train_steps: int = Field(ge=1, description="steps of the loop; the LR schedule ends there")
    version: int = Field(0, ge=0, description="version that the loaded weights are")
    incarnation: int = Field(0, ge=0)
    keys: RunKeys | None = Field(None, description="CURVE keys, needed for tcp addresses")

    @model_validator(mode="after")
    def _rank_fits(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank ({self.rank}) must be below world_size ({self.world_size})")
        return self

    @property
    def health_address(self) -> str:
        """Where the health socket binds."""
        if self.health_bind is not None:
            return self.health_bind
        if self.bind.startswith("tcp://"):
            return f"{self.bind.rpartition(':')[0]}:*"
        return f"{self.bind}.health"
