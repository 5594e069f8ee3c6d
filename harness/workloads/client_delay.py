"""Workload `delay` for any client: `schedule(value, delay_ms)`, `dequeue()`, and `ack(value)` if the queue has it.

A value must not come out before it is due: `delay_ms` after its `schedule` was invoked, by the harness's clock. Delays
are 0, `longest_ms`, and a fifth of it. A clock nemesis causes early values if the system schedules by the wall clock.
Lateness of more than a second is counted but is not a violation: while nobody leads, nothing can be delivered. See
`queue` for values that a dequeue of unknown outcome may have taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from harness.generator import Calls, Context, EachThread, Generator, Mix, Op
from harness.systems.base import CheckOutcome, Setting
from harness.worker import Client
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload
from harness.workloads.checks import delays
from harness.workloads.client_queue import DEQUEUE, taking_client
from harness.workloads.draining import TakeUntilQuiet, unless_taken_unseen
from harness.workloads.queues import Numbered

__all__ = ["ClientDelayWorkload", "delayed_sends"]

SHORTER = 5
"""The middle delay is the longest divided by this."""


async def _schedule(client: Any, value: Any, key: Any) -> Any:
    await client.schedule(value["message"], value["delay_ms"])
    return value


def delayed_sends(delays_ms: Sequence[int]) -> Numbered:
    """Sends of numbered messages, each with one of these delays."""

    def send(context: Context, number: int) -> Op:
        return Op("send", None, {"message": number, "delay_ms": context.random.choice(delays_ms)})

    return Numbered(send)


class ClientDelayWorkload(CapabilityWorkload):
    """40 % delayed sends, 60 % dequeues."""

    name = "delay"
    description = "Delayed values: none early, none lost."
    capabilities = ("schedule", "dequeue")
    settings = (
        Setting("longest_ms", "5000", "longest delay, in milliseconds", bounds=(100, 60_000)),
        Setting("drain_s", "3", "seconds without a value, after the longest delay, until the queue counts as empty",
                bounds=(1, 60)),
    )  # fmt: skip
    calls: ClassVar[Mapping[str, Call]] = {"send": Call("schedule", _schedule), "receive": DEQUEUE}
    check_names = ("delay",)

    def generator(self) -> Generator:
        longest_ms = self.number("longest_ms")
        sends = delayed_sends((0, longest_ms // SHORTER, longest_ms))
        return Mix(((0.4, sends), (0.6, Calls(lambda _: Op("receive")))))

    def final_generator(self) -> Generator:
        """Every thread dequeues until nothing can become due any more."""
        quiet_s = self.number("longest_ms") / 1000 + self.number("drain_s")
        return EachThread(TakeUntilQuiet("receive", quiet_s))

    def client(self, connection: Any) -> Client:
        return taking_client(connection, self.calls, "receive")

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        found = delays(history, context)
        if found.valid is False:
            found = unless_taken_unseen(
                found, history, put="send", taken="receive", lost="lost", certain=("early", "unexpected"),
                due_ms=self.number("longest_ms"),
            )  # fmt: skip
        return {"delay": found}
