"""Takes of unknown outcome: what they may have taken, against brute force and in histories too long for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checker import FIFOQueue, History, Model, Operation, PriorityQueue, Stack, UnorderedQueue, Verdict, check
from checker.linearizability import crashed_takes
from checker.linearizability.budget import Budget
from checker.linearizability.engine import GENERAL, decide
from checker.linearizability.key_outcome import KeyOutcome
from checker.testing import linearizable_by_force, random_history

MODELS: dict[str, Model] = {
    "fifo-queue": FIFOQueue(),
    "stack": Stack(),
    "priority-queue": PriorityQueue(),
    "unordered-queue": UnorderedQueue(),
}
LONGEST = 9
"""Operations of the longest history that brute force decides."""


@st.composite
def histories_with_crashed_takes(draw: st.DrawFn, put: str, take: str) -> History:
    """Two to four puts, one to three takes of unknown outcome, and takes that returned a value or null; each begins
    some events after the one before, and lasts for some."""
    values = draw(st.permutations(range(1, draw(st.integers(2, 4)) + 1)))
    came_out = list(draw(st.permutations(values)))
    takes: list[tuple[str, int | None]] = [("crashed", None)] * draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, LONGEST - len(values) - len(takes)))):
        finds = bool(came_out) and draw(st.booleans())
        takes.append(("took", came_out.pop() if finds else None))
    steps: list[tuple[str, int | None]] = [("put", value) for value in values]
    for each in draw(st.permutations(takes)):
        steps.insert(draw(st.integers(1, len(steps))), each)
    longest = draw(st.sampled_from([2, 6, 16]))
    operations = []
    for number, (kind, value) in enumerate(steps):
        invoked = 4 * number + draw(st.integers(0, longest)) + number / 100
        returned = invoked + draw(st.integers(1, longest)) + 0.001
        is_known = kind != "crashed" and not (kind == "put" and draw(st.integers(0, 9)) == 9)
        operations.append(
            Operation(
                process=number,
                f=put if kind == "put" else take,
                value=value if kind == "put" else None,
                result=value if is_known else None,
                status="ok" if is_known else "info",
                invoked=invoked,
                returned=returned if is_known else None,
            )
        )
    return History.from_operations(sorted(operations, key=lambda each: each.invoked))


def decided(history: History, model: Model) -> KeyOutcome:
    return decide(history, history.rows_by_key(), model, Budget(timeout_s=60.0))[0]


def parts(history: History, rows: Sequence[int]) -> History:
    return History.from_operations(history.operations(rows))


@pytest.mark.parametrize("guesses", [True, False])
@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
def test_crashed_takes_are_decided_without_search_and_agree_with_brute_force(
    name: str, guesses: bool, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not guesses:
            patch.setattr(crashed_takes._Deal, "is_guessed", lambda _: False)
        assert_decided_as_by_brute_force_without_search(name, data)


def assert_decided_as_by_brute_force_without_search(name: str, data: st.DataObject) -> None:
    model = MODELS[name]
    put, take = {"stack": ("push", "pop"), "priority-queue": ("insert", "extract")}.get(name, ("enqueue", "dequeue"))
    history = data.draw(histories_with_crashed_takes(put, take))
    outcome = decided(history, model)
    assert outcome.engine != GENERAL
    assert (outcome.verdict is Verdict.VALID) == linearizable_by_force(history, model)
    if outcome.violation is not None:
        crashed = [row for row in range(len(history)) if history.status[row] == "info"]
        rows = sorted({*outcome.violation.rows, *crashed})
        assert not linearizable_by_force(parts(history, rows), model)


@pytest.mark.parametrize("name", MODELS)
def test_long_valid_histories_with_many_crashed_takes_are_decided_without_search(name: str) -> None:
    needed = 0
    for seed in range(8):
        history = random_history(name, random.Random(seed), operations=600, processes=10, spread=0, crash=0.2, lie=0)
        outcome = decided(history, MODELS[name])
        assert (outcome.verdict, outcome.engine == GENERAL) == (Verdict.VALID, False)
        known = [row for row in range(len(history)) if history.status[row] == "ok" or history.value[row] is not None]
        needed += check(parts(history, known), MODELS[name]).verdict is Verdict.INVALID
    assert needed >= 6, "most histories are invalid without their crashed takes"


def test_crashed_fifo_dequeues_must_explain_both_order_and_emptiness(
    events: Callable[..., list[dict[str, Any]]],
) -> None:
    """Two crashed dequeues have to take 1, which 2 overtook, and 3, before the queue was found empty."""

    def operation(
        process: int, f: str, asked: int | None, answer: int | None
    ) -> list[tuple[int, str, str, int | None]]:
        return [(process, "invoke", f, asked), (process, "ok", f, answer)]

    put = [*operation(0, "enqueue", 1, 1), *operation(0, "enqueue", 2, 2)]
    crashed = [[(n, "invoke", "dequeue", None), (n, "info", "dequeue", None)] for n in (1, 2)]
    third, empty = operation(0, "enqueue", 3, 3), operation(3, "dequeue", None, None)
    two, three = operation(3, "dequeue", None, 2), operation(3, "dequeue", None, 3)
    for history, verdict in (
        ([*put, *crashed[0], *two, *third, *crashed[1], *empty], Verdict.VALID),
        ([*put, *crashed[0], *crashed[1], *two, *third, *empty], Verdict.VALID),
        ([*put, *crashed[0], *two, *third, *empty, *crashed[1]], Verdict.INVALID),
        ([*put, *two, *crashed[0], *third, *crashed[1], *empty], Verdict.INVALID),
        ([*put, *crashed[0], *two, *third, *empty], Verdict.INVALID),
        # A value put in before the queue was empty and a value overtaken later need a crashed dequeue each.
        ([*put[:2], *crashed[0], *empty, *put[2:], *third, *crashed[1], *three], Verdict.VALID),
        ([*put[:2], *crashed[0], *crashed[1], *empty, *put[2:], *third, *three], Verdict.VALID),
        ([*put[:2], *crashed[0], *empty, *put[2:], *third, *three], Verdict.INVALID),
        ([*put[:2], *crashed[0], *empty, *put[2:], *third, *three, *crashed[1]], Verdict.INVALID),
    ):
        result = check(events(*history), FIFOQueue())
        assert result.verdict is verdict and result.stats["engines"] == {"A6 queue orders": 1}


def test_the_general_search_decides_if_crashed_takes_need_too_many_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    history = random_history("stack", random.Random(1), operations=60, processes=3, spread=0, crash=0.1, lie=0)
    assert decided(history, Stack()).engine != GENERAL
    monkeypatch.setattr(crashed_takes, "TESTS_PER_TAKE", -100)
    monkeypatch.setattr(crashed_takes, "SPARE_TESTS", 1)
    outcome = decided(history, Stack())
    assert (outcome.engine, outcome.verdict) == (GENERAL, Verdict.VALID)
    assert outcome.skipped == {"A7 stack nesting": "the verdict depends on what takes of unknown outcome have taken"}
