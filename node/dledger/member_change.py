"""Changes the members of a group, one member at a time; see `membership` for the rules."""

from __future__ import annotations

import asyncio
import logging

from node.dledger.config import DLedgerConfig
from node.dledger.elector import LeaderElector
from node.dledger.member_state import MemberState
from node.dledger.membership import MAX_MEMBERS
from node.dledger.messages import MAX_ID_CHARACTERS
from node.dledger.pusher import DLedgerEntryPusher
from node.dledger.rpc import DLedgerCode, DLedgerError
from node.dledger.snapshot_manager import SnapshotManager
from node.dledger.store import DLedgerStore

__all__ = ["MemberChange"]

logger = logging.getLogger("node.dledger.elector")


class MemberChange:
    """The leader's side. Each member applies a change when its entry is in that member's log."""

    def __init__(
        self,
        config: DLedgerConfig,
        state: MemberState,
        store: DLedgerStore,
        pusher: DLedgerEntryPusher,
        elector: LeaderElector,
        snapshots: SnapshotManager,
    ) -> None:
        self._may_change = config.members_may_change
        self._state = state
        self._store = store
        self._pusher = pusher
        self._elector = elector
        self._snapshots = snapshots
        store.add_commit_listener(self._committed)

    async def change(self, member: str, address: str | None) -> int:
        """Add `member` to the group at `address`, or remove it (None); returns the index of the committed entry.

        A leader that removes itself steps down when that is committed. Raises DLedgerError NOT_LEADER;
        UNEXPECTED_ARGUMENT if the group is fixed, the name is invalid, the change has no effect, the group would have
        no or too many members, or the address is another member's; INCONSISTENT_STATE while the previous change or this
        leader's own first entry is not committed yet. Nothing was done then. Also raises what an append raises; if that
        is indefinite, the change is in doubt too.
        """
        leadership = self._elector.leadership
        if leadership is None or not self._state.is_leader:
            raise DLedgerError(
                DLedgerCode.NOT_LEADER, f"{self._state.self_id} does not lead", leader_id=self._state.leader_id
            )
        if not self._may_change:
            raise DLedgerError(DLedgerCode.UNEXPECTED_ARGUMENT, "the configuration does not let this group change")
        if not self._state.is_member(member) or not member.isprintable() or len(member) > MAX_ID_CHARACTERS:
            raise DLedgerError(DLedgerCode.UNEXPECTED_ARGUMENT, f"{member!r} is no name of a member")
        peers = dict(self._state.members.peers)
        if address is not None:
            if member in peers:
                raise DLedgerError(DLedgerCode.UNEXPECTED_ARGUMENT, f"{member} belongs to the group already")
            self._check_address(member, address)
            peers[member] = address
        elif peers.pop(member, None) is None:
            raise DLedgerError(DLedgerCode.UNEXPECTED_ARGUMENT, f"{member} does not belong to the group")
        if not 0 < len(peers) <= MAX_MEMBERS:
            raise DLedgerError(DLedgerCode.UNEXPECTED_ARGUMENT, f"a group has 1 to {MAX_MEMBERS} members")
        self.check_may_change(leadership.term)
        logger.info("%s: the group is to be %s", self._state.self_id, ", ".join(sorted(peers)))
        own = self._state.members.configured_address(member)
        if address is not None and own not in (None, address):
            logger.warning("%s dials %s at %s, as its configuration says, not at %s", self._state.self_id, member, own,
                           address)  # fmt: skip
        return (await self._pusher.append_members(peers)).index

    def _check_address(self, member: str, address: str) -> None:
        """Raises DLedgerError UNEXPECTED_ARGUMENT if another member is dialled at `address`: the group would count a
        member that does not exist, and then refuse to add it at its right address because it belongs to the group."""
        members = self._state.members
        for other, known in members.peers.items():
            if address in (known, members.address(other)):
                raise DLedgerError(
                    DLedgerCode.UNEXPECTED_ARGUMENT,
                    f"{address} is the address of {other}, which belongs to the group: {member} needs one of its own",
                )

    async def restate(self) -> None:
        """Append the current group once more, so that the part of the log with the former entry can be removed. Does
        nothing if this member does not lead. Raises what an append raises."""
        if self._state.is_leader:
            await self._pusher.append_members(self._state.members.peers)

    def check_may_change(self, term: int) -> None:
        """Raises DLedgerError INCONSISTENT_STATE."""
        committed_index = self._store.committed_index
        if self._state.members.index > committed_index:
            raise DLedgerError(DLedgerCode.INCONSISTENT_STATE, "the change before is not committed yet")
        if self._store.term_at(committed_index) != term:
            raise DLedgerError(DLedgerCode.INCONSISTENT_STATE, "nothing of this term is committed yet")

    def _committed(self) -> None:
        members = self._state.members
        # A checkpoint holds what is durable, a snapshot what is applied; either may be behind the last change.
        needed_index = self._snapshots.newest_index if self._snapshots.is_used else self._store.committed_index
        members.forget_before(min(self._store.committed_index, self._store.durable_index, needed_index))
        if not members.includes_self and self._state.is_leader and members.index <= self._store.committed_index:
            # Not at once: whoever waits for the entry learns first that it is committed.
            asyncio.get_running_loop().call_soon(self._leave, self._state.term)

    def _leave(self, term: int) -> None:
        self._elector.step_down(term, f"{self._state.self_id} does not belong to the group any more")
