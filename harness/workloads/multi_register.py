"""Workload `multi-register`: `transact(micro_operations)` on a few registers, checked as a single object.

Every transaction reads or writes some of the registers, each at most once; no value is written twice. One order of all
transactions must explain every read: strict serializability, decided by searching for that order rather than by
dependencies. See the module `transacting` for the format of a transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from checker import MultiRegister
from harness.generator import Context, Generator, IgnoresEvents, Op
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload
from harness.workloads.checks import linearizable
from harness.workloads.final_reads import one_good_read_each
from harness.workloads.transacting import TRANSACT

__all__ = ["MultiRegisterWorkload"]


@dataclass(frozen=True, slots=True)
class _Load(IgnoresEvents):
    """Transactions, half of them read-only."""

    registers: int
    next_value: int = 1

    def next(self, context: Context) -> tuple[Op, Generator]:
        rng, value = context.random, self.next_value
        only_reads = rng.random() < 0.5
        steps: list[list[Any]] = []
        for register in rng.sample(range(self.registers), rng.randint(1, self.registers)):
            if only_reads or rng.random() < 0.5:
                steps.append(["r", register, None])
            else:
                steps.append(["w", register, value])
                value += 1
        return Op("txn", None, steps), _Load(self.registers, value)


class MultiRegisterWorkload(CapabilityWorkload):
    """Transactions over `registers` registers."""

    name = "multi-register"
    description = "Registers that are read and written together in transactions."
    capabilities = ("transact",)
    settings = (Setting("registers", "3", "number of registers", bounds=(1, 10)),)
    calls: ClassVar[Mapping[str, Call]] = {"txn": TRANSACT}
    check_names = ("linearizable",)

    def generator(self) -> Generator:
        return _Load(self.number("registers"))

    def final_generator(self) -> Generator:
        """Every thread reads all registers once."""
        return one_good_read_each(Op("txn", None, [["r", each, None] for each in range(self.number("registers"))]))

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        return {"linearizable": linearizable(history, MultiRegister(), context)}
