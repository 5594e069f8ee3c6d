"""Grow-only sets read as a whole: against brute force, and what is reported about a contradiction."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checker import GrowOnlySet, History, Operation, Set, Verdict, check
from checker.linearizability.budget import Budget
from checker.linearizability.engine import decide
from checker.testing import linearizable_by_force

Events = list[dict[str, Any]]
NEVER_ADDED = 9


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Additions of 0, 1, ... and reads of some of them, each begun some events after the one before."""
    number = draw(st.integers(2, 7))
    longest = draw(st.sampled_from([2, 6, 16]))
    operations: list[Operation] = []
    added = 0
    for place in range(number):
        invoked = 4 * place + draw(st.integers(0, longest)) + place / 100
        is_read, is_known = draw(st.booleans()), draw(st.integers(0, 3)) > 0
        shown = sorted(draw(st.sets(st.integers(0, added))))
        if draw(st.integers(0, 19)) == 19:
            shown.append(NEVER_ADDED)
        operations.append(
            Operation(
                process=place,
                f="read" if is_read else "add",
                value=None if is_read else added,
                result=None if not is_known else shown if is_read else added,
                status="ok" if is_known else "info",
                invoked=invoked,
                returned=invoked + draw(st.integers(1, longest)) + 0.001 if is_known else None,
            )
        )
        added += not is_read
    return History.from_operations(sorted(operations, key=lambda each: each.invoked))


@given(histories())
def test_grow_only_set_verdicts_agree_with_brute_force(history: History) -> None:
    outcome = decide(history, history.rows_by_key(), GrowOnlySet(), Budget(timeout_s=60.0))[0]
    assert (outcome.verdict is Verdict.VALID) == linearizable_by_force(history, GrowOnlySet())
    if outcome.violation is not None:
        assert outcome.engine == "A5 ranks from whole reads" and len(outcome.violation.rows) <= 3
        crashed = [row for row in range(len(history)) if history.f[row] == "add" and history.status[row] == "info"]
        rows = sorted({*outcome.violation.rows, *crashed})
        alone = History.from_operations(history.operations(rows))
        assert not linearizable_by_force(alone, GrowOnlySet())


def add(element: int) -> tuple[int, str, int, None]:
    return (element, "add", element, None)


def read(*elements: int) -> tuple[int, str, None, list[int]]:
    return (7, "read", None, list(elements))


@pytest.mark.parametrize(
    ("begun", "operations", "said"),
    [
        ([], [add(1), read(1, 9)], r"shows 9, which nobody had added\.$"),
        ([], [add(1), read()], r"process 1's add\(1\) .* returned before process 7's read.*, which lacks 1\.$"),
        ([1, 2], [read(1, 2), read(1)], r"read\(\) -> \[1, 2\] .* which lacks 2, which the former shows\.$"),
        ([1, 2], [read(1), read(2)], r"\[1\] .* shows 1 and lacks 2; .* shows the latter and lacks the former\.$"),
        ([], [read(1), add(1)], r"read\(\) -> \[1\] .* returned before .*add\(1\) .*, and shows 1 already\.$"),
        ([7], [add(1), add(2), (8, "read", None, [2])], r"process 1's add\(1\) .* which lacks 1\.$"),
    ],
)
def test_the_reason_names_the_contradicting_operations(
    done: Callable[..., Events], begun: list[int], operations: list[tuple[Any, ...]], said: str
) -> None:
    events = [{"process": 20 + each, "type": "invoke", "f": "add", "value": each} for each in begun]
    for event in done(*operations):
        del event["index"]
        events.append(event)
    result = check(events, GrowOnlySet())
    assert result.verdict is Verdict.INVALID and result.witness is not None
    assert re.search(said, result.reason), result.reason
    assert len(result.witness.operations) <= 2


def test_a_read_that_contradicts_the_order_of_two_additions_is_named() -> None:
    """1 was added before the addition of 2 was invoked; a concurrent read shows 2 alone."""
    history = History.from_operations(
        [
            Operation(process=0, f="add", value=1, result=1, invoked=1, returned=2),
            Operation(process=1, f="add", value=2, result=2, invoked=3, returned=6),
            Operation(process=2, f="read", result=[2], invoked=0, returned=5),
        ]
    )
    result = check(history, GrowOnlySet())
    assert result.witness is not None and len(result.witness.operations) == 3
    assert "returned before process 1's add(2)" in result.reason and "shows 2 without it" in result.reason


def test_a_wrong_contains_is_explained_by_the_last_remove(done: Callable[..., Events]) -> None:
    happened = [(0, f, 8, 8) for f in ("add", "remove") * 20]
    result = check(done(*happened, (1, "contains", 8, True)), Set())
    assert result.witness is not None and len(result.witness.operations) == 2
    assert "process 0's remove(8)" in result.reason and "whatever state came before" in result.reason
