"""Workload `rw-register`: `transact(micro_operations)` of writes and reads of registers.

Like `list-append`, for systems without lists; a read returns one value, so less of the order of writes is known. Every
written value is new. The result of `[["w", 7, 1], ["r", 8, None]]` is `[["w", 7, 1], ["r", 8, 5]]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from harness.workloads.capability import Call
from harness.workloads.list_append import ListAppendWorkload
from harness.workloads.transacting import TRANSACT

__all__ = ["RwRegisterWorkload"]


class RwRegisterWorkload(ListAppendWorkload):
    """Transactions of writes and reads."""

    name = "rw-register"
    description = "Transactions that write and read registers: which isolation level holds."
    calls: ClassVar[Mapping[str, Call]] = {"txn": TRANSACT}
    write = "w"
    model = "rw-register"
