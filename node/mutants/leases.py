"""Mutants of what makes reads safe: how a leader knows, by its lease or by asking, that it still leads, and for whom
its followers may vote."""

from __future__ import annotations

import asyncio
from typing import Any

from node.dledger import DLedgerServer
from node.dledger.elector import LeaderElector
from node.dledger.leadership import ConfirmationCallback, Leadership
from node.dledger.messages import HeartBeatResponse
from node.dledger.peers import PeerError
from node.mutants.parts import replace

__all__ = [
    "lease_by_role",
    "lease_from_answer",
    "read_confirmed_before",
    "vote_after_restart",
    "vote_despite_leader",
]


def _in_every_leadership(ledger: DLedgerServer, **attributes: Any) -> None:
    """Replace methods in every leadership that this member begins."""

    def _become_leader(self: LeaderElector, term: int) -> None:
        LeaderElector._become_leader(self, term)
        if self.leadership is not None:
            replace(self.leadership, **attributes)

    replace(ledger.elector, _become_leader=_become_leader)


def vote_after_restart(ledger: DLedgerServer) -> None:
    """A restarted member does not wait for the lease that it may have promised its leader before."""

    def start(self: LeaderElector) -> None:
        LeaderElector.start(self)
        self._votes_from_ns = 0

    replace(ledger.elector, start=start)


def vote_despite_leader(ledger: DLedgerServer) -> None:
    def is_bound_to_another(self: LeaderElector, candidate: str) -> bool:
        return False

    replace(ledger.elector, is_bound_to_another=is_bound_to_another)


def lease_from_answer(ledger: DLedgerServer) -> None:
    def _heard(
        self: Leadership, peer: str, number: int, sent_ns: int, is_repeat: bool, answer: HeartBeatResponse | PeerError
    ) -> None:
        Leadership._heard(self, peer, number, self._clock.monotonic_ns(), is_repeat, answer)

    _in_every_leadership(ledger, _heard=_heard)


def lease_by_role(ledger: DLedgerServer) -> None:
    """After a pause, requests that arrived meanwhile are answered before the leader has looked at its clock."""

    def holds_lease(self: Leadership) -> bool:
        return self._quorum_round() > 0

    _in_every_leadership(ledger, holds_lease=holds_lease)


def read_confirmed_before(ledger: DLedgerServer) -> None:
    def confirm_then(self: Leadership, on_done: ConfirmationCallback) -> None:
        if self._quorum_round() == self._round:
            Leadership.confirm_then(self, on_done)
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._config.timing.barrier_timeout_ms / 1000
        self._waiting.append((self._round, on_done, due_s))
        if self._expiry is None:
            self._expiry = loop.call_at(due_s, self._expire)

    _in_every_leadership(ledger, confirm_then=confirm_then)
