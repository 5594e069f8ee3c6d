"""Checkers that need little more time than reading: twice the history takes about twice the steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from checker import Result, check_log, check_set_full, sets
from checker.tally import MAX_EXAMPLES
from checker.words import named_row

Operations = list[tuple[Any, ...]]
#: Of the larger history; a quadratic checker takes four times the steps of half of it.
OPERATIONS = 400


def _steps(checker: Callable[..., Result], history: Any) -> int:
    """How many lines of the checker's own module are executed, counted again on every turn of a loop."""
    source, steps = checker.__code__.co_filename, 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return trace if frame.f_code.co_filename == source else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        checker(history)
    finally:
        sys.settrace(before)
    return steps


def _lost_elements(count: int) -> Operations:
    """Many elements added to a set that loses all of them, and many empty reads."""
    added: Operations = [(0, "add", value, value) for value in range(count)]
    return [*added, *[(0, "read", None, [])] * count]


def _one_value_again(count: int) -> Operations:
    """One value appended to a log again and again, and a read."""
    appended: Operations = [(0, "append", "beat", [offset, "beat"]) for offset in range(count)]
    return [*appended, (0, "read", {"offset": 0}, {"offset": 0, "messages": ["beat"] * count, "tail": count})]


@pytest.mark.parametrize(
    ("checker", "made"), [(check_set_full, _lost_elements), (check_log, _one_value_again)], ids=["set-full", "log"]
)
def test_the_work_grows_linearly_with_the_history(
    done, checker: Callable[..., Result], made: Callable[[int], Operations]
) -> None:
    half, whole = (_steps(checker, done(*made(count))) for count in (OPERATIONS // 2, OPERATIONS))
    assert 0 < whole < 3 * half


def test_lost_elements_are_described_for_examples_only(done, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each description names a read of half of the elements, with all of them."""
    described: list[int] = []

    def describe(history: Any, row: int) -> str:
        described.append(row)
        return named_row(history, row)

    monkeypatch.setattr(sets, "named_row", describe)
    added: Operations = [(0, "add", value, value) for value in range(OPERATIONS)]
    result = check_set_full(done(*added, (0, "read", None, list(range(0, OPERATIONS, 2)))))
    assert result.stats["counts"]["lost"] == OPERATIONS // 2
    assert len(described) <= MAX_EXAMPLES and len(result.stats["examples"]["lost"]) == MAX_EXAMPLES
