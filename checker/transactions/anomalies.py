"""The transactions of a history, and the record of anomalies found in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from checker.history import FAIL, INFO, OK, History
from checker.values import exact
from checker.words import named_row, short

__all__ = ["MAX_EXAMPLES", "Anomalies", "Step", "Transactions", "described"]

Step = tuple[str, Any, Any]

#: Examples kept of every kind of anomaly; counts are exact.
MAX_EXAMPLES = 5


class Anomalies:
    """Counts and first examples (rows and a sentence) by kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, list[tuple[tuple[int, ...], str]]] = {}

    def add(self, kind: str, rows: Sequence[int], text: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append((tuple(dict.fromkeys(rows)), text))


#: Types of values that Python compares, or hashes, differently from JSON.
_UNLIKE_JSON = frozenset({bool, list, tuple, dict, set, frozenset})


class Transactions:
    """The transactions of a history: committed ones in full, others for what they may have left behind.

    ``steps`` holds one list per row: ``(write | r, key, value)``, where ``write`` is ``append`` or ``w`` and keys and
    values are as :func:`checker.values.exact` makes them.  A committed transaction without a result did what was asked,
    and what it read is unknown.  ``altered`` describes the first one that answered with other writes than it was asked
    for, if any did: what became of the requested ones is then unknown.  Raises ValueError for other steps, and for
    reads of lists that do not show a list.
    """

    def __init__(self, history: History, write: str) -> None:
        self.history = history
        self.write = write
        self.steps: list[list[Step]] = []
        self.status = history.status
        self.altered: str | None = None
        lists: list[list[Any]] = []
        for row, (status, asked, done) in enumerate(zip(history.status, history.value, history.result, strict=True)):
            steps = _steps(done if status == OK and done is not None else asked or (), write, row, lists)
            if status == OK and done is None:
                steps = [step for step in steps if step[0] != "r"]
            elif status == OK and asked and self.altered is None and not _has_writes_of(steps, asked):
                self.altered = f"{named_row(history, row)} returned other writes than it was invoked with"
            self.steps.append(steps)
        if not _UNLIKE_JSON.isdisjoint(map(type, chain.from_iterable(lists))):
            self.steps = [
                [(f, key, list(map(exact, value)) if f == "r" and value else value) for f, key, value in steps]
                for steps in self.steps
            ]
        self.committed = [row for row, status in enumerate(history.status) if status == OK]
        self.failed = [row for row, status in enumerate(history.status) if status == FAIL]
        self.unknown = [row for row, status in enumerate(history.status) if status == INFO]

    def writes(self, rows: Iterable[int]) -> Iterator[tuple[int, Any, Any]]:
        """The row, key and value of every write of those transactions."""
        for row in rows:
            for f, key, value in self.steps[row]:
                if f == self.write:
                    yield row, key, value

    def failed_writes(self) -> dict[tuple[Any, Any], int]:
        """The failed transaction that wrote each version (key and value); none of these may be seen."""
        return {(key, value): row for row, key, value in self.writes(self.failed)}

    def keys_written_twice(self, found: Anomalies) -> set[Any]:
        """Keys to which a value was written twice: which of the two writes a read shows is unknown."""
        verb, kind = ("appended", "duplicate-append") if self.write == "append" else ("written", "duplicate-write")
        writer: dict[tuple[Any, Any], int] = {}
        keys = set()
        for row, key, value in self.writes((*self.unknown, *self.committed)):
            if (key, value) in writer:
                text = f"{short(value)} is {verb} twice to {short(key)}: reads of it do not show which write they saw"
                found.add(kind, (writer[key, value], row), text)
                keys.add(key)
            writer[key, value] = row
        return keys

    def leave_out(self, keys: Collection[Any]) -> None:
        """Forget every step on those keys: the rest must hold on its own at every level."""
        self.steps = [[step for step in steps if step[1] not in keys] for steps in self.steps]


_NAMES = {"r": "r", "read": "r", "w": "w", "write": "w", "append": "append"}


def _steps(steps: Any, write: str, row: int, lists: list[list[Any]]) -> list[Step]:
    """The steps of one transaction, checked, with values that compare as JSON's do.

    Adds the lists that were read to ``lists``, with their elements unchanged.
    """
    out: list[Step] = []
    unlike = _UNLIKE_JSON
    for step in steps:
        try:
            f, key, value = step
            name = _NAMES.get(f)
        except (TypeError, ValueError):
            raise ValueError(f"a step of a transaction is [f, key, value], not {short(step)} (T{row})") from None
        if key.__class__ in unlike:
            key = exact(key)
        if name == "r":
            if write == "append" and value is not None:
                if value.__class__ is not list:
                    if not isinstance(value, (list, tuple)):
                        raise ValueError(f"a read of a list must show a list, not {short(value)}")
                    value = list(value)
                lists.append(value)
            elif value.__class__ in unlike:
                value = exact(value)
        elif name != write:
            raise ValueError(f"a step of a transaction must be {write} or r here, not {f!r}")
        elif value.__class__ in unlike:
            value = exact(value)
        out.append((name, key, value))
    return out


def _has_writes_of(steps: Sequence[Step], asked: Any) -> bool:
    """Whether the writes among ``steps`` are those that the transaction was asked for, in the same order."""
    writes = iter([step for step in steps if step[0] != "r"])
    unlike = _UNLIKE_JSON
    for f, key, value in asked:
        name = _NAMES.get(f)
        if name == "r":
            continue
        if key.__class__ in unlike or value.__class__ in unlike:
            key, value = exact(key), exact(value)
        if next(writes, None) != (name, key, value):
            return False
    return next(writes, None) is None


def described(transactions: Transactions, row: int) -> str:
    """A transaction in a few words."""
    steps = transactions.steps[row]
    shown = ", ".join(
        f"{'read' if f == 'r' else f} {short(key, 20)}{'' if f == 'append' else ' ='} {short(value, 40)}"
        for f, key, value in steps[:6]
    )
    more = f", and {len(steps) - 6} more" if len(steps) > 6 else ""
    return f"T{row} of process {transactions.history.process[row]} ({shown}{more})"
