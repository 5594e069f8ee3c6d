"""Workload `log`: appends return their offset, reads return ranges together with the queue's tail.

Offsets fix the order of the appends, so linearizability is decided in linear time. At the end every queue is read
whole, so each acknowledged message is accounted for: lost, duplicated, phantom, reordered or stored under two offsets.
If a queue cannot be read to its end, the outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checker import History, Log
from checker.online import OnlineLog
from harness.generator import Calls, Context, Generator, Mix, Op, Step, Unpaced
from harness.systems.base import CheckOutcome, QueueConnection
from harness.worker import Outcome
from harness.workloads.base import CheckContext, ConnectionClient
from harness.workloads.checks import linearizable, log_contents
from harness.workloads.client_log import ClientLogWorkload, unless_left_unread
from harness.workloads.queues import ReadWhole, distinct_writes

__all__ = ["READ_MAX_MESSAGES", "LogWorkload"]

READ_MAX_MESSAGES = 32
"""Maximum messages per read: a RocketMQ broker's own limit for reads from memory."""


@dataclass(frozen=True, slots=True)
class _RangeReads(Unpaced):
    """Reads of ranges, mostly near the last seen tail, where stale replicas give themselves away."""

    keys: int
    tails: tuple[int, ...]

    def next(self, context: Context) -> tuple[Step, Generator]:
        rng = context.random
        key = rng.randrange(self.keys)
        tail = self.tails[key]
        if rng.random() < 0.75:
            offset = max(0, tail - rng.randrange(1, 8))
        else:
            offset = rng.randrange(tail + 1)
        return Op("read", key, {"offset": offset, "max": READ_MAX_MESSAGES}), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] != "ok":
            return self
        f, key, value = event["f"], event["key"], event["value"]
        tail = value[0] + 1 if f == "append" else value["tail"] if f == "read" else value
        if tail <= self.tails[key]:
            return self
        return replace(self, tails=(*self.tails[:key], tail, *self.tails[key + 1 :]))


@dataclass(frozen=True, slots=True)
class LogWorkload:
    """Appends, range reads and tail reads over `keys` queues."""

    keys: int = 8

    name = "log"
    description = "Append-only queues with offsets: append, read a range, read the tail; everything is read at the end."
    requires = "queue"
    check_names = ("linearizable", "log")
    by_capability = ClientLogWorkload

    def generator(self) -> Generator:
        def tail(context: Context) -> Op:
            return Op("tail", context.random.randrange(self.keys))

        return Mix(
            (
                (0.5, distinct_writes("append", self.keys)),
                (0.35, _RangeReads(self.keys, (0,) * self.keys)),
                (0.15, Calls(tail)),
            )
        )

    def final_generator(self) -> Generator:
        return ReadWhole(self.keys, READ_MAX_MESSAGES)

    def client(self, connection: QueueConnection) -> _LogClient:
        return _LogClient(connection)

    def is_write(self, f: str, value: Any) -> bool:
        return f == "append"

    def online(self) -> OnlineLog:
        return OnlineLog()

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        recorded = History.of(history)
        return {
            "linearizable": linearizable(recorded, Log(), context),
            "log": unless_left_unread(log_contents(recorded, context), recorded, "key"),
        }


class _LogClient(ConnectionClient[QueueConnection]):
    async def invoke(self, op: Op) -> Outcome:
        connection = self.connection
        if op.f == "append":
            offset = await connection.append(op.key, op.value)
            return Outcome("ok", [offset, op.value], node=connection.node, durability=connection.durability)
        if op.f == "tail":
            return Outcome("ok", await connection.tail(op.key), node=connection.node)
        offset, messages, tail = await connection.read(op.key, op.value["offset"], op.value["max"])
        found = {"offset": offset, "messages": messages, "tail": tail}
        return Outcome("ok", {**found, "final": True} if op.value.get("final") else found, node=connection.node)
