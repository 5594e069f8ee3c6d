"""Generators that the queue-like workloads share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.generator import Context, Generator, IgnoresEvents, Op, Step, Unpaced, Wait

__all__ = [
    "BEHIND_RETRY_NS",
    "BEHIND_S",
    "MAX_FINAL_ATTEMPTS",
    "RETRY_NS",
    "Numbered",
    "ReadWhole",
    "distinct_writes",
    "message_numbers",
]

MAX_FINAL_ATTEMPTS = 20
"""Attempts per key at a final read. A key that cannot be read after that is left unread: then all final reads are
repeated once more for as long as the system may take to recover, and the checkers count what was never read. Retrying
forever would turn a dead system into an endless run."""

BEHIND_S = 30.0
"""How long a final read may end before the known end, if reads may be stale: a leader that was replaced behind a
partition answers from its own state for some seconds after the heal."""

BEHIND_RETRY_NS = 500_000_000
"""Pause between two such reads."""

RETRY_NS = 100_000_000
"""Pause between two attempts of a final read: a replica that refuses at once does so for a reason such as an election,
which twenty immediate attempts would not outlast; and thousands of refusals are no more informative than twenty."""


@dataclass(frozen=True, slots=True)
class Numbered(IgnoresEvents):
    """Operations made by `operation` from the numbers 0, 1, 2 ..., each used once in the whole run: distinct values let
    the checkers run in near-linear time and identify the write behind every read."""

    operation: Callable[[Context, int], Op]
    next_number: int = 0

    def next(self, context: Context) -> tuple[Op, Generator]:
        return self.operation(context, self.next_number), Numbered(self.operation, self.next_number + 1)


def distinct_writes(f: str, keys: int) -> Numbered:
    """Operations `f` on random keys of 0..keys-1, every value used once."""
    return Numbered(lambda context, number: Op(f, context.random.randrange(keys), number))


def message_numbers(f: str) -> Numbered:
    """Operations `f` with the values 0, 1, 2 ..., each used once."""
    return Numbered(lambda _, number: Op(f, None, number))


@dataclass(frozen=True, slots=True)
class ReadWhole(Unpaced):
    """Read every queue from its beginning to its tail; key k belongs to thread k modulo the number of threads. These
    reads are marked `final`, so that the checks find those that never reached the end. If the reported tail of a queue
    is before its `known` end, reading goes on for up to `BEHIND_S`."""

    keys: int
    max_messages: int
    known: Mapping[int, int] = field(default_factory=dict)
    began_ns: int = -1
    offsets: tuple[int, ...] = ()
    attempts: tuple[int, ...] = ()
    due_ns: tuple[int, ...] = ()
    """When each key may be read again."""

    def next(self, context: Context) -> tuple[Step, Generator]:
        if not self.offsets:
            nothing = (0,) * self.keys
            began = replace(self, began_ns=context.time_ns, offsets=nothing, attempts=nothing, due_ns=nothing)
            return began.next(context)
        waits_ns = []
        for key in range(context.thread, self.keys, context.threads):
            if self.offsets[key] < 0 or self.attempts[key] >= MAX_FINAL_ATTEMPTS:
                continue
            if self.due_ns[key] <= context.time_ns:
                return Op("read", key, {"offset": self.offsets[key], "max": self.max_messages, "final": True}), self
            waits_ns.append(self.due_ns[key])
        return (Wait(min(waits_ns)) if waits_ns else None), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] == "invoke" or event.get("f") != "read" or not self.offsets:
            return self
        key = event["key"]
        offset, attempts, due_ns = self.offsets[key], self.attempts[key] + 1, context.time_ns + RETRY_NS
        if event["type"] == "ok":
            value = event["value"]
            offset = value["offset"] + len(value["messages"])
            if offset >= value["tail"]:
                if offset < self.known.get(key, 0) and context.time_ns - self.began_ns < BEHIND_S * 1e9:
                    attempts, due_ns = self.attempts[key], context.time_ns + BEHIND_RETRY_NS
                else:
                    offset = -1  # read to its end
            elif value["messages"]:  # else: no progress although there is more, which counts as an attempt
                attempts, due_ns = 0, 0
        return replace(
            self,
            offsets=_with(self.offsets, key, offset),
            attempts=_with(self.attempts, key, attempts),
            due_ns=_with(self.due_ns, key, due_ns),
        )


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])
