"""Workload `unique-ids`: `generate()` returns an id that was never returned before to any client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from checker import check_unique_ids
from harness.generator import Calls, Generator, Op
from harness.systems.base import CheckOutcome
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake
from harness.workloads.checks import judged

__all__ = ["UniqueIdsWorkload"]


async def _generate(client: Any, value: Any, key: Any) -> Any:
    found = await client.generate()
    if found is None:
        raise ClientMistake("generate returned None: it must return an id")
    return found


class UniqueIdsWorkload(CapabilityWorkload):
    """Generates ids as fast as the load allows."""

    name = "unique-ids"
    description = "Ids: all are unique."
    capabilities = ("generate",)
    calls: ClassVar[Mapping[str, Call]] = {"generate": Call("generate", _generate)}
    check_names = ("unique-ids",)

    def generator(self) -> Generator:
        return Calls(lambda _: Op("generate"))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        return {"unique-ids": judged(check_unique_ids, history, context)}
