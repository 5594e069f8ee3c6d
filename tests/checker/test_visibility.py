"""Read atomicity and causal consistency of transactions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from checker import History, Verdict, check_transactions
from checker.linearizability.budget import Budget
from checker.testing.definitions.orders import pair
from checker.testing.definitions.transactions import is_possible
from checker.transactions import visibility

HISTORIES = 400
KEYS = "xyz"

Steps = Sequence[tuple[str, str, Any]]


def in_order(*transactions: tuple[int, Steps]) -> list[dict[str, Any]]:
    """Events of transactions that each process runs one after the other."""
    events = []
    for process, steps in transactions:
        done = [list(step) for step in steps]
        asked = [[f, key, None if f == "r" else value] for f, key, value in steps]
        events.append({"process": process, "type": "invoke", "f": "txn", "value": asked})
        events.append({"process": process, "type": "ok", "f": "txn", "value": done})
    return events


def with_stale_reads(rng: random.Random, write: str) -> list[dict[str, Any]]:
    """Transactions of four processes that read one of the last versions of each key, each key for itself."""
    versions: dict[str, list[Any]] = {key: [None] for key in KEYS}
    events: list[dict[str, Any]] = []
    for number in range(rng.randrange(3, 7)):
        lag, view = rng.randrange(1, 4), dict[str, Any]()
        asked, done = [], []
        for at in range(rng.randrange(1, 4)):
            key, value = rng.choice(KEYS), 10 * number + at
            if rng.random() < 0.6:
                view.setdefault(key, rng.choice(versions[key][-lag:]))
                asked.append(["r", key, None])
                done.append(["r", key, view[key]])
            else:
                view[key] = [*(versions[key][-1] or []), value] if write == "append" else value
                versions[key].append(view[key])
                asked.append([write, key, value])
                done.append(asked[-1])
        kind = rng.choice(["ok"] * 8 + ["info", "fail"])
        process = rng.randrange(4)
        events.append({"process": process, "type": "invoke", "f": "txn", "value": asked})
        events.append({"process": process, "type": kind, "f": "txn", "value": done if kind == "ok" else None})
    return events


@pytest.mark.parametrize(("workload", "write"), [("list-append", "append"), ("rw-register", "w")])
def test_both_levels_are_decided_as_defined(workload: str, write: str) -> None:
    rng = random.Random(31)
    seen = Counter[tuple[str, bool]]()
    for number in range(HISTORIES):
        events = with_stale_reads(rng, write)
        calls = pair(events)
        for level in ("read-atomic", "causal"):
            strict, lenient = (
                is_possible(calls, level, lists=write == "append", strict=strict) for strict in (True, False)
            )
            result = check_transactions(events, workload, level=level)
            # The two answers differ about lists that a transaction read after it had appended to them.
            assert (result.verdict is Verdict.VALID) in (strict, lenient), f"history {number}, {level}: {result.reason}"
            assert (level in result.stats["levels"]) is (result.verdict is Verdict.VALID)
            seen[level, strict] += strict is lenient
    assert all(seen[level, truth] > HISTORIES // 10 for level in ("read-atomic", "causal") for truth in (True, False))
    assert seen["causal", False] > seen["read-atomic", False] + HISTORIES // 50


CASES: dict[str, tuple[tuple[tuple[int, Steps], ...], str, bool]] = {
    "half of a transaction is seen": (
        ((0, (("w", "x", 1), ("w", "y", 1))), (1, (("r", "x", 1), ("r", "y", None)))), "fractured-read", True
    ),
    "two that disagree about one key are seen as a mixture": (
        (
            (0, (("w", "x", 1), ("w", "y", 1))), (1, (("w", "x", 2), ("w", "y", 2))),
            (2, (("r", "x", 1), ("r", "y", 2))),
        ),
        "fractured-read", True,
    ),
    "a process misses its own write": (
        ((0, (("w", "x", 1),)), (0, (("r", "x", None),))), "causal-violation", False
    ),
    "an answer is seen without its question": (
        ((0, (("w", "x", 1),)), (1, (("r", "x", 1), ("w", "y", 1))), (2, (("r", "y", 1),)), (2, (("r", "x", None),))),
        "causal-violation", False,
    ),
    "a process goes back to the older of two versions": (
        ((0, (("w", "x", 1),)), (0, (("w", "x", 2),)), (1, (("r", "x", 2),)), (1, (("r", "x", 1),))),
        "causal-violation", False,
    ),
    "two processes see two writes in opposite orders": (
        (
            (0, (("w", "x", 1),)), (1, (("w", "x", 2),)), (2, (("r", "x", 1),)), (3, (("r", "x", 2),)),
            (2, (("r", "x", 2),)), (3, (("r", "x", 1),)),
        ),
        "causal-violation", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_violation_is_named_and_its_witness_alone_is_one(case: str) -> None:
    transactions, anomaly, is_fractured = CASES[case]
    level = "read-atomic" if is_fractured else "causal"
    result = check_transactions(in_order(*transactions), "rw-register", level=level)
    assert result.verdict is Verdict.INVALID and anomaly in result.stats["anomalies"], result.reason
    assert ("read-atomic" in result.stats["levels"]) is not is_fractured and "causal" not in result.stats["levels"]
    assert result.witness is not None and result.witness.text.startswith(f"{anomaly}: ")
    alone = History.from_operations(result.witness.operations)
    assert check_transactions(alone, "rw-register", level=level, excerpt=True).verdict is Verdict.INVALID


@pytest.mark.parametrize(
    "transactions",
    [
        # A long fork, a lost update, and a crashed transaction that its own process does not see later.
        ((0, (("w", "x", 1),)), (1, (("w", "y", 1),)), (2, (("r", "x", 1), ("r", "y", None))),
         (3, (("r", "x", None), ("r", "y", 1)))),
        ((0, (("r", "x", None), ("w", "x", 1))), (1, (("r", "x", None), ("w", "x", 2)))),
    ],
)  # fmt: skip
def test_causal_consistency_allows_what_snapshot_isolation_does_not(
    transactions: tuple[tuple[int, Steps], ...],
) -> None:
    result = check_transactions(in_order(*transactions), "rw-register", level="causal")
    assert result.verdict is Verdict.VALID and result.reason.startswith("nothing rules out causal"), result.reason
    assert "snapshot-isolation" not in result.stats["levels"]


def test_a_process_need_not_see_its_transaction_of_unknown_outcome() -> None:
    first, last = in_order((0, (("w", "x", 1),)), (0, (("r", "x", None),)))[:2], in_order((1, (("r", "x", 1),)))
    later = in_order((0, (("r", "x", None),)))
    crashed = {"process": 0, "type": "info", "f": "txn", "value": None}
    assert check_transactions([*first, *later, *last], "rw-register", level="causal").verdict is Verdict.INVALID
    assert (
        check_transactions([first[0], crashed, *later, *last], "rw-register", level="causal").verdict is Verdict.VALID
    )


def test_a_list_read_too_late_is_found_though_its_writer_is_on_no_cycle() -> None:
    events = in_order(
        (0, (("append", "x", 1),)),
        (1, (("append", "x", 2), ("append", "y", 3))),
        (2, (("r", "y", [3]), ("r", "x", [1]))),
        (3, (("r", "x", [1, 2]),)),
    )
    result = check_transactions(events, level="read-atomic")
    assert result.verdict is Verdict.INVALID and result.witness is not None
    assert "fractured-read" in result.stats["anomalies"], result.reason


def test_a_thousand_transactions_are_decided_without_a_search_for_an_order() -> None:
    """One read misses a write that another transaction had seen before; no dependency shows it."""
    history = [(number % 5, (("w", f"k{number // 10}", number),)) for number in range(1_500)]
    history += [(5, (("r", "k3", 38), ("w", "flag", 1))), (6, (("r", "flag", 1),)), (6, (("r", "k3", 33),))]
    result = check_transactions(in_order(*history), "rw-register", level="causal")
    assert result.verdict is Verdict.INVALID and list(result.stats["anomalies"]) == ["causal-violation"]
    assert result.witness is not None and len(result.witness.operations) <= 6
    fine = check_transactions(in_order(*history[:-1], (6, (("r", "k3", 38),))), "rw-register", level="causal")
    assert fine.verdict is Verdict.VALID and fine.stats["order"].startswith("neither found")


def test_examples_are_limited_and_counts_are_exact() -> None:
    writers = [(number, (("w", f"x{number}", 1), ("w", f"y{number}", 1))) for number in range(9)]
    readers = [(number, (("r", f"x{number}", 1), ("r", f"y{number}", None))) for number in range(9)]
    result = check_transactions(in_order(*writers, *readers), "rw-register", level="read-atomic")
    assert result.stats["anomalies"]["fractured-read"] == 9 and len(result.stats["examples"]["fractured-read"]) == 5


def test_so_many_sessions_that_their_clocks_would_fill_memory_leave_causal_consistency_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = in_order((0, (("w", "x", 1),)), (1, (("r", "x", 1),)), (1, (("r", "x", None),)))
    for limit, verdict in ((5, Verdict.UNKNOWN), (6, Verdict.INVALID)):  # three transactions of two sessions
        monkeypatch.setattr(visibility, "MAX_CLOCK_ENTRIES", limit)
        result = check_transactions(events, "rw-register", level="causal")
        assert result.verdict is verdict, result.reason
        assert ("causal" in result.stats) is (verdict is Verdict.UNKNOWN)
        assert check_transactions(events, "rw-register", level="read-atomic").verdict is Verdict.VALID
    monkeypatch.setattr(visibility, "MAX_CLOCK_ENTRIES", 5)
    result = check_transactions(events, "rw-register", level="causal")
    assert result.reason.endswith("was not searched: 3 transactions of 2 sessions are too many")


@pytest.mark.parametrize("after", [0, 1])
def test_a_time_limit_during_the_search_leaves_causal_consistency_unknown(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    looks = iter(range(100))
    exhausted = Budget.exhausted

    def runs_out(budget: Budget) -> str | None:
        return "the time limit" if started and next(looks) >= after else exhausted(budget)

    started: list[bool] = []
    fractured: Callable[..., Any] = visibility._fractured
    monkeypatch.setattr(visibility, "_fractured", lambda accesses: started.append(True) or fractured(accesses))
    monkeypatch.setattr(Budget, "exhausted", runs_out)
    events = in_order((0, (("w", "x", 1),)), (0, (("r", "x", None),)))
    result = check_transactions(events, "rw-register", level="causal")
    assert result.verdict is Verdict.UNKNOWN and result.reason.startswith("the time limit")
