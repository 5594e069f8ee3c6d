"""Checks the ``step`` of a user's model for mistakes that make every history look valid."""

from __future__ import annotations

import dis
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from checker.history import FAIL, OK, UNNAMED_FUNCTION, History, HistoryError
from checker.models.base import ILLEGAL, UNKNOWN, Model, ModelError
from checker.values import exact
from checker.words import named_row, short

__all__ = ["VALUE_ERRORS", "Step", "checked_step", "is_ours", "unknown_functions", "unusable"]

#: What a model's ``step`` raises for values of an unexpected shape.
VALUE_ERRORS = (TypeError, ValueError, LookupError, AttributeError)

_MEND = "it must return the state after the operation, or ILLEGAL where the operation is not possible"

Step = Callable[[Any, str, Any, Any], Any]


def is_ours(model: Model) -> bool:
    """Whether the model is one of this package, not a class of the user's."""
    return type(model).__module__.startswith("checker.")


def unusable(history: History, model: Model, error: Exception) -> HistoryError:
    """The error to raise instead of one of :data:`VALUE_ERRORS`: it names the first operation that the model cannot be
    used with, if that already fails in the initial state."""
    what, start = "values like these", model.start()
    for row, (f, value, status, result) in enumerate(
        zip(history.f, history.value, history.status, history.result, strict=True)
    ):
        if status == FAIL:
            continue
        try:
            model.step(start, f, value, result if status == OK else UNKNOWN)
        except VALUE_ERRORS as first:
            what, error = named_row(history, row), first
            if status == OK:
                what += f", which returned {short(result)}"
            break
    return HistoryError(f"a {model.name} cannot be used with {what} ({type(error).__name__}: {short(str(error))})")


def unknown_functions(history: History, model: Model) -> ModelError:
    """The error to raise for operations that the model lacks: it names the first of them, so that its line in a file
    can be found."""
    unknown = sorted(set(history.f) - model.functions)
    first = next(row for row, f in enumerate(history.f) if f in unknown)
    unnamed = ", which stands for events without an 'f'" if UNNAMED_FUNCTION in unknown else ""
    return ModelError(
        f"model {model.name} accepts {', '.join(sorted(model.functions))}; the history has "
        f"{', '.join(map(short, unknown))}{unnamed}: first {named_row(history, first)}"
    )


def checked_step(model: Model) -> Step:
    """``model.step``; for a user's model, wrapped to raise :class:`ModelError` at the first call that

    * changes the state that it was given, or returns another one for an operation in ``pure``;
    * returns ``None`` or a boolean that does not look like a state (see :func:`_is_usual`) and that the model does not
      list in ``unusual_states``.

    Raises :class:`ModelError` at once for a ``step`` that always returns nothing.
    """
    step = model.step
    if is_ours(model):
        return step
    name = type(model).__name__
    if _returns_nothing(step):
        raise ModelError(f"step of {name} returns nothing: {_MEND}")
    start, pure = model.start(), model.pure

    def watched(state: Any, f: str, value: Any, result: Any) -> Any:
        before = _image(state)
        after = step(state, f, value, result)
        if _image(state) != before:
            raise ModelError(
                f"step of {name} changed the state that it was given, at {f}({value!r}): it must return a new state"
            )
        if (after is None or isinstance(after, bool)) and not _is_usual(after, state, start, value, model):
            raise ModelError(
                f"step of {name} returned {after} at {f}({value!r}) in state {state!r}: {_MEND}; "
                "list it in unusual_states if it is a state"
            )
        if f in pure and after is not ILLEGAL and _image(after) != before:
            raise ModelError(f"step of {name} changed the state at {f}({value!r}), although {f!r} is listed in pure")
        return after

    return watched


def _is_usual(after: Any, state: Any, start: Any, value: Any, model: Model) -> bool:
    """Whether ``None`` or a boolean is plausible as the state after an operation.

    It is if it is the previous state, the operation's value or a part of it; for a boolean, also if the initial state
    is one; for ``None``, if it is the initial state and the operation has no value.
    """
    if after is state or any(after is known for known in model.unusual_states):
        return True
    if isinstance(after, bool) and isinstance(start, bool):
        return True
    if value is None:
        return after is None and start is None
    return any(after is part for part in (value if isinstance(value, (list, tuple)) else (value,)))


def _returns_nothing(step: Step) -> bool:
    """Whether every return of a function written in Python returns the constant ``None``."""
    code = getattr(step, "__code__", None)
    if code is None:
        return False
    returns = [
        now.argval is None if now.opname == "RETURN_CONST" else before.opname == "LOAD_CONST" and before.argval is None
        for before, now in pairwise(dis.get_instructions(code))
        if now.opname in ("RETURN_VALUE", "RETURN_CONST")
    ]
    return bool(returns) and all(returns)


def _image(state: Any) -> Any:
    """A snapshot that stays equal as long as the state does not change."""
    held = getattr(state, "__dict__", None)
    if held is None:
        return exact(state)
    return exact(state) if isinstance(state, (list, tuple, dict, set, frozenset)) else None, exact(held)
