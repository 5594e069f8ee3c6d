"""Mistakes in a user's model that would make every history valid are reported at the first call."""

from __future__ import annotations

from typing import Any

import pytest

from checker import ILLEGAL, UNKNOWN, Model, ModelError, Verdict, check, check_sequential


class Base(Model):
    def start(self) -> Any:
        return 0


class ReturnsFalse(Base):
    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        return state + 1 if f == "inc" else result == state or False


class ForgetsTheReturn(Base):
    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "read":
            return state if result == state else ILLEGAL
        state += 1  # and does not return it


class ReturnsNothing(Model):
    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        self.check_name(f)

    def check_name(self, f: str) -> None:
        assert f in ("inc", "read")


class ChangesTheState(Base):
    def start(self) -> Any:
        return []

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        state.append(f)
        return state


class Held:
    def __init__(self) -> None:
        self.count = 0


class ChangesAnObject(Base):
    def start(self) -> Any:
        return Held()

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        state.count += 1
        return state


class PureThatChanges(Base):
    pure = frozenset({"read"})

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        return state + 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ReturnsFalse(), r"step of ReturnsFalse returned False at read\(None\) in state 1: it must return the state"),
        (ForgetsTheReturn(), r"step of ForgetsTheReturn returned None at inc\(None\) in state 0"),
        (ReturnsNothing(), "step of ReturnsNothing returns nothing: it must return the state"),
        (ChangesTheState(), r"step of ChangesTheState changed the state that it was given, at inc\(None\)"),
        (ChangesAnObject(), "step of ChangesAnObject changed the state that it was given"),
        (PureThatChanges(), r"changed the state at read\(None\), although 'read' is listed in pure"),
    ],
)
@pytest.mark.parametrize("checked", [check, check_sequential])
def test_a_mistake_in_a_model_is_reported_at_the_first_call(done, checked: Any, model: Model, message: str) -> None:
    history = done((0, "inc", None, None), (0, "read", None, 5))
    with pytest.raises(ModelError, match=message):
        checked(history, model)


def test_null_and_boolean_states_are_accepted_where_they_are_expected(done) -> None:
    class Flag(Model):
        def start(self) -> Any:
            return False

        def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
            return (not state) if result is UNKNOWN or result == (not state) else ILLEGAL

    class Cell(Model):
        def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
            if f == "read":
                return state if result == state else ILLEGAL
            return None if f == "clear" else value

    class Emptied(Base):
        unusual_states = (None,)

        def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
            return None if f == "empty" else state

    assert check(done((0, "toggle", None, True), (1, "toggle", None, False)), Flag()).verdict is Verdict.VALID
    for written in (True, None, 3):
        history = done((0, "write", written, written), (0, "read", None, written), (0, "clear", None, None))
        assert check(history, Cell()).verdict is check_sequential(history, Cell()).verdict is Verdict.VALID
    assert check(done((0, "empty", None, None), (0, "look", None, None)), Emptied()).verdict is Verdict.VALID
