"""Workload `versioned-register`: `read_version(key)` and `write_version(key, value)`.

Every key is a register whose writes are counted: the first write creates version 1. `read_version` returns `[version,
value]`, or None for a key that was never written; `write_version` returns the version that it created, or None if the
system does not report it. Versions fix the order of all writes, so there is little to search.

With `check=linearizable` one order must explain every result. With `check=sessions` only the session guarantees of
Terry et al. (1994) must hold: a client keeps seeing its own writes and what it has read. A store with stale reads may
promise these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from checker import History, VersionedRegister, check_sessions
from harness.generator import Calls, EachThread, Generator, Mix
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake, is_whole_number, number_from
from harness.workloads.checks import judged, linearizable
from harness.workloads.client_register import RandomReads
from harness.workloads.final_reads import ReadEachKey, unless_registers_unread
from harness.workloads.queues import distinct_writes

__all__ = ["VersionedRegisterWorkload"]


async def _read_version(client: Any, value: Any, key: Any) -> Any:
    found = await client.read_version(key)
    if found is None:
        return [0, None]
    if not isinstance(found, (list, tuple)) or len(found) != 2 or not is_whole_number(found[0], least=1):
        raise ClientMistake(f"read_version returned {found!r:.80}: it must return [version, value], from 1 on, or None")
    return [found[0], number_from("read_version", found[1])]


async def _write_version(client: Any, value: Any, key: Any) -> Any:
    version = await client.write_version(key, value)
    if version is not None and not is_whole_number(version, least=1):
        raise ClientMistake(f"write_version returned {version!r:.80}: it must return the version, from 1 on, or None")
    return version


class VersionedRegisterWorkload(CapabilityWorkload):
    """Half writes, half reads, over `keys` registers."""

    name = "versioned-register"
    description = "Registers that count their writes: linearizable, or with session guarantees."
    capabilities = ("read_version", "write_version")
    settings = (
        Setting("keys", "8", "number of registers", bounds=(1, 1000)),
        Setting("check", "linearizable", "what the versions seen must satisfy", ("linearizable", "sessions")),
    )
    calls: ClassVar[Mapping[str, Call]] = {
        "read": Call("read_version", _read_version, is_read=True),
        "write": Call("write_version", _write_version),
    }
    check_names = ("linearizable", "sessions")

    def generator(self) -> Generator:
        return Mix(((1.0, distinct_writes("write", self.keys)), (1.0, Calls(RandomReads(self.keys)))))

    def final_generator(self) -> Generator:
        """Every thread reads every key."""
        return EachThread(ReadEachKey(self.keys))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        recorded = History.of(history)
        if self.text("check") == "sessions":
            return {"sessions": unless_registers_unread(judged(check_sessions, recorded, context), recorded)}
        found = linearizable(recorded, VersionedRegister(), context)
        return {"linearizable": unless_registers_unread(found, recorded)}
