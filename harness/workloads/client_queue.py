"""Workload `queue` for any client: `enqueue(value)` and `dequeue()`, and `ack(value)` where the queue has that.

`dequeue` returns a value, or None where it found nothing. With `ack` a value counts as taken when it was shown, and
the queue may show it again until it was acknowledged. Without, a dequeue whose outcome is unknown may have taken a
value that nobody will ever see: so many missing values make no violation, but an unknown verdict.

What was acknowledged must come out, and nothing that nobody put in. At the end every thread takes values until none
came for `drain_s` seconds: longer than the queue hides a value that was shown and not acknowledged. With
`order=fifo` or `order=any` the queue must also be linearizable, as a queue of that order that shows each value once
and says that it is empty only where it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from harness.generator import Calls, Context, EachThread, Generator, Mix, Op, Step, Unpaced, Wait
from harness.systems.base import CheckOutcome, Setting
from harness.worker import Client
from harness.workloads.base import CheckContext
from harness.workloads.capability import MISTAKES, Call, CapabilityClient, CapabilityWorkload
from harness.workloads.checks import Events, linearizable_queue, total_queue
from harness.workloads.draining import DRAIN_LIMIT_S
from harness.workloads.queues import MessageNumbers

__all__ = ["Acknowledges", "ClientQueueWorkload"]

logger = logging.getLogger(__name__)

PAUSE_NS = 50_000_000
"""Between two dequeues at the end, the first of which found nothing."""


async def _enqueue(client: Any, value: Any, key: Any) -> Any:
    await client.enqueue(value)
    return value


async def _dequeue(client: Any, value: Any, key: Any) -> Any:
    return await client.dequeue()


async def _dequeue_and_ack(client: Any, value: Any, key: Any) -> Any:
    found = await client.dequeue()
    if found is not None:
        try:
            await client.ack(found)
        except MISTAKES:
            raise
        except Exception as error:
            # It was shown, which is what counts; that it may be shown again is the queue's affair.
            logger.debug("ack: %s: %s", type(error).__name__, error)
    return found


@runtime_checkable
class Acknowledges(Protocol):
    """A client whose queue shows a value again that was not acknowledged."""

    async def ack(self, value: Any) -> None:
        """Acknowledge the value that `dequeue` returned last."""
        ...


DEQUEUE = Call("dequeue", _dequeue)
DEQUEUE_AND_ACK = Call("dequeue", _dequeue_and_ack, is_read=True)
"""What was not acknowledged was not taken: so a dequeue that raised took nothing."""


@dataclass(frozen=True, slots=True)
class _Drain(Unpaced):
    """One thread's dequeues until none brought anything for `quiet_s`."""

    quiet_s: int
    began_ns: int = -1
    found_ns: int = -1
    pause: bool = False

    def next(self, context: Context) -> tuple[Step, Generator]:
        now_ns = context.time_ns
        if self.began_ns < 0:
            return Op("dequeue"), replace(self, began_ns=now_ns, found_ns=now_ns)
        if now_ns - self.found_ns > self.quiet_s * 1e9 or now_ns - self.began_ns > DRAIN_LIMIT_S * 1e9:
            return None, self
        if self.pause:
            return Wait(now_ns + PAUSE_NS), replace(self, pause=False)
        return Op("dequeue"), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] == "invoke":
            return self
        if event["type"] == "ok" and event["value"] is not None:
            return replace(self, found_ns=context.time_ns, pause=False)
        return replace(self, pause=True)


class ClientQueueWorkload(CapabilityWorkload):
    """Somewhat more dequeues than enqueues."""

    name = "queue"
    description = "One queue: what was acknowledged comes out, and nothing else."
    capabilities = ("enqueue", "dequeue")
    settings = (
        Setting("delivery", "at-least-once", "whether a value may come out twice", ("at-least-once", "exactly-once")),
        Setting("order", "none", "the queue that it must be linearizable as, if any", ("none", "any", "fifo")),
        Setting("drain_s", "3", "seconds without a value after which a queue counts as empty at the end",
                bounds=(1, 60)),
    )  # fmt: skip
    calls: ClassVar[Mapping[str, Call]] = {"enqueue": Call("enqueue", _enqueue), "dequeue": DEQUEUE}
    check_names = ("total-queue", "linearizable")

    def generator(self) -> Generator:
        return Mix(((0.45, MessageNumbers("enqueue")), (0.55, Calls(lambda _: Op("dequeue")))))

    def final_generator(self) -> Generator:
        """Every thread takes what is left."""
        return EachThread(_Drain(self.number("drain_s")))

    def client(self, connection: Any) -> Client:
        """With acknowledgements, where the client has them."""
        if not isinstance(connection, Acknowledges):
            return CapabilityClient(connection, self.calls)
        return CapabilityClient(connection, {**self.calls, "dequeue": DEQUEUE_AND_ACK})

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        allow_duplicates = self.text("delivery") == "at-least-once"
        total = total_queue(history, allow_duplicates=allow_duplicates)
        found = {"total-queue": _unless_taken_unseen(total, history, is_once=not allow_duplicates)}
        order = self.text("order")
        if order != "none":
            found["linearizable"] = linearizable_queue(history, context, fifo=order == "fifo")
        return found


def _unless_taken_unseen(outcome: CheckOutcome, history: Events, *, is_once: bool) -> CheckOutcome:
    """`outcome`, unless it only says that values are missing which dequeues of unknown outcome may have taken, or which
    nobody looked for long enough."""
    counts = outcome.details["stats"]["counts"]
    lost = counts["lost"]
    if outcome.valid is not False or not lost or counts["unexpected"] or (counts["duplicated"] and is_once):
        return outcome
    unseen = sum(event["f"] == "dequeue" and event["type"] == "info" for event in history)
    if lost <= unseen:
        reason = f"{lost} values never came out, and {unseen} dequeues of unknown outcome may have taken them"
        return CheckOutcome("unknown", reason, outcome.details)
    if not _was_found_empty(history):
        reason = f"{lost} values never came out, but nobody found the queue empty after the last one was put in"
        return CheckOutcome("unknown", reason, outcome.details)
    return outcome


def _was_found_empty(history: Events) -> bool:
    """Whether a dequeue that began after the last acknowledgement found nothing."""
    asked: set[Any] = set()
    found = False
    for event in history:
        if event["f"] == "enqueue":
            if event["type"] == "ok":
                asked.clear()
                found = False
        elif event["type"] == "invoke":
            asked.add(event["process"])
        elif event["type"] == "ok" and event["value"] is None and event["process"] in asked:
            found = True
    return found
