"""Workload `long-fork`: `transact(micro_operations)` of single writes, and of reads of a whole group of keys.

Every key of a group is written once. If each of two reads of the group sees a write that the other misses, they saw the
writes in opposite orders: a long fork, which parallel snapshot isolation allows and snapshot isolation does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from checker import check_long_fork
from harness.generator import Context, Generator, IgnoresEvents, Op, Step
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload
from harness.workloads.checks import judged
from harness.workloads.transacting import TRANSACT

__all__ = ["LongForkWorkload"]

READS_PER_KEY = 4
"""Number of reads of a group per key, before the next group."""


@dataclass(frozen=True, slots=True)
class _Groups(IgnoresEvents):
    """One group of keys after the other."""

    size: int
    group: int = 0
    unwritten: tuple[int, ...] | None = None
    reads: int = 0

    def next(self, context: Context) -> tuple[Step, Generator]:
        first = self.group * self.size
        keys = range(first, first + self.size)
        rng = context.random
        if self.unwritten is None:
            return _Groups(self.size, self.group, tuple(rng.sample(keys, self.size))).next(context)
        if self.unwritten and rng.random() < 1 / (1 + READS_PER_KEY):
            return Op("txn", None, [["w", self.unwritten[0], 1]]), _Groups(
                self.size, self.group, self.unwritten[1:], self.reads
            )
        is_over = not self.unwritten and self.reads >= READS_PER_KEY * self.size
        after = (
            _Groups(self.size, self.group + 1)
            if is_over
            else _Groups(self.size, self.group, self.unwritten, self.reads + 1)
        )
        return Op("txn", None, [["r", key, None] for key in rng.sample(keys, self.size)]), after


class LongForkWorkload(CapabilityWorkload):
    """Writes of the keys of a group, each once, concurrent with reads of the whole group."""

    name = "long-fork"
    description = "Transactions: no two reads see two writes in opposite orders."
    capabilities = ("transact",)
    settings = (Setting("group_size", "3", "number of keys that are read together", bounds=(2, 100)),)
    calls: ClassVar[Mapping[str, Call]] = {"txn": TRANSACT}
    check_names = ("long-fork",)

    def generator(self) -> Generator:
        return _Groups(self.number("group_size"))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        return {"long-fork": judged(check_long_fork, history, context)}
