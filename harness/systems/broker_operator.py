"""Operator actions on the brokers: see nemesis.target.Operator.

Leadership and membership are changed by the requests that `python -m node transfer` and `python -m node members` send,
addressed to the current leader. Their client is imported only when one is sent, so that other runs do not pay for it. A
promotion in classic HA is done with new configurations and a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from harness.errors import SystemUnderTestError
from harness.systems.left_out import ChangesMembers
from nemesis.target import ReplicaView

__all__ = ["BrokerOperator", "operation_missing"]

LOOK_TIMEOUT_S = 0.5


def operation_missing(ability: str, *, is_classic: bool) -> str | None:
    """Why the brokers lack an operator's ability, as one line that names the fix; None if they have it."""
    if ability == "promote":
        return None if is_classic else "DLedger elects its leaders: promoting is for --set replication=sync or async"
    if is_classic:
        return f"classic HA has no {_GROUP_WORDS[ability]}: it needs --set replication=dledger"
    return None


_GROUP_WORDS = {"transfer": "lead that could be transferred", "members": "group whose members change"}


class BrokerOperator(ChangesMembers):
    """`status(host, timeout_s)` returns a broker's status, `promote(host)` makes it the master. `known_to` returns the
    address by which the other members know a host, `dialled` the address for operator requests."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        group: str,
        is_classic: bool,
        status: Callable[[str, float], Awaitable[Mapping[str, str] | None]],
        known_to: Callable[[str], str],
        dialled: Callable[[str], str],
        promote: Callable[[str], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._hosts = tuple(hosts)
        self._group = group
        self._is_classic = is_classic
        self._status = status
        self._known_to = known_to
        self._dialled = dialled
        self._promote = promote
        self._transferred: dict[str, tuple[str, int]] = {}

    def missing(self, ability: str) -> str | None:
        """Why these brokers lack an ability; None if they have it."""
        return operation_missing(ability, is_classic=self._is_classic)

    async def view(self, host: str, *, timeout_s: float) -> ReplicaView | None:
        """A replica's role, term, members and log end, from the broker's status."""
        table = await self._status(host, timeout_s)
        if table is None:
            return None
        members = frozenset(table.get("members", "").split(",")) - {""}
        leads, takes_writes = table.get("role") == "LEADER", table.get("takesWrites") == "true"
        if self._is_classic:
            follows, end = table.get("haState") == "FOLLOWING", _number(table, "committedPos")
        else:
            follows = table.get("role") == "FOLLOWER" and bool(table.get("leaderId"))
            end = _number(table, "ledgerEndIndex")
        return ReplicaView(
            host=host,
            leads=leads,
            takes_writes=leads and takes_writes,
            follows=follows,
            term=_number(table, "term"),
            members=members,
            members_committed=_number(table, "membersIndex") <= _number(table, "committedIndex"),
            end=end,
        )

    async def _leader(self) -> ReplicaView:
        views = await asyncio.gather(*(self.view(host, timeout_s=LOOK_TIMEOUT_S) for host in self._hosts))
        leading = [view for view in views if view is not None and view.leads]
        if not leading:
            raise RuntimeError("none of the brokers that answer is the leader")
        return max(leading, key=lambda view: view.term)

    async def transfer(self, fault_id: str, host: str) -> None:
        """Have the current leader transfer its leadership to `host`. Raises RuntimeError."""
        leader = await self._leader()
        if leader.host == host:
            raise RuntimeError(f"{host} leads already")
        from node.client.operator import GroupRefuses, give_lead

        peers = {name: self._dialled(name) for name in (leader.host, host)}
        try:
            self._transferred[fault_id] = host, await give_lead(self._group, peers, host)
        except GroupRefuses as error:
            raise RuntimeError(str(error)) from error

    def transferred(self, fault_id: str) -> tuple[str, int] | None:
        """(host, term) of a completed transfer, as the new leader reported it; None if there was none."""
        return self._transferred.get(fault_id)

    async def _change(self, host: str, *, belongs: bool) -> None:
        leader = await self._leader()
        if (host in leader.members) is belongs:
            if not leader.members_committed:
                raise RuntimeError("the change before is not committed yet")
            return
        from node.client.operator import GroupRefuses, change_members

        address = self._known_to(host) if belongs else None
        try:
            await change_members(self._group, {leader.host: self._dialled(leader.host)}, host, address)
        except GroupRefuses as error:
            raise RuntimeError(str(error)) from error

    async def promote(self, fault_id: str, host: str) -> None:
        """Make the slave on `host` the master. Raises RuntimeError."""
        try:
            await self._promote(host)
        except SystemUnderTestError as error:
            raise RuntimeError(str(error)) from error


def _number(table: Mapping[str, str], name: str) -> int:
    try:
        return int(table.get(name, "-1"))
    except ValueError:
        return -1
