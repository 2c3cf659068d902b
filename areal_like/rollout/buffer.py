"""Finished groups that wait for a batch, in the order in which batches take them."""

from __future__ import annotations

from collections.abc import Mapping

from areal_like.api.trajectory import GroupTag


class FinishedBuffer:
    """Groups by stamp, and by admission within a stamp: the order of finishing leaves no trace in a batch.

    Adding and removing cost O(1); choosing sorts the stamps it chooses from, once per batch.
    """

    def __init__(self) -> None:
        self._by_stamp: dict[int, dict[str, tuple[int, GroupTag]]] = {}

    def add(self, group: GroupTag, *, sequence: int) -> None:
        """``sequence``: how many groups were admitted before this one."""
        self._by_stamp.setdefault(group.stamp, {})[group.group_id] = (sequence, group)

    def remove(self, group_id: str, *, stamp: int) -> GroupTag:
        """Take one group out.

        Raises:
            KeyError: it is not here.
        """
        groups = self._by_stamp[stamp]
        _, group = groups.pop(group_id)
        if not groups:
            del self._by_stamp[stamp]
        return group

    def first(self, chosen: Mapping[int, int]) -> tuple[GroupTag, ...]:
        """The first ``chosen[stamp]`` admitted of each stamp, in order of admission over all stamps. They stay here."""
        picked: list[tuple[int, GroupTag]] = []
        for stamp, count in chosen.items():
            picked += sorted(self._by_stamp[stamp].values(), key=lambda entry: entry[0])[:count]
        return tuple(group for _, group in sorted(picked, key=lambda entry: entry[0]))

    @property
    def counts(self) -> dict[int, int]:
        """Number of groups per stamp."""
        return {stamp: len(groups) for stamp, groups in self._by_stamp.items()}

    def __len__(self) -> int:
        return sum(len(groups) for groups in self._by_stamp.values())
