"""Sequential consistency: the order of each process, and nothing else."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import pytest

from checker import (
    Counter,
    FIFOQueue,
    History,
    HistoryError,
    KeyValue,
    Log,
    Model,
    ModelError,
    Register,
    Stack,
    Topic,
    UnorderedQueue,
    Verdict,
    check,
    check_sequential,
)
from checker.models.base import ILLEGAL, UNKNOWN
from checker.testing import SAMPLED_MODELS, random_history


def is_sequential_by_force(history: History, model: Model) -> bool:
    """Whether any order of the completed and some crashed operations, with each process in order, is legal."""
    done = [row for row in range(len(history)) if history.status[row] == "ok"]
    crashed = [row for row in range(len(history)) if history.status[row] == "info" and history.f[row] not in model.pure]
    kinds = [(history.f[row], history.value[row], history.result[row]) for row in [*done, *crashed]]
    for count in range(len(crashed) + 1):
        for some in itertools.combinations(crashed, count):
            for order in itertools.permutations([*done, *some]):
                kept = not any(
                    history.process[one] == history.process[other] and history.status[one] == "ok" and one < other
                    for at, other in enumerate(order)
                    for one in order[at + 1 :]
                )
                if kept and _legal(history, model, order, kinds):
                    return True
    return False


def _continuing_after_crashes(history: History) -> list[int]:
    """The processes, if every new one continues one whose last operation crashed."""
    continued: dict[int, int] = {}
    last: dict[int, str] = {}
    for process, status in zip(history.process, history.status, strict=True):
        if process not in continued:
            continued[process] = next((one for one, left in last.items() if left == "info"), process)
        last[continued[process]] = status
    return [continued[process] for process in history.process]


def _legal(history: History, model: Model, order: tuple[int, ...], kinds: list[Any]) -> bool:
    states = [model.start()]
    for row in order:
        f, value = history.f[row], history.value[row]
        results = [history.result[row]] if history.status[row] == "ok" else list(model.outcomes(f, value, kinds))
        states = [model.step(state, f, value, result) for state in states for result in results]
        states = [state for state in states if state is not ILLEGAL]
    return bool(states)


@pytest.mark.parametrize(
    "name", ["versioned-register", "cas-register", "counter", "fifo-queue", "unordered-queue", "log"]
)
def test_verdicts_agree_with_brute_force(name: str) -> None:
    """With processes that continue after an operation of unknown outcome."""
    rng = random.Random(11)
    verdicts = []
    for _ in range(60):
        history = random_history(name, rng, operations=5, processes=2, crash=0.5, lie=0.7, spread=rng.choice([0, 2]))
        history.process = _continuing_after_crashes(history)
        model = SAMPLED_MODELS[name][0]
        truth = is_sequential_by_force(history, model)
        verdicts.append(truth)
        assert check_sequential(history, model).valid is truth, list(history)
        if check(history, model):
            assert truth, "a linearizable history is sequentially consistent"
    assert len(set(verdicts)) == 2


Step = tuple[int, str, str, Any]


def done_by(process: int, f: str, value: Any, result: Any) -> list[Step]:
    return [(process, "invoke", f, value), (process, "ok", f, result)]


def crashed(process: int, f: str, value: Any) -> list[Step]:
    return [(process, "invoke", f, value), (process, "info", f, value)]


@pytest.mark.parametrize(
    ("model", "rows", "fine"),
    [
        # A process continues after an operation of unknown outcome and reads a value never written.
        (Register(), crashed(0, "write", 3) + done_by(0, "read", None, 9), False),
        # What it wrote may take effect after what it does next, or before.
        (Register(initial=0), crashed(0, "write", 3) + done_by(0, "read", None, 0), True),
        (Register(), crashed(0, "write", 3) + done_by(0, "read", None, 3), True),
        # But not before what it did earlier.
        (Register(initial=0), done_by(0, "read", None, 3) + crashed(0, "write", 3), False),
        # The crashed dequeue may have taken 4.
        (
            UnorderedQueue(),
            done_by(0, "enqueue", 4, 4) + crashed(1, "dequeue", None) + done_by(0, "dequeue", None, None),
            True,
        ),
        (UnorderedQueue(), done_by(0, "enqueue", 4, 4) + done_by(0, "dequeue", None, None), False),
        (FIFOQueue(), crashed(0, "enqueue", 1) + done_by(0, "dequeue", None, 7), False),
        (Stack(), crashed(0, "push", 1) + done_by(0, "pop", None, 1), True),
        (Counter(), crashed(0, "add", 1) + done_by(0, "read", None, 2), False),
        (Log(), crashed(1, "append", 1) + done_by(1, "append", 0, [2, 0]), False),
        (Topic(queues=2), crashed(3, "send", 1) + done_by(3, "tail", {}, [1, 1]), True),
        # A failed write did not happen.
        (Register(), [(0, "invoke", "write", 3), (0, "fail", "write", 3), *done_by(0, "read", None, 3)], False),
    ],
)
def test_small_histories_have_their_expected_verdicts(events, model: Model, rows: list[Step], fine: bool) -> None:
    assert check_sequential(events(*rows), model).valid is fine


def test_sequential_consistency_needs_one_order_across_all_keys(events) -> None:
    def one(process: int, f: str, value: Any, result: Any, key: str) -> list[tuple[Any, ...]]:
        return [(process, "invoke", f, value, key), (process, "ok", f, result, key)]

    apart = [*one(0, "write", 2, 2, "x"), *one(0, "read", None, 0, "y")]
    assert check_sequential(events(*apart), Register(initial=0)).verdict is Verdict.VALID
    # Each key by itself is sequentially consistent, both together are not.
    crossed = [*one(0, "write", 1, 1, "x"), *one(0, "read", None, 0, "y")]
    crossed += [*one(1, "write", 1, 1, "y"), *one(1, "read", None, 0, "x")]
    assert check_sequential(events(*crossed), Register(initial=0)).verdict is Verdict.INVALID
    for key in "xy":
        alone = [row for row in crossed if row[4] == key]
        assert check_sequential(events(*alone), Register(initial=0)).verdict is Verdict.VALID


def test_lists_are_compared_as_values(done) -> None:
    assert check_sequential(done((0, "write", [1], [1]), (0, "read", None, [1])), Register()).verdict is Verdict.VALID
    assert check_sequential(done((0, "write", [1], [1]), (0, "read", None, [2])), Register()).verdict is Verdict.INVALID


def test_the_error_names_the_operation_that_a_model_cannot_judge(done) -> None:
    with pytest.raises(ModelError, match="accepts read, write; the history has 'cas'"):
        check_sequential(done((0, "cas", [1, 2], [1, 2])), Register())
    with pytest.raises(HistoryError, match=r"a log cannot be used with process 0's read\(\) -> 'what\?' "):
        check_sequential(done((0, "read", {}, "what?")), Log())


def test_equal_crashed_operations_are_counted_and_not_permuted(events) -> None:
    rows = [row for _ in range(20) for row in ((0, "invoke", "add", 1), (0, "info", "add", 1))]
    result = check_sequential(events(*rows, (0, "invoke", "read", None), (0, "ok", "read", 21)), Counter())
    assert result.verdict is Verdict.INVALID and result.stats["steps"] < 100


def test_a_crashed_enqueue_has_one_unknown_outcome() -> None:
    assert list(UnorderedQueue().outcomes("enqueue", 1, [])) == [UNKNOWN]


def test_growing_states_stop_at_the_memory_limit(done) -> None:
    text = "x" * 1_000
    history = done(*[(0, "append", text, text)] * 1_000, (0, "get", None, text * 1_000))
    result = check_sequential(history, KeyValue(), memory_mb=32)
    assert result.verdict is Verdict.UNKNOWN and "the memory limit of 32 MiB was reached" in result.reason
    assert check_sequential(history, KeyValue()).verdict is Verdict.VALID


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="only CPython can interrupt a step")
def test_the_time_limit_interrupts_a_step_that_would_not_end(done) -> None:
    result = check_sequential(done(*[(0, "send", value, None) for value in range(40)]), Topic(), timeout_s=0.5)
    assert result.verdict is Verdict.UNKNOWN and result.reason == "the time limit of 0.5 s was reached within a step"
    assert result.stats["operations"] == 40
