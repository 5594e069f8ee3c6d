"""Generators that the queue-like workloads share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.generator import Context, Generator, IgnoresEvents, Op, Step, Unpaced

__all__ = ["MAX_FINAL_ATTEMPTS", "Numbered", "ReadWhole", "distinct_writes", "message_numbers"]

MAX_FINAL_ATTEMPTS = 20
"""Tries per key at a final read. A key that cannot be read after that is left unread, which the checkers
see; trying for ever would turn a dead system into a run without an end."""


@dataclass(frozen=True, slots=True)
class Numbered(IgnoresEvents):
    """What `operation` makes of the numbers 0, 1, 2 ..., each once in the whole run: distinct values let the checkers
    run in near-linear time and name the write behind every read."""

    operation: Callable[[Context, int], Op]
    next_number: int = 0

    def next(self, context: Context) -> tuple[Op, Generator]:
        return self.operation(context, self.next_number), Numbered(self.operation, self.next_number + 1)


def distinct_writes(f: str, keys: int) -> Numbered:
    """Operations `f` on random keys of 0..keys-1, every value used once."""
    return Numbered(lambda context, number: Op(f, context.random.randrange(keys), number))


def message_numbers(f: str) -> Numbered:
    """Operations `f` on the numbers 0, 1, 2 ..., each once."""
    return Numbered(lambda _, number: Op(f, None, number))


@dataclass(frozen=True, slots=True)
class ReadWhole(Unpaced):
    """Read every queue from its beginning to its tail; key k belongs to thread k modulo the threads."""

    keys: int
    max_messages: int
    offsets: tuple[int, ...] = ()
    attempts: tuple[int, ...] = ()

    def next(self, context: Context) -> tuple[Step, Generator]:
        offsets = self.offsets or (0,) * self.keys
        attempts = self.attempts or (0,) * self.keys
        for key in range(context.thread, self.keys, context.threads):
            if offsets[key] >= 0 and attempts[key] < MAX_FINAL_ATTEMPTS:
                op = Op("read", key, {"offset": offsets[key], "max": self.max_messages})
                return op, replace(self, offsets=offsets, attempts=attempts)
        return None, self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] == "invoke" or event.get("f") != "read" or not self.offsets:
            return self
        key = event["key"]
        offset, attempts = self.offsets[key], self.attempts[key] + 1
        if event["type"] == "ok":
            value = event["value"]
            offset, attempts = value["offset"] + len(value["messages"]), 0
            if offset >= value["tail"]:
                offset = -1  # read to its end
            elif not value["messages"]:
                attempts = self.attempts[key] + 1  # no progress although there is more: counts as a try
        return replace(
            self,
            offsets=(*self.offsets[:key], offset, *self.offsets[key + 1 :]),
            attempts=(*self.attempts[:key], attempts, *self.attempts[key + 1 :]),
        )
