"""Puts a mutant into a node; `client.py` puts one into a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from node.broker.controller import BrokerController
from node.dledger import DLedgerServer
from node.ha.ledger import HaLedger
from node.mutants import election, group, ha, leases, replication, serving, storage
from node.mutants.catalogue import CLIENT_MUTANTS, check_mutant

__all__ = ["mutate_broker", "part_of"]

_IN_LEDGER: Mapping[str, Callable[[DLedgerServer], None]] = {
    "vote-not-persisted": election.vote_not_persisted,
    "vote-without-fsync": election.vote_without_fsync,
    "vote-for-shorter-log": election.vote_for_shorter_log,
    "end-term-from-current-term": election.end_term_from_current_term,
    "no-step-down": election.no_step_down,
    "stale-leader-reads": election.stale_leader_reads,
    "lease-on-wall-clock": election.lease_on_wall_clock,
    "commit-old-terms": replication.commit_old_terms,
    "ack-before-quorum": replication.ack_before_quorum,
    "ack-before-fsync": replication.ack_before_fsync,
    "quorum-off-by-one": replication.quorum_off_by_one,
    "commit-beyond-end": replication.commit_beyond_end,
    "truncate-committed": replication.truncate_committed,
    "truncate-not-persisted": replication.truncate_not_persisted,
    "compare-index-only": replication.compare_index_only,
    "accept-gap": replication.accept_gap,
    "checksum-ignored": replication.checksum_ignored,
    "members-forgotten": group.members_forgotten,
    "removed-leader-stays": group.removed_leader_stays,
    "transfer-keeps-lead": group.transfer_keeps_lead,
    "lead-term-again": election.lead_term_again,
    "vote-after-restart": leases.vote_after_restart,
    "vote-despite-leader": leases.vote_despite_leader,
    "lease-from-answer": leases.lease_from_answer,
    "lease-by-role": leases.lease_by_role,
    "read-confirmed-before": leases.read_confirmed_before,
    "late-truncate": replication.late_truncate,
    "verified-forever": replication.verified_forever,
    "watermark-outlives-term": replication.watermark_outlives_term,
    "vote-lost-with-its-file": storage.vote_lost_with_its_file,
    "durable-mark-stays": storage.durable_mark_stays,
    "checkpoint-ahead": storage.checkpoint_ahead,
    "damage-cut-off": storage.damage_cut_off,
    "change-before-own-commit": group.change_before_own_commit,
    "changes-overlap": group.changes_overlap,
    "truncated-members-stay": group.truncated_members_stay,
}

_IN_HA: Mapping[str, Callable[[HaLedger], None]] = {
    "ha-ack-when-sent": ha.ack_when_sent,
    "ha-ack-before-slave-syncs": ha.ack_before_slave_syncs,
    "ha-send-before-sync": ha.send_before_sync,
    "ha-never-compares": ha.never_compares,
}

_IN_BROKER: Mapping[str, Callable[[BrokerController], None]] = {
    "early-promotion": serving.early_promotion,
    "queue-offset-reuse": serving.queue_offset_reuse,
    "duplicate-apply": serving.duplicate_apply,
    "pop-without-checkpoint": serving.pop_without_checkpoint,
    "in-hand-forgotten": serving.in_hand_forgotten,
    "timers-forgotten": serving.timers_forgotten,
}


def mutate_broker(name: str, broker: BrokerController) -> None:
    """Put the mutant `name` into a broker that has not started. Does nothing for "none" and for mutants of clients.

    Raises ValueError for an unknown name or an unsuitable broker, MissingPart if the code no longer fits the mutant.
    """
    check_mutant(name)
    if name in _IN_LEDGER:
        ledger = broker.ledger
        if not isinstance(ledger, DLedgerServer):
            raise ValueError(f"mutant {name} needs DLedger's log")
        _IN_LEDGER[name](ledger)
    elif name in _IN_HA:
        if not isinstance(broker.ledger, HaLedger):
            raise ValueError(f"mutant {name} needs classic HA")
        _IN_HA[name](broker.ledger)
    elif name in _IN_BROKER:
        _IN_BROKER[name](broker)


def part_of(name: str) -> str:
    """The part of the program that the mutant `name` is put into: its module in this package, such as "election", or
    "client" for mutants of clients. Raises ValueError for an unknown name and for "none"."""
    check_mutant(name)
    if name in CLIENT_MUTANTS:
        return "client"
    for table in (_IN_LEDGER, _IN_HA, _IN_BROKER):
        if name in table:
            return table[name].__module__.rpartition(".")[2]
    raise ValueError(f"{name} is put into nothing")
