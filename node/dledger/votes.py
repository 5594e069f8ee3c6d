"""Counting the answers to a request for votes, as DLedger does (R).

    what was learnt                                       outcome
    a member knows a greater term                         WAIT_TO_VOTE_NEXT, in that term or the one after
    no quorum without the members that have a leader      WAIT_TO_REVOTE after a further lease
    no quorum answered                                    WAIT_TO_REVOTE
    no quorum without the members with longer logs        WAIT_TO_REVOTE, a little later
    a quorum accepts                                      PASSED
    a quorum accepts or is only just entering the term    REVOTE_IMMEDIATELY
    otherwise (split votes)                               WAIT_TO_VOTE_NEXT

(DLedger waits when a single member has a leader. Here the others may go on when they are a quorum: that member may
only have restarted, or be the last one that a cut-off leader can reach.)

Beyond what others have already reached, the term increases only if a quorum has answered. So a member that is cut off
keeps its term, and disturbs nobody when it comes back.
"""

from __future__ import annotations

import enum

from node.dledger.rpc import VoteResult

__all__ = ["VoteOutcome", "VoteTally"]


class VoteOutcome(enum.Enum):
    """What a candidate does next."""

    PASSED = "PASSED"
    REVOTE_IMMEDIATELY = "REVOTE_IMMEDIATELY"
    WAIT_TO_REVOTE = "WAIT_TO_REVOTE"
    WAIT_TO_VOTE_NEXT = "WAIT_TO_VOTE_NEXT"


_BIGGER_LEDGER = (VoteResult.REJECT_EXPIRED_LEDGER_TERM, VoteResult.REJECT_SMALL_LEDGER_END_INDEX)


class VoteTally:
    """The answers of one round in `term`, from `member_count` members of which `quorum_size` decide."""

    def __init__(self, *, term: int, member_count: int, quorum_size: int) -> None:
        self._term = term
        self._member_count = member_count
        self._quorum_size = quorum_size
        self._answered = 0
        self._valid = 0
        self._accepted = 0
        self._not_ready = 0
        self._bigger_ledgers = 0
        self._have_leader = 0
        self.known_max_term = term
        """The greatest term that any answer named."""

    def add(self, result: VoteResult, term: int) -> None:
        """Count one member's answer; `term` is that member's. No answer at all counts as UNKNOWN."""
        self._answered += 1
        if result in (VoteResult.UNKNOWN, VoteResult.REJECT_UNKNOWN_LEADER):
            return  # a member that does not know this one counts as silent, and is no reason for a new term
        self._valid += 1
        self.known_max_term = max(self.known_max_term, term)
        if result is VoteResult.ACCEPT:
            self._accepted += 1
        elif result is VoteResult.REJECT_ALREADY_HAS_LEADER:
            self._have_leader += 1
        elif result in _BIGGER_LEDGER:
            self._bigger_ledgers += 1
        elif result is VoteResult.REJECT_TERM_NOT_READY:
            self._not_ready += 1

    @property
    def has_leader(self) -> bool:
        """Whether so many members have a leader that the rest is no quorum."""
        return self._have_leader > 0 and not self._is_quorum(self._valid - self._have_leader)

    @property
    def has_longer_ledgers(self) -> bool:
        """Whether so many members have more in their logs that the rest is no quorum."""
        return not self._is_quorum(self._valid - self._bigger_ledgers)

    @property
    def is_decided(self) -> bool:
        """Whether further answers are not worth waiting for. A silent member must not delay the round: the members that
        were not ready would soon stand themselves, and split the votes round after round."""
        return (
            self._answered == self._member_count
            or self._is_quorum(self._accepted + self._not_ready)
            or self.known_max_term > self._term
            or self._have_leader > self._member_count - self._quorum_size
        )

    def outcome(self) -> VoteOutcome:
        """The outcome of the answers so far."""
        if self.known_max_term > self._term:
            return VoteOutcome.WAIT_TO_VOTE_NEXT
        if self._is_quorum(self._accepted):
            return VoteOutcome.PASSED
        if self.has_leader or not self._is_quorum(self._valid) or self.has_longer_ledgers:
            return VoteOutcome.WAIT_TO_REVOTE
        if self._is_quorum(self._accepted + self._not_ready):
            return VoteOutcome.REVOTE_IMMEDIATELY
        return VoteOutcome.WAIT_TO_VOTE_NEXT

    def _is_quorum(self, count: int) -> bool:
        return count >= self._quorum_size
