"""Workload `register`: every key is a queue, and the newest message of the queue is the register's value.

A write sends a message; a read asks for the queue's end and returns the message just before it. Values are
distinct, so that Gibbons and Korach's near-linear test decides linearizability for each key. A stale read, as served by
a deposed leader, is a violation of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checker import History, Register
from checker.online import OnlineRegister
from harness.generator import Calls, Context, EachThread, Generator, Mix, Op
from harness.systems.base import CheckOutcome, QueueConnection
from harness.worker import Outcome
from harness.workloads.base import CheckContext, ConnectionClient
from harness.workloads.checks import linearizable
from harness.workloads.client_register import ClientRegisterWorkload
from harness.workloads.final_reads import ReadEachKey, unless_registers_unread
from harness.workloads.queues import distinct_writes

__all__ = ["RegisterWorkload"]


@dataclass(frozen=True, slots=True)
class RegisterWorkload:
    """Half writes, half reads, over `keys` registers."""

    keys: int = 8

    name = "register"
    description = "Registers made of queues: write appends, read returns the newest committed message."
    requires = "queue"
    check_names = ("linearizable",)
    by_capability = ClientRegisterWorkload

    def generator(self) -> Generator:
        def read(context: Context) -> Op:
            return Op("read", context.random.randrange(self.keys))

        return Mix(((1.0, distinct_writes("write", self.keys)), (1.0, Calls(read))))

    def final_generator(self) -> Generator:
        """Every thread reads every key."""
        return EachThread(ReadEachKey(self.keys))

    def client(self, connection: QueueConnection) -> _RegisterClient:
        return _RegisterClient(connection)

    def is_write(self, f: str, value: Any) -> bool:
        return f == "write"

    def online(self) -> OnlineRegister:
        return OnlineRegister()

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        recorded = History.of(history)
        return {"linearizable": unless_registers_unread(linearizable(recorded, Register(), context), recorded)}


class _RegisterClient(ConnectionClient[QueueConnection]):
    async def invoke(self, op: Op) -> Outcome:
        if op.f == "write":
            await self.connection.append(op.key, op.value)
            return Outcome("ok", op.value, node=self.connection.node)
        value = await self.connection.latest(op.key)
        return Outcome("ok", value, node=self.connection.node)
