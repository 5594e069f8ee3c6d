"""Mutants of what an operator does to a group: changes of its members, and transfers of leadership."""

from __future__ import annotations

from collections.abc import Sequence

from node.dledger import DLedgerServer
from node.dledger.elector import LeaderElector
from node.dledger.member_change import MemberChange
from node.dledger.membership import Membership
from node.dledger.rpc import DLedgerCode, DLedgerError
from node.mutants.parts import replace

__all__ = [
    "change_before_own_commit",
    "changes_overlap",
    "members_forgotten",
    "removed_leader_stays",
    "transfer_keeps_lead",
    "truncated_members_stay",
]


def members_forgotten(ledger: DLedgerServer) -> None:
    def restore(self: Membership, history: Sequence[tuple[int, dict[str, str]]], last_index: int) -> None:
        return None

    replace(ledger.member_state.members, restore=restore)


def removed_leader_stays(ledger: DLedgerServer) -> None:
    def _leave(self: MemberChange, term: int) -> None:
        return None

    replace(ledger.members, _leave=_leave)


def transfer_keeps_lead(ledger: DLedgerServer) -> None:
    def give_up(self: LeaderElector, term: int, successor: str) -> None:
        return None

    replace(ledger.elector, give_up=give_up)


def change_before_own_commit(ledger: DLedgerServer) -> None:
    def check_may_change(self: MemberChange, term: int) -> None:
        if self._state.members.index > self._store.committed_index:
            raise DLedgerError(DLedgerCode.INCONSISTENT_STATE, "the change before is not committed yet")

    replace(ledger.members, check_may_change=check_may_change)


def changes_overlap(ledger: DLedgerServer) -> None:
    def check_may_change(self: MemberChange, term: int) -> None:
        return None

    replace(ledger.members, check_may_change=check_may_change)


def truncated_members_stay(ledger: DLedgerServer) -> None:
    def cut(self: Membership, end_index: int) -> None:
        return None

    replace(ledger.member_state.members, cut=cut)
