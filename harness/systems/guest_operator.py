"""What an operator does to the system of a plug-in: promote a replica, where the plug-in says how.

Roles that are written into configurations change with the files and programs of the hosts, which are asked for anew.
No plug-in can say how a lead is transferred or members are changed: both are missing, with that reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from harness.errors import OperatorError
from harness.sdk.system import Status
from nemesis.target import ReplicaView

__all__ = ["GuestOperator", "operation_missing"]


def operation_missing(ability: str, *, has_promote: bool, name: str) -> str | None:
    """Why nobody can ask it of the system, as one line; None where somebody can."""
    if ability == "promote":
        return None if has_promote else f"system {name} has no method promote(host)"
    return f"a system of harness.sdk has no {ability} that an operator could ask for"


class GuestOperator:
    """See nemesis.target.Operator. `status(host, timeout_s)` is what the replica says of itself, `promote(host)` has it
    lead."""

    def __init__(
        self,
        *,
        status: Callable[[str, float], Awaitable[Status | None]],
        promote: Callable[[str], Awaitable[None]],
        missing: Callable[[str], str | None],
    ) -> None:
        self._status = status
        self._promote = promote
        self.missing = missing

    async def view(self, host: str, *, timeout_s: float) -> ReplicaView | None:
        """What the plug-in's `status` says. Who leads is taken to take writes."""
        status = await self._status(host, timeout_s)
        if status is None:
            return None
        leads = status.leads
        return ReplicaView(
            host=host, leads=leads, takes_writes=leads, follows=not leads, term=status.term, end=status.end
        )

    async def promote(self, fault_id: str, host: str) -> None:
        """Have the replica of `host` lead. Raises RuntimeError."""
        try:
            await self._promote(host)
        except OperatorError as error:  # what the plug-in raised, or its program that did not start
            raise RuntimeError(str(error)) from error

    async def transfer(self, fault_id: str, host: str) -> None:
        """Raises RuntimeError: nobody can ask for it."""
        raise RuntimeError(str(self.missing("transfer")))

    def transferred(self, fault_id: str) -> tuple[str, int] | None:
        """None: nothing was."""
        return None

    async def remove(self, fault_id: str, host: str) -> None:
        """Raises RuntimeError: nobody can ask for it."""
        raise RuntimeError(str(self.missing("members")))

    async def let_in(self, fault_id: str) -> None:
        """Nobody was removed."""

    async def release_all(self) -> None:
        """Nobody was removed."""
