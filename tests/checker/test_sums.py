"""Fetch-and-add: against brute force, with additions of unknown outcome, and what is reported about a contradiction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checker import FetchAndAdd, History, Operation, Verdict, check
from checker.linearizability.budget import Budget
from checker.linearizability.engine import GENERAL, decide
from checker.testing import linearizable_by_force

Events = list[dict[str, Any]]


@st.composite
def histories(draw: st.DrawFn, *, amounts: list[int], initial: int) -> History:
    """Two to seven operations that begin one after the other; each answers the sum of those before it, in an order
    near that of the invocations, or a wrong sum."""
    number = draw(st.integers(2, 7))
    longest = draw(st.sampled_from([2, 6, 16]))
    begins = [4 * place + draw(st.integers(0, longest)) + place / 100 for place in range(number)]
    order = sorted(range(number), key=lambda place: begins[place] + draw(st.integers(0, longest)))
    total = initial
    operations = []
    for place in order:
        kind, is_known = draw(st.sampled_from(["read", "add", "add", "add"])), draw(st.integers(0, 2)) > 0
        amount = None if kind == "read" else draw(st.sampled_from(amounts))
        answer = total + draw(st.sampled_from([0, 0, 0, 0, 0, -1, 1, 2]))
        if is_known or draw(st.booleans()):
            total += amount or 0
        returned = begins[place] + draw(st.integers(1, longest)) + 0.001
        operations.append(
            Operation(
                process=place,
                f=kind,
                value=amount,
                result=answer if is_known else None,
                status="ok" if is_known else "info",
                invoked=begins[place],
                returned=returned if is_known else None,
            )
        )
    return History.from_operations(sorted(operations, key=lambda each: each.invoked))


@pytest.mark.parametrize("amounts", [[1], [2], [1, 3], [0, 1], [-1, 2]])
@given(data=st.data())
def test_fetch_and_add_verdicts_agree_with_brute_force(amounts: list[int], data: st.DataObject) -> None:
    model = FetchAndAdd(initial=data.draw(st.sampled_from([0, 3])))
    history = data.draw(histories(amounts=amounts, initial=model.initial))
    outcome = decide(history, history.rows_by_key(), model, Budget(timeout_s=60.0))[0]
    assert len(amounts) > 1 or outcome.engine != GENERAL
    assert (outcome.verdict is Verdict.VALID) == linearizable_by_force(history, model)
    if outcome.engine != GENERAL and outcome.violation is not None:
        alone = History.from_operations(history.operations(outcome.violation.rows))
        assert not linearizable_by_force(alone, model)


def test_the_reason_names_the_contradicting_operations(done: Callable[..., Events]) -> None:
    def add(process: int, amount: int | None, answer: int) -> tuple[int, str, int | None, int]:
        return (process, "add", amount, answer)

    def reason_of(*operations: tuple[Any, ...], begun: int = 0) -> str:
        events = [{"process": 9 + place, "type": "invoke", "f": "add", "value": 1} for place in range(begun)]
        for event in done(*operations):
            del event["index"]
            events.append(event)
        result = check(events, FetchAndAdd())
        assert result.stats["engines"] == {"A5 ranks from sums": 1}
        return "valid" if result.verdict is Verdict.VALID else result.reason

    assert "add(1) -> 0 (0.002000 s to 0.003000 s) returned the same sum" in reason_of(add(0, None, 0), add(1, None, 0))
    assert "the former leads from 0 directly to 3" in reason_of(add(0, 3, 0), add(1, 1, 2))
    assert "the addition leads from 0 directly to 3" in reason_of(add(0, 3, 0), (1, "read", None, 1))
    assert "but the latter has a smaller sum" in reason_of(add(1, 1, 1), (0, "read", None, 0), begun=1)
    assert "the sum that the former added to" in reason_of(add(1, 1, 0), (0, "read", None, 0))
    assert "returned a sum that additions to 0 cannot produce" in reason_of((0, "read", None, "7"))
    two, four = add(0, 2, 0), add(1, 1, 4)
    assert "but all additions that saw a smaller sum lead to 2 (process 0's add(2) -> 0 (0.0" in reason_of(two, four)
    short = "invoked before it returned, 1 in total, do not add up to what is missing by then, 2"
    assert short in reason_of(two, four, begun=1)
    assert [reason_of(two, four, begun=2), reason_of(two, add(1, 1, 3), begun=2)] == ["valid", "valid"]


def crashed(invoked: int, amount: int) -> Operation:
    return Operation(process=invoked, f="add", value=amount, status="info", invoked=invoked)


def added(amount: int, answer: int, invoked: int, returned: int) -> Operation:
    return Operation(process=invoked, f="add", value=amount, result=answer, invoked=invoked, returned=returned)


def test_a_crashed_addition_invoked_too_late_does_not_fill_a_gap() -> None:
    history = History.from_operations([added(1, 2, 0, 2), added(1, 1, 1, 4), crashed(3, 1)])
    result = check(history, FetchAndAdd())
    assert "unknown outcome invoked before process 0's add(1) -> 2 (event 0 to event 2) returned, 0" in result.reason
    assert result.witness is not None and len(result.witness.operations) == 3


def test_a_gap_with_crashed_additions_of_different_amounts_is_left_to_the_search() -> None:
    for gap, verdict in ((2, Verdict.INVALID), (4, Verdict.VALID)):
        result = check(History.from_operations([crashed(0, 1), crashed(1, 3), added(1, gap, 2, 3)]), FetchAndAdd())
        assert result.verdict is verdict and "different amounts" in str(result.stats["not_applicable"])
