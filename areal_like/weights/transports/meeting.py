"""Where a trainer and its servers meet: a TCPStore of the trainer, and the location that a manifest carries."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from areal_like.errors import WeightUpdateError

#: seconds until the trainer's store must accept a connection
_CONNECT = 5.0
#: seconds without progress after which a member of a transfer counts as lost, unless the experiment says otherwise
DEFAULT_STALL = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A manifest's location: where the trainer's store is, under which key this version is offered, and how.

    ``door``: the port for engines that join a group of their own making (``weights.transports.door``).
    ``stall``: seconds without progress after which a member counts as lost (nccl).
    """

    host: str
    port: int
    key: str
    bucket_bytes: int
    backend: str
    door: int = 0
    stall: float = DEFAULT_STALL

    def location(self) -> str:
        query = f"bucket_bytes={self.bucket_bytes}&backend={self.backend}&door={self.door}&stall={self.stall!r}"
        return f"tcp://{self.host}:{self.port}/{self.key}?{query}"

    @classmethod
    def parse(cls, location: str) -> Meeting:
        """The inverse of :meth:`location`.

        Raises:
            WeightUpdateError: it is no location of this transport.
        """
        try:
            parts = urlsplit(location)
            query = parse_qs(parts.query)
            return cls(
                host=parts.hostname or "",
                port=parts.port or 0,
                key=parts.path.lstrip("/"),
                bucket_bytes=int(query["bucket_bytes"][0]),
                backend=query["backend"][0],
                door=int(query.get("door", ["0"])[0]),
                stall=float(query.get("stall", [DEFAULT_STALL])[0]),
            )
        except (KeyError, ValueError) as error:
            raise WeightUpdateError(f"{location!r} is no location of the collective transport: {error}") from error


def open_store(host: str) -> tuple[TCPStore, int]:
    """The trainer's store, which listens on ``host`` alone, and its port."""
    listener = socket.create_server((host, 0))
    port: int = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def reach_store(meeting: Meeting, what: str, *, timeout: float) -> Store:
    """A connection to the trainer's store, of the caller's own.

    Raises:
        WeightUpdateError: nobody answers there; ``what`` was wanted.
    """
    try:
        # a plain connection first: the store would try a dead address for minutes
        socket.create_connection((meeting.host, meeting.port), timeout=_CONNECT).close()
        return TCPStore(meeting.host, meeting.port, is_master=False, timeout=timedelta(seconds=timeout))
    except (OSError, RuntimeError) as error:
        raise WeightUpdateError(f"{what}: the trainer does not answer: {error}") from error
