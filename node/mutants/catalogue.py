"""The names of the mutants, what each does wrong, and the source of each mistake.

Origins: S0 to S4 are the source articles, "R" is DLedger or RocketMQ as published, `dledger#N` and `rocketmq#N` are
reports against them, "raft-dev 2015" is the flaw that Ongaro found in single-member changes, "FAST 2018" is Alagappan
and others on recovery from damaged logs, "Raft" and "DLedger's tests" are what their names say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node.nearest import nearest

__all__ = ["CLIENT_MUTANTS", "MUTANTS", "NO_MUTANT", "SCRIPTED_MUTANTS", "Mutant", "check_mutant"]

NO_MUTANT = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mistake. `is_in_client`: it is put into clients, not into nodes. `is_unscripted`: it needs several conditions
    at once and has no scripted scenario; it serves to show what a search finds on its own."""

    does: str
    origin: str
    is_in_client: bool = False
    is_unscripted: bool = False


MUTANTS: Mapping[str, Mutant] = {
    "vote-not-persisted": Mutant(does="the vote is kept in memory only", origin="Raft 5.2"),
    "vote-without-fsync": Mutant(does="term and vote are written, not synced", origin="R"),
    "vote-for-shorter-log": Mutant(does="a vote is given whatever the candidate's log holds", origin="S3"),
    "end-term-from-current-term": Mutant(
        does="elections compare the current term instead of the last entry's", origin="S0, dledger#52"
    ),
    "commit-old-terms": Mutant(
        does="entries of earlier terms are committed by counting (Figure 8)", origin="S0, S2, dledger#4"
    ),
    "ack-before-quorum": Mutant(does="an append is acknowledged once the leader has it", origin="S2"),
    "ack-before-fsync": Mutant(does="acknowledgements do not wait for the sync", origin="S1, R"),
    "quorum-off-by-one": Mutant(does="one member fewer than a majority commits", origin="S0, S2"),
    "commit-beyond-end": Mutant(
        does="a follower takes over the leader's committed index unbounded", origin="dledger#278"
    ),
    "truncate-committed": Mutant(
        does="a truncation may cross the committed index, and the leader asks for it at the first agreement",
        origin="dledger#316",
    ),
    "truncate-not-persisted": Mutant(
        does="a truncation leaves index and checkpoint as they were, and is not synced", origin="rocketmq#10666"
    ),
    "compare-index-only": Mutant(does="COMPARE takes entries with the same index for equal", origin="S0, S2"),
    "accept-gap": Mutant(does="a follower acknowledges entries whose predecessors it lacks", origin="S0, S2"),
    "stale-leader-reads": Mutant(
        does="a leader answers reads without asking a quorum, and does not step down without one", origin="Raft 6.4, R"
    ),
    "lease-on-wall-clock": Mutant(does="the lease is measured by the wall clock", origin="Raft 6.4.1"),
    "no-step-down": Mutant(does="a leader without a quorum keeps leading", origin="R"),
    "early-promotion": Mutant(does="a new leader takes messages before its log is dispatched", origin="S3"),
    "queue-offset-reuse": Mutant(
        does="a promoted master goes on with the queue offsets of its last mastership", origin="S3"
    ),
    "duplicate-apply": Mutant(
        does="a restart dispatches entries again, and queues take them again", origin="rocketmq#3210"
    ),
    "pop-without-checkpoint": Mutant(
        does="what POP consumers are given counts as dealt with, and no checkpoint is written", origin="R"
    ),
    "in-hand-forgotten": Mutant(does="a restart forgets which messages POP consumers have in hand", origin="R"),
    "timers-forgotten": Mutant(does="a restart forgets which timer messages wait", origin="R"),
    "checksum-ignored": Mutant(does="recovery and reads take any bytes for an entry", origin="S1"),
    "members-forgotten": Mutant(
        does="a restart forgets the group's members and uses those of the configuration", origin="Raft 6"
    ),
    "removed-leader-stays": Mutant(does="a leader that was removed goes on leading", origin="Raft 6"),
    "transfer-keeps-lead": Mutant(
        does="a leader that transfers its leadership goes on leading, and reading by its lease", origin="R"
    ),
    "ha-ack-when-sent": Mutant(
        does="classic HA: what was sent to a slave counts as acknowledged", origin="S4, rocketmq#3015"
    ),
    "ha-ack-before-slave-syncs": Mutant(
        does="classic HA: a slave acknowledges what it has received, not what it has synced", origin="S4"
    ),
    "ha-send-before-sync": Mutant(does="classic HA: slaves get what the master has not synced", origin="S4"),
    "ha-never-compares": Mutant(
        does="classic HA: a slave requests what follows its end and appends whatever arrives", origin="rocketmq#3388"
    ),
    "indefinite-as-definite": Mutant(
        does="clients report sends of unknown outcome as failed", origin="DLedger's tests", is_in_client=True
    ),
    "lead-term-again": Mutant(
        does="a member may lead a term that it has led before, and gives other entries the same numbers",
        origin="R",
    ),
    "vote-after-restart": Mutant(
        does="a restarted member votes at once, whatever lease it may have promised before",
        origin="Raft 6.4.1",
        is_unscripted=True,
    ),
    "vote-despite-leader": Mutant(
        does="members vote for others although they hear their leader",
        origin="Raft 4.2.3, 6.4.1",
    ),
    "lease-from-answer": Mutant(
        does="the lease counts from when a heartbeat's answer comes, not from when it was sent",
        origin="Raft 6.4.1",
        is_unscripted=True,
    ),
    "lease-by-role": Mutant(
        does="a leader always counts as holding the lease, even right after a pause",
        origin="Raft 6.4.1",
    ),
    "read-confirmed-before": Mutant(
        does="a read is confirmed by answers to heartbeats that were sent before it came",
        origin="Raft 6.4",
        is_unscripted=True,
    ),
    "late-truncate": Mutant(
        does="a truncation that was delayed for long removes what has been acknowledged since",
        origin="Raft 5.3",
    ),
    "verified-forever": Mutant(
        does="what one leader found to agree counts as agreed with the next",
        origin="dledger#278",
        is_unscripted=True,
    ),
    "watermark-outlives-term": Mutant(
        does="a leader starts from what it knew of its peers when it last led",
        origin="Raft 5.3, S2",
        is_unscripted=True,
    ),
    "vote-lost-with-its-file": Mutant(
        does="a member whose term and vote cannot be read votes as if it never had",
        origin="Raft 5.2, FAST 2018",
    ),
    "durable-mark-stays": Mutant(
        does="a truncation does not lower the durable index, and what is written in its place is acknowledged at once",
        origin="S1, S2",
        is_unscripted=True,
    ),
    "checkpoint-ahead": Mutant(
        does="a checkpoint names entries as durable that are not yet",
        origin="S1",
        is_unscripted=True,
    ),
    "damage-cut-off": Mutant(
        does="durable entries that cannot be read are cut off like an unfinished write",
        origin="FAST 2018",
    ),
    "change-before-own-commit": Mutant(
        does="a new leader changes the group before anything of its term is committed",
        origin="raft-dev 2015",
    ),
    "changes-overlap": Mutant(
        does="the group is changed again before the previous change is committed",
        origin="Raft 4.1",
    ),
    "truncated-members-stay": Mutant(
        does="a change of the group that was truncated still counts",
        origin="Raft 4.1",
    ),
}

SCRIPTED_MUTANTS = tuple(name for name, mutant in MUTANTS.items() if not mutant.is_unscripted)
"""Those with a scenario (harness.exploration.mutants), in the catalogue's order."""

CLIENT_MUTANTS = frozenset(name for name, mutant in MUTANTS.items() if mutant.is_in_client)


def check_mutant(name: object) -> str:
    """Return `name` if it is a mutant's or "none". Raises ValueError, which lists the names, otherwise."""
    if not isinstance(name, str) or (name != NO_MUTANT and name not in MUTANTS):
        known = [NO_MUTANT, *MUTANTS]
        raise ValueError(f"no mutant is called {name!r}; there are: {', '.join(known)}{nearest(str(name), known)}")
    return name
