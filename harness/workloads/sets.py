"""Workload `set`: `add(value)` and `members()`, one set of distinct numbers.

Every acknowledged element must be in every later read of all members, up to the last one, and none may be there that
was refused or never added. Reads become rarer as the set grows: operations return at most `elements_per_operation`
elements on average, so that the history stays readable.

With `reads=eventual` an element may be missing from some reads if a later one has it; with `reads=linearizable` it may
not. At the end clients read in turn, for 30 s at most, until all read the same: an element that some host never gets is
lost. `check` selects another checker: `simple-set` checks only the last read, `grow-only-set` searches for one order of
all operations, which takes long for sets of more than a few hundred elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from checker import GrowOnlySet, check_set, check_set_full
from harness.generator import Context, Generator, IgnoresEvents, Op
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake, gives, numbers_from
from harness.workloads.checks import judged, linearizable
from harness.workloads.final_reads import InTurnUntilEqual

__all__ = ["SetWorkload"]

MOST_READS = 0.5
"""Share of reads while the set is small."""


async def _members(client: Any, value: Any, key: Any) -> Any:
    members = await client.members()
    if isinstance(members, (str, bytes, Mapping)) or not isinstance(members, Iterable):
        raise ClientMistake(f"members returned {members!r:.80}: it must return all elements, as a list or a set")
    return numbers_from("members", members)


@dataclass(frozen=True, slots=True)
class _Load(IgnoresEvents):
    """Adds of 0, 1, 2 ..., and reads."""

    elements_per_operation: int
    next_value: int = 0

    def next(self, context: Context) -> tuple[Op, Generator]:
        reads = min(MOST_READS, self.elements_per_operation / max(1, self.next_value))
        if context.random.random() < reads:
            return Op("read"), self
        return Op("add", None, self.next_value), _Load(self.elements_per_operation, self.next_value + 1)


class SetWorkload(CapabilityWorkload):
    """Adds of distinct elements to one set, and reads of all of it."""

    name = "set"
    description = "One set: an added element is never lost."
    capabilities = ("add", "members")
    settings = (
        Setting("elements_per_operation", "50", "maximum number of elements that an operation reads on average",
                bounds=(1, 100_000)),
        Setting("reads", "eventual", "eventual: an element may be missing from a read and appear later",
                ("eventual", "linearizable")),
        Setting("check", "set-full", "check of the reads",
                ("set-full", "simple-set", "grow-only-set")),
    )  # fmt: skip
    calls: ClassVar[Mapping[str, Call]] = {"add": gives("add"), "read": Call("members", _members, is_read=True)}
    check_names = ("set-full", "simple-set", "linearizable")

    def generator(self) -> Generator:
        return _Load(self.number("elements_per_operation"))

    def final_generator(self) -> Generator:
        """Clients read in turn, until all read the same."""
        return InTurnUntilEqual(Op("read"))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        if self.text("check") == "simple-set":
            return {"simple-set": judged(check_set, history, context)}
        if self.text("check") == "grow-only-set":
            return {"linearizable": linearizable(history, GrowOnlySet(), context)}
        is_linearizable = self.text("reads") == "linearizable"
        return {"set-full": judged(check_set_full, history, context, linearizable=is_linearizable)}
