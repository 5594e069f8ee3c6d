"""Operations and times as text, for explanations."""

from __future__ import annotations

from typing import Any

from checker.history import FAIL, INFO, OK, History, Operation
from checker.models.base import UNKNOWN, Model
from checker.values import NUMBERS

__all__ = ["at", "named", "named_row", "of_key", "seconds", "short", "span"]

#: Longest value shown in a sentence: an explanation is read by people, and reports are bounded.
MAX_VALUE_CHARS = 80


def short(value: Any, limit: int = MAX_VALUE_CHARS) -> str:
    """``repr`` of ``value``, cut in the middle beyond ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 3 :]}"


def of_key(key: Any) -> str:
    """`` of key K``, with a leading blank; empty if the history has no keys."""
    return "" if key is None else f" of key {short(key)}"


def seconds(time_ns: int | None) -> str | None:
    """A time since the start of the test, or ``None`` if the history has no times."""
    return f"{time_ns / 1e9:.6f} s" if isinstance(time_ns, NUMBERS) else None


def at(operation: Operation, *, invoked: bool) -> str:
    """When the operation was invoked, or returned: a time, or the position among the events."""
    time = seconds(operation.invoked_ns if invoked else operation.returned_ns)
    if time is not None:
        return f"at {time}"
    position = operation.invoked if invoked else operation.returned
    return "never" if position is None else f"at event {position}"


def span(operation: Operation) -> str:
    """From when to when the operation ran."""
    start = seconds(operation.invoked_ns) or f"event {operation.invoked}"
    if operation.status == INFO or operation.returned is None:
        return f"from {start}, outcome unknown"
    return f"{start} to {seconds(operation.returned_ns) or f'event {operation.returned}'}"


def named(operation: Operation, model: Model | None = None) -> str:
    """The operation with its process and times: ``process 3's write(5) (0.1 s to 0.2 s)``."""
    model = model or _PLAIN
    what = model.describe(operation.f, operation.value, operation.result if operation.status == OK else UNKNOWN)
    if operation.status == FAIL:
        what = f"failed {what}"
    where = f" on {operation.node}" if operation.node else ""
    return f"process {operation.process}'s {what}{where} ({span(operation)})"


def named_row(history: History, row: int, model: Model | None = None) -> str:
    """As `named`, for a row of a history."""
    return named(history.operation(row), model)


class _Plain(Model):
    def describe(self, f: str, value: Any, result: Any) -> str:
        if f in ("read", "get", "dequeue", "tail") and result is not UNKNOWN:
            return f"{f}() -> {short(result)}"
        return f"{f}({'' if value is None else short(value)})"


_PLAIN = _Plain()
