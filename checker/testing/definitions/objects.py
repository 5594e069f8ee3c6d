"""What each object does when one client at a time uses it, in the simplest form.

An object is a class with three methods.  ``start`` gives the first state.  ``outcomes`` gives every pair of an answer
and a next state that one operation may have.  ``agrees`` says whether a recorded answer matches such an answer: a
system may return less than the object does, and an echo of the request is no answer.  States are canonical values, so
that they can be compared and hashed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from checker.testing.definitions.values import canonical, same

__all__ = ["OBJECTS", "Object", "make_object"]

State = Any
Outcome = tuple[Any, State]

PUTS = frozenset({"enqueue", "add", "send", "push", "insert"})


class Object(ABC):
    """A sequential specification.  Answers are compared as JSON values unless a subclass says otherwise."""

    @abstractmethod
    def start(self) -> State:
        """The state before the first operation."""

    @abstractmethod
    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        """Every (answer, next state) that ``f(value)`` may have in ``state``; none if it is impossible there."""

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        """Whether the recorded ``result`` of ``f(value)`` is consistent with ``answer``."""
        return same(answer, result)


class Register(Object):
    """Holds the value written last."""

    def __init__(self, initial: Any = None, none_is_any: bool | None = None) -> None:
        self.initial = initial
        self.none_is_any = none_is_any if none_is_any is not None else initial is not None

    def start(self) -> State:
        return canonical(self.initial)

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        if f == "read":
            return [(state, state)]
        return [(None, canonical(value))]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        if f != "read" or (result is None and self.none_is_any):
            return True
        return bool(answer == canonical(result))


class CASRegister(Register):
    """A register with compare-and-set; if the comparison fails, the answer is false."""

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        if f != "cas":
            return super().outcomes(state, f, value)
        expected, new = value
        if state == canonical(expected):
            return [(True, canonical(new))]
        return [(False, state)]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        if f != "cas":
            return super().agrees(f, value, answer, result)
        return bool(answer == (result is not False))


class MultiRegister(Object):
    """Several registers; a transaction reads and writes them in the order of its steps."""

    def __init__(self, initial: dict[str, Any] | None = None) -> None:
        self.initial = initial or {}

    def start(self) -> State:
        return frozenset((canonical(name), canonical(value)) for name, value in self.initial.items())

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        registers = dict(state)
        answer = []
        for kind, name, written in value:
            register = canonical(name)
            if kind in ("write", "w"):
                registers[register] = canonical(written)
            answer.append(registers.get(register, canonical(None)))
        return [(answer, frozenset(registers.items()))]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        if not isinstance(result, list | tuple) or len(result) != len(value):
            return False
        return all(
            same(asked[:2], step[:2]) and (asked[0] in ("write", "w") or canonical(step[2]) == answered)
            for asked, step, answered in zip(value, result, answer, strict=True)
        )


class VersionedRegister(Object):
    """A register whose writes are numbered, each by one more than the write before it."""

    def __init__(self, initial: Any = None, initial_version: int = 0) -> None:
        self.initial = initial
        self.initial_version = initial_version

    def start(self) -> State:
        return (self.initial_version, canonical(self.initial))

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        version, _ = state
        if f == "read":
            return [(state, state)]
        return [(version + 1, (version + 1, canonical(value)))]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        if f == "write":
            return result is None or same(answer, result)
        version, held = answer
        return isinstance(result, list | tuple) and canonical(result) == ("array", canonical(version), held)


class Mutex(Object):
    """A lock that does not track its owner."""

    def __init__(self, held: bool = False) -> None:
        self.held = held

    def start(self) -> State:
        return self.held

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        if f == "acquire":
            return [] if state else [(None, True)]
        return [(None, False)] if state else []

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        return True


class Set(Object):
    """A mathematical set; additions and removals return whether they changed it."""

    def start(self) -> State:
        return frozenset()

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        element = canonical(value)
        if f == "add":
            return [(element not in state, state | {element})]
        if f == "remove":
            return [(element in state, state - {element})]
        if f == "contains":
            return [(element in state, state)]
        return [(state, state)]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        if f in ("add", "remove"):
            return not isinstance(result, bool) or result == answer
        if f == "contains":
            return same(answer, result)
        return isinstance(result, list | tuple) and frozenset(map(canonical, result)) == answer


class GrowOnlySet(Set):
    """A set from which nothing is removed; an addition's answer is ignored."""

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        return f == "add" or super().agrees(f, value, answer, result)


class Counter(Object):
    """A number that is added to."""

    def __init__(self, initial: int = 0) -> None:
        self.initial = initial

    def start(self) -> State:
        return self.initial

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        if f == "read":
            return [(state, state)]
        amount = 1 if value is None else value
        return [(None, state - amount if f == "decrement" else state + amount)]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        return f != "read" or same(answer, result)


class FetchAndAdd(Counter):
    """A counter whose additions return the number before them."""

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        return [(state, state if f == "read" else state + value)]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        return same(answer, result)


class _Container(Object):
    """Values go in and come out; a take that finds none returns null.  A state is the values in order of their puts."""

    def start(self) -> State:
        return ()

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        if f in PUTS:
            return [(None, (*state, canonical(value)))]
        if not state:
            return [(canonical(None), state)]
        return [(state[place], (*state[:place], *state[place + 1 :])) for place in self.next_places(state)]

    @abstractmethod
    def next_places(self, state: State) -> list[int]:
        """Which of the values inside may come out next."""

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        return f in PUTS or answer == canonical(result)


class FIFOQueue(_Container):
    """First in, first out."""

    def next_places(self, state: State) -> list[int]:
        return [0]


class Stack(_Container):
    """Last in, first out."""

    def next_places(self, state: State) -> list[int]:
        return [len(state) - 1]


class PriorityQueue(_Container):
    """The smallest comes out first, or the largest."""

    def __init__(self, largest_first: bool = False) -> None:
        self.largest_first = largest_first

    def next_places(self, state: State) -> list[int]:
        best = max(state) if self.largest_first else min(state)
        return [state.index(best)]


class UnorderedQueue(_Container):
    """Anything inside may come out."""

    def next_places(self, state: State) -> list[int]:
        return list(range(len(state)))


class Log(Object):
    """Messages with offsets from 0.  A read returns messages from an offset on, and how many there are in all."""

    def start(self) -> State:
        return ()

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        if f == "append":
            return [(len(state), (*state, canonical(value)))]
        return [(state, state)]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        if f == "append":
            if result is None:
                return True
            if not isinstance(result, list | tuple) or len(result) != 2:
                return False
            offset, _ = result
            return offset is None or same(offset, answer)
        if f == "tail":
            return same(len(answer), result)
        return _reads(value, answer, result)


def _reads(asked: Any, messages: tuple[Any, ...], result: Any) -> bool:
    """Whether a recorded read of a log is what the log holds from the returned offset on, and its tail is right.

    The request is not judged: a read may return fewer messages than asked for, or more, or those of another offset.
    """
    if not isinstance(result, dict) or not isinstance(result.get("messages"), list | tuple):
        return False
    begin = result.get("offset", (asked or {}).get("offset")) or 0
    answered = tuple(map(canonical, result["messages"]))
    place = int(begin)
    is_tail_right = same(result.get("tail", len(messages)), len(messages))
    return is_tail_right and messages[place : place + len(answered)] == answered


class Topic(Object):
    """Several logs; a message goes to any of them."""

    def __init__(self, queues: int = 4) -> None:
        self.queues = queues

    def start(self) -> State:
        return ((),) * self.queues

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        if f == "send":
            message = canonical(value)
            return [
                ((queue, len(log)), (*state[:queue], (*log, message), *state[queue + 1 :]))
                for queue, log in enumerate(state)
            ]
        return [(state, state)]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        if f == "send":
            return result is None or (
                isinstance(result, list | tuple)
                and len(result) == 2
                and all(answered is None or same(answered, true) for answered, true in zip(result, answer, strict=True))
            )
        if f == "tail":
            queue, tail = result
            return queue in range(self.queues) and same(tail, len(answer[int(queue)]))
        if not isinstance(result, dict):
            return False
        queue = result.get("queue", value["queue"])
        return queue in range(self.queues) and _reads(value, answer[int(queue)], result)


class KeyValue(Object):
    """A string that can be replaced and extended."""

    def __init__(self, initial: str = "") -> None:
        self.initial = initial

    def start(self) -> State:
        return self.initial

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        if f == "get":
            return [(state, state)]
        return [(None, value if f == "put" else state + value)]

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        return f != "get" or same(answer, result)


OBJECTS: dict[str, Callable[..., Object]] = {
    "register": Register,
    "cas-register": CASRegister,
    "multi-register": MultiRegister,
    "versioned-register": VersionedRegister,
    "mutex": Mutex,
    "set": Set,
    "grow-only-set": GrowOnlySet,
    "counter": Counter,
    "fetch-and-add": FetchAndAdd,
    "fifo-queue": FIFOQueue,
    "stack": Stack,
    "priority-queue": PriorityQueue,
    "unordered-queue": UnorderedQueue,
    "log": Log,
    "key-value": KeyValue,
    "topic": Topic,
}


def make_object(name: str, options: dict[str, Any] | None = None) -> Object:
    """The specification called ``name``, with the options of the model of that name.  Raises KeyError if unknown."""
    return OBJECTS[name](**(options or {}))
