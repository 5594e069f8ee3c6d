"""Workload `transactions` for any client: `prepare(value)`, then `commit(value)` or `rollback(value)`, and `dequeue()`,
with `ack(value)` if the queue has it.

A value must come out if its transaction was committed, and only then: neither before the commit nor after a rollback.
One client does both steps of a transaction in sequence. Some transactions are prepared and never ended, among them
those whose `prepare` has an unknown outcome (their event has `"ended": false`): their values must never come out. If
the commit or rollback is refused, the outcome of the transaction is unknown. See `queue` for values that a dequeue of
unknown outcome may have taken.

For the checker each `transact` becomes a `prepare` and a `commit` or `rollback` at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from checker import check_transaction_visibility
from harness.generator import Calls, Context, EachThread, Generator, Mix, Op
from harness.systems.base import CheckOutcome
from harness.worker import Client, TellsOutcome
from harness.workloads.base import CheckContext
from harness.workloads.capability import MISTAKES, Call, CapabilityWorkload, ClientMistake, Unfinished, gives
from harness.workloads.checks import judged
from harness.workloads.client_queue import DEQUEUE, end_of_share, taking_client
from harness.workloads.draining import TakeUntilQuiet, unless_taken_unseen
from harness.workloads.queues import Numbered
from harness.workloads.stack import DRAIN_SETTING

__all__ = ["ClientTransactionsWorkload", "as_prepare_and_end"]

COMMITTED_SHARE = 0.6
ROLLED_BACK_SHARE = 0.3
"""The rest is never ended."""


class _Undecided(Exception):
    """The transaction was prepared and its commit or rollback refused: the system may decide either way."""

    is_definite = False


async def _transact(client: Any, value: Any, key: Any) -> Any:
    message = value["message"]
    try:
        async with asyncio.timeout_at(end_of_share(client)):
            await client.prepare(message)
    except (ClientMistake, *MISTAKES):
        raise
    except Exception as error:
        if isinstance(error, TellsOutcome) and error.is_definite:
            raise
        raise Unfinished({**value, "ended": False}, error) from error
    try:
        await (client.commit if value["commit"] else client.rollback)(message)
    except Exception as error:
        if isinstance(error, TellsOutcome) and error.is_definite:
            raise _Undecided(f"prepared, then {error}") from error
        raise
    return value


def _transaction(context: Context, number: int) -> Op:
    draw = context.random.random()
    if draw >= COMMITTED_SHARE + ROLLED_BACK_SHARE:
        return Op("prepare", None, number)
    return Op("transact", None, {"message": number, "commit": draw < COMMITTED_SHARE})


class ClientTransactionsWorkload(CapabilityWorkload):
    """40 % transactions, 60 % dequeues."""

    name = "transactions"
    description = "Transactional values: they come out if, and only if, they were committed."
    capabilities = ("prepare", "commit", "rollback", "dequeue")
    settings = (DRAIN_SETTING,)
    calls: ClassVar[Mapping[str, Call]] = {
        "prepare": gives("prepare"),
        "transact": Call("commit", _transact),
        "receive": DEQUEUE,
    }
    check_names = ("transaction-visibility",)

    def generator(self) -> Generator:
        return Mix(((0.4, Numbered(_transaction)), (0.6, Calls(lambda _: Op("receive")))))

    def final_generator(self) -> Generator:
        """Every thread dequeues until nothing is left."""
        return EachThread(TakeUntilQuiet("receive", self.number("drain_s")))

    def client(self, connection: Any) -> Client:
        return taking_client(connection, self.calls, "receive")

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        certain = ("rolled-back-seen", "prepared-seen", "unexpected")
        found = judged(check_transaction_visibility, list(as_prepare_and_end(history)), context)
        if found.valid is False:
            found = unless_taken_unseen(
                found, history, put="transact", taken="receive", lost="committed-lost", certain=certain
            )
        return {"transaction-visibility": found}


def as_prepare_and_end(history: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The history in the checker's operations: process p becomes 2p for `prepare` and 2p + 1 for the concurrent commit
    or rollback. One that was never requested counts as failed."""
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
        kind_of_end = event["type"] if value.get("ended", True) else "fail"
        for f, process, kind in (
            ("prepare", base["process"], event["type"]),
            (end, base["process"] + 1, kind_of_end),
        ):
            yield {**base, "index": index, "process": process, "type": kind, "f": f, "value": value["message"]}
            index += 1
