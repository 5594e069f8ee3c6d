"""Workload `queue` for any client: `enqueue(value)` and `dequeue()`, and `ack(value)` if the queue has it.

`dequeue` returns a value, or None if it found nothing. With `ack` a value counts as taken once it was delivered, and
the queue may deliver it again until it is acknowledged. Without `ack`, a dequeue of unknown outcome may have taken a
value that nobody will ever see: up to that many missing values make the verdict unknown, not invalid.

Every acknowledged value must come out, and nothing that was never enqueued. At the end every thread takes values until
none came for `drain_s` seconds, which must exceed the time that the queue hides an unacknowledged value. With
`order=fifo` or `order=any` the queue must also be linearizable, as a queue of that order that delivers each value once
and reports itself empty only if it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from checker import FIFOQueue, UnorderedQueue, check_total_queue
from harness.generator import Calls, EachThread, Generator, Mix, Op
from harness.systems.base import CheckOutcome, Setting
from harness.worker import Client, TellsOutcome
from harness.workloads.base import CheckContext
from harness.workloads.capability import (
    MISTAKES,
    Call,
    CapabilityClient,
    CapabilityWorkload,
    ClientMistake,
    Happened,
    gives,
    number_from,
    takes,
)
from harness.workloads.checks import judged, linearizable
from harness.workloads.draining import TakeUntilQuiet, unless_taken_unseen
from harness.workloads.queues import message_numbers

__all__ = ["DEQUEUE", "Acknowledges", "ClientQueueWorkload", "end_of_share", "taking_client"]

logger = logging.getLogger(__name__)


SHARE_OF_TIME = 0.9
"""Fraction of an operation's timeout after which a step of it, such as an acknowledgement, is abandoned: a delivered
value must not be forgotten because the operation timed out."""


async def _dequeue_and_ack(client: Any, value: Any, key: Any) -> Any:
    due_s = end_of_share(client)
    found = number_from("dequeue", await client.dequeue())
    if found is not None:
        try:
            async with asyncio.timeout_at(due_s):
                await client.ack(found)
        except (ClientMistake, *MISTAKES):
            raise
        except Exception as error:
            # The value was delivered, which is what counts; the queue may deliver it again.
            logger.debug("ack: %s: %s", type(error).__name__, error)
            if not (isinstance(error, TellsOutcome) and error.is_definite):
                raise Happened(found) from error  # an answer may still be on its way to this client
    return found


@runtime_checkable
class _HasTime(Protocol):
    timeout_s: float


def end_of_share(client: Any) -> float | None:
    """The event loop time at which `SHARE_OF_TIME` of an operation that begins now is over; None without a timeout."""
    now_s = asyncio.get_running_loop().time()
    return now_s + client.timeout_s * SHARE_OF_TIME if isinstance(client, _HasTime) else None


@runtime_checkable
class Acknowledges(Protocol):
    """A client whose queue redelivers unacknowledged values."""

    async def ack(self, value: Any) -> None:
        """Acknowledge the value of the last `dequeue`."""
        ...


DEQUEUE = takes("dequeue", numbers=True)
DEQUEUE_AND_ACK = Call("dequeue", _dequeue_and_ack, is_read=True)
"""A read, since an unacknowledged value is not taken: a dequeue that raised took nothing."""


def taking_client(connection: Any, calls: Mapping[str, Call], taken: str) -> CapabilityClient:
    """A client with these calls whose operation `taken` dequeues, and acknowledges if the client has `ack`."""
    take = DEQUEUE_AND_ACK if isinstance(connection, Acknowledges) else DEQUEUE
    return CapabilityClient(connection, {**calls, taken: take})


class ClientQueueWorkload(CapabilityWorkload):
    """By default somewhat more dequeues than enqueues, which keeps the queue short."""

    name = "queue"
    description = "One queue: every acknowledged value comes out, and nothing else."
    capabilities = ("enqueue", "dequeue")
    settings = (
        Setting("delivery", "at-least-once", "exactly-once: no value may come out twice",
                ("at-least-once", "exactly-once")),
        Setting("order", "none", "also require linearizability, as a queue of this order",
                ("none", "any", "fifo")),
        Setting("dequeues", "55", "percentage of dequeues; with fewer, the queue holds more values for faults to lose",
                bounds=(0, 95)),
        Setting("drain_s", "3", "seconds without a value until the queue counts as empty at the end",
                bounds=(1, 60)),
    )  # fmt: skip
    calls: ClassVar[Mapping[str, Call]] = {"enqueue": gives("enqueue"), "dequeue": DEQUEUE}
    check_names = ("total-queue", "linearizable")

    def generator(self) -> Generator:
        share = self.number("dequeues") / 100
        return Mix(((1 - share, message_numbers("enqueue")), (share, Calls(lambda _: Op("dequeue")))))

    def final_generator(self) -> Generator:
        """Every thread dequeues until the queue is empty."""
        return EachThread(TakeUntilQuiet("dequeue", self.number("drain_s")))

    def client(self, connection: Any) -> Client:
        return taking_client(connection, self.calls, "dequeue")

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        allow_duplicates = self.text("delivery") == "at-least-once"
        total = judged(check_total_queue, history, context, allow_duplicates=allow_duplicates)
        certain = ("unexpected",) if allow_duplicates else ("unexpected", "duplicated")
        seen = unless_taken_unseen(total, history, put="enqueue", taken="dequeue", lost="lost", certain=certain)
        found = {"total-queue": seen}
        order = self.text("order")
        if order != "none":
            model = FIFOQueue() if order == "fifo" else UnorderedQueue()
            found["linearizable"] = linearizable(history, model, context)
        return found
