"""Workload `transactions`: messages that are received if their transaction committed, and only then.

`transact` sends a half message and then decides: commit or rollback, and whether the client reports this at once or the
system has to ask for it, which every client of the run can answer. A transaction whose half message has an unknown
outcome is never decided (its event has `"ended": false`), so its message must never be received.

For the checker each `transact` becomes a `prepare` and a `commit` or `rollback` at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from checker import check_transaction_visibility
from harness.generator import Calls, Context, EachThread, Generator, Mix, Op
from harness.systems.base import CheckOutcome, MessagingConnection
from harness.worker import Outcome
from harness.workloads.base import CheckContext
from harness.workloads.checks import judged
from harness.workloads.client_transactions import ClientTransactionsWorkload, as_prepare_and_end
from harness.workloads.draining import Drain, unless_drained
from harness.workloads.queue import MessagingClient
from harness.workloads.queues import Numbered

__all__ = ["TransactionsWorkload"]

COMMITTED_SHARE = 0.65
TOLD_SHARE = 0.7

SETTLE_S = 12.0
"""For transaction checks of undecided messages: several rounds, also by a new leader."""


def _transaction(context: Context, number: int) -> Op:
    rng = context.random
    commit, tell = rng.random() < COMMITTED_SHARE, rng.random() < TOLD_SHARE
    return Op("transact", None, {"message": number, "commit": commit, "tell": tell})


@dataclass(frozen=True, slots=True)
class TransactionsWorkload:
    """Transactional sends and receives over `keys` queues."""

    keys: int = 8

    name = "transactions"
    description = (
        "Transactional messages: seen if, and only if, committed, even if the system has to ask for the outcome."
    )
    requires = "messaging"
    check_names = ("transaction-visibility",)
    by_capability = ClientTransactionsWorkload

    def generator(self) -> Generator:
        return Mix(((0.4, Numbered(_transaction)), (0.6, Calls(lambda _: Op("receive")))))

    def final_generator(self) -> Generator:
        return EachThread(Drain("receive", at_least_s=SETTLE_S))

    def client(self, connection: MessagingConnection) -> _TransactionsClient:
        return _TransactionsClient(connection)

    def is_write(self, f: str, value: Any) -> bool:
        return f == "transact"

    def online(self) -> None:
        return None

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        outcome = judged(check_transaction_visibility, list(as_prepare_and_end(history)), context, redelivers=True)
        wrong_whatever_comes = ("rolled-back-seen", "prepared-seen", "unexpected")
        return {"transaction-visibility": unless_drained(outcome, history, certain=wrong_whatever_comes)}


@runtime_checkable
class _TellsDecision(Protocol):
    """An error that tells whether its transaction was decided, and whether its message may be stored."""

    is_decided: bool
    is_definite: bool


class _TransactionsClient(MessagingClient):
    async def invoke(self, op: Op) -> Outcome:
        try:
            return await super().invoke(op)
        except Exception as error:
            if not isinstance(error, _TellsDecision) or error.is_decided or error.is_definite:
                raise
            text = f"{type(error).__name__}: {error}"
            return Outcome("info", {**op.value, "ended": False}, error=text, node=self.connection.node)

    async def send(self, op: Op) -> None:
        value = op.value
        await self.connection.send_in_transaction(value["message"], commit=value["commit"], tell=value["tell"])
