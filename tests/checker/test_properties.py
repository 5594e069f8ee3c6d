"""Checkers other than linearizability: what each counts, on histories small enough to read."""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checker import (
    HistoryError,
    Register,
    Result,
    Verdict,
    VersionedRegister,
    check,
    check_bank,
    check_consumer_progress,
    check_counter,
    check_delay,
    check_exclusion,
    check_long_fork,
    check_replicas,
    check_sequential,
    check_sessions,
    check_set,
    check_set_full,
    check_total_queue,
    check_transaction_visibility,
    check_transactions,
    check_unique_ids,
    worst,
)


def test_the_worst_verdict_is_invalid_then_unknown_then_valid() -> None:
    assert worst([]) is Verdict.VALID
    assert worst([Verdict.VALID, Verdict.UNKNOWN]) is Verdict.UNKNOWN
    assert worst([Verdict.UNKNOWN, Verdict.INVALID]) is Verdict.INVALID
    assert [verdict.exit_status for verdict in Verdict] == [0, 1, 2]


def test_total_queue_counts_each_kind_of_anomaly(events, done) -> None:
    puts = [(0, "enqueue", value, value) for value in (1, 2, 3)]
    good = check_total_queue(done(*puts, (1, "dequeue", None, 2), (1, "drain", None, [1, 3])))
    assert good.verdict is Verdict.VALID and good.stats["acknowledged"] == 3
    bad = check_total_queue(done(*puts, (1, "dequeue", None, 2), (1, "drain", None, [2, 9])))
    assert bad.stats["counts"] == {"lost": 2, "unexpected": 1, "recovered": 0, "missing": 0, "duplicated": 1}
    twice = done(puts[0], (1, "dequeue", None, 1), (2, "dequeue", None, 1))
    assert check_total_queue(twice).verdict is Verdict.VALID
    assert check_total_queue(twice, allow_duplicates=False).verdict is Verdict.INVALID
    assert check_total_queue(done(*puts)).verdict is Verdict.UNKNOWN
    recovered = events(
        (0, "invoke", "enqueue", 1), (0, "info", "enqueue", 1), (1, "invoke", "dequeue", None), (1, "ok", "dequeue", 1)
    )
    assert check_total_queue(recovered).stats["counts"]["recovered"] == 1


def test_takes_of_unknown_outcome_may_account_for_missing_values(events) -> None:
    put = [(0, "invoke", "enqueue", 1), (0, "ok", "enqueue", 1), (0, "invoke", "enqueue", 2), (0, "ok", "enqueue", 2)]
    looked = [(3, "invoke", "dequeue", None), (3, "ok", "dequeue", None)]

    def crashed(process: int, f: str = "dequeue") -> list[tuple]:
        return [(process, "invoke", f, None), (process, "info", f, None)]

    one, two = [*put, *crashed(1), *looked], [*put, *crashed(1), *crashed(2), *looked]
    assert check_total_queue(events(*one)).stats["counts"]["lost"] == 2, "one take cannot have taken two values"
    result = check_total_queue(events(*two))
    assert result.verdict is Verdict.UNKNOWN and result.stats["counts"] == {
        "lost": 0, "unexpected": 0, "recovered": 0, "missing": 2, "duplicated": 0,
    }  # fmt: skip
    assert "2 values never came out" in result.reason
    assert check_total_queue(events(*put, *crashed(1, "drain"), *looked)).verdict is Verdict.UNKNOWN
    assert check_total_queue(events(*two), redelivers=True).verdict is Verdict.INVALID
    refused = [(4, "invoke", "dequeue", None), (4, "fail", "dequeue", None)]
    assert check_total_queue(events(*one, *refused)).verdict is Verdict.INVALID


def test_a_take_from_another_queue_accounts_for_no_missing_value(events) -> None:
    lost = [(0, "invoke", "enqueue", 1, "a"), (0, "ok", "enqueue", 1, "a"), (0, "invoke", "dequeue", None, "a")]
    lost += [(0, "ok", "dequeue", None, "a"), (1, "invoke", "dequeue", None, "b"), (1, "info", "dequeue", None, "b")]
    assert check_total_queue(events(*lost)).verdict is Verdict.INVALID


def test_set_counts_lost_and_unexpected_elements(done) -> None:
    adds = [(0, "add", value, value) for value in (1, 2)]
    assert check_set(done(*adds, (1, "read", None, [1, 2]))).verdict is Verdict.VALID
    counts = check_set(done(*adds, (1, "read", None, [1, 7]))).stats["counts"]
    assert (counts["lost"], counts["unexpected"]) == (1, 1)
    assert check_set(done(*adds)).verdict is Verdict.UNKNOWN


def test_set_full_tells_lost_stale_and_duplicated_elements_apart(done) -> None:
    add = (0, "add", 1, 1)
    lost = check_set_full(done(add, (1, "read", None, [1]), (1, "read", None, [])))
    assert lost.verdict is Verdict.INVALID and lost.stats["counts"]["lost"] == 1
    stale = done(add, (1, "read", None, []), (1, "read", None, [1]))
    assert check_set_full(stale).verdict is Verdict.VALID
    assert check_set_full(stale).stats["visible_ms"]["max"] == 3.0
    assert check_set_full(stale, linearizable=True).verdict is Verdict.INVALID
    assert check_set_full(done(add)).verdict is Verdict.UNKNOWN
    assert check_set_full(done(add, (1, "read", None, [1, 1]))).stats["counts"]["duplicated"] == 1


def test_a_full_set_shows_nothing_that_was_refused_or_never_added(events) -> None:
    acked = [(0, "invoke", "add", 1), (0, "ok", "add", 1)]
    refused = [(0, "invoke", "add", 2), (0, "fail", "add", 2)]
    crashed = [(2, "invoke", "add", 2), (2, "info", "add", 2)]
    shows = [(1, "invoke", "read", None), (1, "ok", "read", [1, 2])]

    def judged(*parts) -> tuple[Verdict, int, str]:
        result = check_set_full(events(*(event for part in parts for event in part)))
        return result.verdict, result.stats["counts"]["unexpected"], result.reason

    verdict, count, reason = judged(acked, refused, shows, shows)
    assert (verdict, count) == (Verdict.INVALID, 1) and "shows 2, which only process 0's failed add(2)" in reason
    verdict, count, reason = judged(acked, shows)
    assert (verdict, count) == (Verdict.INVALID, 1) and "shows 2, which nobody had tried to add" in reason
    assert judged(acked, shows, crashed)[:2] == (Verdict.INVALID, 1)
    assert judged(acked, refused, crashed, shows)[:2] == (Verdict.VALID, 0)
    assert judged(acked, shows[:1], crashed, shows[1:], shows)[:2] == (Verdict.VALID, 0)


def test_an_element_is_lost_only_if_a_read_after_its_last_sighting_lacks_it(events) -> None:
    add = [(0, "invoke", "add", 1), (0, "ok", "add", 1)]
    shows = [(1, "invoke", "read", None), (1, "ok", "read", [1])]
    lacks = [(2, "invoke", "read", None), (2, "ok", "read", [])]
    beside = events(*add, shows[0], *lacks, shows[1])
    assert check_set_full(beside).verdict is Verdict.VALID and check_set_full(beside).stats["counts"]["stale"] == 1
    assert check_set_full(beside, linearizable=True).verdict is Verdict.INVALID
    assert check_set_full(events(*add, *shows, *lacks)).stats["counts"]["lost"] == 1


def test_an_element_that_a_read_shows_is_not_counted_as_never_read(events) -> None:
    crashed = [(0, "invoke", "add", 1), (0, "info", "add", 1)]
    acked = [(1, "invoke", "add", 2), (1, "ok", "add", 2)]
    last = [(2, "invoke", "read", None), (2, "ok", "read", [1, 2])]
    result = check_set_full(events(*crashed, *acked, *last))
    assert result.verdict is Verdict.VALID and result.stats["counts"]["never-read"] == 0
    alone = check_set_full(events(*crashed, (2, "invoke", "read", None), (2, "ok", "read", [1])))
    assert alone.verdict is Verdict.UNKNOWN and alone.stats["counts"]["never-read"] == 0
    late = check_set_full(events(*crashed, acked[0], last[0], acked[1], last[1]))
    assert late.verdict is Verdict.UNKNOWN and late.stats["counts"]["never-read"] == 1


def test_negative_consumer_offsets_are_compared_as_numbers(events) -> None:
    def fetched(offset: int) -> list[tuple]:
        about = {"group": "g", "queue": 0}
        return [(1, "invoke", "fetch", about), (1, "ok", "fetch", {**about, "offset": offset})]

    commit = {"group": "g", "queue": 0, "offset": 5}
    committed = [(0, "invoke", "commit", commit), (0, "ok", "commit", commit)]
    assert check_consumer_progress(events(*fetched(-1001), *committed)).verdict is Verdict.VALID
    assert check_consumer_progress(events(*fetched(-1), *fetched(-1001))).verdict is Verdict.INVALID
    assert check_consumer_progress(events(*committed, *fetched(-1001))).verdict is Verdict.INVALID


def test_strings_are_not_accepted_as_numbers(events) -> None:
    commit = {"group": "g", "queue": 0, "offset": "5"}
    with pytest.raises(TypeError, match="'5' is not a number"):
        check_consumer_progress(events((0, "invoke", "commit", commit), (0, "ok", "commit", commit)))
    with pytest.raises(TypeError, match="'9' is not a number"):
        check_sessions(events((0, "invoke", "write", None), (0, "ok", "write", "9")))


def test_duplicate_ids_and_wrong_counter_reads_are_invalid(done) -> None:
    assert check_unique_ids(done((0, "generate", None, 1), (1, "generate", None, 2))).verdict is Verdict.VALID
    assert check_unique_ids(done((0, "generate", None, 1), (1, "generate", None, 1))).verdict is Verdict.INVALID
    assert check_counter(done((0, "add", 2, 2), (1, "read", None, 2))).verdict is Verdict.VALID
    assert check_counter(done((0, "add", 2, 2), (1, "read", None, 1))).verdict is Verdict.INVALID


def test_overlapping_holds_of_a_lock_are_invalid(events) -> None:
    both = events(
        (0, "invoke", "acquire", None),
        (0, "ok", "acquire", None),
        (1, "invoke", "acquire", None),
        (1, "ok", "acquire", None),
        (0, "invoke", "release", None),
        (0, "ok", "release", None),
    )
    assert check_exclusion(both).stats["counts"]["overlapping"] == 1
    one = events(
        (0, "invoke", "acquire", None),
        (0, "ok", "acquire", None),
        (0, "invoke", "release", None),
        (0, "ok", "release", None),
        (1, "invoke", "acquire", None),
        (1, "ok", "acquire", None),
    )
    assert check_exclusion(one).verdict is Verdict.VALID


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=8), st.integers(0, 50), st.randoms(use_true_random=False))
def test_a_bank_of_floats_allows_for_rounding_and_no_more(
    balances: list[float], transfers: int, rng: random.Random
) -> None:
    reads = []
    for _ in range(transfers + 2):
        pairs = list(enumerate(balances))
        rng.shuffle(pairs)
        reads.append({"process": 0, "f": "read", "value": [list(pair) for pair in pairs]})
        (source, _), (target, _) = pairs[:2]
        amount = rng.random() * 100
        balances[source], balances[target] = balances[source] - amount, balances[target] + amount
    history = [{**read, "type": kind} for read in reads for kind in ("invoke", "ok")]
    assert check_bank(history, allow_negative=True).verdict is Verdict.VALID
    history[-1] = {**history[-1], "value": [*history[-1]["value"], ["more", 0.1]]}
    assert check_bank(history, allow_negative=True).verdict is Verdict.INVALID


def test_a_lock_acquired_again_is_held_since_its_first_acquisition(events) -> None:
    def done(process: int, f: str) -> list[tuple]:
        return [(process, "invoke", f, None), (process, "ok", f, None)]

    failed = [(0, "invoke", "release", None), (0, "fail", "release", None)]
    first, other = done(0, "acquire"), [*done(1, "acquire"), *done(1, "release")]
    again = [*done(0, "acquire"), *done(0, "release")]
    assert check_exclusion(events(*first, *other, *failed, *again)).verdict is Verdict.INVALID
    assert check_exclusion(events(*first, *failed, *again, *other)).verdict is Verdict.VALID


def both(first: list[tuple], second: list[tuple]) -> list[dict]:
    """Operations of two keys, each (process, f, value, result), one after the other."""
    return [
        {"time": at * 1_000_000, "process": process, "type": kind, "f": f, "value": value, "key": key}
        for at, (key, operation) in enumerate([*product("a", first), *product("b", second)])
        for process, f, asked, result in [operation]
        for kind, value in (("invoke", asked), ("ok", result))
    ]


SENT = {"message": 1, "delay_ms": 0}
STEPS = [[["r", "x", 1], ["r", "y", None]], [["r", "x", None], ["r", "y", 1]]]
AT_9, AT_0 = {"group": "g", "offset": 9}, {"group": "g", "offset": 0}
#: For each checker, operations that are valid as two keys and invalid as one.
APART = [
    (check_unique_ids, [(0, "generate", None, 1)], [(0, "generate", None, 1)]),
    (check_bank, [(0, "read", None, {"a": 5})], [(0, "read", None, {"a": 50})]),
    (check_set, [(0, "add", 1, 1), (0, "read", None, [1])], [(0, "add", 2, 2), (0, "read", None, [2])]),
    (check_long_fork, [(0, "read", None, STEPS[0])], [(0, "read", None, STEPS[1])]),
    (check_consumer_progress, [(0, "commit", AT_9, AT_9)], [(0, "fetch", {"group": "g"}, AT_0)]),
]  # fmt: skip
#: Operations that are valid as one key and invalid as two.
CROSSED = [
    (check_total_queue, [(0, "enqueue", 1, 1), (0, "dequeue", None, None)], [(0, "dequeue", None, 1)]),
    (check_set, [(0, "add", 1, 1), (0, "read", None, [])], [(0, "read", None, [1])]),
    (check_transaction_visibility,
     [(0, "prepare", 1, 1), (0, "commit", 1, 1), (0, "receive", None, [])], [(0, "receive", None, [1])]),
    (partial(check_delay, tolerance_ms=0.0, late_is_wrong=False),
     [(0, "send", SENT, SENT), (0, "receive", None, [])], [(0, "receive", None, [1])]),
]  # fmt: skip
#: Operations that leave one key undecided.
UNREAD = [
    (check_set, [(0, "add", 1, 1)], [(0, "read", None, [])], "no read of key 'a' completed"),
    (check_set_full, [(0, "add", 1, 1)], [(0, "add", 2, 2), (0, "read", None, [2])], "no read of key 'a' began"),
    (check_total_queue, [(0, "enqueue", 1, 1)], [(0, "enqueue", 1, 1), (0, "dequeue", None, 1)], "nothing of key 'a'"),
    (check_delay, [(0, "send", SENT, SENT)], [(0, "receive", None, [])], "no receive of key 'a' completed"),
    (check_transaction_visibility,
     [(0, "commit", 1, 1)], [(0, "receive", None, [])], "no receive of key 'a' completed"),
]  # fmt: skip


def without_keys(history: list[dict]) -> list[dict]:
    return [{name: value for name, value in event.items() if name != "key"} for event in history]


@pytest.mark.parametrize(("checked", "first", "second"), APART)
def test_keys_that_are_valid_apart_are_not_merged(checked, first: list[tuple], second: list[tuple]) -> None:
    history = both(first, second)
    assert checked(history).verdict is Verdict.VALID
    assert checked(without_keys(history)).verdict is Verdict.INVALID


@pytest.mark.parametrize(("checked", "first", "second"), CROSSED)
def test_an_operation_on_one_key_does_not_excuse_a_violation_of_another(
    checked, first: list[tuple], second: list[tuple]
) -> None:
    history = both(first, second)
    result = checked(history)
    assert result.verdict is Verdict.INVALID and result.reason.startswith("Key 'a': ")
    assert result.witness is not None and result.witness.key == "a"
    assert checked(without_keys(history)).verdict is Verdict.VALID


@pytest.mark.parametrize(("checked", "first", "second", "reason"), UNREAD)
def test_an_unread_key_makes_the_verdict_unknown(checked, first, second, reason: str) -> None:
    result = checked(both(first, second))
    assert result.verdict is Verdict.UNKNOWN and result.reason.startswith(reason)


def test_transactions_with_a_key_outside_their_steps_are_refused() -> None:
    steps = [["append", "x", 1]]
    with pytest.raises(HistoryError, match=r"transactions have their keys in their steps.* 'a'"):
        check_transactions(both([(0, "txn", steps, steps)], []), "list-append")


def test_wrong_totals_negative_balances_and_long_forks_are_found(done) -> None:
    first = (0, "read", None, {"a": 5, "b": 5})
    assert check_bank(done(first, (0, "read", None, {"a": 4, "b": 6}))).verdict is Verdict.VALID
    assert check_bank(done(first, (0, "read", None, {"a": 4, "b": 5}))).verdict is Verdict.INVALID
    assert check_bank(done((0, "read", None, {"a": 12, "b": -2}))).stats["counts"]["negative"] == 1
    views = [[["r", 0, 1], ["r", 1, None]], [["r", 0, None], ["r", 1, 1]]]
    assert check_long_fork(done(*[(i, "read", None, view) for i, view in enumerate(views)])).verdict is Verdict.INVALID
    assert check_long_fork(done((0, "read", None, views[0]))).verdict is Verdict.VALID


def test_long_fork_is_unknown_if_a_key_is_written_with_two_values(done) -> None:
    reads = [(2, "read", None, [["r", "x", seen], ["r", "y", None]]) for seen in (2, 1)]
    writes = [(process, "write", [["w", "x", process + 1]], [["w", "x", process + 1]]) for process in range(2)]
    result = check_long_fork(done(*writes, *reads))
    assert result.verdict is Verdict.UNKNOWN and result.reason.startswith("'x' was written twice, by process 0's write")
    again = (1, "write", [["w", "x", 1]], [["w", "x", 1]])  # a retry after a lost answer
    assert check_long_fork(done(writes[0], again, reads[1])).verdict is Verdict.VALID


@pytest.mark.parametrize(("received_ms", "kind"), [(50, "early"), (5000, "late"), (110, None), (None, "lost")])
def test_delay_tells_early_late_and_lost_messages_apart(received_ms: int | None, kind: str | None) -> None:
    def at(ms: int, process: int, type: str, f: str, value: object) -> dict[str, object]:
        return {"time": ms * 1_000_000, "process": process, "type": type, "f": f, "value": value}

    message = {"message": "m", "delay_ms": 100}
    history = [at(0, 0, "invoke", "send", message), at(1, 0, "ok", "send", message)]
    if received_ms is not None:
        history += [at(2, 1, "invoke", "receive", None), at(received_ms, 1, "ok", "receive", ["m"])]
    history += [at(9000, 2, "invoke", "receive", None), at(9001, 2, "ok", "receive", [])]
    result = check_delay(history)
    assert [name for name in ("lost", "early", "late") if result.stats["counts"][name]] == ([kind] if kind else [])


@pytest.mark.parametrize(("kind", "verdict"), [("fail", Verdict.INVALID), ("info", Verdict.VALID)])
def test_a_received_message_that_was_never_sent_is_unexpected(kind: str, verdict: Verdict) -> None:
    sent = timed("send", {"message": "m", "delay_ms": 0}, {"message": "m", "delay_ms": 0}, 0)
    unsent = timed("send", {"message": "n", "delay_ms": 0}, {"message": "n", "delay_ms": 0}, 2)
    unsent[1]["type"] = kind
    result = check_delay([*sent, *unsent, *timed("receive", None, ["m", "n"], 4)])
    assert result.verdict is verdict and result.stats["counts"]["unexpected"] == (kind == "fail")
    invented = check_delay([*sent, *timed("receive", None, ["m", "x"], 4)])
    assert invented.verdict is Verdict.INVALID and "'x', which was never sent" in invented.reason


def timed(f: str, asked: object, answer: object, ms: int | None) -> list[dict[str, object]]:
    """An operation of one millisecond, or without times."""
    times = [{}, {}] if ms is None else [{"time": ms * 1_000_000}, {"time": (ms + 1) * 1_000_000}]
    values = zip(("invoke", "ok"), (asked, answer), times, strict=True)
    return [{"process": 0, "type": kind, "f": f, "value": value, **time} for kind, value, time in values]


@pytest.mark.parametrize("untimed", ["send", "receive"])
@pytest.mark.parametrize("shown", [["m"], []])
def test_a_delay_without_times_is_unknown(untimed: str, shown: list[str]) -> None:
    message = {"message": "m", "delay_ms": 10}
    send = timed("send", message, message, None if untimed == "send" else 5_000)
    receive = timed("receive", None, shown, None if untimed == "receive" else 5_100)
    result = check_delay([*send, *receive])
    assert result.verdict is Verdict.UNKNOWN and f"{untimed}(" in result.reason and "no times" in result.reason


def test_an_empty_receive_needs_no_times() -> None:
    message = {"message": "m", "delay_ms": 10}
    send, nothing = timed("send", message, message, 5_000), timed("receive", None, [], None)
    assert check_delay([*send, *nothing, *timed("receive", None, ["m"], 5_100)]).verdict is Verdict.VALID
    assert check_delay([*send, *nothing, *timed("receive", None, ["m"], 5_005)]).verdict is Verdict.INVALID


def test_transaction_visibility_counts_each_kind_of_anomaly(done) -> None:
    base = [
        (0, "prepare", "a", "a"),
        (0, "prepare", "b", "b"),
        (0, "prepare", "c", "c"),
        (0, "commit", "a", "a"),
        (0, "rollback", "b", "b"),
    ]
    good = check_transaction_visibility(done(*base, (1, "receive", None, ["a"])))
    assert good.verdict is Verdict.VALID
    bad = check_transaction_visibility(done(*base, (1, "receive", None, ["b", "c"])))
    counts = bad.stats["counts"]
    assert (counts["committed-lost"], counts["rolled-back-seen"], counts["prepared-seen"]) == (1, 1, 1)
    invented = check_transaction_visibility(done(*base, (1, "receive", None, ["a", "x"])))
    assert invented.verdict is Verdict.INVALID and "'x', which nobody prepared" in invented.reason


def test_a_commit_or_rollback_that_is_acknowledged_when_retried_counts(events) -> None:
    ends = {"commit": "committed-lost", "rollback": "rolled-back-seen"}
    for end, kind in ends.items():
        unsure = [
            (0, "invoke", "prepare", "m"),
            (0, "ok", "prepare", "m"),
            (0, "invoke", end, "m"),
            (0, "info", end, "m"),
        ]
        again = [(0, "invoke", end, "m"), (0, "ok", end, "m")]
        shown = ["m"] if end == "rollback" else []
        result = check_transaction_visibility(
            events(*unsure, *again, (1, "invoke", "receive", None), (1, "ok", "receive", shown))
        )
        assert result.verdict is Verdict.INVALID and result.stats["counts"][kind] == 1
    seen = [(1, "invoke", "receive", None), (1, "ok", "receive", ["m"])]
    prepared = [
        (0, "invoke", "prepare", "m"),
        (0, "ok", "prepare", "m"),
        (0, "invoke", "commit", "m"),
        (0, "info", "commit", "m"),
    ]
    again = [(0, "invoke", "commit", "m"), (0, "ok", "commit", "m")]
    assert check_transaction_visibility(events(*prepared, *seen, *again)).verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("received", "lost", "said"),
    [
        ([("ok", []), ("ok", ["b"])], 1, "'a' of "),
        ([("ok", None), ("ok", "b")], 1, "'a' of "),
        ([("ok", "b")], 0, "no receive found the queue empty afterwards"),
        ([("info", None), ("ok", "b"), ("ok", None)], 0, "receives of unknown outcome may have taken it"),
        ([("info", None), ("ok", ["b"])], 0, "receives of unknown outcome may have taken it"),
        ([("info", None), ("ok", None)], 2, "'a' of "),
        ([("fail", None), ("ok", ["b"])], 1, "'a' of "),
    ],
)
def test_a_message_that_may_have_been_taken_or_may_still_come_is_not_lost(received, lost: int, said: str) -> None:
    """Two messages, of which ``a`` is never received."""

    def history(*puts: tuple[str, object]) -> list[dict]:
        asked = [(0, f, "ok", value, value) for f, value in puts]
        asked += [(at, "receive", kind, None, value) for at, (kind, value) in enumerate(received, 1)]
        return [
            {"process": process, "type": kind, "f": f, "value": value, "time": (2 * at + is_end) * 10**9}
            for at, (process, f, outcome, before, after) in enumerate(asked)
            for is_end, (kind, value) in enumerate((("invoke", before), (outcome, after)))
        ]

    sends = history(*(("send", {"message": message, "delay_ms": 0}) for message in "ab"))
    commits = history(*((f, message) for message in "ab" for f in ("prepare", "commit")))
    is_left_open = received[0][0] == "info" and not lost
    for check_it, events, kind in (
        (partial(check_delay, tolerance_ms=0.0, late_is_wrong=False), sends, "lost"),
        (check_transaction_visibility, commits, "committed-lost"),
    ):
        result = check_it(events)
        assert result.stats["counts"][kind] == lost and said in result.reason
        assert result.verdict is (Verdict.INVALID if lost else Verdict.UNKNOWN)
        assert result.stats["counts"]["missing"] == (not lost)
        if is_left_open:
            assert check_it(events, redelivers=True).stats["counts"][kind] == 1


def test_consumer_progress_counts_regressions_and_backward_commits(done) -> None:
    def op(process: int, f: str, offset: int) -> tuple:
        return process, f, {"group": "g", "queue": 0, "offset": offset}, {"group": "g", "queue": 0, "offset": offset}

    assert check_consumer_progress(done(op(0, "commit", 3), op(1, "fetch", 3))).verdict is Verdict.VALID
    assert check_consumer_progress(done(op(0, "commit", 3), op(1, "fetch", 2))).stats["counts"]["regression"] == 1
    assert check_consumer_progress(done(op(0, "commit", 3), op(0, "commit", 1))).stats["counts"]["backward"] == 1


def test_a_failed_release_prepare_or_commit_did_not_happen(events) -> None:
    """A lock whose release failed is still held; a message whose prepare or commit failed was never committed."""
    rows = [(0, "invoke", "acquire", None), (0, "ok", "acquire", None), (0, "invoke", "release", None)]
    rows += [(0, "fail", "release", None), (1, "invoke", "acquire", None), (1, "ok", "acquire", None)]
    assert check_exclusion(events(*rows)).verdict is Verdict.INVALID
    for failed in ("prepare", "commit"):
        rows = [(0, "invoke", failed, 1), (0, "fail", failed, 1)]
        rows += [(1, "invoke", "receive", None), (1, "ok", "receive", [1])]
        result = check_transaction_visibility(events(*rows))
        assert result.verdict is Verdict.INVALID and result.stats["counts"]["prepared-seen"] == 1


def test_only_an_empty_take_after_the_put_shows_a_loss(done) -> None:
    for take, nothing in (("dequeue", None), ("drain", [])):
        before, after = (0, take, None, nothing), (0, "enqueue", 3, 3)
        assert check_total_queue(done(before, after)).verdict is Verdict.UNKNOWN
        assert check_total_queue(done(after, before)).stats["counts"]["lost"] == 1


def test_a_value_that_may_still_be_in_the_queue_is_not_lost(done) -> None:
    puts = [(0, "enqueue", 1, 1), (0, "enqueue", 2, 2)]
    one, empty = (1, "dequeue", None, 1), (1, "dequeue", None, None)
    for history in ([*puts, one], [puts[0], one, puts[1]], [puts[0], one, empty, puts[1]]):
        left = check_total_queue(done(*history))
        assert left.verdict is Verdict.UNKNOWN and left.stats["counts"]["missing"] == 1, history
        assert left.reason == "1 value never came out, and no take found the queue empty after it was acknowledged"
    for history in ([*puts, one, empty], [*puts, (1, "drain", None, [1])]):
        assert check_total_queue(done(*history)).stats["counts"]["lost"] == 1
    twice = [(0, "enqueue", 1, 1), one, empty, (0, "enqueue", 1, 1)]
    assert check_total_queue(done(*twice)).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("said", [{"error": "exhausted"}, {"error": ":exhausted"}, {"value": "exhausted"}])
def test_a_take_that_failed_as_exhausted_found_the_queue_empty(done, said) -> None:
    """As Jepsen's clients report it in EDN, in history.txt, and as the value; other failures show nothing."""

    def judged(*operations: Any, **said: str) -> Result:
        history = done(*operations)
        for event in history:
            if event["value"] == "nothing":
                event.update({"type": "fail", "value": None, **said})
        return check_total_queue(history)

    moves = [(0, "enqueue", 1, 1), (0, "enqueue", 2, 2), (1, "dequeue", None, 1)]
    look = (1, "dequeue", None, "nothing")
    assert judged(*moves, look, **said).stats["counts"]["lost"] == 1
    assert judged(look, *moves, **said).verdict is Verdict.UNKNOWN, "nothing had been put in"
    assert judged(*moves, look, error="connection refused").verdict is Verdict.UNKNOWN


def test_a_drain_that_ends_exhausted_has_taken_nothing(done) -> None:
    puts = [(0, "enqueue", 1, 1), (0, "enqueue", 2, 2), (1, "dequeue", None, 1)]
    end = (2, "drain", None, "exhausted")
    assert check_total_queue(done(*puts, (1, "dequeue", None, 2), end)).verdict is Verdict.VALID
    found = check_total_queue(done(*puts, end)).stats["counts"]
    assert found["lost"] == 1 and found["unexpected"] == 0


def test_a_value_seen_before_its_enqueue_or_add_was_invoked_is_a_violation(done, events) -> None:
    put, take, empty = (0, "enqueue", 1, 1), (1, "dequeue", None, 1), (1, "dequeue", None, None)
    early = check_total_queue(done(take, put, empty))
    assert early.verdict is Verdict.INVALID and early.stats["counts"]["unexpected"] == 1
    assert (
        "1 came out by process 1's dequeue() -> 1 (" in early.reason
        and "), before process 0's enqueue(1) (" in early.reason
    )
    twice = done(put, take, take, put, empty)
    assert check_total_queue(twice).verdict is Verdict.VALID
    assert check_total_queue(twice, allow_duplicates=False).stats["counts"]["duplicated"] == 1
    once_put = check_total_queue(done(put, take, take, empty))
    assert "1 came out twice, put in once" in str(once_put.stats["examples"]["duplicated"])
    assert check_total_queue(done(put, take, put, take, empty), allow_duplicates=False).verdict is Verdict.VALID
    added = check_set(done((0, "add", 1, 1), (1, "read", None, [1, 2]), (0, "add", 2, 2)))
    assert added.verdict is Verdict.INVALID and added.stats["counts"]["unexpected"] == 1
    beside = [(1, "invoke", "read", None), (0, "invoke", "add", 2), (1, "ok", "read", [2]), (0, "ok", "add", 2)]
    assert check_set(events(*beside)).verdict is Verdict.VALID


def test_replicas_must_agree_on_their_common_committed_entries() -> None:
    assert check_replicas({"n1": [1, 2, 3], "n2": [1, 2]}).verdict is Verdict.VALID
    differ = check_replicas({"n1": [1, 2, 3], "n2": [1, 9]})
    assert differ.verdict is Verdict.INVALID and "index 1" in differ.reason
    assert check_replicas({"n1": [1, 2, 3], "n2": [1, 9]}, {"n1": 3, "n2": 1}).verdict is Verdict.VALID
    assert check_replicas({"n1": [1]}, {"n1": 2}).stats["counts"]["missing"] == 1
    assert check_replicas({}).verdict is Verdict.UNKNOWN


def test_sequential_is_weaker_than_linearizable(done) -> None:
    stale = done((0, "write", 1, 1), (1, "read", None, None))
    assert check(stale, Register()).verdict is Verdict.INVALID
    assert check_sequential(stale, Register()).verdict is Verdict.VALID
    back = done((0, "write", 1, 1), (1, "read", None, 1), (1, "read", None, None))
    result = check_sequential(back, Register())
    assert result.verdict is Verdict.INVALID and result.witness is not None


@pytest.mark.parametrize(
    ("operations", "kind"),
    [
        ([(0, "read", None, [2, "b"]), (0, "read", None, [1, "a"])], "monotonic-reads"),
        ([(0, "write", "a", 1), (0, "read", None, [0, None])], "read-your-writes"),
        ([(0, "write", "a", 2), (0, "write", "b", 1)], "monotonic-writes"),
        ([(0, "read", None, [2, "b"]), (0, "write", "c", 1)], "writes-follow-reads"),
    ],
)
def test_each_session_guarantee_is_checked_per_process(done, operations: list[tuple], kind: str) -> None:
    counts = check_sessions(done(*operations)).stats["counts"]
    assert [name for name, count in counts.items() if count] == [kind]
    apart = [(process, *rest) for process, (_, *rest) in enumerate(operations)]
    assert check_sessions(done(*apart)).verdict is Verdict.VALID


def test_versions_are_checked_by_rank(done) -> None:
    history = done((0, "write", "a", 1), (1, "read", None, [1, "a"]), (2, "read", None, [0, None]))
    result = check(history, VersionedRegister())
    assert result.verdict is Verdict.INVALID and "A5 ranks from versions" in result.stats["engines"]


def test_delay_allows_for_the_resolution_and_the_lateness_of_the_system() -> None:
    def history(received_ms: float) -> list[dict[str, object]]:
        message = {"message": "m", "delay_ms": 100}
        rows = [(0.0, 0, "invoke", "send", message), (1.0, 0, "ok", "send", message),
                (2.0, 1, "invoke", "receive", None), (received_ms, 1, "ok", "receive", ["m"])]  # fmt: skip
        names = ("time", "process", "type", "f", "value")
        return [dict(zip(names, (int(row[0] * 1e6), *row[1:]), strict=True)) for row in rows]

    assert check_delay(history(99.5)).verdict is Verdict.INVALID
    assert check_delay(history(99.5), resolution_ms=1.0).verdict is Verdict.VALID
    assert check_delay(history(98.5), resolution_ms=1.0).verdict is Verdict.INVALID
    late = check_delay(history(5000), late_is_wrong=False)
    assert (late.verdict, late.stats["counts"]["late"]) == (Verdict.VALID, 1)
