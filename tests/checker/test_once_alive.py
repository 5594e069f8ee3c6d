"""Histories that tell the checker from mutants of it which no test noticed once (``benchmarks/checker_mutants.py``)."""

from __future__ import annotations

from typing import Any

import pytest

from checker import CASRegister, FIFOQueue, KeyValue, Model, Register, Verdict, check, check_sessions
from checker.testing.definitions.objects import make_object
from checker.testing.definitions.orders import is_linearizable, pair

Event = dict[str, Any]


def told(*lines: tuple[Any, ...]) -> list[Event]:
    """Events from (process, type, f, value)."""
    return [{"process": process, "type": kind, "f": f, "value": value} for process, kind, f, value in lines]


def done(process: int, f: str, value: Any, result: Any) -> list[tuple[Any, ...]]:
    """An operation that nothing overlaps."""
    return [(process, "invoke", f, value), (process, "ok", f, result)]


def crashed(process: int, f: str, value: Any) -> list[tuple[Any, ...]]:
    """One of which nothing more was heard."""
    return [(process, "invoke", f, value), (process, "info", f, value)]


THREE_CRASHED = [*crashed(0, "write", 1), *crashed(1, "cas", [1, 2]), *crashed(2, "cas", [2, 3])]


@pytest.mark.parametrize(
    ("model", "options", "lines", "valid"),
    [
        pytest.param(
            Register,
            {},
            [
                (0, "invoke", "write", 7),
                (1, "invoke", "read", None),
                (0, "ok", "write", 7),
                *crashed(2, "write", 5),
                (1, "ok", "read", 5),
                *done(0, "read", None, 7),
            ],
            False,
            id="a crashed write took effect after it was invoked, between a write and a read of its value",
        ),
        pytest.param(
            Register,
            {},
            [*done(0, "read", None, 5), *crashed(1, "write", 5)],
            False,
            id="a crashed write was invoked after its value had been read",
        ),
        pytest.param(
            CASRegister,
            {},
            [*THREE_CRASHED, *done(3, "read", None, 3)],
            True,
            id="what was read shows three crashed operations, one by the other",
        ),
        pytest.param(
            CASRegister,
            {},
            [*done(3, "read", None, 3), *THREE_CRASHED],
            False,
            id="three crashed operations that all began after what they would explain",
        ),
        pytest.param(
            FIFOQueue,
            {},
            [
                *done(0, "enqueue", 1, 1),
                *done(0, "enqueue", 2, 2),
                *done(0, "dequeue", None, 2),
                *crashed(1, "dequeue", None),
            ],
            False,
            id="a crashed dequeue began after the value before it had to be gone",
        ),
        pytest.param(
            FIFOQueue,
            {},
            [
                *done(0, "enqueue", 1, 1),
                *done(0, "enqueue", 2, 2),
                *crashed(1, "dequeue", None),
                *done(0, "dequeue", None, 2),
            ],
            True,
            id="a crashed dequeue began in time",
        ),
        pytest.param(
            Register, {"initial": 0, "none_is_any": True}, done(0, "read", None, None), True, id="null says nothing"
        ),
        pytest.param(
            Register, {"initial": 0, "none_is_any": False}, done(0, "read", None, None), False, id="null is a value"
        ),
        pytest.param(
            CASRegister, {"initial": 0, "none_is_any": True}, done(0, "read", None, None), True, id="null too"
        ),
        pytest.param(
            KeyValue,
            {},
            [(0, "invoke", "append", "ab"), (1, "invoke", "put", "a"), *done(2, "get", None, "aab")],
            True,
            id="one state by either of two crashed operations or both, and only both explain what was read",
        ),
        pytest.param(
            CASRegister,
            {"initial": 5},
            [
                *crashed(0, "write", 1),
                *crashed(1, "write", 2),
                *crashed(2, "cas", [2, 1]),
                *crashed(3, "cas", [5, 1]),
                *done(4, "read", None, 1),
                *(line for _ in range(2) for line in (*done(4, "write", 0, 0), *done(4, "read", None, 1))),
            ],
            True,
            id="one state in three ways by crashed operations, and only the last leaves those that are needed later",
        ),
        pytest.param(
            CASRegister,
            {"initial": 5},
            [
                *crashed(0, "write", 1),
                *crashed(1, "write", 2),
                *crashed(2, "cas", [2, 1]),
                *crashed(3, "cas", [5, 1]),
                *done(4, "write", 0, 0),
                *done(4, "read", None, 1),
                *(line for _ in range(2) for line in (*done(4, "write", 0, 0), *done(4, "read", None, 1))),
            ],
            False,
            id="the same where the last way is closed",
        ),
    ],
)
def test_a_history_that_a_mutant_got_wrong(
    model: type[Model], options: dict[str, Any], lines: list[tuple[Any, ...]], valid: bool
) -> None:
    events = told(*lines)
    assert is_linearizable(pair(events), make_object(model.name, options)) is valid
    assert check(events, model(**options)).verdict is (Verdict.VALID if valid else Verdict.INVALID)


@pytest.mark.parametrize(
    ("lines", "kinds"),
    [
        ([*done(0, "read", None, [2, "b"]), (0, "invoke", "read", None), (0, "info", "read", [1, "a"])], []),
        ([(0, "invoke", "write", "b"), (0, "info", "write", 5), *done(0, "write", "c", 3)], []),
        ([*done(0, "write", "a", 2), *done(0, "write", "b", 2)], ["monotonic-writes"]),
        ([*done(0, "read", None, [2, "b"]), *done(0, "write", "c", 2)], ["writes-follow-reads"]),
        ([*done(0, "read", None, [2, "b"]), *done(0, "read", None, [2, "b"])], []),
        ([*done(0, "write", "b", 2), *done(0, "read", None, [2, "b"])], []),
    ],
    ids=[
        "a crashed read says nothing",
        "a crashed write says nothing",
        "two writes at one place",
        "a write at the place that was read",
        "a value read twice",
        "a value read back",
    ],
)
def test_a_session_that_a_mutant_got_wrong(lines: list[tuple[Any, ...]], kinds: list[str]) -> None:
    counts = check_sessions(told(*lines)).stats["counts"]
    assert [kind for kind, count in counts.items() if count] == kinds
