"""Workload `mini-txn`: `transact(micro_operations)` of one or two registers, each read before it is written.

A transaction that reads a register before it writes it shows which value it replaced. So the reads show in which order
the values of each register were written, and a history of any length is proven to be serializable, or what snapshot
isolation allows, or not: `rw-register` may leave that open. Only a write of unknown outcome that somebody read leaves a
gap. After Wei et al., "Boosting end-to-end database isolation checking via mini-transactions" (2025). The steps are
those of `rw-register`: the result of `[["r", 7, None], ["w", 7, 2], ["r", 8, None]]` is
`[["r", 7, 1], ["w", 7, 2], ["r", 8, 5]]`.
"""

from __future__ import annotations

from typing import Any

from harness.generator import Context, Generator, Op, Step
from harness.workloads.list_append import KEYS, WRITES_PER_KEY
from harness.workloads.rw_register import RwRegisterWorkload
from harness.workloads.transacting import ISOLATION, Transactions

__all__ = ["MiniTxnWorkload"]


class MiniTxnWorkload(RwRegisterWorkload):
    """Transactions of one or two registers."""

    name = "mini-txn"
    description = (
        "Transactions that read one or two registers and write some of them: whether an isolation level holds."
    )
    settings = (KEYS, WRITES_PER_KEY, ISOLATION)

    def _transactions(self) -> Transactions:
        return _MiniTransactions(
            write=self.write, keys=self.keys, max_length=4, writes_per_key=self.number("writes_per_key")
        )


class _MiniTransactions(Transactions):
    """Transactions that read one or two keys and write each with a chance of one half, at once or after both reads."""

    __slots__ = ()

    def next(self, context: Context) -> tuple[Step, Generator]:
        rng = context.random
        keys = rng.sample(self.active, min(rng.randint(1, 2), len(self.active)))
        reads: list[list[Any]] = [["r", key, None] for key in keys]
        writes: list[list[Any]] = []
        for key in keys:
            if rng.random() < 0.5:
                writes.append([self._write, key, self.next_value])
                self.next_value += 1
        for _, key, _ in writes:
            self._count(key)
        if rng.random() < 0.5:
            return Op("txn", None, [*reads, *writes]), self
        return Op("txn", None, [step for key in keys for step in [*reads, *writes] if step[1] == key]), self
