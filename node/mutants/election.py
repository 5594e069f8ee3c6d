"""Mutants of voting, leading and reading."""

from __future__ import annotations

from typing import Any

from node.dledger import DLedgerServer
from node.dledger.document import encode_document
from node.dledger.elector import LeaderElector
from node.dledger.leadership import ConfirmationCallback, Leadership
from node.dledger.member_state import MemberState
from node.dledger.rpc import VoteResult
from node.dledger.store import DLedgerStore
from node.mutants.parts import replace
from node.runtime import Clock

__all__ = [
    "end_term_from_current_term",
    "lead_term_again",
    "lease_on_wall_clock",
    "no_step_down",
    "stale_leader_reads",
    "vote_for_shorter_log",
    "vote_not_persisted",
    "vote_without_fsync",
]


def vote_not_persisted(ledger: DLedgerServer) -> None:
    async def persist(self: MemberState, term: int, voted_for: str | None) -> None:
        await MemberState.persist(self, term, None)

    replace(ledger.member_state, persist=persist)


def vote_without_fsync(ledger: DLedgerServer) -> None:
    disk = ledger.runtime.disk
    path = f"{ledger.config.ledger_dir}/member_state"

    async def persist(self: MemberState, term: int, voted_for: str | None) -> None:
        if not disk.exists(path):
            await MemberState.persist(self, term, voted_for)  # only the first one, so that there is a file
            return
        data = encode_document({"term": term, "voted_for": voted_for})
        file = disk.open(path)
        try:
            await file.write(0, data)
            if file.size_bytes() > len(data):
                await file.truncate(len(data))
        finally:
            file.close()

    replace(ledger.member_state, persist=persist)


def vote_for_shorter_log(ledger: DLedgerServer) -> None:
    def judge_log(self: LeaderElector, ledger_end_term: int, ledger_end_index: int) -> VoteResult | None:
        return None

    replace(ledger.elector, judge_log=judge_log)


class _StampedStore:
    """The log as seen by elections; its last entry always has the current term."""

    def __init__(self, store: DLedgerStore, state: MemberState) -> None:
        self._store = store
        self._state = state

    @property
    def ledger_end_term(self) -> int:
        return self._state.term

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def end_term_from_current_term(ledger: DLedgerServer) -> None:
    stamped: Any = _StampedStore(ledger.store, ledger.member_state)
    ledger.elector._store = stamped


def lead_term_again(ledger: DLedgerServer) -> None:
    def may_lead(self: LeaderElector, term: int) -> bool:
        return True

    replace(ledger.elector, may_lead=may_lead)


def no_step_down(ledger: DLedgerServer) -> None:
    def must_step_down(self: LeaderElector, leadership: Leadership) -> bool:
        return False

    def _lead(self: LeaderElector) -> int:
        wait_ns = LeaderElector._lead(self)
        if self.leadership is None:
            return wait_ns
        # The end of the lease has passed without effect: wait only for the next heartbeat.
        due_ns = self.leadership.last_beat_ns + self._timing.heartbeat_interval_ms * 1_000_000
        return max(wait_ns, due_ns - self._clock.monotonic_ns(), 1)

    replace(ledger.elector, must_step_down=must_step_down, _lead=_lead)


def stale_leader_reads(ledger: DLedgerServer) -> None:
    def confirm_leadership(self: object, leadership: Leadership, on_done: ConfirmationCallback) -> None:
        on_done(None)

    no_step_down(ledger)
    replace(ledger.reads, confirm_leadership=confirm_leadership)


class _WallClock:
    """A clock that measures durations by the time of day."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def monotonic_ns(self) -> int:
        return self._clock.wall_ms() * 1_000_000


def lease_on_wall_clock(ledger: DLedgerServer) -> None:
    """The leader's side of the lease: heartbeats are timed by the monotonic clock, the lease by the wall clock."""
    wall = _WallClock(ledger.runtime.clock)

    def _send(self: Leadership, peer: str, number: int, sent_ns: int, *, is_repeat: bool = False) -> None:
        Leadership._send(self, peer, number, wall.monotonic_ns(), is_repeat=is_repeat)

    def _held(self: Leadership, ratio: float) -> bool:
        lease_ns = self._config.timing.lease_ms * ratio * 1e6
        return wall.monotonic_ns() - self.quorum_sent_ns() < lease_ns

    def holds_quorum(self: Leadership) -> bool:
        return _held(self, 1.0)

    def holds_lease(self: Leadership) -> bool:
        return self._quorum_round() > 0 and _held(self, 1 - self._config.timing.clock_drift_ratio)

    def _become_leader(self: LeaderElector, term: int) -> None:
        LeaderElector._become_leader(self, term)
        if self.leadership is not None:
            self.leadership._answered_sent_ns = dict.fromkeys(self.leadership._others, wall.monotonic_ns())
            replace(self.leadership, _send=_send, holds_quorum=holds_quorum, holds_lease=holds_lease)

    replace(ledger.elector, _become_leader=_become_leader)
