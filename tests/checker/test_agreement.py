"""Every engine against brute force: all orders of at most eight operations."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checker import CASRegister, History, Operation, Register, Verdict, check
from checker.linearizability import general
from checker.testing import SAMPLED_MODELS, linearizable_by_force, random_history
from checker.testing.agreement import draw_history, judge
from checker.testing.large import large_history

#: Histories per model here; the full run is ``benchmarks/checker_oracle.py``.
HISTORIES = 400


@pytest.mark.parametrize("name", SAMPLED_MODELS)
def test_engines_agree_with_brute_force(name: str) -> None:
    rng = random.Random(1)
    model = SAMPLED_MODELS[name][0]
    truths = {judge(draw_history(name, rng), model, f"{name} {number}")[0] for number in range(HISTORIES)}
    assert truths == {True, False}


def test_restarting_at_every_step_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in ("NAIVE_PATIENCE_STEPS", "PATIENCE_STEPS", "BLIND_PATIENCE_STEPS", "EASE_STEPS"):
        monkeypatch.setattr(general, steps, 1)
    rng = random.Random(2)
    decided = 0
    for number in range(HISTORIES):
        name = ("cas-register", "mutex", "set", "key-value", "register")[number % 5]
        history = random_history(name, rng, operations=8, processes=4, spread=2, crash=0.4, lie=0.3)
        decided += judge(history, SAMPLED_MODELS[name][0], f"restarts {number}")[1] is not None
    assert decided > HISTORIES / 2


@pytest.mark.parametrize("crash", [0, 0.03])
def test_lookahead_rejects_no_valid_history(monkeypatch: pytest.MonkeyPatch, crash: float) -> None:
    for steps in ("NAIVE_PATIENCE_STEPS", "PATIENCE_STEPS", "EASE_STEPS"):
        monkeypatch.setattr(general, steps, 1)
    decided = 0
    for seed in range(80):
        clients = (5, 15, 30, 50)[seed % 4]
        history = large_history("cas-register", 100 + 20 * (seed % 10), clients, seed=seed, crash=crash)
        search = general.Search(history, range(len(history)), CASRegister())
        answer = search.run(1_000)
        assert answer is not False, seed
        decided += answer is True
    assert decided > 40


@st.composite
def operations(draw: st.DrawFn) -> list[Operation]:
    """Operations with overlapping intervals and arbitrary answers, as no real register makes them."""
    out = []
    for index in range(draw(st.integers(1, 7))):
        start = draw(st.integers(0, 20))
        status = draw(st.sampled_from(["ok", "ok", "ok", "info", "fail"]))
        f = draw(st.sampled_from(["read", "write", "cas"]))
        value: object = None if f == "read" else draw(st.integers(1, 4))
        if f == "cas":
            value = (draw(st.sampled_from([None, 1, 2, 3])), value)
        out.append(
            Operation(
                process=index,
                f=f,
                value=value,
                result=draw(st.sampled_from({"read": [None, 1, 2, 3], "cas": [value, False]}.get(f, [value]))),
                status=status,
                invoked=start,
                returned=None if status == "info" else start + draw(st.integers(1, 8)),
            )
        )
    return out


@settings(max_examples=300, deadline=None)
@given(operations())
def test_verdicts_of_arbitrary_cas_histories_agree_with_brute_force(history: list[Operation]) -> None:
    columns = History.from_operations(history)
    assert check(columns, CASRegister()).valid is linearizable_by_force(columns, CASRegister())


@settings(max_examples=300, deadline=None)
@given(operations())
def test_verdicts_of_arbitrary_register_histories_agree_with_brute_force(history: list[Operation]) -> None:
    columns = History.from_operations([operation for operation in history if operation.f != "cas"])
    assert check(columns, Register()).valid is linearizable_by_force(columns, Register())


@settings(max_examples=100, deadline=None)
@given(operations(), st.integers(0, 25))
def test_a_prefix_of_a_linearizable_history_is_linearizable(history: list[Operation], end: int) -> None:
    whole = History.from_operations(history)
    if not check(whole, CASRegister()):
        return
    prefix = []
    for operation in history:
        if operation.invoked >= end:
            continue
        cut = operation.returned is not None and operation.returned >= end
        prefix.append(
            Operation(
                process=operation.process,
                f=operation.f,
                value=operation.value,
                result=operation.result,
                status="info" if cut else operation.status,
                invoked=operation.invoked,
                returned=None if cut else operation.returned,
            )
        )
    assert check(History.from_operations(prefix), CASRegister()).verdict is Verdict.VALID
