"""Workload `register` for any client: `read(key)` and `write(key, value)`.

Every key is a register. Values are distinct, so that Gibbons and Korach's near-linear test decides linearizability
for each key. A key that was never written reads as None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from checker import History, Register
from checker.online import OnlineRegister
from harness.generator import Calls, Context, EachThread, Generator, Mix, Op
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, gives, number_from
from harness.workloads.checks import linearizable
from harness.workloads.final_reads import ReadEachKey, unless_registers_unread
from harness.workloads.queues import distinct_writes

__all__ = ["READ", "WRITE", "ClientRegisterWorkload", "RandomReads"]


async def _read(client: Any, value: Any, key: Any) -> Any:
    return number_from("read", await client.read(key))


READ = Call("read", _read, is_read=True)
WRITE = gives("write", keyed=True)


class RandomReads:
    """Operations `read` on random keys below `keys`."""

    __slots__ = ("_keys",)

    def __init__(self, keys: int) -> None:
        self._keys = keys

    def __call__(self, context: Context) -> Op:
        return Op("read", context.random.randrange(self._keys))


class ClientRegisterWorkload(CapabilityWorkload):
    """Half writes, half reads, over `keys` registers."""

    name = "register"
    description = "Registers: reads and writes of independent keys."
    capabilities = ("read", "write")
    settings = (Setting("keys", "8", "number of registers", bounds=(1, 1000)),)
    calls: ClassVar[Mapping[str, Call]] = {"read": READ, "write": WRITE}
    check_names = ("linearizable",)

    def generator(self) -> Generator:
        return Mix(((1.0, distinct_writes("write", self.keys)), (1.0, Calls(RandomReads(self.keys)))))

    def final_generator(self) -> Generator:
        """Every thread reads every key."""
        return EachThread(ReadEachKey(self.keys))

    def online(self) -> OnlineRegister:
        return OnlineRegister()

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        recorded = History.of(history)
        return {"linearizable": unless_registers_unread(linearizable(recorded, Register(), context), recorded)}
