"""Where conversations and groups were served last: a table of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from areal_like.client.routing import group_key, session_key

#: keys remembered; the least recently used go first. A forgotten key costs one prefix computed again.
DEFAULT_CAPACITY = 65_536


class AffinityTable(Mapping[str, str]):
    """Key -> server name, the least recently remembered forgotten first."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._servers: OrderedDict[str, str] = OrderedDict()

    def remember(self, server: str, *, session_id: str | None, group_id: str | None) -> None:
        """Note that ``server`` serves this conversation and this group."""
        if session_id is not None:
            self._set(session_key(session_id), server)
        if group_id is not None:
            self._set(group_key(group_id), server)

    def _set(self, key: str, server: str) -> None:
        self._servers[key] = server
        self._servers.move_to_end(key)
        while len(self._servers) > self._capacity:
            self._servers.popitem(last=False)

    def __getitem__(self, key: str) -> str:
        return self._servers[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)
