"""Linearizability by brute force: every order of the operations.  Exponential; for small histories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from checker.history import INFO, OK, History
from checker.models.base import ILLEGAL, UNKNOWN, Model
from checker.models.collections import UnorderedQueue
from checker.models.logs import Topic

__all__ = ["linearizable_by_force"]


def linearizable_by_force(history: History, model: Model) -> bool:
    """Whether some order of the operations, within their real-time bounds, is legal for the model.

    Operations of unknown outcome may take effect at any time after their invocation, or never.  Shares nothing with
    the engines but the model's ``step``.
    """
    kept: list[tuple[Any, ...]] = []
    for row in range(len(history)):
        status, f = history.status[row], history.f[row]
        if status == OK:
            kept.append((history.invoked[row], history.returned[row], f, history.value[row], history.result[row]))
        elif status == INFO:
            kept.append((history.invoked[row], None, f, history.value[row], UNKNOWN))
    return _extend(model, model.start(), kept)


def _extend(model: Model, state: Any, left: list[tuple[Any, ...]]) -> bool:
    must = [returned for _, returned, *_ in left if returned is not None]
    if not must:
        return True
    first_return = min(must)
    for position, (invoked, _, f, value, result) in enumerate(left):
        if invoked > first_return:
            continue
        rest = left[:position] + left[position + 1 :]
        for after in _outcomes(model, state, f, value, result):
            if _extend(model, after, rest):
                return True
    return False


def _outcomes(model: Model, state: Any, f: str, value: Any, result: Any) -> Iterable[Any]:
    """Every state that may follow; more than one only for crashed operations of ambiguous models."""
    if result is UNKNOWN and isinstance(model, UnorderedQueue) and f in model.takes:
        return [model.step(state, f, value, item) for item in set(state)]
    if result is UNKNOWN and isinstance(model, Topic) and f == "send":
        return [model.step(state, f, value, [queue, len(log)]) for queue, log in enumerate(state)]
    after = model.step(state, f, value, result)
    return [] if after is ILLEGAL else [after]
