"""Every anomaly planted in a few transactions, and random serial ones that must pass."""

from __future__ import annotations

import random
from typing import Any

import pytest

from checker import History, Operation, Verdict, check_transactions
from checker.testing.large import large_history
from checker.transactions import ISOLATION_LEVELS, orders, serial
from checker.transactions import check as checking


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
    "fractured-read": [(("append", "x", 1), ("append", "y", 1)), (("r", "x", [1]), ("r", "y", []))],
    "G2": [(("r", "x", []), ("append", "y", 1)), (("r", "y", []), ("append", "x", 1))],
    "internal": [(("append", "x", 1), ("r", "x", [2])), (("append", "x", 2),)],
    "incompatible-order": [(("append", "x", 1), ("append", "x", 2)), (("r", "x", [1, 2]),), (("r", "x", [2, 1]),)],
    "G1b": [(("append", "x", 1), ("append", "x", 2)), (("r", "x", [1]),)],
    "lost-update": [(("r", "x", []), ("append", "x", 1)), (("r", "x", []), ("append", "x", 2))],
    "garbage-read": [(("r", "x", [9]),)],
}
READER = {
    "G0": (("r", "x", [1, 2]), ("r", "y", [2, 1])),
    "G2": (("r", "x", [1]), ("r", "y", [1])),
    "lost-update": (("r", "x", [1, 2]),),
}
STRONGEST = {
    "G0": None,
    "G1c": "read-uncommitted",
    "G-single": "read-committed",
    "fractured-read": "read-committed",
    "G2": "snapshot-isolation",
    "internal": "read-uncommitted",
    "incompatible-order": None,
    "G1b": "read-uncommitted",
    "lost-update": "read-atomic",
    "garbage-read": None,
}


@pytest.mark.parametrize("anomaly", LIST)
def test_each_list_append_anomaly_is_found_and_limits_the_strongest_level(events, anomaly: str) -> None:
    transactions = [*LIST[anomaly], *([READER[anomaly]] if anomaly in READER else [])]
    result = check_transactions(overlapping(events, *[txn(i, *steps) for i, steps in enumerate(transactions)]))
    assert anomaly in result.stats["anomalies"]
    assert result.stats["strongest"] == STRONGEST[anomaly]
    assert result.verdict is Verdict.INVALID
    if anomaly.startswith("G") and anomaly != "G1b":
        assert result.witness is not None and 2 <= len(result.witness.edges) <= len(result.witness.operations)


def test_a_read_of_a_failed_append_is_g1a(events) -> None:
    result = check_transactions(
        events(
            (0, "invoke", "txn", [["append", "x", 1]]),
            (0, "fail", "txn", [["append", "x", 1]]),
            (1, "invoke", "txn", [["r", "x", None]]),
            (1, "ok", "txn", [["r", "x", [1]]]),
        )
    )
    assert result.stats["anomalies"] == {"G1a": 1}


def test_a_stale_read_violates_real_time_or_process_order(done) -> None:
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
def test_each_rw_register_anomaly_is_found(events, anomaly: str) -> None:
    history = overlapping(events, *[txn(i, *steps) for i, steps in enumerate(REGISTER[anomaly])])
    result = check_transactions(history, "rw-register")
    assert anomaly in result.stats["anomalies"] and result.verdict is Verdict.INVALID


def test_keys_declared_consistent_order_their_versions(done) -> None:
    stale = done(txn(0, ("w", "x", 1)), txn(1, ("w", "x", 2)), txn(2, ("r", "x", 1)))
    again = done(txn(0, ("w", "x", 1)), txn(1, ("w", "x", 2)), *(txn(2, ("r", "x", value)) for value in (2, 1, 2)))
    lost = done(txn(0, ("w", "x", 1)), txn(2, ("r", "x", 1)), txn(2, ("r", "x", None)))
    for history, keys in ((stale, "linearizable_keys"), (again, "sequential_keys"), (lost, "sequential_keys")):
        assert check_transactions(history, "rw-register", level="read-committed").verdict is Verdict.VALID
        result = check_transactions(history, "rw-register", level="read-committed", **{keys: True})
        assert result.verdict is Verdict.INVALID
        assert set(result.stats["anomalies"]) & {"G0", "cyclic-versions"}


@pytest.mark.parametrize("keys", ["linearizable_keys", "sequential_keys"])
def test_a_written_null_is_not_the_initial_null(done, keys: str) -> None:
    history = done(txn(0, ("w", "x", 1)), txn(0, ("w", "x", None), ("w", "y", 1)), txn(0, ("r", "y", 1)))
    assert check_transactions(history, "rw-register", **{keys: True}).verdict is Verdict.VALID
    wrong = [*history, *done(txn(0, ("r", "y", None)))]
    for index, event in enumerate(wrong):
        event["index"] = index
    assert check_transactions(wrong, "rw-register", **{keys: True}).verdict is Verdict.INVALID


def test_a_violation_without_a_cycle_of_dependencies_is_found_by_searching_orders(done) -> None:
    """The older value is read after the newer one: nothing says which version came first, but no order fits."""
    history = done(txn(0, ("w", "x", 1)), txn(1, ("w", "x", 2)), txn(2, ("r", "x", 2)), txn(3, ("r", "x", 1)),
                   txn(4, ("r", "x", 2)))  # fmt: skip
    result = check_transactions(history, "rw-register")
    assert set(result.stats["anomalies"]) == {"no-order-realtime", "no-snapshot-order-realtime"}
    level = "strong-session-serializable"
    assert result.stats["strongest"] == level and result.stats["order"] == f"found for {level}"
    assert result.witness is not None and "no order of these transactions explains what they read" in result.reason
    assert check_transactions(history, "rw-register", level="serializable").verdict is Verdict.VALID


def test_the_reason_says_that_the_search_for_an_order_reached_its_limits(
    events, done, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing says who wrote first: one of the two must be tried.
    history = overlapping(
        events, txn(0, ("w", "x", 1)), txn(1, ("w", "x", 2)), txn(2, ("r", "x", 1)), txn(3, ("r", "x", 2))
    )
    monkeypatch.setattr(checking, "has_strict_order", lambda *args: False)
    assert check_transactions(history, "rw-register").stats["order"] == "found for strict-serializable"
    monkeypatch.setattr(orders, "MAX_TRIED", 0)
    result = check_transactions(history, "rw-register")
    assert result.reason.endswith("was neither found nor excluded within the limits of the search")
    monkeypatch.setattr(checking, "MAX_TRANSACTIONS", 3)
    result = check_transactions(history, "rw-register")
    assert result.reason.endswith("was neither found nor excluded within the limits of the search")
    late = [{**event, "index": 8 + event["index"]} for event in done(txn(4, ("r", "x", None)))]
    result = check_transactions([*history, *late], "rw-register", level="serializable")
    assert result.reason.endswith("was not searched: more than 3 transactions")


@pytest.mark.parametrize(
    ("search", "levels"),
    [
        ("find_order", {level for level in ISOLATION_LEVELS if "read" not in level} - {"causal"}),
        ("find_snapshot_order", {level for level in ISOLATION_LEVELS if "snapshot" in level}),
    ],
)
def test_a_timed_out_search_for_an_order_leaves_the_levels_it_decides_unknown(
    events, monkeypatch: pytest.MonkeyPatch, search: str, levels: set[str]
) -> None:
    history = overlapping(
        events, txn(0, ("w", "x", 1)), txn(1, ("w", "x", 2)), txn(2, ("r", "x", 1)), txn(3, ("r", "x", 2))
    )
    searched = getattr(checking, search)
    monkeypatch.setattr(checking, "has_strict_order", lambda *args: False)

    def times_out(*args: Any) -> bool | None:
        *_, is_over = args
        is_over.__self__.timeout_s = 1e-9
        return searched(*args)

    if search == "find_snapshot_order":  # runs only where no serial order is known
        monkeypatch.setattr(checking, "MAX_TRANSACTIONS", 3)
    monkeypatch.setattr(checking, search, times_out)
    for level in ISOLATION_LEVELS:
        result = check_transactions(history, "rw-register", level=level)
        assert result.verdict is (Verdict.UNKNOWN if level in levels else Verdict.VALID), level
        assert (level not in levels) or "s was reached before an order of the transactions" in result.reason


def test_a_value_appended_twice_is_unknown_unless_every_order_is_tried(done, monkeypatch: pytest.MonkeyPatch) -> None:
    history = done(txn(0, ("append", "x", 1)), txn(1, ("append", "x", 1)), txn(0, ("r", "x", [1, 1])))
    assert check_transactions(history).verdict is Verdict.VALID
    lost = done(txn(0, ("append", "x", 1)), txn(1, ("append", "x", 1)), txn(0, ("r", "x", [1])))
    result = check_transactions(lost)
    assert result.verdict is Verdict.INVALID and "no-order-realtime" in result.stats["anomalies"]
    monkeypatch.setattr(serial, "MAX_TRANSACTIONS", 2)
    result = check_transactions(lost)
    assert result.verdict is Verdict.UNKNOWN and "1 is appended twice to 'x'" in result.reason


def test_an_anomaly_of_another_key_is_found_despite_a_value_appended_twice(done) -> None:
    twice = [txn(process, ("append", "x", 1)) for process in range(40)]
    result = check_transactions(done(*twice, txn(0, ("append", "y", 1)), txn(1, ("r", "y", []))))
    assert result.verdict is Verdict.INVALID and "G-single-realtime" in result.stats["anomalies"]


def test_a_concurrent_write_of_the_same_value_may_explain_a_later_read(events) -> None:
    history = events((0, "invoke", "txn", [["w", "x", 1]]), (2, "invoke", "txn", [["w", "x", 1]]),
                     (2, "ok", "txn", [["w", "x", 1]]), (2, "invoke", "txn", [["w", "x", 5]]),
                     (2, "ok", "txn", [["w", "x", 5]]), (0, "ok", "txn", [["w", "x", 1]]),
                     (0, "invoke", "txn", [["r", "x", None]]), (0, "ok", "txn", [["r", "x", 1]]))  # fmt: skip
    assert check_transactions(history, "rw-register").verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ([["append", "x", 1]], []),
        ([["append", "x", 1]], [["append", "x", 2]]),
        ([["append", "x", 1]], [["r", "x", None]]),
        ([["append", "x", 1], ["append", "y", 1]], [["append", "y", 1], ["append", "x", 1]]),
        ([["r", "x", None]], [["append", "x", 1]]),
    ],
)
@pytest.mark.parametrize("workload", ["list-append", "rw-register"])
def test_writes_that_differ_from_those_invoked_make_the_verdict_unknown(
    events, workload: str, asked: list, answered: list
) -> None:
    """The fate of the invoked writes is unknown."""
    if workload == "rw-register":
        asked, answered = ([[f.replace("append", "w"), k, v] for f, k, v in steps] for steps in (asked, answered))
    result = check_transactions(events((0, "invoke", "txn", asked), (0, "ok", "txn", answered)), workload)
    assert result.verdict is Verdict.UNKNOWN and "returned other writes than it was invoked with" in result.reason


def test_an_answer_may_omit_reads_and_use_other_names_of_functions(events) -> None:
    asked, answered = [["read", "x", None], ["w", "x", 1.0], ["r", "y", None]], [["write", "x", 1], ["r", "y", None]]
    history = events((0, "invoke", "txn", asked), (0, "ok", "txn", answered))
    assert check_transactions(history, "rw-register").verdict is Verdict.VALID


FUTURES = {
    "own future": [(("r", "x", [1]), ("append", "x", 1))],
    "own future, then not": [(("r", "x", [1]), ("r", "x", []), ("append", "x", 1))],
    "the end of another's appends": [(("append", "x", 2), ("append", "x", 3)), (("r", "x", [3]),)],
    "another's appends turned round": [(("append", "x", 2), ("append", "x", 3)), (("r", "x", [3, 2]),)],
    "one's own appends in another place than others see": [
        (("append", "x", 1), ("r", "x", [2, 1])), (("append", "x", 2),), (("r", "x", [1, 2]),)
    ],
}  # fmt: skip


def test_reads_that_order_committed_appends_differently_rule_out_every_level(events) -> None:
    """An element that was rolled back may have been read before; all others have one order."""
    for told, strongest in (([2, 1], None), ([3, 1, 2], "read-uncommitted")):
        history = events(
            (5, "invoke", "txn", [["append", "x", 3]]), (5, "info", "txn", None),
            *[event for number in (1, 2) for event in (
                (0, "invoke", "txn", [["append", "x", number]]), (0, "ok", "txn", [["append", "x", number]]))],
            (1, "invoke", "txn", [["r", "x", None]]), (1, "ok", "txn", [["r", "x", told]]),
            (1, "invoke", "txn", [["r", "x", None]]), (1, "ok", "txn", [["r", "x", [1, 2]]]),
        )  # fmt: skip
        assert check_transactions(history).stats["strongest"] == strongest


def test_g0_is_also_found_in_a_read_that_is_internally_wrong(done) -> None:
    torn = [("append", "x", 14), ("r", "x", [11, 14, 12])]
    history = done(txn(0, ("append", "x", 11), ("append", "x", 12)), txn(0, *torn))
    result = check_transactions(history)
    assert set(result.stats["anomalies"]) == {"internal", "G0"} and result.stats["strongest"] is None


@pytest.mark.parametrize("reading", FUTURES)
def test_reads_of_own_future_or_torn_writes_are_not_serializable(events, reading: str) -> None:
    history = overlapping(events, *[txn(i, *steps) for i, steps in enumerate(FUTURES[reading])])
    result = check_transactions(history, level="serializable")
    assert result.verdict is Verdict.INVALID and result.witness is not None


@pytest.mark.parametrize(("workload", "write", "seen", "none"), [
    ("list-append", "append", [1], []), ("rw-register", "w", 1, None)
])  # fmt: skip
def test_a_crashed_transaction_takes_effect_as_a_whole(events, workload: str, write: str, seen: Any, none: Any) -> None:
    asked = [[write, "x", 1], [write, "y", 1]]
    told = [["r", "x", seen], ["r", "y", none]]
    history = events((0, "invoke", "txn", asked), (0, "info", "txn", None), (1, "invoke", "txn", told),
                     (1, "ok", "txn", told))  # fmt: skip
    result = check_transactions(history, workload, level="snapshot-isolation")
    assert result.verdict is Verdict.INVALID and set(result.stats["anomalies"]) == {"G-single", "fractured-read"}


@pytest.mark.parametrize(("workload", "value"), [("list-append", [9]), ("rw-register", 9)])
def test_a_read_of_a_value_never_written_is_invalid_in_a_complete_history(done, workload: str, value: Any) -> None:
    history = History.of(done(txn(0, ("r", "x", value))))
    assert check_transactions(history, workload, level="read-uncommitted").verdict is Verdict.INVALID
    assert check_transactions(history, workload, excerpt=True).verdict is Verdict.UNKNOWN
    history.problems.append("line 3 was left out")
    assert check_transactions(history, workload).verdict is Verdict.UNKNOWN


LONG_FORK = {
    "list-append": [
        (("append", "x", 1),), (("append", "y", 1),), (("r", "x", [1]), ("r", "y", [])),
        (("r", "x", []), ("r", "y", [1])),
    ],
    "rw-register": [(("w", "x", 1),), (("w", "y", 1),), (("r", "x", 1), ("r", "y", None)),
                    (("r", "x", None), ("r", "y", 1))],
}  # fmt: skip


@pytest.mark.parametrize("workload", LONG_FORK)
def test_a_long_fork_rules_out_snapshot_isolation(events, workload: str) -> None:
    history = overlapping(events, *[txn(i, *steps) for i, steps in enumerate(LONG_FORK[workload])])
    result = check_transactions(history, workload, level="snapshot-isolation")
    assert result.verdict is Verdict.INVALID and set(result.stats["anomalies"]) == {"G-nonadjacent"}
    assert result.stats["levels"] == ["read-uncommitted", "read-committed", "read-atomic", "causal"]
    assert result.witness is not None and [edge.kind for edge in result.witness.edges].count("rw") == 2
    assert check_transactions(history, workload, level="read-committed").verdict is Verdict.VALID


def test_snapshot_isolation_allows_write_skew_unless_both_also_write_one_key(events) -> None:
    skew = [(("r", "x", []), ("append", "y", 1)), (("r", "y", []), ("append", "x", 1))]
    history = overlapping(events, *[txn(i, *steps) for i, steps in enumerate(skew)])
    assert check_transactions(history, level="strong-snapshot-isolation").verdict is Verdict.VALID
    assert check_transactions(history, level="serializable").verdict is Verdict.INVALID
    both = [(*steps, ("append", "z", number)) for number, steps in enumerate(skew)]
    result = check_transactions(overlapping(events, *[txn(i, *steps) for i, steps in enumerate(both)]))
    assert "no-snapshot-order" in result.stats["anomalies"]


def test_a_stale_read_rules_out_the_stronger_snapshot_levels(done) -> None:
    stale = [txn(0, ("append", "x", 1)), txn(1, ("r", "x", []))]
    levels = check_transactions(done(*stale)).stats["levels"]
    assert "strong-session-snapshot-isolation" in levels and "strong-snapshot-isolation" not in levels
    same = [txn(0, ("append", "x", 1)), txn(0, ("r", "x", []))]
    levels = check_transactions(done(*same)).stats["levels"]
    assert "snapshot-isolation" in levels and "strong-session-snapshot-isolation" not in levels


def test_a_non_repeatable_read_leaves_read_committed(events) -> None:
    for workload, write, first, then in (("list-append", "append", [], [1]), ("rw-register", "w", None, 1)):
        history = overlapping(events, txn(0, (write, "x", 1)), txn(1, ("r", "x", first), ("r", "x", then)))
        assert check_transactions(history, workload).stats["strongest"] == "read-committed"


def test_a_crashed_transaction_need_not_precede_the_next_one_of_its_process(events) -> None:
    for workload, write, seen in (("list-append", "append", [1]), ("rw-register", "w", 1)):
        history = events(
            (0, "invoke", "txn", [[write, "x", 1], [write, "y", 1]]), (0, "info", "txn", None),
            (0, "invoke", "txn", [["r", "y", None]]), (0, "ok", "txn", [["r", "y", None]]),
            (1, "invoke", "txn", [["r", "x", None]]), (1, "ok", "txn", [["r", "x", seen]]),
        )  # fmt: skip
        assert check_transactions(history, workload).verdict is Verdict.VALID


def test_values_compare_as_json_does(done) -> None:
    cases: list[tuple[Any, Any, bool]] = [(1, True, False), (0, False, False), (1, 1.0, True), ("1", 1, False)]
    cases += [([1], [True], False)]
    cases += [({"a": 1}, {"a": True}, False), ({"a": 1}, [["a", 1]], False)]
    for one, other, is_same in cases:
        expected = Verdict.VALID if is_same else Verdict.INVALID
        listed = done(txn(0, ("append", "x", one)), txn(1, ("r", "x", [other])))
        assert check_transactions(listed).verdict is expected, (one, other)
        written = done(txn(0, ("w", "x", one)), txn(1, ("r", "x", other)))
        assert check_transactions(written, "rw-register").verdict is expected, (one, other)
        keys = done(txn(0, ("append", one, 1)), txn(1, ("r", other, [1])))
        assert check_transactions(keys).verdict is expected, (one, other)
    both = done(txn(0, ("append", "x", 1)), txn(0, ("append", "x", True)), txn(1, ("r", "x", [1, True])))
    assert check_transactions(both).verdict is Verdict.VALID


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


def test_unknown_levels_and_workloads_are_refused(done) -> None:
    with pytest.raises(ValueError, match="no isolation level"):
        check_transactions([], level="perfect")
    with pytest.raises(ValueError, match="no transaction workload"):
        check_transactions([], "nonsense")


def test_null_can_be_written_and_read_as_a_value(done, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of it may be of the initial state or of a write; the orders of few transactions tell which."""
    listed = done(txn(0, ("append", "x", None)), txn(1, ("r", "x", [None])))
    assert check_transactions(listed).verdict is Verdict.VALID
    history = done(txn(0, ("w", "x", 1)), txn(1, ("w", "x", None)), txn(2, ("r", "x", None)))
    assert check_transactions(history, "rw-register").verdict is Verdict.VALID
    stale = done(txn(1, ("w", "x", None)), txn(0, ("w", "x", 1)), txn(2, ("r", "x", None)))
    assert check_transactions(stale, "rw-register").verdict is Verdict.INVALID
    monkeypatch.setattr(serial, "MAX_TRANSACTIONS", 2)
    result = check_transactions(stale, "rw-register")
    assert result.verdict is Verdict.UNKNOWN and "'x' was read as null" in result.reason


def one_after_the_other(*transactions: list[tuple]) -> list[Operation]:
    return [
        Operation(process=0, f="txn", value=steps, result=steps, invoked=2 * at, returned=2 * at + 1)
        for at, steps in enumerate(transactions)
    ]


def test_steps_of_the_other_workload_are_refused() -> None:
    """Without them the history would be empty, and so valid."""
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
def test_lists_may_be_tuples_and_keys_and_values_may_have_any_type(one: Any, kind: Any) -> None:
    appended = [("append", one, one), ("r", one, kind([one]))]
    fine = check_transactions(one_after_the_other(appended, [("r", one, [one]), ("r", one, kind([one]))]))
    assert (fine.verdict, fine.stats["anomalies"]) == (Verdict.VALID, {})
    assert check_transactions(one_after_the_other(appended, [("r", one, kind())])).verdict is Verdict.INVALID
    written = [("w", one, one)]
    fine = check_transactions(one_after_the_other(written, [("r", one, one)]), "rw-register")
    assert (fine.verdict, fine.stats["anomalies"]) == (Verdict.VALID, {})
    stale = check_transactions(one_after_the_other(written, [("r", one, None)]), "rw-register")
    assert stale.verdict is Verdict.INVALID


def test_the_memory_of_transactions_is_measured_and_not_estimated() -> None:
    """The estimate of 114 MiB is for transactions of four steps; these take a tenth of that."""
    history = History.from_operations(
        Operation(
            process=0, f="txn", value=[["w", at, at]], result=[["w", at, at]], invoked=2 * at, returned=2 * at + 1
        )
        for at in range(20_000)
    )
    assert check_transactions(history, "rw-register", memory_mb=100).verdict is Verdict.VALID
    result = check_transactions(history, "rw-register", memory_mb=100, timeout_s=1e-6)
    assert result.verdict is Verdict.UNKNOWN and "time limit" in result.reason
