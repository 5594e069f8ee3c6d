"""Mutants of what an operator does to a group: who belongs to it, who is given the lead."""

from __future__ import annotations

from collections.abc import Sequence

from node.dledger import DLedgerServer
from node.dledger.elector import LeaderElector
from node.dledger.member_change import MemberChange
from node.dledger.membership import Membership
from node.mutants.parts import replace

__all__ = ["members_forgotten", "removed_leader_stays", "transfer_keeps_lead"]


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
