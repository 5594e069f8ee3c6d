"""Workload `queue`: every client is a producer and a member of one consumer group.

Every acknowledged message must come out, and nothing that was never sent. A message may come out twice, as delivery is
at least once; the number of duplicates is reported. Each client is a real consumer, with its share of the queues and
its stored offsets, so this also tests rebalancing: a client whose send has an unknown outcome leaves and rejoins as
another member.

At the end all clients receive until the group's stored offsets have reached the end of every queue. If they do not
within a minute of draining, a missing message is not reported as lost; the verdict is unknown.
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
"""Maximum messages of one final receive."""


@dataclass(frozen=True, slots=True)
class QueueWorkload:
    """Somewhat more receives than sends, one message each, over `keys` queues."""

    keys: int = 8

    name = "queue"
    description = "Producers and a consumer group: every acknowledged message comes out, at least once."
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
        # Messages that a consumer received and did not acknowledge are redelivered.
        total = judged(check_total_queue, moves, context, redelivers=True)
        return {"total-queue": unless_drained(total, history, certain=("unexpected",))}


class MessagingClient(ConnectionClient[MessagingConnection]):
    """Base of clients of groups: the operations `lag`, and `receive` and `drain`, which take available messages."""

    async def invoke(self, op: Op) -> Outcome:
        connection = self.connection
        if op.f == "lag":
            return Outcome("ok", await connection.lag(), node=connection.node)
        if op.f in ("receive", "drain"):
            return Outcome("ok", await connection.receive(DRAIN_MESSAGES))
        await self.send(op)
        return Outcome("ok", op.value, node=connection.node)

    async def send(self, op: Op) -> None:
        """Perform any other operation."""
        await self.connection.send(op.value)


class _QueueClient(MessagingClient):
    async def invoke(self, op: Op) -> Outcome:
        if op.f != "dequeue":
            return await super().invoke(op)
        messages = await self.connection.receive(1)
        return Outcome("ok", messages[0] if messages else None)
