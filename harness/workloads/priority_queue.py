"""Workload `priority-queue`: `insert(value)` and `extract()`, one queue of numbers that starts empty.

`extract` removes the smallest number (with `first=largest` the largest) and returns it, or None if the queue is empty.
All numbers are distinct. One order of all operations must explain every result. At the end every thread extracts until
nothing came for `drain_s` seconds, so that lost numbers are noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from checker import PriorityQueue
from harness.generator import Calls, Context, EachThread, Generator, Mix, Op
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, gives, takes
from harness.workloads.checks import linearizable
from harness.workloads.draining import TakeUntilQuiet, unless_left_inside
from harness.workloads.queues import Numbered
from harness.workloads.stack import DRAIN_SETTING

__all__ = ["PriorityQueueWorkload"]

PRIORITIES = 1_000
"""Number of priorities: enough that few concurrent operations have the same one."""

OPERATIONS = 1_000_000_000
"""More inserts than any run makes: keeps numbers of one priority distinct."""


def _numbered_insert(context: Context, number: int) -> Op:
    return Op("insert", None, context.random.randrange(PRIORITIES) * OPERATIONS + number)


class PriorityQueueWorkload(CapabilityWorkload):
    """As many inserts as extracts."""

    name = "priority-queue"
    description = "One priority queue: the most urgent value comes out first."
    capabilities = ("insert", "extract")
    settings = (
        Setting("first", "smallest", "which value is the most urgent", ("smallest", "largest")),
        DRAIN_SETTING,
    )
    calls: ClassVar[Mapping[str, Call]] = {"insert": gives("insert"), "extract": takes("extract", numbers=True)}
    check_names = ("linearizable",)

    def generator(self) -> Generator:
        return Mix(((1.0, Numbered(_numbered_insert)), (1.0, Calls(lambda _: Op("extract")))))

    def final_generator(self) -> Generator:
        """Every thread extracts until the queue is empty."""
        return EachThread(TakeUntilQuiet("extract", self.number("drain_s")))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        model = PriorityQueue(largest_first=self.text("first") == "largest")
        found = linearizable(history, model, context)
        return {"linearizable": unless_left_inside(found, history, put="insert", taken="extract")}
