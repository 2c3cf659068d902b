"""What crosses the seam between a trainer that exports weights and a server that loads them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class TransportKind(StrEnum):
    DISK = "disk"
    SHM = "shm"
    COLLECTIVE = "collective"
    IPC = "ipc"


class InterruptMode(StrEnum):
    """What happens to requests in flight at a commit (DESIGN.md, section 5)."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    DRAIN = "drain"


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorEntry(_Wire):
    """One tensor of a manifest. ``dtype`` is torch's name without the prefix (``float32``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str


class Manifest(_Wire):
    """A complete, ordered list of what version ``version`` consists of, and where it lies.

    ``location`` is a directory (disk), a shared-memory segment name (shm), where the trainer's store listens
    (collective) or handles of GPU memory as JSON (ipc); it is meaningful to ``transport`` only.
    ``digest`` covers every entry's name, dtype, shape and content digest.
    """

    version: int
    incarnation: int
    transport: TransportKind
    location: str
    tensors: tuple[TensorEntry, ...]
    digest: str

    @property
    def total_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class CommitReceipt(_Wire):
    """A server's word that it serves ``version``: ``digest`` is computed from the tensors it holds now.

    ``seconds_by_part``: where an engine can tell, what the pause was for, by names of its own; they may nest
    (``load`` and ``load.verify``).
    """

    server: str
    incarnation: int
    version: int
    digest: str
    bytes: int
    seconds_staged: float
    seconds_paused: float
    interrupted_requests: int
    seconds_by_part: dict[str, float] = Field(default_factory=dict)
