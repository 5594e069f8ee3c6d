"""What must hold for simulated replicas at every moment, checked on their own state as they change it.

A history shows a bug only when it affects a client, and most bugs are harmless most of the time. The invariants show it
where it happens. They are Raft's (Ongaro and Ousterhout, figure 3 and section 5) and those that this node adds:

    votes            a member votes once in a term; in a group whose members may change, it may transfer its vote to
                     the leader of that term, by following it (node.dledger.membership)
    election         a term has one leader
    completeness     a leader's log holds every entry that was committed in an earlier term
    matching         entries of the same index and term are the same, and so are all before them
    commitment       no two members have committed different entries at an index
    durability       what a leader commits is on the disks of a majority (flush mode sync)
    acknowledgement  an append is acknowledged only once its entry is committed
    end              nothing is committed beyond the end of a member's log, and nothing committed is removed from it
    recovery         a start recovers every durable entry, and none that had been removed
    quorum           a leader that no quorum answers steps down
    membership       a leader that the group has removed steps down

Entries are compared by their chain CRC, which covers everything before them, so one comparison at an index compares
whole logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.clusters.sim.clock import SimClock
from harness.clusters.sim.process_disk import ProcessDisk
from harness.clusters.sim.watch import ReplicaWatch
from harness.systems.base import CheckOutcome
from node.dledger import DLedgerServer
from node.dledger.rpc import Role
from node.runtime import Clock

__all__ = ["Invariants", "Violation"]

MAX_VIOLATIONS = 50
"""Violations kept with the results. The first one counts; later ones help to see what happened."""

QUORUM_LEASES = 3
"""Leases that may pass without a quorum; with slow timings, a leader notices the end of its lease one lease late."""

LOOK_INTERVAL_S = 0.25
PRUNE_AT = 8_000
"""Beyond this many remembered entries, those that all members have committed long ago are forgotten."""
PRUNE_KEEP = 2_000


@dataclass(frozen=True, slots=True)
class Violation:
    """One invariant that did not hold. `at_s` is the event loop's time."""

    rule: str
    at_s: float
    text: str


def _shown_ns(clock: Clock) -> int:
    """A monotonic clock, read without counting as a read by the member."""
    return clock.shown_monotonic_ns() if isinstance(clock, SimClock) else clock.monotonic_ns()


class _Seen(NamedTuple):
    """An entry as it was read. `crc` covers the bytes that were read: a damaged disk may return wrong bytes with the
    chain CRC of the right ones."""

    term: int
    chain_crc: int
    crc: int


@dataclass(slots=True)
class _Member:
    """What is known of one member across its lives."""

    ledger: DLedgerServer
    committed: int = -1
    durable: int = -1
    """The last index up to which its durable entries were checked."""
    is_over: bool = False
    """Whether a new process of its host has started, and opens the log that this one has left."""
    late_since_s: float | None = None
    cut: asyncio.Future[None] | None = None
    """Its last truncation; until that is done, a start may recover what it removes."""
    log: dict[int, _Seen] = field(default_factory=dict)
    """The newest of its durable entries."""

    def entry(self, index: int) -> _Seen | None:
        """An entry as it was when it became durable, or as its owner would read it now; None when it has none."""
        return self.log.get(index) or _entry_of(self.ledger, index)


class Invariants:
    """Checks everything that a ReplicaWatch reports. `now_s` returns the run's time; `is_running(host)` whether the
    host's process is neither dead nor paused."""

    def __init__(
        self,
        watch: ReplicaWatch,
        *,
        now_s: Callable[[], float],
        is_running: Callable[[str], bool],
    ) -> None:
        self._now_s = now_s
        self._is_running = is_running
        self._members: dict[str, _Member] = {}
        self._committed: dict[int, _Seen] = {}
        self._committed_by: dict[int, str] = {}
        self._last_committed = -1
        self._committed_in: dict[int, int] = {}
        """Term -> index of the last entry whose commitment was first seen on a member in that term."""
        self._entries: dict[tuple[int, int], tuple[int, str]] = {}
        self._leaders: dict[int, str] = {}
        self._votes: dict[tuple[int, str], str] = {}
        self._led_outside: dict[str, int] = {}
        """Host -> the last term in which it was seen leading a group that it does not belong to."""
        self._timer: asyncio.TimerHandle | None = None
        self.violations: list[Violation] = []
        self.on_violation: Callable[[Violation], None] | None = None
        """Called with each violation at the moment at which it is found."""
        tell = watch.tell
        tell.starting.append(self._starting)
        tell.recovered.append(self._recovered)
        tell.role.append(self._role_changed)
        tell.vote.append(self._voted)
        tell.committed.append(self._commits)
        tell.acknowledged.append(self._acknowledged)
        tell.progressed.append(self._progressed)
        tell.truncated.append(self._truncated)

    def start(self) -> None:
        """Begin to check leaders periodically."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look)

    def stop(self) -> None:
        """Stop the periodic checks at the end of the run, because replicas that are taken down may miss their times."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def has_members(self) -> bool:
        """Whether any replica was a member of a DLedger group."""
        return bool(self._members)

    def outcome(self, zero_s: float = 0.0) -> CheckOutcome:
        """False with the first violation, True if everything held. Times are in seconds since `zero_s` of the loop."""
        details: Mapping[str, Any] = {
            "violations": [
                {"rule": each.rule, "time_s": round(each.at_s - zero_s, 6), "text": each.text}
                for each in self.violations
            ]
        }
        if self.violations:
            first = self.violations[0]
            return CheckOutcome(False, f"{first.rule}: {first.text} (at {first.at_s - zero_s:.3f} s)", details)
        if not self._leaders:
            return CheckOutcome("unknown", "no member ever became leader", details)
        return CheckOutcome(True, f"held for {self._last_committed + 1} committed entries", details)

    def _broken(self, rule: str, text: str) -> None:
        if len(self.violations) < MAX_VIOLATIONS:
            violation = Violation(rule, self._now_s(), text)
            self.violations.append(violation)
            if self.on_violation is not None:
                self.on_violation(violation)

    # Elections

    def _voted(self, host: str, term: int, candidate: str) -> None:
        before = self._votes.setdefault((term, host), candidate)
        if before != candidate:
            if self._leaders.get(term) == candidate and self._may_change(host):
                self._votes[term, host] = candidate
                return
            self._broken("votes", f"{host} voted for {before} and for {candidate} in term {term}")
            self._votes[term, host] = candidate

    def _may_change(self, host: str) -> bool:
        member = self._members.get(host)
        return member is not None and member.ledger.config.members_may_change

    def _role_changed(self, host: str, term: int, role: Role) -> None:
        if role is not Role.LEADER:
            return
        before = self._leaders.setdefault(term, host)
        if before != host:
            self._broken("election", f"{before} and {host} lead term {term}")
        # Votes may come so late that a later term has a leader already; this one need not have what that one commits.
        index = max((last for each, last in self._committed_in.items() if each < term), default=-1)
        seen = self._committed.get(index)
        member = self._members.get(host)
        if seen is not None and member is not None and _entry_of(member.ledger, index) != seen:
            self._broken(
                "completeness",
                f"{host} leads term {term} without entry {index} of term {seen.term}, which "
                f"{self._committed_by[index]} has committed",
            )

    def _look(self) -> None:
        """Find leaders that no quorum has answered for too long."""
        for host, member in self._members.items():
            leadership = member.ledger.elector.leadership
            if leadership is None or member.is_over or not self._is_running(host):
                member.late_since_s = None
                continue
            self._check_membership(host, member, leadership.term)
            age_ms = (_shown_ns(member.ledger.runtime.clock) - leadership.quorum_sent_ns()) / 1e6
            lease_ms = member.ledger.config.timing.lease_ms
            if age_ms <= QUORUM_LEASES * lease_ms:
                member.late_since_s = None
            elif member.late_since_s is None:
                member.late_since_s = self._now_s()
            elif self._now_s() - member.late_since_s >= lease_ms / 1000:
                member.late_since_s = float("inf")  # reported once
                self._broken(
                    "quorum",
                    f"{host} leads term {leadership.term} although no quorum has answered for {age_ms:.0f} ms",
                )
        self._timer = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look)

    def _check_membership(self, host: str, member: _Member, term: int) -> None:
        group = member.ledger.member_state.members
        is_out = not group.includes_self and group.index <= member.ledger.store.committed_index
        if is_out and self._led_outside.setdefault(host, term - 1) < term:
            self._led_outside[host] = term  # reported once
            self._broken("membership", f"{host} leads term {term} although the group has removed it")

    # The log

    def _starting(self, host: str) -> None:
        member = self._members.get(host)
        if member is not None:
            member.is_over = True  # its leadership is a dead process's, however long the new one takes to open its log

    def _recovered(self, host: str, ledger: DLedgerServer) -> None:
        before = self._members.get(host)
        member = self._members[host] = _Member(ledger)
        begin, end = ledger.store.ledger_begin_index, ledger.store.ledger_end_index
        if before is not None:
            self._compare_lives(host, before, ledger)
            member.log = {index: seen for index, seen in before.log.items() if begin <= index <= end}
        member.committed = ledger.store.committed_index
        self._check_committed(host, member)
        self._learn_durable(host, member)

    def _compare_lives(self, host: str, before: _Member, ledger: DLedgerServer) -> None:
        end, former_end = ledger.store.ledger_end_index, before.ledger.store.ledger_end_index
        durable = before.ledger.store.durable_index
        if end > former_end and (before.cut is None or before.cut.done()):
            self._broken(
                "recovery", f"{host} starts with {end - former_end} entries after {former_end} that it had removed"
            )
        elif before.ledger.store.ledger_begin_index <= durable and end < durable:
            self._broken("recovery", f"{host} starts with entries up to {end}, but had up to {durable} on its disk")
        begin = ledger.store.ledger_begin_index  # entries before it have expired
        for index, seen in before.log.items():
            if begin <= index <= end and _entry_of(ledger, index) != seen:
                self._broken("recovery", f"entry {index} of {host} is a different one after its start")
                return

    def _progressed(self, host: str) -> None:
        member = self._members.get(host)
        if member is not None:
            self._learn_durable(host, member)
            if member.ledger.store.committed_index > member.ledger.store.ledger_end_index:
                self._beyond_end(host, member.ledger)

    def _beyond_end(self, host: str, ledger: DLedgerServer) -> None:
        store = ledger.store
        committed, end = store.committed_index, store.ledger_end_index
        self._broken("end", f"{host} has committed up to {committed}, but its log ends at {end}")

    def _learn_durable(self, host: str, member: _Member) -> None:
        """Check log matching for the entries that have become durable."""
        durable = min(member.ledger.store.durable_index, member.ledger.store.ledger_end_index)
        first = max(member.durable + 1, durable - PRUNE_KEEP, member.ledger.store.ledger_begin_index)
        for index in range(first, durable + 1):
            seen = _entry_of(member.ledger, index)
            if seen is None:
                break
            member.log[index] = seen
            crc, owner = self._entries.setdefault((index, seen.term), (seen.chain_crc, host))
            if crc != seen.chain_crc:
                text = f"{owner} and {host} have different entries at index {index} of term {seen.term}"
                self._broken("matching", text)
        member.durable = durable
        if len(member.log) > PRUNE_AT:
            for index in [index for index in member.log if index < durable - PRUNE_KEEP]:
                del member.log[index]

    def _truncated(self, host: str, stays: int, before: int, done: asyncio.Future[None]) -> None:
        member = self._members.get(host)
        if member is None:
            return
        member.cut = done
        if stays < member.committed and member.ledger.store.ledger_begin_index <= member.committed:
            gone = f"entries {stays + 1} to {before}"
            self._broken("end", f"{host} removes {gone}, but has committed up to {member.committed}")
        member.durable = min(member.durable, stays)
        for index in [index for index in member.log if index > stays]:
            del member.log[index]

    def _commits(self, host: str) -> None:
        member = self._members.get(host)
        if member is None:
            return
        store = member.ledger.store
        if store.committed_index > store.ledger_end_index:
            self._beyond_end(host, member.ledger)
            return
        if store.committed_index < member.committed:
            now = store.committed_index
            self._broken("end", f"{host} had committed up to {member.committed}, and now only up to {now}")
        first = max(member.committed, self._last_committed, store.ledger_begin_index - 1) + 1
        for index in range(first, store.committed_index + 1):
            seen = member.entry(index)
            if seen is not None:
                self._committed[index] = seen
                self._committed_by[index] = host
        member.committed = store.committed_index
        if not self._check_committed(host, member):
            return
        if member.committed > self._last_committed:
            self._last_committed = self._committed_in[member.ledger.member_state.term] = member.committed
            if member.ledger.member_state.is_leader and member.ledger.config.flush_mode == "sync":
                self._check_durability(host, member.ledger, member.committed)
            self._prune()

    def _acknowledged(self, host: str, index: int) -> None:
        member = self._members.get(host)
        if member is not None and index > member.ledger.store.committed_index:
            committed = member.ledger.store.committed_index
            text = f"{host} acknowledges entry {index}, but has committed only up to {committed}"
            self._broken("acknowledgement", text)

    def _check_committed(self, host: str, member: _Member) -> bool:
        """Whether a member's last committed entry is the one that others have committed."""
        seen = self._committed.get(member.committed)
        own = member.entry(member.committed) if seen is not None else None
        if seen is None or own == seen:
            return True
        what = f"of term {own.term}" if own is not None else "nothing"
        other = self._committed_by[member.committed]
        self._broken(
            "commitment",
            f"at index {member.committed}, {host} has committed {what}, but {other} an entry of term {seen.term}",
        )
        return False

    def _check_durability(self, host: str, ledger: DLedgerServer, index: int) -> None:
        """Check that a majority of the group, as its leader knows it, has the entry on disk."""
        group = ledger.member_state.members
        seen = self._committed.get(index)
        holders = [
            name
            for name, member in self._members.items()
            if name in group.ids and member.ledger.store.durable_index >= index and member.entry(index) == seen
        ]
        if len(holders) < group.quorum_size:
            self._broken(
                "durability",
                f"{host} commits entry {index}, which is on the disks of {', '.join(holders) or 'no members'} only",
            )

    def _prune(self) -> None:
        if len(self._committed) <= PRUNE_AT:
            return
        oldest = min(member.committed for member in self._members.values()) - PRUNE_KEEP
        for index in [index for index in self._committed if index < oldest]:
            del self._committed[index], self._committed_by[index]
        for key in [key for key in self._entries if key[0] < oldest]:
            del self._entries[key]


def _entry_of(ledger: DLedgerServer, index: int) -> _Seen | None:
    """An entry as its owner would read it from a disk without injected errors; None when it has none, or a damaged one.
    A disk whose reads fail still has the entry, and this read is not the member's."""
    disk = ledger.runtime.disk
    try:
        with disk.device.looked_at() if isinstance(disk, ProcessDisk) else contextlib.nullcontext():
            entry = ledger.store.get(index)
    except OSError:
        return None
    return None if entry is None else _Seen(entry.term, entry.chain_crc, zlib.crc32(entry.raw))
