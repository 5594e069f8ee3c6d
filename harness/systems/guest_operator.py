"""Operator actions on a plug-in's system: promoting a replica, changing members, if the plug-in implements them.

Roles and groups that are written into configurations change with the hosts' files and commands, which the plug-in is
asked for again. Plug-ins have no method for transferring leadership, so that ability is always missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from harness.errors import OperatorError
from harness.sdk.system import Status, System
from harness.systems.left_out import ChangesMembers
from nemesis.target import ReplicaView

__all__ = ["GuestOperator", "has_members", "operation_missing"]

_MEMBERSHIP = ("members", "leave", "join")


def has_members(system_class: type[System]) -> bool:
    """Whether a plug-in implements membership: `members`, `leave`, `join` and `status`."""
    return all(getattr(system_class, name) is not getattr(System, name) for name in (*_MEMBERSHIP, "status"))


def operation_missing(ability: str, *, system_class: type[System], name: str) -> str | None:
    """Why a plug-in lacks an operator's ability, as one line; None if it has it."""
    if ability == "promote":
        has_promote = system_class.promote is not System.promote
        return None if has_promote else f"system {name} has no method promote(host)"
    if ability == "members":
        lacking = [each for each in (*_MEMBERSHIP, "status") if getattr(system_class, each) is getattr(System, each)]
        words = ", ".join(f"{each}(host)" for each in lacking)
        return f"system {name} has no method {words}" if lacking else None
    return f"systems of harness.sdk have no operation {ability}"


class GuestOperator(ChangesMembers):
    """See nemesis.target.Operator. `status(host, timeout_s)` returns a replica's status, `members(host)` the group as
    it sees it (None if the plug-in has no membership); `promote(host)` makes it lead, `leave(host)` and `join(host)`
    change the group."""

    def __init__(
        self,
        *,
        status: Callable[[str, float], Awaitable[Status | None]],
        members: Callable[[str], Awaitable[Collection[str]]] | None,
        promote: Callable[[str], Awaitable[None]],
        leave: Callable[[str], Awaitable[None]],
        join: Callable[[str], Awaitable[None]],
        missing: Callable[[str], str | None],
    ) -> None:
        super().__init__()
        self._status = status
        self._members = members
        self._promote = promote
        self._leave = leave
        self._join = join
        self.missing = missing

    async def view(self, host: str, *, timeout_s: float) -> ReplicaView | None:
        """The results of the plug-in's `status` and `members`. A leader is assumed to accept writes."""
        try:
            async with asyncio.timeout(timeout_s):
                status = await self._status(host, timeout_s)
                members = await self._members(host) if self._members is not None and status is not None else ()
        except Exception:  # whatever the error, the replica did not answer
            return None
        if status is None:
            return None
        leads = status.leads
        return ReplicaView(
            host=host,
            leads=leads,
            takes_writes=leads,
            follows=not leads,
            term=status.term,
            members=frozenset(members),
            end=status.end,
        )

    async def promote(self, fault_id: str, host: str) -> None:
        """Make the replica of `host` the leader. Raises RuntimeError."""
        await _as_refusal(self._promote(host))

    async def _change(self, host: str, *, belongs: bool) -> None:
        await _as_refusal(self._join(host) if belongs else self._leave(host))

    async def transfer(self, fault_id: str, host: str) -> None:
        """Raises RuntimeError: plug-ins cannot transfer leadership."""
        raise RuntimeError(str(self.missing("transfer")))

    def transferred(self, fault_id: str) -> tuple[str, int] | None:
        """None: there are no transfers."""
        return None

    async def remove(self, fault_id: str, host: str) -> None:
        """Remove `host` from the group. Raises RuntimeError."""
        if (why_not := self.missing("members")) is not None:
            raise RuntimeError(why_not)
        await super().remove(fault_id, host)


async def _as_refusal(work: Awaitable[None]) -> None:
    """Await `work`; an OperatorError (of the plug-in, or of a program that does not start) becomes a RuntimeError."""
    try:
        await work
    except OperatorError as error:
        raise RuntimeError(str(error)) from error
