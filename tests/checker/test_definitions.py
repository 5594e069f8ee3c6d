"""The checker against the definitions of consistency, which share no code with it; and the definitions themselves."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import pytest

from checker import Result, Topic, Verdict, check, check_transaction_visibility
from checker.testing import comparison, definitions
from checker.testing.comparison import PARTS, Row, compare, rows
from checker.testing.definitions.objects import OBJECTS, make_object
from checker.testing.definitions.orders import first_invalid_prefix, is_linearizable, is_sequential, pair
from checker.testing.definitions.property_samples import draw_property
from checker.testing.definitions.samples import draw_sample
from checker.testing.definitions.transaction_samples import draw_transactions
from checker.testing.definitions.transactions import LEVELS, is_possible
from checker.testing.definitions.values import same

HISTORIES = 100
"""Per row here; the full run is ``python -m benchmarks.checker_oracle``."""

Event = dict[str, Any]
KINDS = ("invoke", "ok")


def made(*lines: tuple[Any, ...]) -> list[Event]:
    """Events from (process, type, f, value) and a key, if any."""
    return [
        {"process": process, "type": kind, "f": f, "value": value, **({"key": key[0]} if key else {})}
        for process, kind, f, value, *key in lines
    ]


def done(*operations: tuple[Any, ...]) -> list[Event]:
    """One operation after the other: (process, f, value, result)."""
    return made(
        *(
            event
            for process, f, value, result in operations
            for event in ((process, "invoke", f, value), (process, "ok", f, result))
        )
    )


def test_the_definitions_import_nothing_of_the_checker() -> None:
    folder = Path(definitions.__file__).parent
    imported = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imported.add(str(node.module))
    ours = {name for name in imported if name.split(".")[0] in ("checker", "harness", "node", "nemesis")}
    assert ours, "the folder has no modules that use each other"
    assert {name for name in ours if not name.startswith(definitions.__name__ + ".")} == set()


@pytest.mark.parametrize("row", rows(), ids=str)
def test_the_checker_agrees_with_the_definitions(row: Row) -> None:
    comparison = compare(row, histories=HISTORIES, seed=1)
    shown = {
        kind: [(judgement.answer, judgement.truth, sample.events) for sample, judgement in samples]
        for kind, samples in comparison.shown.items()
    }
    assert shown == {}
    assert comparison.verdicts.total() == HISTORIES
    assert len(comparison.verdicts) > 1, "all of these histories have one verdict"


@pytest.mark.parametrize("part", PARTS)
def test_a_checker_that_always_answers_valid_is_detected(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def always_valid(*_: Any, **__: Any) -> Result:
        return Result(verdict=Verdict.VALID)

    for name in ("check", "check_sequential", "check_transactions"):
        monkeypatch.setattr(comparison, name, always_valid)
    monkeypatch.setattr(comparison, "CHECKERS", dict.fromkeys(comparison.CHECKERS, always_valid))
    monkeypatch.setattr(comparison.Online, "feed", lambda self, event: None)
    for row in rows([part])[::4]:
        found = compare(row, histories=60, seed=2)
        assert any("where invalid" in kind or "valid where" in kind for kind in found.kinds), str(row)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (True, 1, False),
        (False, 0, False),
        (1, 1.0, True),
        ("1", 1, False),
        (None, False, False),
        ([True], [1], False),
        ([1, [2.0]], (1, (2,)), True),
        ({"a": 1, "b": 2}, {"b": 2.0, "a": 1}, True),
        ({"a": True}, {"a": 1}, False),
    ],
)
def test_values_compare_as_json_does(one: Any, other: Any, equal: bool) -> None:
    assert same(one, other) is equal
    assert same(other, one) is equal


@pytest.mark.parametrize(
    ("name", "options", "events", "linearizable", "sequential"),
    [
        ("register", {}, done((0, "write", 1, 1), (1, "read", None, None)), False, True),
        ("register", {}, done((0, "write", 1, 1), (0, "read", None, True)), False, False),
        ("register", {"initial": 0}, done((0, "read", None, None), (0, "write", None, None)), True, True),
        ("register", {"initial": 0, "none_is_any": False}, done((0, "read", None, None)), False, False),
        (
            "register",
            {"initial": 0},
            made((0, "invoke", "write", 3), (0, "info", "write", 3), *((0, kind, "read", 0) for kind in KINDS)),
            True,
            True,
        ),
        (
            "register",
            {},
            made((0, "invoke", "write", 3), (0, "fail", "write", 3), (1, "invoke", "read", None), (1, "ok", "read", 3)),
            False,
            False,
        ),
        ("cas-register", {"initial": 0}, done((0, "cas", [1, 2], False), (0, "read", None, 0)), True, True),
        ("cas-register", {"initial": 0}, done((0, "cas", [0, 2], False)), False, False),
        ("cas-register", {"initial": 0}, done((0, "cas", [0, 2], [0, 2]), (0, "read", None, 2)), True, True),
        (
            "multi-register",
            {"initial": {"x": 1}},
            done((0, "txn", [["read", "x", None], ["write", "x", 2]], [["read", "x", 1], ["write", "x", 2]])),
            True,
            True,
        ),
        ("versioned-register", {"initial_version": 3}, done((0, "write", 7, 4), (0, "read", None, [4, 7])), True, True),
        ("versioned-register", {}, done((0, "write", 7, 2)), False, False),
        ("mutex", {}, done((0, "acquire", None, None), (1, "acquire", None, None)), False, False),
        ("mutex", {"held": True}, done((0, "release", None, None), (1, "acquire", None, None)), True, True),
        ("set", {}, done((0, "add", 1, True), (0, "add", True, True), (0, "read", None, [True, 1])), True, True),
        ("grow-only-set", {}, done((0, "add", 1, None), (1, "read", None, [])), False, True),
        ("counter", {"initial": 5}, done((0, "decrement", None, None), (0, "read", None, 4.0)), True, True),
        ("fetch-and-add", {}, done((0, "add", 2, 0), (0, "add", 1, 1)), False, False),
        ("fifo-queue", {}, done((0, "enqueue", 1, 1), (0, "enqueue", 2, 2), (0, "dequeue", None, 2)), False, False),
        ("stack", {}, done((0, "push", 1, 1), (0, "push", 2, 2), (0, "pop", None, 2)), True, True),
        ("priority-queue", {}, done((0, "insert", 3, 3), (0, "insert", 2, 2), (0, "extract", None, 2)), True, True),
        (
            "unordered-queue",
            {},
            made(
                *((0, kind, "enqueue", 4) for kind in KINDS),
                (1, "invoke", "dequeue", None),
                *((0, kind, "dequeue", None) for kind in KINDS),
            ),
            True,
            True,
        ),
        ("log", {}, done((0, "append", 5, [None, 5]), (0, "tail", None, 1)), True, True),
        ("topic", {"queues": 2}, done((0, "send", 5, [1, 0]), (0, "tail", {"queue": 0}, [0, 1])), False, False),
        ("key-value", {"initial": "a"}, done((0, "append", "b", None), (0, "get", None, "ab")), True, True),
    ],
)
def test_definitions_judge_linearizability_and_sequential_consistency(
    name: str, options: dict[str, Any], events: list[Event], linearizable: bool, sequential: bool
) -> None:
    specification = make_object(name, options)
    assert is_linearizable(pair(events), specification) is linearizable
    assert is_sequential(pair(events), specification) is sequential
    assert (first_invalid_prefix(events, specification) is None) is linearizable


def test_sequential_consistency_needs_one_order_across_all_keys() -> None:
    # Each key alone has an order that keeps every process's own; both together have none.
    events = made(
        *((0, kind, "write", 1, "x") for kind in KINDS),
        *((0, kind, "read", None, "y") for kind in KINDS),
        *((1, kind, "write", 1, 1) for kind in KINDS),
        *((1, kind, "write", 1, "y") for kind in KINDS),
        *((1, kind, "read", None, "x") for kind in KINDS),
    )
    calls = pair(events)
    for key in ("x", "y"):
        assert is_sequential([call for call in calls if call.key == key], make_object("register"))
    assert not is_sequential(calls, make_object("register"))


def transactions(*lines: tuple[Any, ...]) -> list[Event]:
    """Events of transactions: (process, type, steps)."""
    return [{"process": process, "type": kind, "f": "txn", "value": steps} for process, kind, steps in lines]


def at_once(*lines: tuple[Any, list[Any]]) -> list[Event]:
    """Transactions that all overlap: (process, steps as answered)."""
    return transactions(
        *((process, "invoke", steps) for process, steps in lines), *((process, "ok", steps) for process, steps in lines)
    )


@pytest.mark.parametrize(
    ("events", "strongest"),
    [
        (at_once((0, [["append", "x", 1]]), (1, [["r", "x", [1]]])), "strict-serializable"),
        (
            transactions(
                (0, "invoke", [["append", "x", 1]]),
                (0, "ok", [["append", "x", 1]]),
                (1, "invoke", [["r", "x", None]]),
                (1, "ok", [["r", "x", None]]),
            ),
            "strong-session-serializable",
        ),
        (
            transactions(
                (0, "invoke", [["append", "x", 1]]),
                (0, "ok", [["append", "x", 1]]),
                (0, "invoke", [["r", "x", None]]),
                (0, "ok", [["r", "x", None]]),
            ),
            "serializable",
        ),
        # Write skew.
        (
            at_once(
                (0, [["r", "x", []], ["append", "y", 1]]),
                (1, [["r", "y", []], ["append", "x", 1]]),
            ),
            "snapshot-isolation",
        ),
        # A long fork.
        (
            at_once(
                (0, [["append", "x", 1]]),
                (1, [["append", "y", 1]]),
                (2, [["r", "x", [1]], ["r", "y", []]]),
                (3, [["r", "x", []], ["r", "y", [1]]]),
            ),
            "read-atomic",
        ),
        # A lost update.
        (
            at_once(
                (0, [["r", "x", []], ["append", "x", 1]]),
                (1, [["r", "x", []], ["append", "x", 2]]),
            ),
            "read-atomic",
        ),
        # Reads that are not repeatable.
        (at_once((0, [["append", "x", 1]]), (1, [["r", "x", []], ["r", "x", [1]]])), "read-committed"),
        # An intermediate read, and two transactions that read each other.
        (at_once((0, [["append", "x", 1], ["append", "x", 2]]), (1, [["r", "x", [1]]])), "read-uncommitted"),
        (
            at_once(
                (0, [["append", "x", 1], ["r", "y", [1]]]),
                (1, [["append", "y", 1], ["r", "x", [1]]]),
            ),
            "read-uncommitted",
        ),
        # A transaction's own future, and another's writes in part.
        (at_once((0, [["r", "x", [1]], ["append", "x", 1]])), "read-uncommitted"),
        (
            transactions(
                (0, "invoke", [["append", "x", 1], ["append", "y", 1]]),
                (1, "invoke", [["r", "x", None], ["r", "y", None]]),
                (1, "ok", [["r", "x", [1]], ["r", "y", []]]),
            ),
            "read-committed",
        ),
        # An aborted read.
        (
            transactions(
                (0, "invoke", [["append", "x", 1]]),
                (0, "fail", [["append", "x", 1]]),
                (1, "invoke", [["r", "x", None]]),
                (1, "ok", [["r", "x", [1]]]),
            ),
            "read-uncommitted",
        ),
        # Orders that contradict each other, and a value never written.
        (
            at_once(
                (0, [["append", "x", 1]]),
                (1, [["append", "x", 2]]),
                (2, [["r", "x", [1, 2]], ["r", "x", [2, 1]]]),
            ),
            None,
        ),
        (at_once((0, [["r", "x", [7]]])), None),
    ],
)
def test_definitions_find_the_strongest_isolation_level(events: list[Event], strongest: str | None) -> None:
    calls = pair(events)
    possible = [is_possible(calls, level, lists=True) for level in LEVELS]
    expected = [strongest is not None and place <= LEVELS.index(strongest) for place in range(len(LEVELS))]
    assert dict(zip(LEVELS, possible, strict=True)) == dict(zip(LEVELS, expected, strict=True))


@pytest.mark.parametrize("name", ["list-append", "rw-register"])
def test_a_history_possible_at_one_level_is_possible_at_every_weaker_level(name: str) -> None:
    rng = random.Random(4)
    for _ in range(120):
        calls = pair(draw_transactions(name, rng).events)
        possible = [is_possible(calls, level, lists=name == "list-append") for level in LEVELS]
        assert possible == sorted(possible, reverse=True)


def test_the_samples_contain_every_special_case() -> None:
    rng = random.Random(3)
    samples = [draw_sample(name, rng) for name in OBJECTS for _ in range(60)]
    samples += [draw_transactions(name, rng) for name in ("list-append", "rw-register") for _ in range(60)]
    samples += [draw_property(name, rng) for name in ("unique-ids", "sessions", "total-queue") for _ in range(60)]
    seen = {
        "a process with a name": lambda event, before: isinstance(event["process"], str),
        "failed with an error": lambda event, before: event["type"] == "fail" and "error" in event,
        "failed without one": lambda event, before: event["type"] == "fail" and "error" not in event,
        "crashed": lambda event, before: event["type"] == "info",
        "goes on after a crash": lambda event, before: (event["process"], "info") in before,
        "a boolean": lambda event, before: event["value"] is True,
        "a whole number as a float": lambda event, before: event["value"] == 1.0 and isinstance(event["value"], float),
        "null written": lambda event, before: event["f"] == "write" and event["value"] is None,
        "an empty answer": lambda event, before: event["type"] == "ok" and event["value"] in (None, []),
        "a key": lambda event, before: "key" in event,
    }
    for what, shows in seen.items():
        count = sum(
            any(
                shows(event, {(before["process"], before["type"]) for before in sample.events[:place]})
                for place, event in enumerate(sample.events)
            )
            for sample in samples
        )
        assert count > len(samples) / 200, what


@pytest.mark.parametrize(
    "events",
    [
        made(
            (1, "invoke", "send", 2),
            (0, "invoke", "read", {"offset": 0, "max": 2, "queue": 0}),
            (0, "ok", "read", {"queue": 0, "offset": 0, "messages": [2], "tail": 1}),
            (0, "invoke", "send", 0),
            (0, "ok", "send", [0, 0]),
        ),
        made(
            ("c", "invoke", "tail", {"queue": 0}),
            ("c", "ok", "tail", [0.0, 1]),
            ("b", "invoke", "send", "v1"),
            ("a", "invoke", "read", {"offset": 3, "queue": 0}),
            ("a", "ok", "read", {"queue": 0, "offset": 3, "messages": [], "tail": 1}),
        ),
    ],
    ids=["a place with two messages", "a tail before any message"],
)
def test_the_witness_of_an_invalid_topic_is_invalid_alone(events: list[Event]) -> None:
    """Two of the three histories in 100,000 whose witness was once reduced by another model's engine."""
    result = check(events, Topic(queues=2))
    assert result.verdict is Verdict.INVALID and result.witness is not None
    assert check(result.witness.operations, Topic(queues=2)).verdict is Verdict.INVALID


@pytest.mark.parametrize("also_invoked", [False, True])
def test_receiving_a_message_before_its_commit_was_invoked_is_invalid(also_invoked: bool) -> None:
    early = made((2, "invoke", "receive", None), (2, "ok", "receive", [1]), (3, "invoke", "commit", 1))
    late = (made((1, "invoke", "receive", None)), made((1, "ok", "receive", [1]))) if also_invoked else ([], [])
    result = check_transaction_visibility([*late[0], *early, *late[1]])
    assert result.verdict is Verdict.INVALID and "prepared but not committed" in result.reason
