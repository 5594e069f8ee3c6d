"""Workload `queue`: a producer for every client, and one consumer group that they all are members of.

What was acknowledged must come out, and nothing that nobody sent. A message may come out twice: queues that deliver
at least once say so, and the number is reported. Each client is a real consumer, with its share of the queues and
its stored offsets, so this is also a test of rebalancing: a client whose send has an unknown outcome goes away
and comes back as another member.

At the end everybody receives until the group's stored offsets have reached the end of every queue. If they do not
within a minute of the last heal, a missing message is not called lost; the verdict is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checker import check_total_queue
from harness.generator import Calls, EachThread, Generator, Mix, Op
from harness.systems.base import CheckOutcome, MessagingConnection
from harness.worker import Outcome
from harness.workloads.base import CheckContext, ConnectionClient
from harness.workloads.checks import judged
from harness.workloads.client_queue import ClientQueueWorkload
from harness.workloads.draining import Drain, unless_drained
from harness.workloads.queues import message_numbers

__all__ = ["MessagingClient", "QueueWorkload"]

DRAIN_MESSAGES = 32
"""Messages that one final receive takes at most."""


@dataclass(frozen=True, slots=True)
class QueueWorkload:
    """Somewhat more receives than sends, one message each, over `keys` queues."""

    keys: int = 8

    name = "queue"
    description = "Producers and a consumer group: what was acknowledged comes out, at least once."
    requires = "messaging"
    check_names = ("total-queue",)
    by_capability = ClientQueueWorkload

    def generator(self) -> Generator:
        return Mix(((0.45, message_numbers("enqueue")), (0.55, Calls(lambda _: Op("dequeue")))))

    def final_generator(self) -> Generator:
        return EachThread(Drain("drain"))

    def client(self, connection: MessagingConnection) -> _QueueClient:
        return _QueueClient(connection)

    def is_write(self, f: str, value: Any) -> bool:
        return f == "enqueue"

    def online(self) -> None:
        return None

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        moves = [event for event in history if event["f"] != "lag"]
        # What a consumer of the group was given and has not acknowledged comes again.
        total = judged(check_total_queue, moves, context, redelivers=True)
        return {"total-queue": unless_drained(total, history, certain=("unexpected",))}


class MessagingClient(ConnectionClient[MessagingConnection]):
    """What clients of groups have in common: the operations `lag`, `receive` and `drain`, which take what is there."""

    async def invoke(self, op: Op) -> Outcome:
        connection = self.connection
        if op.f == "lag":
            return Outcome("ok", await connection.lag(), node=connection.node)
        if op.f in ("receive", "drain"):
            return Outcome("ok", await connection.receive(DRAIN_MESSAGES))
        await self.send(op)
        return Outcome("ok", op.value, node=connection.node)

    async def send(self, op: Op) -> None:
        """Do any other operation."""
        await self.connection.send(op.value)


class _QueueClient(MessagingClient):
    async def invoke(self, op: Op) -> Outcome:
        if op.f != "dequeue":
            return await super().invoke(op)
        messages = await self.connection.receive(1)
        return Outcome("ok", messages[0] if messages else None)
