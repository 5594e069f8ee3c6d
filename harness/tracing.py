"""Each operation as a span of distributed tracing: its ids, and the `traceparent` that its client passes on.

The ids are derived from the run and from the index of the operation's invocation in the history, so that a client
knows them before the operation has a result, and the export of the history finds the same ones. Format of
`traceparent`: W3C Trace Context, version 00.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from typing import NamedTuple

__all__ = ["Operation", "SpanIds", "current_traceparent", "ids_of", "operation_under_way"]

SAMPLED = "01"
"""Flag that asks the system under test to record its spans too."""


class Operation(NamedTuple):
    """An operation of a run: the run's id and the index of the invocation."""

    run_id: str
    invocation: int


class SpanIds(NamedTuple):
    """Ids in lower-case hexadecimal: 32 digits for the trace, 16 for the span."""

    trace: str
    span: str


operation_under_way: ContextVar[Operation | None] = ContextVar("operation_under_way", default=None)
"""The operation that the current task performs, set by its worker; tasks and threads that it starts inherit it."""


def ids_of(run_id: str, what: int | str) -> SpanIds:
    """The ids of an operation by the index of its invocation, or of another span of the run by its name."""
    digits = hashlib.sha256(f"{run_id}/{what}".encode()).hexdigest()
    return SpanIds(digits[:32], digits[32:48])


def current_traceparent() -> str | None:
    """The W3C traceparent of the operation under way; None outside of one, or if the run has no id."""
    operation = operation_under_way.get()
    if operation is None:
        return None
    ids = ids_of(*operation)
    return f"00-{ids.trace}-{ids.span}-{SAMPLED}"
