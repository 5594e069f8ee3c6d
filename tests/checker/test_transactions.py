"""Every anomaly planted in a few transactions, and random serial ones that must pass."""

from __future__ import annotations

import random
from typing import Any

import pytest

from checker import Operation, Verdict, check_transactions
from checker.testing.large import large_history
from checker.transactions import check as checking
from checker.transactions import orders


def txn(process: int, *steps: tuple) -> tuple:
    asked = [[f, k, None if f == "r" else v] for f, k, v in steps]
    return process, "txn", asked, [list(step) for step in steps]


def overlapping(events, *transactions: tuple):
    """All invoked before any returns."""
    begin = [(process, "invoke", f, asked) for process, f, asked, _ in transactions]
    return events(*begin, *[(process, "ok", f, answered) for process, f, _, answered in transactions])


LIST = {
    "G0": [(("append", "x", 1), ("append", "y", 1)), (("append", "x", 2), ("append", "y", 2))],
    "G1c": [(("append", "x", 1), ("r", "y", [1])), (("append", "y", 1), ("r", "x", [1]))],
    "G-single": [(("append", "x", 1), ("append", "y", 1)), (("r", "x", []), ("r", "y", [1]))],
    "G2": [(("r", "x", []), ("append", "y", 1)), (("r", "y", []), ("append", "x", 1))],
    "internal": [(("append", "x", 1), ("r", "x", [2])), (("append", "x", 2),)],
    "incompatible-order": [(("append", "x", 1), ("append", "x", 2)), (("r", "x", [1, 2]),), (("r", "x", [2, 1]),)],
    "G1b": [(("append", "x", 1), ("append", "x", 2)), (("r", "x", [1]),)],
    "lost-update": [(("r", "x", []), ("append", "x", 1)), (("r", "x", []), ("append", "x", 2))],
    "unwritten-read": [(("r", "x", [9]),)],
}
READER = {"G0": (("r", "x", [1, 2]), ("r", "y", [2, 1])), "G2": (("r", "x", [1]), ("r", "y", [1])),
          "lost-update": (("r", "x", [1, 2]),)}
STRONGEST = {"G0": None, "G1c": "read-uncommitted", "G-single": "read-committed", "G2": "snapshot-isolation",
             "internal": "read-uncommitted", "incompatible-order": None, "G1b": "read-uncommitted",
             "lost-update": "read-committed", "unwritten-read": "strict-serializable"}


@pytest.mark.parametrize("anomaly", LIST)
def test_list_append_anomalies(events, anomaly: str) -> None:
    transactions = [*LIST[anomaly], *([READER[anomaly]] if anomaly in READER else [])]
    result = check_transactions(overlapping(events, *[txn(i, *steps) for i, steps in enumerate(transactions)]))
    assert anomaly in result.stats["anomalies"]
    assert result.stats["strongest"] == STRONGEST[anomaly]
    assert result.verdict is (Verdict.VALID if anomaly == "unwritten-read" else Verdict.INVALID)
    if anomaly.startswith("G") and anomaly != "G1b":
        assert result.witness is not None and 2 <= len(result.witness.edges) <= len(result.witness.operations)


def test_aborted_read(events) -> None:
    result = check_transactions(
        events(
            (0, "invoke", "txn", [["append", "x", 1]]),
            (0, "fail", "txn", [["append", "x", 1]]),
            (1, "invoke", "txn", [["r", "x", None]]),
            (1, "ok", "txn", [["r", "x", [1]]]),
        )
    )
    assert result.stats["anomalies"] == {"G1a": 1}


def test_order_of_time_and_of_processes(done) -> None:
    stale = [txn(0, ("append", "x", 1)), txn(1, ("r", "x", []))]
    result = check_transactions(done(*stale))
    assert set(result.stats["anomalies"]) == {"G-single-realtime"}
    assert result.stats["strongest"] == "strong-session-serializable"
    assert check_transactions(done(*stale), level="serializable").verdict is Verdict.VALID
    same = [txn(0, ("append", "x", 1)), txn(0, ("r", "x", []))]
    assert "G-single-process" in check_transactions(done(*same)).stats["anomalies"]


def test_unobserved_appends_come_after_the_longest_read(done) -> None:
    reads = [txn(process, ("r", "x", [1])) for process in (1, 3)]
    history = done(txn(0, ("append", "x", 1)), reads[0], txn(2, ("append", "x", 2)), reads[1])
    assert "G-single-realtime" in check_transactions(history).stats["anomalies"]


REGISTER = {
    "G1c": [(("w", "x", 1), ("r", "y", 1)), (("w", "y", 1), ("r", "x", 1))],
    "G-single": [(("w", "x", 1), ("w", "y", 1)), (("r", "x", None), ("r", "y", 1))],
    "G2": [(("r", "x", None), ("w", "y", 1)), (("r", "y", None), ("w", "x", 1))],
    "internal": [(("w", "x", 1), ("r", "x", 2))],
    "G1b": [(("w", "x", 1), ("w", "x", 2)), (("r", "x", 1),)],
    "lost-update": [(("r", "x", None), ("w", "x", 2)), (("r", "x", None), ("w", "x", 3))],
}


def test_a_graver_cycle_does_not_hide_a_milder_one(events) -> None:
    apart = [tuple((f, f"{key}{key}", value) for f, key, value in steps) for steps in LIST["G2"]]
    readers = [READER["G2"], tuple((f, f"{key}{key}", value) for f, key, value in READER["G2"])]
    single = [(("append", "a", 1), ("append", "b", 1)), (("r", "a", []), ("r", "b", [1]))]
    both = [*apart, readers[1], *single]
    result = check_transactions(overlapping(events, *[txn(i, *steps) for i, steps in enumerate(both)]))
    assert {"G-single", "G2"} <= set(result.stats["anomalies"])


@pytest.mark.parametrize("anomaly", REGISTER)
def test_rw_register_anomalies(events, anomaly: str) -> None:
    history = overlapping(events, *[txn(i, *steps) for i, steps in enumerate(REGISTER[anomaly])])
    result = check_transactions(history, "rw-register")
    assert anomaly in result.stats["anomalies"] and result.verdict is Verdict.INVALID


def test_keys_that_are_consistent_by_themselves_order_their_versions(done) -> None:
    stale = done(txn(0, ("w", "x", 1)), txn(1, ("w", "x", 2)), txn(2, ("r", "x", 1)))
    again = done(txn(0, ("w", "x", 1)), txn(1, ("w", "x", 2)), *(txn(2, ("r", "x", value)) for value in (2, 1, 2)))
    lost = done(txn(0, ("w", "x", 1)), txn(2, ("r", "x", 1)), txn(2, ("r", "x", None)))
    for history, keys in ((stale, "linearizable_keys"), (again, "sequential_keys"), (lost, "sequential_keys")):
        assert check_transactions(history, "rw-register", level="read-committed").verdict is Verdict.VALID
        result = check_transactions(history, "rw-register", level="read-committed", **{keys: True})
        assert result.verdict is Verdict.INVALID
        assert set(result.stats["anomalies"]) & {"G0", "cyclic-versions"}


def test_what_no_dependency_shows_is_found_by_looking_for_an_order(done) -> None:
    """Process 2 reads the older value after the newer one: nothing says which version came first, but no order fits."""
    history = done(txn(0, ("w", "x", 1)), txn(1, ("w", "x", 2)), txn(2, ("r", "x", 2)), txn(2, ("r", "x", 1)),
                   txn(2, ("r", "x", 2)))  # fmt: skip
    result = check_transactions(history, "rw-register")
    assert set(result.stats["anomalies"]) == {"no-order-process", "no-order-realtime"}
    assert result.stats["strongest"] == "serializable" and result.stats["order"] == "found for serializable"
    assert result.witness is not None and "no order of these transactions explains what they read" in result.reason
    assert check_transactions(history, "rw-register", level="serializable").verdict is Verdict.VALID


def test_a_search_for_an_order_that_ends_at_its_limits_is_said(events, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing says who wrote first: one of the two must be tried.
    history = overlapping(
        events, txn(0, ("w", "x", 1)), txn(1, ("w", "x", 2)), txn(2, ("r", "x", 1)), txn(3, ("r", "x", 2))
    )
    assert check_transactions(history, "rw-register").stats["order"] == "found for strict-serializable"
    monkeypatch.setattr(orders, "MAX_TRIED", 0)
    result = check_transactions(history, "rw-register")
    assert result.reason.endswith("was neither found nor excluded within the limits of the search")
    monkeypatch.setattr(checking, "MAX_TRANSACTIONS", 3)
    assert check_transactions(history, "rw-register").reason.endswith("was not searched: more than 3 transactions")


def test_an_append_made_twice_leaves_it_open(done) -> None:
    history = done(txn(0, ("append", "x", 1)), txn(1, ("append", "x", 1)))
    assert check_transactions(history).verdict is Verdict.UNKNOWN


def test_random_serializable_histories_pass_and_corrupted_ones_mostly_do_not() -> None:
    caught = 0
    for seed in range(20):
        history = large_history("list-append", 300, 5, seed=seed, crash=0.02)
        assert check_transactions(history).verdict is Verdict.VALID, seed
        rng = random.Random(seed)
        reads = [
            step
            for steps, status in zip(history.result, history.status, strict=True)
            if status == "ok"
            for step in steps
            if step[0] == "r" and len(step[2]) > 3
        ]
        broken = rng.choice(reads)
        broken[2] = broken[2][:-2]
        caught += check_transactions(history).verdict is Verdict.INVALID
    assert caught >= 15


def test_unknown_names_are_refused(done) -> None:
    with pytest.raises(ValueError, match="no isolation level"):
        check_transactions([], level="perfect")
    with pytest.raises(ValueError, match="no transaction workload"):
        check_transactions([], "nonsense")


def test_nothing_cannot_be_written(events) -> None:
    """Whoever reads it is told what everybody is told who finds nothing: no order would be known from it."""
    history = events(*[
        event
        for one in (txn(0, ("w", "x", 1)), txn(1, ("w", "x", None)), txn(2, ("r", "x", None)))
        for event in ((one[0], "invoke", *one[1:3]), (one[0], "ok", one[1], one[3]))
    ])  # fmt: skip
    with pytest.raises(ValueError, match="null is written to 'x'"):
        check_transactions(history, "rw-register")


def one_after_the_other(*transactions: list[tuple]) -> list[Operation]:
    return [
        Operation(process=0, f="txn", value=steps, result=steps, invoked=2 * at, returned=2 * at + 1)
        for at, steps in enumerate(transactions)
    ]


def test_steps_of_the_other_workload_are_refused() -> None:
    """Left out, they would make a history of nothing, in which nothing is wrong."""
    torn = one_after_the_other([("append", "x", 1)], [("append", "x", 2)], [("r", "x", [2, 1])])
    assert check_transactions(torn).verdict is Verdict.INVALID
    with pytest.raises(ValueError, match="must be w or r here, not 'append'"):
        check_transactions(torn, "rw-register")
    with pytest.raises(ValueError, match="must be append or r here, not 'w'"):
        check_transactions(one_after_the_other([("w", "x", 1)], [("r", "x", 1)]))
    with pytest.raises(ValueError, match="must show a list, not 5"):
        check_transactions(one_after_the_other([("r", "x", 5)]))


@pytest.mark.parametrize("one", [1, [1], {"a": [1]}, (1, 2)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_may_be_tuples_and_values_and_keys_anything(one: Any, kind: Any) -> None:
    appended = [("append", one, one), ("r", one, kind([one]))]
    fine = check_transactions(one_after_the_other(appended, [("r", one, [one]), ("r", one, kind([one]))]))
    assert (fine.verdict, fine.stats["anomalies"]) == (Verdict.VALID, {})
    assert check_transactions(one_after_the_other(appended, [("r", one, kind())])).verdict is Verdict.INVALID
    written = [("w", one, one)]
    fine = check_transactions(one_after_the_other(written, [("r", one, one)]), "rw-register")
    assert (fine.verdict, fine.stats["anomalies"]) == (Verdict.VALID, {})
    stale = check_transactions(one_after_the_other(written, [("r", one, None)]), "rw-register")
    assert stale.verdict is Verdict.INVALID
