"""Workload `delay`: delayed messages that must not arrive early.

Sends have a delay of 0, 1 or 5 seconds. A message is early if it is received less than its delay after its send was
invoked, by the harness's clock. A clock nemesis causes early messages if the system schedules by the wall clock, as
RocketMQ does. It also causes lost ones: a message with a delay of 5 seconds (a timer message of RocketMQ 5) that was
sent while a clock was ahead arrives late by as much, perhaps after the run. Other lateness of more than a second is
counted but is not a violation: while nobody leads, nothing can be delivered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.generator import Calls, EachThread, Generator, Mix, Op
from harness.systems.base import CheckOutcome, MessagingConnection
from harness.workloads.base import CheckContext
from harness.workloads.checks import delays
from harness.workloads.client_delay import ClientDelayWorkload, delayed_sends
from harness.workloads.draining import Drain, unless_drained
from harness.workloads.queue import MessagingClient

__all__ = ["DELAYS_MS", "DelayWorkload"]

DELAYS_MS = (0, 1_000, 5_000)

SETTLE_S = 10.0
"""The longest delay, and as long again for a new leader to deliver what is due."""


@dataclass(frozen=True, slots=True)
class DelayWorkload:
    """Delayed sends and receives over `keys` queues."""

    keys: int = 8

    name = "delay"
    description = "Delayed messages: none early, none lost."
    requires = "messaging"
    check_names = ("delay",)
    by_capability = ClientDelayWorkload

    def generator(self) -> Generator:
        return Mix(((0.4, delayed_sends(DELAYS_MS)), (0.6, Calls(lambda _: Op("receive")))))

    def final_generator(self) -> Generator:
        return EachThread(Drain("receive", at_least_s=SETTLE_S))

    def client(self, connection: MessagingConnection) -> _DelayClient:
        return _DelayClient(connection)

    def is_write(self, f: str, value: Any) -> bool:
        return f == "send"

    def online(self) -> None:
        return None

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        moves = [event for event in history if event["f"] != "lag"]
        found = delays(moves, context, redelivers=True)
        return {"delay": unless_drained(found, history, certain=("early", "unexpected"))}


class _DelayClient(MessagingClient):
    async def send(self, op: Op) -> None:
        await self.connection.send(op.value["message"], delay_ms=op.value["delay_ms"])
