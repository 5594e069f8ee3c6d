"""Orders of any number of transactions on registers: by execution, and from versions that reads show."""

from __future__ import annotations

import random
from typing import Any

import pytest

from checker import History, Verdict, check_transactions
from checker.testing.definitions.transaction_samples import draw_transactions
from checker.transactions import check as checking
from checker.transactions import strict_order
from checker.transactions.anomalies import Anomalies, Transactions
from checker.transactions.graph import DependencyGraph
from checker.transactions.orders import find_order
from checker.transactions.rw_register import build_rw_register
from checker.transactions.strict_order import has_strict_order
from tests.checker.test_transaction_orders import random_transactions, some_order_explains


def database_run(
    rng: random.Random, transactions: int, *, clients: int, reads_first: bool, crash: float = 0.02
) -> list[dict[str, Any]]:
    """Events of clients of one database that executes each transaction at some moment between invocation and return."""
    state: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    running: dict[int, tuple[list[Any], list[Any] | None]] = {}
    idle, spare, issued = list(range(clients)), clients, 0
    while issued < transactions or running:
        if idle and issued < transactions and (not running or rng.random() < 0.4):
            process = idle.pop(rng.randrange(len(idle)))
            issued += 1
            steps: list[Any] = []
            for at, name in enumerate(rng.sample("uvwxyz", rng.randint(1, 2))):
                key = f"{name}{issued // 150}"
                if reads_first or rng.random() < 0.5:
                    steps.append(["r", key, None])
                if rng.random() < 0.5:
                    steps.append(["w", key, 2 * issued + at])
            running[process] = steps, None
            events.append({"process": process, "type": "invoke", "f": "txn", "value": steps})
            continue
        process = rng.choice(list(running))
        steps, answers = running.pop(process)
        if answers is not None:
            events.append({"process": process, "type": "ok", "f": "txn", "value": answers})
            idle.append(process)
            continue
        answers = []
        for f, key, value in steps:
            if f == "w":
                state[key] = value
            answers.append([f, key, state.get(key)])
        if rng.random() < crash:
            events.append({"process": process, "type": "info", "f": "txn", "value": steps})
            idle.append(spare)
            spare += 1
        else:
            running[process] = steps, answers
    return events


def _built(history: History) -> tuple[Transactions, DependencyGraph, Anomalies, Any]:
    transactions = Transactions(history, "w")
    graph, found = DependencyGraph(len(history)), Anomalies()
    return transactions, graph, found, build_rw_register(transactions, graph, found)


def test_an_order_that_is_found_is_one_by_brute_force() -> None:
    rng = random.Random(21)
    found = missed = wrong = 0
    for number in range(1_500):
        history = random_transactions(rng, "rw-register")
        transactions, _, anomalies, versions = _built(history)
        if anomalies.counts:
            continue
        truth = some_order_explains(history, "strict-serializable", frozenset(range(len(history))), {})
        is_found = has_strict_order(transactions, versions)
        assert truth or not is_found, number
        found += is_found
        missed += truth and not is_found
        wrong += not truth
    assert found > 300 and wrong > 50
    assert missed == 0, "of so few transactions it finds every order that there is"


@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("clients", [3, 12])
def test_thousands_of_transactions_are_proven_and_one_stale_read_refutes_them(clients: int, reads_first: bool) -> None:
    events = database_run(random.Random(clients), 4_000, clients=clients, reads_first=reads_first)
    result = check_transactions(events, "rw-register")
    assert result.verdict is Verdict.VALID and result.stats["order"] == "found for strict-serializable"
    stale = _read_of_an_old_write(events)
    stale["value"] = [["r", stale["value"][0][1], None], *stale["value"][1:]]
    assert check_transactions(events, "rw-register").verdict is Verdict.INVALID


def _read_of_an_old_write(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A late completion that begins with a read of what had been acknowledged before its invocation."""
    acknowledged: dict[Any, int] = {}
    invoked: dict[Any, int] = {}
    for at, event in enumerate(events):
        if event["type"] == "invoke":
            invoked[event["process"]] = at
        elif event["type"] == "ok":
            steps = event["value"]
            found = steps[0][2] if at > len(events) // 2 and steps and steps[0][0] == "r" else None
            if acknowledged.get(found, at) < invoked[event["process"]]:
                return event
            acknowledged |= {value: at for f, _, value in steps if f == "w"}
    raise AssertionError("there is none")


CROWDED = ((False, 2), (False, 3), (True, 0))
"""Histories of 40 clients, whether transactions read first and the seed, in which the first guess leads nowhere."""


def _crowded() -> list[bool]:
    found = []
    for reads_first, seed in CROWDED:
        events = database_run(random.Random(seed), 2_000, clients=40, reads_first=reads_first, crash=0.05)
        transactions, _, _, versions = _built(History.from_events(events))
        found.append(has_strict_order(transactions, versions))
    return found


def test_dead_ends_teach_which_writer_should_have_waited() -> None:
    assert _crowded() == [True, True, True]


@pytest.mark.parametrize(
    ("part", "instead", "expected"),
    [
        ("_learned", lambda search, row: None, [False, False, False]),
        ("_blocked", lambda search, row: None, [False, True, True]),
        (
            "_put_before",
            lambda search, first, key: search._learn(first, search._state.get(key, (None, -1))[1]),
            [True, False, False],
        ),
        ("_deadlines", lambda search, versions: list(search._returned), [False, True, True]),
    ],
)
def test_each_part_of_the_search_decides_some_history(
    monkeypatch: pytest.MonkeyPatch, part: str, instead: Any, expected: list[bool]
) -> None:
    """Without it that history is left open; an order that is found is one in any case."""
    monkeypatch.setattr(strict_order._Search, part, instead)
    assert _crowded() == expected


def test_an_order_that_was_given_up_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    events = database_run(random.Random(1), 1_500, clients=5, reads_first=False)
    monkeypatch.setattr(strict_order, "MAX_EXECUTED", 0)
    result = check_transactions(events, "rw-register")
    assert result.stats["order"] == "neither found nor excluded within the limits of the search"
    monkeypatch.undo()
    looks = iter((None, "the time limit"))
    transactions, _, _, versions = _built(History.from_events(events))
    assert not has_strict_order(transactions, versions, lambda: next(looks))


def test_versions_that_reads_show_decide_every_level_as_the_searches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transactions that read each key before they write it: the graph alone gives the searches' verdicts."""
    rng = random.Random(4)
    known = 0
    verdicts = set()
    for number in range(1_500):
        sample = draw_transactions("rw-register", rng)
        if not _built(History.from_events(sample.events))[3].are_known:
            continue
        known += 1
        for level in ("snapshot-isolation", "strong-snapshot-isolation", "serializable", "strict-serializable"):
            quick = check_transactions(list(sample.events), "rw-register", level=level)
            with monkeypatch.context() as patch:
                patch.setattr(checking._Findings, "_take_from_graph", _search_all)
                slow = check_transactions(list(sample.events), "rw-register", level=level)
            assert quick.verdict is slow.verdict, (number, level, quick.reason, slow.reason)
            verdicts.add((level, quick.verdict))
    assert known > 250 and len(verdicts) >= 8


def _search_all(findings: Any) -> None:
    """In the place of the short way: the search that decides registers in general."""
    transactions = findings.transactions
    rows = sorted([*transactions.committed, *transactions.unknown])
    for _, name, extra in checking._ORDERED_LEVELS:
        if find_order(transactions, rows, extra) is False:
            findings.anomalies.add(name, rows[:1], "none")


def test_write_skew_in_thousands_of_transactions_leaves_snapshots_proven() -> None:
    events = database_run(random.Random(7), 3_000, clients=4, reads_first=True, crash=0)
    skew = [
        (900, [["r", "p", None], ["r", "q", None], ["w", "p", 1]]),
        (901, [["r", "p", None], ["r", "q", None], ["w", "q", 1]]),
    ]
    events += [{"process": process, "type": "invoke", "f": "txn", "value": steps} for process, steps in skew]
    events += [{"process": process, "type": "ok", "f": "txn", "value": steps} for process, steps in skew]
    result = check_transactions(events, "rw-register", level="snapshot-isolation")
    assert result.verdict is Verdict.VALID and result.stats["order"] == "excluded"
    assert result.stats["snapshot_order"] == "found for strong-snapshot-isolation"
    assert check_transactions(events, "rw-register", level="serializable").verdict is Verdict.INVALID


def test_two_that_replaced_the_same_version_are_no_order_of_versions() -> None:
    steps = [["r", "x", None], ["w", "x", 1]], [["r", "x", None], ["w", "x", 2]]
    events: list[dict[str, Any]] = []
    for process, each in enumerate(steps):
        events.append({"process": process, "type": "invoke", "f": "txn", "value": each})
        events.append({"process": process, "type": "ok", "f": "txn", "value": each})
    result = check_transactions(events, "rw-register", level="snapshot-isolation")
    assert result.verdict is Verdict.INVALID and "lost-update" in result.stats["anomalies"]
