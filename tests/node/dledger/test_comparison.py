"""The search for the index at which two logs diverge, against logs written out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dledger.comparison import Comparison, Decision
from node.dledger.rpc import PushType

Log = dict[int, str]


def ends(log: Log) -> tuple[int, int]:
    return (min(log), max(log)) if log else (-1, -1)


def search(leader: Log, follower: Log) -> tuple[Decision, int]:
    """Play both sides; returns the final decision and the number of questions."""
    begin, end = ends(leader)
    comparison = Comparison(begin=begin, end=end)
    index, questions = comparison.first, 0
    while True:
        questions += 1
        assert begin <= index <= end, "asked for an entry that the leader does not have"
        assert questions < 200
        is_same = follower.get(index) == leader[index]
        follower_begin, follower_end = ends(follower)
        decision = comparison.decide(index, is_same=is_same, follower_begin=follower_begin, follower_end=follower_end)
        if decision.type is not PushType.COMPARE:
            return decision, questions
        index = decision.index


def log(common: int, own: int = 0, name: str = "l", begin: int = 0) -> Log:
    """A log from `begin`: entries up to `common` shared with others, then `own` more of its own."""
    shared = {index: "shared" for index in range(begin, common)}
    return {**shared, **{index: name for index in range(common, common + own)}}


@pytest.mark.mechanism("COMPARE decisions...")
def test_every_case_of_the_decision_table() -> None:
    assert search(log(10), log(10))[0] == Decision(PushType.APPEND, 9)
    assert search(log(10), log(5))[0] == Decision(PushType.APPEND, 4)  # beyond its end: ask for its end
    assert search(log(10), log(10, 3, "f"))[0] == Decision(PushType.TRUNCATE, 9)  # the follower is longer
    assert search(log(5, 5), log(5, 5, "f"))[0] == Decision(PushType.TRUNCATE, 4)
    assert search(log(5, 5), log(5, 9, "f"))[0] == Decision(PushType.TRUNCATE, 4)
    assert search(log(5, 9), log(5, 2, "f"))[0] == Decision(PushType.TRUNCATE, 4)
    assert search(log(10), {})[0] == Decision(PushType.TRUNCATE, 0)  # the follower is empty
    assert search(log(10, begin=6), log(3))[0] == Decision(PushType.TRUNCATE, 6)  # disjoint, before
    assert search(log(10), log(30, begin=20))[0] == Decision(PushType.TRUNCATE, 0)  # disjoint, ahead
    assert search(log(10), log(10, 3, "f", begin=8))[0] == Decision(PushType.TRUNCATE, 9)
    assert search(log(5, 8), log(9, 3, "f", begin=9))[0] == Decision(PushType.TRUNCATE, 0)  # differs at its begin
    assert search(log(3, 7, begin=3), log(0, 12, "f"))[0] == Decision(PushType.TRUNCATE, 3)  # differs at the floor


def test_equal_logs_take_one_question_and_a_shorter_log_takes_two() -> None:
    assert search(log(1000), log(1000))[1] == 1
    assert search(log(1000), log(300))[1] == 2


def test_a_wide_difference_takes_few_questions() -> None:
    decision, questions = search(log(10, 100_000), log(10, 90_000, "f"))
    assert decision == Decision(PushType.TRUNCATE, 9)
    assert questions <= 40


@given(
    leader_begin=st.integers(0, 30),
    common=st.integers(0, 60),
    leader_own=st.integers(0, 30),
    follower_own=st.integers(0, 30),
    follower_begin=st.integers(0, 60),
)
def test_the_search_agrees_with_comparing_every_entry(
    leader_begin: int, common: int, leader_own: int, follower_own: int, follower_begin: int
) -> None:
    leader = {index: value for index, value in log(common, leader_own).items() if index >= leader_begin}
    follower = {index: value for index, value in log(common, follower_own, "f").items() if index >= follower_begin}
    if not leader:
        return
    decision, _ = search(leader, follower)
    agreeing = [index for index in leader if follower.get(index) == leader[index]]
    if agreeing:
        last = max(agreeing)
        expected = PushType.APPEND if last == max(follower) else PushType.TRUNCATE
        assert decision == Decision(expected, last)
    else:
        assert decision == Decision(PushType.TRUNCATE, min(leader))
