"""Shared by the transaction workloads: the call, rotating keys, distinct values.

`transact(micro_operations)` performs a list of steps as one transaction and returns the list with the reads filled in:

    ["r", key, None]       read: in the result None is replaced by the value, if the key has one
    ["w", key, value]      write
    ["append", key, value] append to the list that the key holds
    ["add", key, amount]   add to the number that the key holds, initially 0 (bank)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from harness.generator import Context, Generator, IgnoresEvents, Op, Step, Unpaced, Wait
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.capability import Call, ClientMistake, number_from, numbers_from
from harness.workloads.final_reads import unless_left
from harness.workloads.queues import MAX_FINAL_ATTEMPTS, RETRY_NS

__all__ = [
    "ISOLATION",
    "TRANSACT",
    "TRANSACT_LISTS",
    "FinalTransactions",
    "Transactions",
    "completed",
    "unless_keys_unread",
]

FINAL_KEYS = 8
"""Keys that a final transaction reads."""

ISOLATION = Setting(
    "isolation", "strict-serializable", "isolation level that must hold",
    (
        "read-uncommitted", "read-committed", "read-atomic", "causal", "snapshot-isolation",
        "strong-session-snapshot-isolation", "strong-snapshot-isolation", "serializable",
        "strong-session-serializable", "strict-serializable",
    ),
)  # fmt: skip


async def _transact(client: Any, value: Any, key: Any) -> Any:
    done = completed(value, await client.transact([list(step) for step in value]))
    for f, _, found in done:
        if f == "r":
            number_from("transact", found)
    return done


async def _transact_lists(client: Any, value: Any, key: Any) -> Any:
    done = completed(value, await client.transact([list(step) for step in value]))
    for f, at, found in done:
        if f == "r" and found is not None:
            if not isinstance(found, (list, tuple)):
                due = "it must be the list that the key holds, or None"
                raise ClientMistake(f"transact returned {found!r:.80} as the value of {at!r}: {due}")
            numbers_from("transact", found)
    return done


def completed(asked: Any, answered: Any) -> list[list[Any]]:
    """The steps with the answered reads. Raises ClientMistake if the answer does not match the requested steps."""
    if not isinstance(answered, (list, tuple)) or len(answered) != len(asked):
        raise ClientMistake(f"transact returned {answered!r:.80}: it must return the {len(asked)} steps it was given")
    done = []
    for step, answer in zip(asked, answered, strict=True):
        if not isinstance(answer, (list, tuple)) or len(answer) != 3 or [*answer[:2]] != [*step[:2]]:
            raise ClientMistake(f"transact returned the step {answer!r:.80} for {step!r:.80}")
        done.append(list(answer) if step[0] == "r" else list(step))
    return done


def _only_reads(steps: Any) -> bool:
    return all(step[0] == "r" for step in steps)


TRANSACT = Call("transact", _transact, is_read=_only_reads)
"""For keys that each hold an integer."""

TRANSACT_LISTS = Call("transact", _transact_lists, is_read=_only_reads)
"""For keys that each hold a list of integers."""


class Transactions(IgnoresEvents):
    """Transactions of 1 to `max_length` steps on `keys` keys at a time, half of the steps reads; a key is replaced by a
    new one after `writes_per_key` writes."""

    __slots__ = ("_keys", "_max_length", "_write", "_writes_per_key", "active", "counts", "next_key", "next_value")

    def __init__(self, *, write: str, keys: int, max_length: int, writes_per_key: int) -> None:
        self._write = write
        self._keys = keys
        self._max_length = max_length
        self._writes_per_key = writes_per_key
        self.active = list(range(keys))
        self.counts = dict.fromkeys(self.active, 0)
        self.next_key = keys
        self.next_value = 1

    def next(self, context: Context) -> tuple[Step, Generator]:
        rng = context.random
        steps: list[list[Any]] = []
        for _ in range(rng.randint(1, self._max_length)):
            key = self.active[rng.randrange(self._keys)]
            if rng.random() < 0.5:
                steps.append(["r", key, None])
                continue
            steps.append([self._write, key, self.next_value])
            self.next_value += 1
            self._count(key)
        return Op("txn", None, steps), self

    def _count(self, key: int) -> None:
        self.counts[key] += 1
        if self.counts[key] >= self._writes_per_key:
            del self.counts[key]
            self.active[self.active.index(key)] = self.next_key
            self.counts[self.next_key] = 0
            self.next_key += 1


class FinalTransactions(Unpaced):
    """Reads of every key ever in use, `FINAL_KEYS` at a time; an unanswered read is repeated, `MAX_FINAL_ATTEMPTS`
    attempts in all."""

    __slots__ = ("_load", "_tries", "_waiting")

    def __init__(self, load: Transactions) -> None:
        self._load = load
        self._waiting: deque[tuple[int, int]] | None = None
        """(due time, first key)"""
        self._tries: Counter[int] = Counter()

    def next(self, context: Context) -> tuple[Step, Generator]:
        if self._waiting is None:
            self._waiting = deque((0, first) for first in range(0, self._load.next_key, FINAL_KEYS))
        if not self._waiting:
            return None, self  # an unanswered transaction is put back before its thread asks again
        due_ns, first = self._waiting[0]
        if context.time_ns < due_ns:
            return Wait(due_ns), self
        self._waiting.popleft()
        self._tries[first] += 1
        keys = range(first, min(first + FINAL_KEYS, self._load.next_key))
        return Op("txn", None, [["r", key, None] for key in keys]), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] in ("fail", "info") and self._waiting is not None:
            first = event["value"][0][1]
            if self._tries[first] < MAX_FINAL_ATTEMPTS:
                self._waiting.append((context.time_ns + RETRY_NS, first))
        return self


def unless_keys_unread(outcome: CheckOutcome, history: Sequence[Mapping[str, Any]]) -> CheckOutcome:
    """`outcome`, or "unknown" if it is valid although some key with an acknowledged write was not read afterwards, or
    its last read was not answered."""
    invoked: dict[Any, int] = {}
    written: dict[Any, int] = {}
    is_unread: dict[Any, bool] = {}
    for at, event in enumerate(history):
        if event["type"] == "invoke":
            invoked[event["process"]] = at
            continue
        writes = {key for f, key, _ in event["value"] if f != "r"}
        reads = {key for f, key, _ in event["value"] if f == "r"} - writes
        if event["type"] == "ok":
            written |= dict.fromkeys(writes, at)
            is_unread |= dict.fromkeys(writes, True)
            began = invoked.get(event["process"], -1)
            is_unread |= {key: False for key in reads if began > written.get(key, -1)}
        elif not writes:
            is_unread |= dict.fromkeys(reads, True)
    left = [key for key in written if is_unread[key]]
    return unless_left(outcome, left, "{count} written keys ({}) could not be read")
