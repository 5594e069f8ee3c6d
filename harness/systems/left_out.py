"""Who was taken out of a group by which fault, and letting them in again: the same for every system with members."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

__all__ = ["ChangesMembers"]

RELEASE_TIMEOUT_S = 20.0
"""To let everybody in again once all other faults are healed: an election with default timings and some attempts."""
RETRY_S = 0.2


class ChangesMembers(ABC):
    """The part of nemesis.target.Operator that is about members. A subclass says how one change is made."""

    def __init__(self) -> None:
        self._removed: dict[str, list[str]] = {}
        """fault id -> hosts that may not belong to the group at the moment"""

    @abstractmethod
    async def _change(self, host: str, *, belongs: bool) -> None:
        """Have a host belong to the group, or no longer. Done already, it is done. Raises RuntimeError."""

    async def remove(self, fault_id: str, host: str) -> None:
        """Have `host` belong to the group no longer. Raises RuntimeError."""
        removed = self._removed.setdefault(fault_id, [])
        if host not in removed:
            removed.append(host)  # first, because an answer that is lost says nothing
        await self._change(host, belongs=False)

    async def let_in(self, fault_id: str) -> None:
        """Have those that a fault removed, and no other fault keeps out, belong to the group again. Raises
        RuntimeError."""
        for host in list(self._removed.get(fault_id, ())):
            if not any(host in hosts for other, hosts in self._removed.items() if other != fault_id):
                await self._change(host, belongs=True)
            self._removed[fault_id].remove(host)
        self._removed.pop(fault_id, None)

    async def release_all(self) -> None:
        """Let in whoever was removed, trying for a while. Raises RuntimeError with what kept the last one out."""
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
