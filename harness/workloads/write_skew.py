"""Workload `write-skew`: `insert_if_absent(key, table, row)` and `rows(key)`.

`insert_if_absent` is one transaction of two steps. It checks with a predicate read whether either of two tables has a
row of the key; if not, it inserts its own row into table 0 or 1 and returns True, else it returns False. `rows` returns
the rows of a key in both tables, as one transaction.

Several clients try every key at the same moment, each with its own row, alternating between the tables. Whichever
commits first, the others must see its row: a key gets at most one row if transactions are serializable. Under snapshot
isolation each may read before there is a row, and no two write the same row: write skew, the anomaly G2 of Adya's
thesis, as Jepsen's G2 test provokes it.

The isolation level of a database's transactions is a setting of its system (`--set isolation=serializable`).

An insert that found a row is recorded as failed. Its value is `[row, null]` or `[null, row]`, by table. At the end the
keys with an insert of unknown outcome are read, and the last keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from checker import check_write_skew
from harness.generator import Context, Generator, Op, Step, Unpaced, Wait
from harness.systems.base import CheckOutcome, Setting
from harness.workloads.base import CheckContext
from harness.workloads.capability import Call, CapabilityWorkload, ClientMistake, is_whole_number
from harness.workloads.checks import judged
from harness.workloads.final_reads import unless_left_unanswered
from harness.workloads.queues import MAX_FINAL_ATTEMPTS, RETRY_NS

__all__ = ["TABLES", "WriteSkewWorkload"]

TABLES = 2
"""Tables in which a key may have a row."""

LAST_KEYS = 20
"""Number of last keys, which a crash would lose first, that are always read at the end."""


class _RowThere(Exception):
    """The key already has a row."""

    is_definite = True


async def _insert(client: Any, value: Any, key: Any) -> Any:
    table = next(number for number, row in enumerate(value) if row is not None)
    done = await client.insert_if_absent(key, table, value[table])
    if done is False:
        raise _RowThere("the key has a row")
    if done is not True:
        raise ClientMistake(
            f"insert_if_absent returned {done!r:.80}: it must return True (inserted) or False (the key has a row)"
        )
    return value


async def _read(client: Any, value: Any, key: Any) -> Any:
    rows = await client.rows(key)
    if not isinstance(rows, (list, tuple)) or not all(map(is_whole_number, rows)):
        raise ClientMistake(f"rows returned {rows!r:.80}: it must be a list of the rows that were inserted")
    return list(rows)


class _Load(Unpaced):
    """`attempts` inserts of each key, all due at once; key and row numbers increase."""

    __slots__ = ("_attempts", "next_key", "next_row", "open_keys")

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self.next_key = 0
        self.next_row = 0
        self.open_keys: dict[int, None] = {}
        """Keys with an insert of unknown outcome."""

    def next(self, context: Context) -> tuple[Step, Generator]:
        row, turn = self.next_row, self.next_row % self._attempts
        if turn == 0 and row:
            self.next_key += 1
        self.next_row += 1
        value = [row if table == turn % TABLES else None for table in range(TABLES)]
        return Op("insert", self.next_key, value, with_next=turn < self._attempts - 1), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        if event["type"] == "info":
            self.open_keys[event["key"]] = None
        return self


class _FinalReads(Unpaced):
    """One answered read of every key with an insert of unknown outcome, and of the last keys."""

    __slots__ = ("_load", "_tries", "_waiting")

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._waiting: deque[tuple[int, int]] | None = None
        """(due time, key)"""
        self._tries: dict[int, int] = {}

    def next(self, context: Context) -> tuple[Step, Generator]:
        if self._waiting is None:
            last = self._load.next_key + bool(self._load.next_row)
            keys = dict.fromkeys((*self._load.open_keys, *range(max(0, last - LAST_KEYS), last)))
            self._waiting = deque((0, key) for key in keys)
        if not self._waiting:
            return None, self  # an unanswered key is put back before its thread asks again
        due_ns, key = self._waiting[0]
        if context.time_ns < due_ns:
            return Wait(due_ns), self
        self._waiting.popleft()
        self._tries[key] = self._tries.get(key, 0) + 1
        return Op("read", key), self

    def update(self, context: Context, event: Mapping[str, Any]) -> Generator:
        key = event["key"]
        if event["type"] in ("fail", "info") and self._waiting is not None and self._tries[key] < MAX_FINAL_ATTEMPTS:
            self._waiting.append((context.time_ns + RETRY_NS, key))
        return self


class WriteSkewWorkload(CapabilityWorkload):
    """`attempts` inserts of each key at the same moment, of which at most one may succeed."""

    name = "write-skew"
    description = "Transactions that each insert a row if there is none yet: no two for a key both commit."
    capabilities = ("insert_if_absent", "rows")
    settings = (Setting("attempts", "2", "concurrent inserts of a key, each by a different client", bounds=(2, 16)),)
    calls: ClassVar[Mapping[str, Call]] = {
        "insert": Call("insert_if_absent", _insert),
        "read": Call("rows", _read, is_read=True),
    }
    check_names = ("write-skew",)

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings)
        self._load = _Load(self.number("attempts"))

    def generator(self) -> Generator:
        return self._load

    def final_generator(self) -> Generator:
        """Reads of the keys with an insert of unknown outcome, and of the last keys."""
        return _FinalReads(self._load)

    def check(self, history: Sequence[Mapping[str, Any]], context: CheckContext) -> Mapping[str, CheckOutcome]:
        # The load reads nothing.
        reads = [(event["key"], event["type"] == "ok") for event in history if event["f"] == "read"]
        found = judged(check_write_skew, history, context)
        return {"write-skew": unless_left_unanswered(found, reads, "key")}
