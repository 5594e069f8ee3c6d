"""Workload `stack`: `push(value)` and `pop()`, one stack that starts empty.

`pop` removes and returns the most recently pushed value, or returns None if the stack is empty. All values are
distinct. One order of all operations must explain every result. At the end every thread pops until nothing came for
`drain_s` seconds, so that lost values are noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from checker import Stack
from harness.generator import Calls, EachThread, Generator, Mix, Op
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, gives, takes
from harness.workloads.checks import linearizable
from harness.workloads.draining import TakeUntilQuiet, unless_left_inside
from harness.workloads.queues import message_numbers

__all__ = ["DRAIN_SETTING", "StackWorkload"]

DRAIN_SETTING = Setting(
    "drain_s", "1", "seconds without a value until nothing is considered left at the end", bounds=(1, 60)
)


class StackWorkload(CapabilityWorkload):
    """As many pushes as pops."""

    name = "stack"
    description = "One stack: last in, first out."
    capabilities = ("push", "pop")
    settings = (DRAIN_SETTING,)
    calls: ClassVar[Mapping[str, Call]] = {"push": gives("push"), "pop": takes("pop", numbers=True)}
    check_names = ("linearizable",)

    def generator(self) -> Generator:
        return Mix(((1.0, message_numbers("push")), (1.0, Calls(lambda _: Op("pop")))))

    def final_generator(self) -> Generator:
        """Every thread pops until the stack is empty."""
        return EachThread(TakeUntilQuiet("pop", self.number("drain_s")))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        found = linearizable(history, Stack(), context)
        return {"linearizable": unless_left_inside(found, history, put="push", taken="pop")}
