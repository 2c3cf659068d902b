"""The words that a trainer and its receivers exchange over the store before, in and after a broadcast between GPUs.

    receiver: join --> (terms) --> be in the group --> receiving --> (go) --> ... --> done
    trainer:  terms --> be in the group --> wait for all "receiving" --> go --> broadcast --> wait for all "done"

One *round* is one attempt to bring one version to those who joined; its keys lie under ``<key of the version>/<number
of the round>``, and the key is secret. A round that broke is marked so, and who was in it joins the next one. All
values are JSON or base64; nothing is unpickled.
"""

from __future__ import annotations

import base64
import json
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

#: seconds between two looks at the store: for somebody to join; where a server is paused meanwhile
SLOW_LOOK, QUICK_LOOK = 0.005, 0.001
#: seconds between two signs of life
PULSE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Who joins: one worker of ``server``, which has ``workers`` of them; they take part all or none.

    ``held``: the group that it is still in; ``library``: NCCL's version; ``gpu``: its device's name.
    """

    id: str
    server: str
    workers: int
    held: str
    library: str
    gpu: str
    host: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        found = json.loads(text)
        named = {name: str(found[name]) for name in ("id", "server", "held", "library", "gpu", "host")}
        return cls(**named, workers=int(found["workers"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a round's members are told: the group, by its name; its NCCL id where it is to be formed; everybody's rank.

    ``fault``: why there will be no group of these members, ever.
    """

    group: str
    unique_id: bytes
    ranks: Mapping[str, int]
    fault: str = ""

    @property
    def size(self) -> int:
        """Members and the trainer."""
        return 1 + len(self.ranks)

    def to_json(self) -> str:
        named = {"group": self.group, "unique_id": base64.b64encode(self.unique_id).decode(), "fault": self.fault}
        return json.dumps({**named, "ranks": dict(self.ranks)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Terms:
        found = json.loads(text)
        return cls(
            group=str(found["group"]),
            unique_id=base64.b64decode(found["unique_id"], validate=True),
            ranks={str(name): int(rank) for name, rank in found["ranks"].items()},
            fault=str(found["fault"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundKeys:
    """The store's keys of one round."""

    key: str
    number: int

    @property
    def prefix(self) -> str:
        return f"{self.key}/{self.number}"

    @property
    def joined(self) -> str:
        """A counter."""
        return f"{self.prefix}/joined"

    @property
    def terms(self) -> str:
        return f"{self.prefix}/terms"

    @property
    def go(self) -> str:
        return f"{self.prefix}/go"

    @property
    def broken(self) -> str:
        """Why the round broke."""
        return f"{self.prefix}/broken"

    def member(self, place: int) -> str:
        return f"{self.prefix}/member/{place}"

    def receiving(self, rank: int) -> str:
        return f"{self.prefix}/receiving/{rank}"

    def done(self, rank: int) -> str:
        return f"{self.prefix}/done/{rank}"

    def alive(self, rank: int) -> str:
        """A counter that a living member raises."""
        return f"{self.prefix}/alive/{rank}"


def over_key(key: str) -> str:
    """Set when a version is no longer offered."""
    return f"{key}/over"


def own_host() -> str:
    """This machine, as members tell each other's apart."""
    return socket.gethostname()


def whole_servers(members: Sequence[Member]) -> Sequence[Member]:
    """Those whose server is there with all its workers."""
    there = Counter(member.server for member in members)
    return [member for member in members if there[member.server] >= member.workers]


def fault_of(members: Sequence[Member], trainer: Member) -> str:
    """Why these members can form no group; empty where they can.

    NCCL wants one version of itself everywhere, and a GPU for each member.
    """
    for member in members:
        if member.library != trainer.library:
            return (
                f"the trainer has NCCL {trainer.library} and a server has {member.library}: both environments need the "
                "same; install one torch in both, or use weights.group=gloo"
            )
    places = [(member.host, member.gpu) for member in (trainer, *members)]
    shared = next((place for place in places if places.count(place) > 1), None)
    if shared is not None:
        return (
            f"GPU {shared[1]} of {shared[0]} would have two members of one NCCL group, which NCCL refuses; use "
            "weights.transport=ipc where trainer and server share a GPU"
        )
    return ""
