"""Workload `list-append`: `transact(micro_operations)` of appends to lists and reads of them.

A read returns a whole list and with it the order of all appends so far, so dependency cycles between transactions are
found as in Elle, and the verdict names the isolation levels that are ruled out. See the module `transacting` for the
format of a transaction: the result of `[["append", 7, 1], ["r", 7, None]]` is `[["append", 7, 1], ["r", 7, [1]]]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from checker import check_transactions
from harness.generator import Generator
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload
from harness.workloads.checks import judged
from harness.workloads.transacting import (
    ISOLATION,
    TRANSACT_LISTS,
    FinalTransactions,
    Transactions,
    unless_keys_unread,
)

__all__ = ["KEYS", "TRANSACTION_SETTINGS", "WRITES_PER_KEY", "ListAppendWorkload"]

KEYS = Setting("keys", "5", "number of keys in use at a time", bounds=(1, 1000))
WRITES_PER_KEY = Setting(
    "writes_per_key", "32", "writes to a key before it is replaced by a new one", bounds=(1, 10_000)
)
TRANSACTION_SETTINGS = (
    KEYS,
    Setting("max_length", "4", "maximum number of steps of a transaction", bounds=(1, 100)),
    WRITES_PER_KEY,
    ISOLATION,
)


class ListAppendWorkload(CapabilityWorkload):
    """Transactions of appends and reads."""

    name = "list-append"
    description = "Transactions that append to lists and read them: which isolation level holds."
    capabilities = ("transact",)
    settings: ClassVar[tuple[Setting, ...]] = TRANSACTION_SETTINGS
    calls: ClassVar[Mapping[str, Call]] = {"txn": TRANSACT_LISTS}
    check_names = ("isolation",)
    write = "append"
    model = "list-append"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings)
        self._load = self._transactions()

    def _transactions(self) -> Transactions:
        return Transactions(
            write=self.write,
            keys=self.keys,
            max_length=self.number("max_length"),
            writes_per_key=self.number("writes_per_key"),
        )

    def generator(self) -> Generator:
        return self._load

    def final_generator(self) -> Generator:
        """Reads of every key."""
        return FinalTransactions(self._load)

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        level = self.text("isolation")
        found = judged(check_transactions, history, context, workload=self.model, level=level)
        return {"isolation": unless_keys_unread(found, history)}
