"""Tracks which fault removed which group member, and readmits members; common to all systems with membership."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

__all__ = ["ChangesMembers"]

RELEASE_TIMEOUT_S = 20.0
"""For readmitting everybody once all other faults are healed: an election with default timings and some retries."""
RETRY_S = 0.2


class ChangesMembers(ABC):
    """The membership part of nemesis.target.Operator. A subclass implements a single change."""

    def __init__(self) -> None:
        self._removed: dict[str, list[str]] = {}
        """Fault id -> hosts that it keeps out of the group."""

    @abstractmethod
    async def _change(self, host: str, *, belongs: bool) -> None:
        """Add a host to the group or remove it. Idempotent. Raises RuntimeError."""

    async def remove(self, fault_id: str, host: str) -> None:
        """Remove `host` from the group. Raises RuntimeError."""
        removed = self._removed.setdefault(fault_id, [])
        if host not in removed:
            removed.append(host)  # recorded first: if the answer is lost, the change may still have happened
        await self._change(host, belongs=False)

    async def let_in(self, fault_id: str) -> None:
        """Readmit the hosts that this fault removed and no other fault keeps out. Raises RuntimeError."""
        for host in list(self._removed.get(fault_id, ())):
            if not any(host in hosts for other, hosts in self._removed.items() if other != fault_id):
                await self._change(host, belongs=True)
            self._removed[fault_id].remove(host)
        self._removed.pop(fault_id, None)

    async def release_all(self) -> None:
        """Readmit all removed hosts, retrying for RELEASE_TIMEOUT_S. Raises RuntimeError with the last failure."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + RELEASE_TIMEOUT_S
        for fault_id in list(self._removed):
            while True:
                try:
                    await self.let_in(fault_id)
                    break
                except RuntimeError:
                    if loop.time() > deadline_s:
                        raise
                    await asyncio.sleep(RETRY_S)
