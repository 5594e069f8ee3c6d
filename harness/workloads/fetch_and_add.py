"""Workload `fetch-and-add`: `fetch_add(by)` and `value()`, one number that starts at 0.

`fetch_add` atomically adds to the number and returns its previous value. One order of all operations must explain every
result, so no two additions may return the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from checker import FetchAndAdd
from harness.generator import Calls, Context, Generator, Mix, Op
from harness.systems.base import CheckOutcome
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake, is_whole_number
from harness.workloads.checks import linearizable
from harness.workloads.counter import VALUE
from harness.workloads.final_reads import one_good_read_each

__all__ = ["FetchAndAddWorkload"]


async def _fetch_add(client: Any, value: Any, key: Any) -> Any:
    before = await client.fetch_add(value)
    if not is_whole_number(before):
        raise ClientMistake(f"fetch_add returned {before!r:.80}: it must return what the number was before")
    return before


class FetchAndAddWorkload(CapabilityWorkload):
    """Two additions of 1 to 5 for every read."""

    name = "fetch-and-add"
    description = "One number with an atomic add that returns the previous value."
    capabilities = ("fetch_add", "value")
    calls: ClassVar[Mapping[str, Call]] = {"add": Call("fetch_add", _fetch_add), "read": VALUE}
    check_names = ("linearizable",)

    def generator(self) -> Generator:
        def add(context: Context) -> Op:
            return Op("add", None, context.random.randint(1, 5))

        return Mix(((2.0, Calls(add)), (1.0, Calls(lambda _: Op("read")))))

    def final_generator(self) -> Generator:
        """Every thread reads once."""
        return one_good_read_each(Op("read"))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        return {"linearizable": linearizable(history, FetchAndAdd(), context)}
