"""Transactions that tell the checker from mutants that once survived all tests (``benchmarks/checker_mutants.py``)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from checker import Operation, Result, Verdict, check_transactions
from checker.testing.definitions.orders import pair
from checker.testing.definitions.transactions import is_possible
from checker.testing.large import large_history
from checker.transactions import cycles

Step = tuple[str, str, Any]
Event = dict[str, Any]


def transaction(process: int, *steps: Step) -> tuple[Event, Event]:
    """The invocation and the return of a transaction."""
    asked = [[f, key, None if f == "r" else value] for f, key, value in steps]
    begun = {"process": process, "type": "invoke", "f": "txn", "value": asked}
    return begun, {**begun, "type": "ok", "value": [list(step) for step in steps]}


def overlapping(*transactions: tuple[Step, ...]) -> list[Event]:
    """Events of transactions, all of which begin before any ends."""
    both = [transaction(process, *steps) for process, steps in enumerate(transactions)]
    return [begun for begun, _ in both] + [done for _, done in both]


def edges_of(result: Result) -> list[tuple[Operation, str, Operation]]:
    """Why each transaction of the witness comes before the next."""
    assert result.witness is not None
    shown = result.witness.operations
    return [(shown[edge.source], edge.kind, shown[edge.target]) for edge in result.witness.edges]


def test_a_serializable_history_is_not_searched_for_a_snapshot_order() -> None:
    result = check_transactions(overlapping((("append", "x", 1),), (("r", "x", [1]),)), level="snapshot-isolation")
    assert result.verdict is Verdict.VALID
    assert "snapshot_order" not in result.stats


def test_the_witness_of_a_long_fork_is_its_cycle_of_dependencies() -> None:
    result = check_transactions(
        overlapping(
            (("append", "z", 0),),
            (("append", "x", 1),),
            (("append", "y", 1),),
            (("r", "x", [1]), ("r", "y", [])),
            (("r", "x", []), ("r", "y", [1])),
        ),
        level="snapshot-isolation",
    )
    assert result.stats["anomalies"] == {"G-nonadjacent": 1}
    edges = edges_of(result)
    assert {(source.process, kind, target.process) for source, kind, target in edges} == {
        (1, "wr", 3),
        (3, "rw", 2),
        (2, "wr", 4),
        (4, "rw", 1),
    }


def test_anti_dependencies_separated_only_by_a_detour_are_not_g_nonadjacent() -> None:
    # T0 and T1 read each other's writes; T2 -rw-> T0 -rw-> T3 -wr-> T2 are adjacent but for the detour by T1.
    result = check_transactions(
        overlapping(
            (("append", "x", 1), ("r", "y", [1]), ("append", "z", 1), ("r", "w", [])),
            (("append", "y", 1), ("r", "x", [1])),
            (("r", "z", []), ("r", "v", [1])),
            (("append", "w", 1), ("append", "v", 1)),
        )
    )
    assert set(result.stats["anomalies"]) == {"G1c"}
    assert {operation.process for operation in (result.witness.operations if result.witness else ())} == {0, 1}


def test_process_order_closes_a_cycle_of_three_transactions() -> None:
    (first, first_done), (later, later_done) = transaction(0, ("append", "x", 1)), transaction(0, ("append", "y", 1))
    reader, reader_done = transaction(1, ("r", "y", [1]), ("r", "x", []))
    events = [reader, first, first_done, later, later_done, reader_done]
    result = check_transactions(events)
    assert set(result.stats["anomalies"]) == {"G-single-process", "causal-violation"}
    assert result.stats["strongest"] == "serializable"
    assert "process" in {kind for _, kind, _ in edges_of(result)}


def test_adjacent_appends_of_one_transaction_are_not_reported_as_g0() -> None:
    result = check_transactions(
        overlapping(
            (("append", "x", 1), ("append", "x", 2)),
            (("append", "x", 3),),
            (("append", "x", 4), ("append", "x", 5)),
            (("r", "x", [3, 1, 2]),),
            (("r", "x", [1, 2]),),
        )
    )
    assert "incompatible-order" in result.stats["anomalies"]
    assert "G0" not in result.stats["anomalies"]


def test_two_unread_appends_to_one_list_do_not_rule_out_snapshot_isolation() -> None:
    events = overlapping(
        (("r", "x", []), ("append", "y", 1)),
        (("r", "y", []), ("append", "x", 1)),
        (("r", "x", [1]), ("r", "y", [1])),
        (("append", "z", 1),),
        (("append", "z", 2),),
    )
    assert is_possible(pair(events), "snapshot-isolation", lists=True)
    assert not is_possible(pair(events), "serializable", lists=True)
    result = check_transactions(events, level="snapshot-isolation")
    assert result.verdict is Verdict.VALID
    assert result.stats["snapshot_order"] == "found for strong-snapshot-isolation"


def test_a_null_read_of_a_register_written_once_is_of_the_initial_value() -> None:
    result = check_transactions(overlapping((("r", "x", None),), (("w", "x", 1),)), "rw-register")
    assert result.verdict is Verdict.VALID
    assert result.stats["anomalies"] == {}


def test_a_register_with_an_unread_write_of_null_is_judged() -> None:
    result = check_transactions(overlapping((("w", "x", None),), (("w", "x", 1),), (("r", "x", 1),)), "rw-register")
    assert result.verdict is Verdict.VALID
    assert result.stats["anomalies"] == {}


def test_a_cycle_through_a_helper_node_is_found() -> None:
    # Six that read x as empty come before six that append to it; the first reader also reads the first appender's y.
    result = check_transactions(
        overlapping(
            (("r", "x", []), ("r", "y", [1])),
            *((("r", "x", []),) for _ in range(5)),
            (("append", "x", 0), ("append", "y", 1)),
            *((("append", "x", number),) for number in range(1, 6)),
        )
    )
    assert set(result.stats["anomalies"]) == {"G-single", "fractured-read"}
    assert {source.process for source, _, _ in edges_of(result)} == {0, 6}


def test_the_levels_left_do_not_depend_on_the_limit_for_large_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    left = set()
    for seed in range(40):
        rng = random.Random(seed)
        history = large_history("list-append", 60, rng.choice((3, 8)), seed=seed)
        reads = [step for steps in history.result for step in steps if step[0] == "r" and step[2]]
        shown = rng.choice(reads)[2]
        del shown[-rng.randint(1, 2) :]
        levels = []
        for most in (cycles.MAX_LISTED, 0):
            with monkeypatch.context() as patched:
                patched.setattr(cycles, "MAX_LISTED", most)
                levels.append(check_transactions(history).stats["levels"])
        assert levels[0] == levels[1], seed
        left.add(tuple(levels[0]))
    assert len(left) > 2
