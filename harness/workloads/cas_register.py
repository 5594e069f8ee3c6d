"""Workload `cas-register`: `read(key)`, `write(key, value)` and `cas(key, old, new)`.

`cas` sets a key to `new` if it holds `old` and returns whether it did. `old` is the value last seen for the key, so
that some succeed and some do not. Every written value is new; a key is replaced by a new one after `operations_per_key`
operations on average, which keeps the linearizability search short. The keys in use last are read at the end. A loss
after a key's retirement goes unnoticed, so `operations_per_key` also determines how long a write is watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from checker import CASRegister, History
from harness.generator import Context, EachThread, Generator, Op, Unpaced
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake
from harness.workloads.checks import linearizable
from harness.workloads.client_register import READ, WRITE
from harness.workloads.final_reads import ReadEachKey, unless_registers_unread

__all__ = ["CasRegisterWorkload"]


async def _cas(client: Any, value: Any, key: Any) -> Any:
    old, new = value
    done = await client.cas(key, old, new)
    if done is not True and done is not False:
        raise ClientMistake(
            f"cas returned {done!r:.80}: it must return True (it was set) or False (it had another value)"
        )
    return done


@dataclass(slots=True)
class _Progress:
    """Operation count of the load, which determines the keys in use, also at the end."""

    operations: int = 0
    next_value: int = 0


@dataclass(frozen=True, slots=True)
class _Load(Unpaced):
    """Of five operations two are reads, one is a write and two are compare-and-sets, on `keys` keys at a time."""

    keys: int
    operations_per_key: int
    progress: _Progress
    last: Mapping[int, int]

    def first_key(self) -> int:
        return self.progress.operations // (self.keys * self.operations_per_key) * self.keys

    def next(self, context: Context) -> tuple[Op, Generator]:
        first, progress = self.first_key(), self.progress
        key = first + context.random.randrange(self.keys)
        progress.operations += 1
        kind = context.random.randrange(5)
        if kind < 2:
            return Op("read", key), self
        value, progress.next_value = progress.next_value, progress.next_value + 1
        if kind == 2 or key not in self.last:
            return Op("write", key, value), self
        return Op("cas", key, [self.last[key], value]), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] != "ok" or event["f"] == "cas":
            return self
        key, seen = event["key"], event["value"]
        if seen is None or self.last.get(key) == seen:
            return self
        first = self.first_key()
        last = {k: v for k, v in self.last.items() if k >= first}
        return _Load(self.keys, self.operations_per_key, self.progress, {**last, key: seen})


class CasRegisterWorkload(CapabilityWorkload):
    """Reads, writes and compare-and-sets over `keys` registers at a time."""

    name = "cas-register"
    description = "Registers with compare-and-set."
    capabilities = ("read", "write", "cas")
    settings = (
        Setting("keys", "5", "number of registers in use at a time", bounds=(1, 1000)),
        Setting("operations_per_key", "200", "operations on a register before it is replaced by a new one",
                bounds=(10, 100_000)),
    )  # fmt: skip
    calls: ClassVar[Mapping[str, Call]] = {"read": READ, "write": WRITE, "cas": Call("cas", _cas)}
    check_names = ("linearizable",)

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings)
        self._load = _Load(self.keys, self.number("operations_per_key"), _Progress(), {})

    def generator(self) -> Generator:
        return self._load

    def final_generator(self) -> Generator:
        """Every thread reads every key in use last."""
        return EachThread(ReadEachKey(self.keys, first_key=self._load.first_key))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        newest = max((event["key"] for event in history), default=0) // self.keys

        recorded = History.of(history)
        found = linearizable(recorded, CASRegister(), context)
        return {"linearizable": unless_registers_unread(found, recorded, lambda key: key // self.keys == newest)}
