"""Workload `counter`: `increment(by)` and `value()`, one counter that starts at 0.

Every value read must lie between the sum of the increments acknowledged before the read began and the sum of all
increments invoked before it ended (`counter-bounds`). With `check=linearizable` one order of all operations must also
explain every value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from checker import Counter, check_counter
from harness.generator import Calls, Context, Generator, Mix, Op
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake, gives, is_whole_number
from harness.workloads.checks import judged, linearizable
from harness.workloads.final_reads import one_good_read_each

__all__ = ["VALUE", "CounterWorkload"]


async def _value(client: Any, value: Any, key: Any) -> Any:
    found = await client.value()
    if not is_whole_number(found):
        raise ClientMistake(f"value returned {found!r:.80}: it must return a whole number")
    return found


VALUE = Call("value", _value, is_read=True)


class CounterWorkload(CapabilityWorkload):
    """Increments by 1 to 5, and reads."""

    name = "counter"
    description = "One counter: no increment is lost or counted twice."
    capabilities = ("increment", "value")
    settings = (Setting("check", "bounds", "what the values read must satisfy", ("bounds", "linearizable")),)
    calls: ClassVar[Mapping[str, Call]] = {
        "add": gives("increment"),
        "read": VALUE,
    }
    check_names = ("counter-bounds", "linearizable")

    def generator(self) -> Generator:
        def add(context: Context) -> Op:
            return Op("add", None, context.random.randint(1, 5))

        return Mix(((1.0, Calls(add)), (1.0, Calls(lambda _: Op("read")))))

    def final_generator(self) -> Generator:
        """Every thread reads once."""
        return one_good_read_each(Op("read"))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        found = {"counter-bounds": judged(check_counter, history, context)}
        if self.text("check") == "linearizable":
            found["linearizable"] = linearizable(history, Counter(), context)
        return found
