"""How a candidate evaluates the answers."""

from __future__ import annotations

import itertools

import pytest

from node.dledger.rpc import VoteResult
from node.dledger.votes import VoteOutcome, VoteTally

ACCEPT = VoteResult.ACCEPT
VOTED = VoteResult.REJECT_ALREADY_VOTED
LEADER = VoteResult.REJECT_ALREADY_HAS_LEADER
NOT_READY = VoteResult.REJECT_TERM_NOT_READY
SHORT = VoteResult.REJECT_SMALL_LEDGER_END_INDEX
OLD_LOG = VoteResult.REJECT_EXPIRED_LEDGER_TERM
OLD_TERM = VoteResult.REJECT_EXPIRED_VOTE_TERM
SILENT = VoteResult.UNKNOWN


def tally_of(*results: VoteResult, term: int = 4, terms: tuple[int, ...] = (), members: int = 0) -> VoteTally:
    count = members or len(results)
    tally = VoteTally(term=term, member_count=count, quorum_size=count // 2 + 1)
    for number, result in enumerate(results):
        tally.add(result, terms[number] if terms else term)
    return tally


@pytest.mark.parametrize(
    ("results", "outcome"),
    [
        ([ACCEPT], VoteOutcome.PASSED),
        ([ACCEPT, ACCEPT, SILENT], VoteOutcome.PASSED),
        ([ACCEPT, ACCEPT, SHORT], VoteOutcome.PASSED),
        ([ACCEPT, ACCEPT, LEADER], VoteOutcome.PASSED),
        ([ACCEPT, SILENT, SILENT], VoteOutcome.WAIT_TO_REVOTE),
        ([ACCEPT, LEADER, SILENT], VoteOutcome.WAIT_TO_REVOTE),
        ([ACCEPT, NOT_READY, SILENT], VoteOutcome.REVOTE_IMMEDIATELY),
        ([ACCEPT, NOT_READY, LEADER], VoteOutcome.REVOTE_IMMEDIATELY),
        ([ACCEPT, VOTED, LEADER], VoteOutcome.WAIT_TO_VOTE_NEXT),
        ([ACCEPT, LEADER, LEADER], VoteOutcome.WAIT_TO_REVOTE),
        ([ACCEPT, VOTED, LEADER, LEADER, LEADER], VoteOutcome.WAIT_TO_REVOTE),
        ([ACCEPT, VOTED, VOTED, LEADER, LEADER], VoteOutcome.WAIT_TO_VOTE_NEXT),
        ([ACCEPT, VOTED, SILENT], VoteOutcome.WAIT_TO_VOTE_NEXT),
        ([ACCEPT, VOTED, VOTED], VoteOutcome.WAIT_TO_VOTE_NEXT),
        ([VOTED, VOTED, VOTED], VoteOutcome.WAIT_TO_VOTE_NEXT),
        ([ACCEPT, SHORT, SHORT], VoteOutcome.WAIT_TO_REVOTE),
        ([ACCEPT, OLD_LOG, SILENT], VoteOutcome.WAIT_TO_REVOTE),
        ([ACCEPT, SHORT, VOTED], VoteOutcome.WAIT_TO_VOTE_NEXT),
        ([ACCEPT, ACCEPT, SILENT, SILENT, SILENT], VoteOutcome.WAIT_TO_REVOTE),
        ([ACCEPT, ACCEPT, SHORT, OLD_LOG, SHORT], VoteOutcome.WAIT_TO_REVOTE),
        ([ACCEPT, ACCEPT, NOT_READY, SHORT, SHORT], VoteOutcome.REVOTE_IMMEDIATELY),
    ],
)
def test_the_answers_decide_the_outcome_of_a_round(results: list[VoteResult], outcome: VoteOutcome) -> None:
    assert tally_of(*results).outcome() is outcome


@pytest.mark.parametrize(
    ("results", "decided"),
    [
        ([ACCEPT, ACCEPT], True),
        ([ACCEPT, NOT_READY], True),  # it will accept when asked again; the third one may be cut off for long
        ([ACCEPT, VOTED], False),
        ([ACCEPT, SHORT], False),
        ([ACCEPT], False),
    ],
)
def test_a_round_ends_when_a_quorum_has_decided(results: list[VoteResult], decided: bool) -> None:
    assert tally_of(*results, members=3).is_decided is decided


def test_a_greater_term_outweighs_a_quorum_of_votes() -> None:
    tally = tally_of(ACCEPT, ACCEPT, OLD_TERM, terms=(4, 4, 9))
    assert tally.outcome() is VoteOutcome.WAIT_TO_VOTE_NEXT
    assert tally.known_max_term == 9


def test_a_missing_answer_names_no_term() -> None:
    assert tally_of(ACCEPT, SILENT, SILENT, terms=(4, 99, 99)).known_max_term == 4


def test_has_leader_is_set_only_if_the_other_members_are_no_quorum() -> None:
    assert tally_of(ACCEPT, LEADER, SILENT).has_leader
    assert not tally_of(ACCEPT, LEADER, VOTED).has_leader
    assert not tally_of(ACCEPT, SILENT, SILENT).has_leader


def test_a_round_of_five_may_be_decided_before_all_have_answered() -> None:
    assert not tally_of(ACCEPT, SHORT, members=5).is_decided
    assert tally_of(ACCEPT, ACCEPT, ACCEPT, members=5).is_decided
    assert tally_of(ACCEPT, NOT_READY, NOT_READY, members=5).is_decided
    assert not tally_of(ACCEPT, NOT_READY, VOTED, members=5).is_decided
    assert tally_of(ACCEPT, OLD_TERM, members=5, terms=(4, 9)).is_decided
    assert tally_of(ACCEPT, LEADER, LEADER, LEADER, members=5).is_decided
    assert not tally_of(ACCEPT, LEADER, LEADER, members=5).is_decided
    assert tally_of(SILENT, SILENT, SILENT).is_decided


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_only_a_majority_of_accepts_elects(size: int) -> None:
    for results in itertools.product((ACCEPT, VOTED, LEADER, SHORT, NOT_READY, SILENT), repeat=size):
        passed = tally_of(*results).outcome() is VoteOutcome.PASSED
        assert passed == (results.count(ACCEPT) * 2 > size)
