"""Where the processes of a run report that they are ready, and at which address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_like.errors import InfrastructureError


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One ready process: ``address`` is what the controller calls it by."""

    role: str
    index: int
    address: str
    pid: int


class Registry:
    """Collects registrations; ``expect`` waits for them. Registering twice replaces the address (a restart)."""

    def __init__(self) -> None:
        self._ready: dict[tuple[str, int], Registration] = {}
        self._changed = asyncio.Event()

    def register(self, role: str, index: int, address: str, pid: int) -> bool:
        self._ready[role, index] = Registration(role=role, index=index, address=address, pid=pid)
        self._changed.set()
        return True

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """What the controller's RPC endpoint offers to its children."""
        return {"register": self.register}

    def present(self, role: str) -> list[Registration]:
        """The registered processes of ``role``, by index."""
        return sorted((r for r in self._ready.values() if r.role == role), key=lambda r: r.index)

    async def expect(self, role: str, count: int, timeout: float) -> list[Registration]:
        """Wait until ``count`` processes of ``role`` have registered.

        Raises:
            InfrastructureError: fewer than ``count`` registered within ``timeout`` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                while len(self.present(role)) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = sorted(set(range(count)) - {r.index for r in self.present(role)})
            raise InfrastructureError(
                f"{role} {missing} did not become ready within {timeout:.0f} s; see logs/{role}-{missing[0]}.log, "
                f"or raise the section's start_timeout"
            ) from None
        return self.present(role)[:count]
