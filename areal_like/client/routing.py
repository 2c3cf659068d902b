"""Which server gets a request. Pure: a frozen view of the pool in, a name out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: a group's server is left once it has this many times the least busy one's requests in flight, plus the slack:
#: a shared prefix saves less than a queue costs. A conversation stays, since its whole history is cached there.
GROUP_LOAD_FACTOR = 2
GROUP_LOAD_SLACK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """A server that may get requests. ``dispatched`` counts all that it ever got."""

    name: str
    in_flight: int = 0
    dispatched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingView:
    """Servers that may get requests now, and where keys of affinity were served last."""

    servers: tuple[ServerLoad, ...]
    affinity: Mapping[str, str] = field(default_factory=dict)


def session_key(session_id: str) -> str:
    return f"session:{session_id}"


def group_key(group_id: str) -> str:
    return f"group:{group_id}"


def choose_server(
    view: RoutingView, *, session_id: str | None, group_id: str | None, avoid: frozenset[str] = frozenset()
) -> str | None:
    """The server of the conversation, else of the group unless it is overloaded, else the least busy one.

    ``avoid`` names servers on which this request has failed: they serve only if no other is left. None means that no
    server may get requests.
    """
    candidates = {s.name: s for s in view.servers if s.name not in avoid} or {s.name: s for s in view.servers}
    if not candidates:
        return None
    least = min(candidates.values(), key=lambda s: (s.in_flight, s.dispatched, s.name))
    if session_id is not None:
        known = candidates.get(view.affinity.get(session_key(session_id), ""))
        if known is not None:
            return known.name
    if group_id is not None:
        known = candidates.get(view.affinity.get(group_key(group_id), ""))
        if known is not None and known.in_flight <= GROUP_LOAD_FACTOR * least.in_flight + GROUP_LOAD_SLACK:
            return known.name
    return least.name
