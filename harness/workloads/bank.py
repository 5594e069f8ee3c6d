"""Workload `bank`: `transact(micro_operations)` of transfers between accounts.

Every account starts at 0. A transfer is one transaction that moves an amount between two accounts, `[["add", 1, -5],
["add", 4, 5]]`; a read is one transaction that reads all accounts, `[["r", 0, None], ["r", 1, None], ...]`, in which
None counts as 0. The balances of one read must add up to 0. `["add", key, amount]` adds to the number that the key
holds; balances may be negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from checker import check_bank
from harness.generator import Calls, Context, Generator, Mix, Op
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake, is_whole_number
from harness.workloads.checks import judged
from harness.workloads.final_reads import one_good_read_each
from harness.workloads.transacting import completed

__all__ = ["BankWorkload"]


async def _transfer(client: Any, value: Any, key: Any) -> Any:
    steps = [["add", value["from"], -value["amount"]], ["add", value["to"], value["amount"]]]
    completed(steps, await client.transact([list(step) for step in steps]))
    return value


async def _read(client: Any, value: Any, key: Any) -> Any:
    steps = [["r", account, None] for account in value]
    balances = []
    for _, account, balance in completed(steps, await client.transact(steps)):
        if balance is not None and not is_whole_number(balance):
            raise ClientMistake(f"transact read {balance!r:.80} of an account: it must be a whole number or None")
        balances.append([account, balance or 0])
    return balances


class BankWorkload(CapabilityWorkload):
    """Transfers between `accounts` accounts, and reads of all of them."""

    name = "bank"
    description = "Transfers between accounts: no money appears or disappears."
    capabilities = ("transact",)
    settings = (
        Setting("accounts", "8", "number of accounts", bounds=(2, 1000)),
        Setting("max_amount", "5", "largest amount of a transfer", bounds=(1, 1_000_000)),
    )
    calls: ClassVar[Mapping[str, Call]] = {
        "transfer": Call("transact", _transfer),
        "read": Call("transact", _read, is_read=True),
    }
    check_names = ("bank",)

    @property
    def _read_all(self) -> Op:
        return Op("read", None, list(range(self.number("accounts"))))

    def generator(self) -> Generator:
        accounts, max_amount, read = self.number("accounts"), self.number("max_amount"), self._read_all

        def transfer(context: Context) -> Op:
            source, target = context.random.sample(range(accounts), 2)
            return Op("transfer", None, {"from": source, "to": target, "amount": context.random.randint(1, max_amount)})

        return Mix(((1.0, Calls(transfer)), (1.0, Calls(lambda _: read))))

    def final_generator(self) -> Generator:
        """Every thread reads once."""
        return one_good_read_each(self._read_all)

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        return {"bank": judged(check_bank, history, context, total=0, allow_negative=True)}
