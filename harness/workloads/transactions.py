"""Workload `transactions`: messages that are seen if their transaction committed, and only then.

`transact` sends a half message and then decides: commit or rollback, and whether the system is told at once or has to
ask back, which every client of the run can answer. A transaction whose half message has an unknown outcome is
never decided, so its message must never be seen.

The checker gets each `transact` as a `prepare` and a `commit` or `rollback` of the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.generator import Calls, Context, EachThread, Generator, Mix, Op, Step, Unpaced
from harness.systems.base import CheckOutcome, MessagingConnection
from harness.worker import Outcome
from harness.workloads.base import CheckContext
from harness.workloads.checks import transaction_visibility
from harness.workloads.draining import Drain, unless_drained
from harness.workloads.queue import DRAIN_MESSAGES, lag

__all__ = ["TransactionsWorkload", "as_prepare_and_end"]

COMMITTED_SHARE = 0.65
TOLD_SHARE = 0.7

SETTLE_S = 12.0
"""For questions about transactions whose end never came: several rounds of them, also by a new leader."""


@dataclass(frozen=True, slots=True)
class _Transactions(Unpaced):
    next_value: int = 0

    def next(self, context: Context) -> tuple[Step, Generator]:
        rng = context.random
        value = {
            "message": self.next_value,
            "commit": rng.random() < COMMITTED_SHARE,
            "tell": rng.random() < TOLD_SHARE,
        }
        return Op("transact", None, value), _Transactions(self.next_value + 1)

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        return self


@dataclass(frozen=True, slots=True)
class TransactionsWorkload:
    """Transactional sends, and receives of whatever is there, over `keys` queues."""

    keys: int = 8

    name = "transactions"
    description = "Transactional messages: seen if committed and only then, also when the system has to ask."
    requires = "messaging"
    check_names = ("transaction-visibility",)

    def generator(self) -> Generator:
        return Mix(((0.4, _Transactions()), (0.6, Calls(lambda _: Op("receive")))))

    def final_generator(self) -> Generator:
        return EachThread(Drain("receive", at_least_s=SETTLE_S))

    def client(self, connection: MessagingConnection) -> _TransactionsClient:
        return _TransactionsClient(connection)

    def online(self) -> None:
        return None

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        outcome = transaction_visibility(list(as_prepare_and_end(history)))
        wrong_whatever_comes = ("rolled-back-seen", "prepared-seen")
        return {"transaction-visibility": unless_drained(outcome, history, certain=wrong_whatever_comes)}


def as_prepare_and_end(history: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The checker's vocabulary: process p becomes 2p, and 2p + 1 where it ends a transaction meanwhile."""
    index = 0
    for event in history:
        if event["f"] == "lag":
            continue
        base = {**event, "process": 2 * event["process"]}
        if event["f"] != "transact":
            yield {**base, "index": index}
            index += 1
            continue
        value = event["value"]
        end = "commit" if value["commit"] else "rollback"
        for f, process in (("prepare", base["process"]), (end, base["process"] + 1)):
            yield {**base, "index": index, "process": process, "f": f, "value": value["message"]}
            index += 1


@dataclass(slots=True)
class _TransactionsClient:
    connection: MessagingConnection

    async def open(self) -> None:
        await self.connection.open()

    async def invoke(self, op: Op) -> Outcome:
        connection, value = self.connection, op.value
        if op.f == "transact":
            await connection.send_in_transaction(value["message"], commit=value["commit"], tell=value["tell"])
            return Outcome("ok", value, node=connection.node)
        if op.f == "lag":
            return await lag(connection)
        return Outcome("ok", await connection.receive(DRAIN_MESSAGES))

    async def close(self) -> None:
        await self.connection.close()
