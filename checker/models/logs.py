"""Append-only logs with offsets, and topics made of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from checker.models.base import ILLEGAL, UNKNOWN, Model, shortened
from checker.values import exact

__all__ = ["Log", "Topic"]


def _log_step(state: tuple[Any, ...], f: str, value: Any, result: Any) -> Any:
    if f in ("append", "send"):
        if result is not UNKNOWN and result is not None and result[0] not in (None, len(state)):
            return ILLEGAL
        return (*state, exact(value))
    if result is UNKNOWN:
        return state
    if f == "tail":
        return state if result == len(state) else ILLEGAL
    offset, messages = result["offset"], result["messages"]
    tail = result.get("tail")
    if tail is not None and tail != len(state):
        return ILLEGAL
    if offset < 0 and messages:
        return ILLEGAL
    return state if not messages or state[offset : offset + len(messages)] == exact(messages) else ILLEGAL


@dataclass(frozen=True, kw_only=True)
class Log(Model):
    """An append-only queue: ``append(v) -> [offset, v]``, ``read({offset, max}) -> {offset, messages, tail}``,
    ``tail() -> number of messages``.  The messages of a read and its tail are one atomic observation.  An append that
    returns ``None`` or ``[None, v]`` got no offset.  The arguments of a read are not judged: it may return fewer
    messages than requested, or more.
    """

    name: ClassVar[str] = "log"
    functions: ClassVar[frozenset[str]] = frozenset({"append", "read", "tail"})
    pure: ClassVar[frozenset[str]] = frozenset({"read", "tail"})

    def start(self) -> Hashable:
        return ()

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        return _log_step(state, f, value, result)

    def describe(self, f: str, value: Any, result: Any) -> str:
        if f == "append":
            where = "" if result is UNKNOWN or result is None else f" at offset {result[0]}"
            return f"append({shortened(value)}){where}"
        if f == "tail" or result is UNKNOWN:
            return f"tail() -> {shortened(result)}"
        messages = result["messages"]
        shown = f"[{', '.join(map(shortened, messages[:6]))}]"
        if len(messages) > 6:
            shown = f"{len(messages)} messages ending in {shortened(messages[-1])}"
        return f"read from offset {result['offset']} -> {shown}, tail {result.get('tail')}"


@dataclass(frozen=True, kw_only=True)
class Topic(Model):
    """A topic of ``queues`` logs: ``send(v) -> [queue, offset]``, ``read({queue, offset, max}) ->
    {queue, offset, messages, tail}``, ``tail({queue}) -> [queue, tail]``.  A send that crashed, or that returns
    ``None`` or ``[None, offset]``, may be in any queue; one that returns ``[queue, None]`` may be at any offset of that
    queue.  The arguments of a read are not judged.
    """

    queues: int = 4

    name: ClassVar[str] = "topic"
    functions: ClassVar[frozenset[str]] = frozenset({"send", "read", "tail"})
    pure: ClassVar[frozenset[str]] = frozenset({"read", "tail"})

    def outcomes(self, f: str, value: Any, operations: Sequence[tuple[str, Any, Any]]) -> Sequence[Any]:
        return [(queue, None) for queue in range(self.queues)] if f == "send" else (UNKNOWN,)

    def specialised(self, operations: Sequence[tuple[str, Any, Any]]) -> Model:
        done = (result for f, _, result in operations if f == "send" and result is not UNKNOWN)
        return _Unplaced(queues=self.queues) if any(map(_lacks_queue, done)) else self

    def start(self) -> Hashable:
        return ((),) * self.queues

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        if result is UNKNOWN:
            return state
        queue = result["queue"] if f == "read" else result[0]
        if not 0 <= queue < len(state):
            return ILLEGAL
        after = _log_step(state[queue], f, value, result[1:] if f == "send" else result[1] if f == "tail" else result)
        return after if after is ILLEGAL else (*state[:queue], after, *state[queue + 1 :])

    def describe(self, f: str, value: Any, result: Any) -> str:
        if f == "send":
            where = "" if _lacks_queue(result) else f" to queue {result[0]} at offset {result[1]}"
            return f"send({shortened(value)}){where}"
        return f"{f} -> {shortened(result)}"


def _lacks_queue(result: Any) -> bool:
    """Whether the result of a send names no queue."""
    return result is UNKNOWN or result is None or result[0] is None


@dataclass(frozen=True, kw_only=True)
class _Unplaced(Topic):
    """A topic in which completed sends may be in any queue: a state is the set of all possible states of the topic.

    A read excludes some of them, so no operation is pure.
    """

    pure: ClassVar[frozenset[str]] = frozenset()

    def outcomes(self, f: str, value: Any, operations: Sequence[tuple[str, Any, Any]]) -> Sequence[Any]:
        return (UNKNOWN,)

    def specialised(self, operations: Sequence[tuple[str, Any, Any]]) -> Model:
        return self

    def start(self) -> Hashable:
        return frozenset({super().start()})

    def step(self, state: Any, f: str, value: Any, result: Any) -> Any:
        results = [result]
        if f == "send" and _lacks_queue(result):
            offset = None if result is UNKNOWN or result is None else result[1]
            results = [(queue, offset) for queue in range(self.queues)]
        after = {super(_Unplaced, self).step(one, f, value, each) for one in state for each in results}
        return frozenset(after - {ILLEGAL}) or ILLEGAL
