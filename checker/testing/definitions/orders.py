"""Consistency by trying every order of the operations: linearizability and sequential consistency.

Both require one order of the operations in which every recorded answer is what the object would have answered.  They
differ in which operations must keep their order: all that did not overlap (Herlihy and Wing 1990), or those of one
process (Lamport 1979).  An operation that failed did not happen.  One of unknown outcome happened at any time after
its invocation, or never; so nothing has to come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checker.testing.definitions.objects import Object
from checker.testing.definitions.values import canonical

__all__ = [
    "NEVER",
    "Call",
    "acknowledged",
    "first_invalid_prefix",
    "has_order",
    "is_linearizable",
    "is_reached",
    "is_sequential",
    "pair",
]

NEVER = float("inf")


@dataclass(frozen=True)
class Call:
    """One operation; ``invoked`` and ``returned`` are positions in the history, ``returned`` is NEVER if unknown."""

    process: Any
    f: str
    value: Any
    result: Any
    status: str
    invoked: float
    returned: float
    key: Any = None


def pair(events: Iterable[Mapping[str, Any]]) -> list[Call]:
    """The operations of a history, in order of invocation; those still open at its end have an unknown outcome."""
    calls: list[Call] = []
    open_calls: dict[Any, int] = {}
    for position, event in enumerate(events):
        process = canonical(event["process"])
        if event["type"] == "invoke":
            open_calls[process] = len(calls)
            calls.append(Call(process, event["f"], event.get("value"), None, "info", position, NEVER, event.get("key")))
            continue
        number = open_calls.pop(process)
        returned = NEVER if event["type"] == "info" else position
        calls[number] = replace(calls[number], result=event.get("value"), status=event["type"], returned=returned)
    return calls


def is_linearizable(calls: Sequence[Call], specification: Object) -> bool:
    """Whether some order that respects real time explains every answer; every key is an object of its own."""
    happened = [call for call in calls if call.status != "fail"]
    before = [[other.returned < call.invoked for other in happened] for call in happened]
    return has_order(happened, before, specification)


def is_sequential(calls: Sequence[Call], specification: Object) -> bool:
    """Whether some order that keeps the order of each process explains every answer, over all keys at once."""
    happened = [call for call in calls if call.status != "fail"]
    before = [
        [other.process == call.process and other.returned < call.invoked for other in happened] for call in happened
    ]
    return has_order(happened, before, specification)


def has_order(calls: list[Call], before: list[list[bool]], specification: Object) -> bool:
    """Whether some order explains every answer; ``before[i][j]`` says that call j has to come before call i.

    Depth first over the orders; a position already reached in another order is not tried again.
    """
    predecessors = [{other for other, is_before in enumerate(row) if is_before} for row in before]
    required = acknowledged(calls)
    keys = [canonical(call.key) for call in calls]

    def following(done: frozenset[int], states: Any) -> Iterator[tuple[frozenset[int], Any]]:
        state_of = dict(states)
        for number, call in enumerate(calls):
            if number in done or not predecessors[number] <= done:
                continue
            for answer, state in specification.outcomes(state_of[keys[number]], call.f, call.value):
                if call.status == "info" or specification.agrees(call.f, call.value, answer, call.result):
                    yield done | {number}, frozenset({**state_of, keys[number]: state}.items())

    first = (frozenset[int](), frozenset((key, specification.start()) for key in keys))
    return is_reached(first, lambda done, _: required <= done, following)


def acknowledged(calls: Sequence[Call]) -> frozenset[int]:
    """Which of the calls have certainly happened."""
    return frozenset(number for number, call in enumerate(calls) if call.status == "ok")


def is_reached(
    start: tuple[Any, ...], is_end: Callable[..., bool], following: Callable[..., Iterable[tuple[Any, ...]]]
) -> bool:
    """Whether a walk from ``start``, from each position to those that follow it, reaches an end."""
    tried, pending = set(), [start]
    while pending:
        position = pending.pop()
        if is_end(*position):
            return True
        if position not in tried:
            tried.add(position)
            pending += following(*position)
    return False


def first_invalid_prefix(events: Sequence[Mapping[str, Any]], specification: Object) -> int | None:
    """The number of events in the shortest prefix that is not linearizable; None if the whole history is."""
    for length, event in enumerate(events, 1):
        if event["type"] in ("ok", "fail") and not is_linearizable(pair(events[:length]), specification):
            return length
    return None
