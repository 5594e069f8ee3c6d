"""Queues, stacks and sets.  Every queue accepts all common names of its operations: ``enqueue``/``dequeue`` etc."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

from checker.models.base import ILLEGAL, UNKNOWN, Model, shortened
from checker.values import exact, truth

__all__ = [
    "PUT_NOTHING",
    "FIFOQueue",
    "GrowOnlySet",
    "PriorityQueue",
    "Set",
    "Stack",
    "UnorderedQueue",
    "elements_shown",
]

PUT_NOTHING = "null was put in, which cannot be told from finding nothing when it is taken"


def elements_shown(result: Any) -> Collection[Any]:
    """The elements that a read of a set shows.  Raises ValueError if its result is not a list or set: a string would
    yield its characters, a map its keys."""
    if not isinstance(result, (list, tuple, set, frozenset)):
        raise ValueError(f"a read of a set must show a list, not {shortened(result)}")
    return result


@dataclass(frozen=True, kw_only=True)
class _Container(Model):
    """Base of all containers; taking from an empty one returns ``None``.

    So ``None`` cannot be put in: a history that does so would be ambiguous, and is refused.
    """

    puts: ClassVar[frozenset[str]] = frozenset({"enqueue", "add", "send", "push", "insert"})
    takes: ClassVar[frozenset[str]] = frozenset({"dequeue", "remove", "receive", "pop", "poll", "extract"})
    functions: ClassVar[frozenset[str]] = puts | takes

    def start(self) -> Hashable:
        return ()

    def is_pure(self, f: str, value: Any, result: Any) -> bool:
        return f in self.takes and result is None

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f in self.puts:
            if value is None:
                raise ValueError(PUT_NOTHING)
            return self._put(state, value)
        if not state:
            return state if result is None or result is UNKNOWN else ILLEGAL
        return self._take(state, result)

    def _put(self, state: Any, value: Any) -> Any:
        return (*state, value)

    def _take(self, state: Any, result: Any) -> Any:
        raise TypeError(f"{type(self).__name__} does not say what comes out")

    def describe(self, f: str, value: Any, result: Any) -> str:
        if f in self.takes:
            return f"{f}()" if result is UNKNOWN else f"{f}() -> {'empty' if result is None else shortened(result)}"
        return f"{f}({shortened(value)})"


@dataclass(frozen=True, kw_only=True)
class FIFOQueue(_Container):
    """First in, first out: ``enqueue(v)``, ``dequeue() -> v``, or ``None`` when empty."""

    name: ClassVar[str] = "fifo-queue"

    def _take(self, state: Any, result: Any) -> Any:
        return state[1:] if result is UNKNOWN or result == state[0] else ILLEGAL


@dataclass(frozen=True, kw_only=True)
class Stack(_Container):
    """Last in, first out: ``push(v)``, ``pop() -> v``, or ``None`` when empty."""

    name: ClassVar[str] = "stack"

    def _take(self, state: Any, result: Any) -> Any:
        return state[:-1] if result is UNKNOWN or result == state[-1] else ILLEGAL


@dataclass(frozen=True, kw_only=True)
class PriorityQueue(_Container):
    """``insert(v)``, ``extract() -> the smallest v``, or ``None`` when empty; ``largest_first`` reverses the order."""

    largest_first: bool = False

    name: ClassVar[str] = "priority-queue"

    def _put(self, state: Any, value: Any) -> Any:
        at = bisect.bisect(state, value)
        return (*state[:at], value, *state[at:])

    def _take(self, state: Any, result: Any) -> Any:
        if self.largest_first:
            return state[:-1] if result is UNKNOWN or result == state[-1] else ILLEGAL
        return state[1:] if result is UNKNOWN or result == state[0] else ILLEGAL


@dataclass(frozen=True, kw_only=True)
class UnorderedQueue(_Container):
    """A bag: ``dequeue`` returns any value that is in it, or ``None`` when empty.

    A crashed ``dequeue`` may have taken any value that was ever put in.
    """

    name: ClassVar[str] = "unordered-queue"

    def outcomes(self, f: str, value: Any, operations: Sequence[tuple[str, Any, Any]]) -> Sequence[Any]:
        if f in self.puts:
            return (UNKNOWN,)
        return list({exact(put): put for name, put, _ in operations if name in self.puts}.values())

    def _put(self, state: Any, value: Any) -> Any:
        return tuple(sorted((*state, value), key=repr))

    def _take(self, state: Any, result: Any) -> Any:
        if result not in state:
            return ILLEGAL
        at = state.index(result)
        return state[:at] + state[at + 1 :]


MAX_ELEMENTS_OF_STATES = 3
"""Maximum elements of a set whose subsets are all tried as starting states: each element doubles their number."""


@dataclass(frozen=True, kw_only=True)
class Set(Model):
    """``add(v)``, ``remove(v)``, ``contains(v) -> bool``, and ``read() -> all``.

    ``add`` and ``remove`` return whether they changed anything, or a value that is not a bool if the system does not
    tell.
    """

    name: ClassVar[str] = "set"
    functions: ClassVar[frozenset[str]] = frozenset({"add", "remove", "contains", "read"})
    pure: ClassVar[frozenset[str]] = frozenset({"contains", "read"})
    answers: ClassVar[frozenset[str]] = frozenset({"add", "remove", "contains"})

    def start(self) -> Hashable:
        return frozenset()

    def is_pure(self, f: str, value: Any, result: Any) -> bool:
        return f in self.pure or (f != "read" and truth(result) is False)

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "read":
            return state if result is UNKNOWN or frozenset(elements_shown(result)) == state else ILLEGAL
        present = value in state
        if f == "contains":
            return state if result is UNKNOWN or truth(result) is present else ILLEGAL
        changes = present if f == "remove" else not present
        if truth(result) not in (None, changes):
            return ILLEGAL
        if not changes:
            return state
        return state - {value} if f == "remove" else state | {value}

    def possible_states(self, operations: Sequence[tuple[str, Any, Any]]) -> Iterable[Hashable] | None:
        elements: set[Any] = set()
        for f, value, result in operations:
            elements.update([value] if f != "read" else () if result is UNKNOWN else elements_shown(result))
            if len(elements) > MAX_ELEMENTS_OF_STATES:
                return None
        sizes = range(len(elements) + 1)
        return [frozenset(chosen) for size in sizes for chosen in combinations(elements, size)]

    def describe(self, f: str, value: Any, result: Any) -> str:
        if f == "read":
            return super().describe(f, value, result)
        says = result is not UNKNOWN if f == "contains" else truth(result) is not None
        return f"{f}({shortened(value)})" + (f" -> {shortened(result)}" if says else "")


@dataclass(frozen=True, kw_only=True)
class GrowOnlySet(Model):
    """``add(v)``, ``read() -> all elements``; nothing is ever removed."""

    name: ClassVar[str] = "grow-only-set"
    functions: ClassVar[frozenset[str]] = frozenset({"add", "read"})
    pure: ClassVar[frozenset[str]] = frozenset({"read"})

    def start(self) -> Hashable:
        return frozenset()

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if f == "add":
            return state | {value}
        return state if result is UNKNOWN or frozenset(elements_shown(result)) == state else ILLEGAL
