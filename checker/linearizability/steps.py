"""The ``step`` of a model that somebody else wrote, watched for the mistakes that make every history look valid."""

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

#: What a model's ``step`` raises at a value of another shape than its own.
VALUE_ERRORS = (TypeError, ValueError, LookupError, AttributeError)

_MEND = "it must return the state after the operation, or ILLEGAL where the operation is not possible"

Step = Callable[[Any, str, Any, Any], Any]


def is_ours(model: Model) -> bool:
    """Whether the model is one of this package, not a class of the user's."""
    return type(model).__module__.startswith("checker.")


def unusable(history: History, model: Model, error: Exception) -> HistoryError:
    """What to raise in the place of one of :data:`VALUE_ERRORS`: it names the first operation that the model cannot be
    used with, where that shows in its first state already."""
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
                what += f", which answered {short(result)}"
            break
    return HistoryError(f"a {model.name} cannot be used with {what} ({type(error).__name__}: {short(str(error))})")


def unknown_functions(history: History, model: Model) -> ModelError:
    """What to raise for operations whose name is none of the model's: it names the first of them, by which the line
    of a file is found."""
    unknown = sorted(set(history.f) - model.functions)
    first = next(row for row, f in enumerate(history.f) if f in unknown)
    unnamed = ", for which events without an 'f' are taken" if UNNAMED_FUNCTION in unknown else ""
    return ModelError(
        f"model {model.name} knows {', '.join(sorted(model.functions))}; the history has "
        f"{', '.join(map(short, unknown))}{unnamed}: first {named_row(history, first)}"
    )


def checked_step(model: Model) -> Step:
    """``model.step``; one of the user's raises :class:`ModelError` at the first call that

    * changes the state that it was given, or, being of an operation in ``pure``, returns another one;
    * returns ``None`` or a boolean that is no state by all appearances (see :func:`_is_usual`) and that the model does
      not list in ``unusual_states``.

    Raises :class:`ModelError` at once for a ``step`` that returns nothing at all.
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
    """Whether ``None`` or a boolean may well be the state that an operation has led to.

    It may if it is the state as it was, the value that was asked or a part of it; a boolean, if the first state is one;
    ``None``, if it is the first state and the operation has no value.
    """
    if after is state or any(after is known for known in model.unusual_states):
        return True
    if isinstance(after, bool) and isinstance(start, bool):
        return True
    if value is None:
        return after is None and start is None
    return any(after is part for part in (value if isinstance(value, (list, tuple)) else (value,)))


def _returns_nothing(step: Step) -> bool:
    """Whether every way out of a function written in Python returns a constant ``None``."""
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
    """Something that equals itself for as long as the state is the same."""
    held = getattr(state, "__dict__", None)
    if held is None:
        return exact(state)
    return exact(state) if isinstance(state, (list, tuple, dict, set, frozenset)) else None, exact(held)
