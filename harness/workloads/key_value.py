"""Workload `key-value`: `get(key)`, `put(key, text)` and `concat(key, text)`.

Every key holds a text that is empty at first. `put` replaces it, `concat` appends to it, `get` returns it, or None if
nothing was ever put. Appended texts are distinct, so a text shows which appends it contains and in which order, as in
the tests of the key-value store of MIT's course 6.824. One order for each key must explain every text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from checker import History, KeyValue
from harness.generator import Context, EachThread, Generator, IgnoresEvents, Op
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake, gives
from harness.workloads.checks import linearizable
from harness.workloads.final_reads import ReadEachKey, unless_registers_unread

__all__ = ["KeyValueWorkload"]

PUT_SHARE = 0.05
"""Share of all operations. Each put restarts a text, which keeps texts at about ten appends."""

CONCAT_SHARE = 0.45


async def _get(client: Any, value: Any, key: Any) -> Any:
    found = await client.get(key)
    if found is not None and not isinstance(found, str):
        raise ClientMistake(f"get returned {found!r:.80}: it must return a text, or None")
    return found


@dataclass(frozen=True, slots=True)
class _Load(IgnoresEvents):
    keys: int
    next_number: int = 0

    def next(self, context: Context) -> tuple[Op, Generator]:
        key, draw = context.random.randrange(self.keys), context.random.random()
        if draw >= PUT_SHARE + CONCAT_SHARE:
            return Op("get", key), self
        f = "put" if draw < PUT_SHARE else "append"
        return Op(f, key, f"{self.next_number} "), _Load(self.keys, self.next_number + 1)


class KeyValueWorkload(CapabilityWorkload):
    """Half reads, over `keys` texts."""

    name = "key-value"
    description = "Strings by key that are replaced, appended to and read."
    capabilities = ("get", "put", "concat")
    settings = (Setting("keys", "8", "number of keys", bounds=(1, 1000)),)
    calls: ClassVar[Mapping[str, Call]] = {
        "get": Call("get", _get, is_read=True),
        "put": gives("put", keyed=True),
        "append": gives("concat", keyed=True),
    }
    check_names = ("linearizable",)

    def generator(self) -> Generator:
        return _Load(self.keys)

    def final_generator(self) -> Generator:
        """Every thread reads every key."""
        return EachThread(ReadEachKey(self.keys, "get"))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        recorded = History.of(history)
        found = linearizable(recorded, KeyValue(), context)
        return {"linearizable": unless_registers_unread(found, recorded, f="get")}
