"""Lists that transactions append to and read: every read shows the whole order of versions so far."""

from __future__ import annotations

from collections import Counter
from itertools import repeat
from typing import Any

from checker.history import OK
from checker.transactions.anomalies import Anomalies, Transactions, described
from checker.transactions.graph import RW, WR, WW, DependencyGraph
from checker.words import short

__all__ = ["build_list_append"]

#: A read: its row, the list it saw, and how many of its elements others had appended.
_Read = tuple[int, list[Any], int]


class _Keys:
    """Per key: who appended what, the longest read, and who read how much of it."""

    def __init__(self) -> None:
        #: By key: who appended each element, first those of unknown outcome.
        self.writers: dict[Any, dict[Any, int]] = {}
        self.failed: dict[tuple[Any, Any], int] = {}
        self.longest: dict[Any, tuple[list[Any], int]] = {}
        self.reads: dict[Any, list[_Read]] = {}
        #: By key: transactions that appended more than one element to it, and the last of those elements.
        self.several: dict[Any, dict[int, Any]] = {}
        #: Reads that contradict their own transaction, or the longest read: row, key and list.
        self.odd: list[tuple[int, Any, list[Any]]] = []
        #: Transactions of unknown outcome of which a longest read shows an element, so that they happened.
        self.seen: set[int] = set()

    def writer(self, key: Any, value: Any) -> int:
        """Who appended an element; -1 if nobody did who may have committed."""
        return self.writers.get(key, _NOBODY).get(value, -1)


_NOBODY: dict[Any, int] = {}


def build_list_append(transactions: Transactions, graph: DependencyGraph, found: Anomalies) -> None:
    """Fill ``graph`` with ww, wr and rw edges, and ``found`` with what single reads contradict."""
    keys = _Keys()
    if not _index(transactions, keys):
        transactions.leave_out(transactions.keys_written_twice(found))
        keys = _Keys()
        _index(transactions, keys)
    for row in transactions.committed:
        _read_steps(transactions, row, keys, found)
    writers = {key: _writers(transactions, keys, key, found) for key in keys.longest}
    for key in keys.several:
        if key in writers:
            order, holder = keys.longest[key]
            _judge_several(transactions, keys, (holder, key, order), found, is_odd=False)
    for key, rows in writers.items():
        _order_of_key(transactions, graph, found, keys, key, rows)
    for read in keys.odd:
        _could_be_once(transactions, keys, read, found)
        _judge_several(transactions, keys, read, found, is_odd=True)


def _index(transactions: Transactions, keys: _Keys) -> bool:
    """Who appended what; ``False`` if one element was appended twice to a key."""
    writers = keys.writers
    keys.failed = transactions.failed_writes()
    known = 0
    for rows in (transactions.unknown, transactions.committed):
        for row in rows:
            for f, key, value in transactions.steps[row]:
                if f == "append":
                    known += 1
                    try:
                        writers[key][value] = row
                    except KeyError:
                        writers[key] = {value: row}
    if sum(map(len, writers.values())) < known:
        return False
    for key, of_key in writers.items():
        if len(set(of_key.values())) < len(of_key):
            times = Counter(of_key.values())
            keys.several[key] = {row: value for value, row in of_key.items() if times[row] > 1}
    return True


def _read_steps(transactions: Transactions, row: int, keys: _Keys, found: Anomalies) -> None:
    """Internal consistency of one transaction, and its external reads."""
    longest, reads = keys.longest, keys.reads
    known: dict[Any, list[Any]] | None = None
    own: dict[Any, list[Any]] | None = None
    for f, key, value in transactions.steps[row]:
        if f == "append":
            if own is None:
                own = {}
            own.setdefault(key, []).append(value)
            if known is not None and key in known:
                if value in known[key]:
                    _saw_no_future(transactions, row, key, [value], found)
                known[key] = [*known[key], value]
            continue
        if value is None:
            value = []
        mine = own.get(key) if own is not None else None
        if mine is not None and value[-len(mine) :] != mine:
            text = f"{described(transactions, row)} does not see its own appends to {short(key)}"
            found.add("internal", (row,), text)
            keys.odd.append((row, key, value))
            continue
        if known is None:
            known = {}
        elif key in known:
            if known[key] == value:
                continue
            text = f"{described(transactions, row)} should have read {short(known[key])} of {short(key)}"
            found.add("non-repeatable-read", (row,), text)
            _saw_no_future(transactions, row, key, [each for each in known[key] if each not in (mine or ())], found)
        known[key] = value
        reads.setdefault(key, []).append((row, value, len(value) if mine is None else len(value) - len(mine)))
        best = longest.get(key)
        if best is None or len(value) > len(best[0]):
            longest[key] = (value, row)


def _saw_no_future(transactions: Transactions, row: int, key: Any, values: list[Any], found: Anomalies) -> None:
    """What a transaction read before it appended it must have been appended by another."""
    for f, each, value in transactions.steps[row]:
        if f == "append" and each == key and value in values:
            text = f"{described(transactions, row)} read {short(value)} of {short(key)} before it appended it"
            found.add("internal", (row,), text)


def _writers(transactions: Transactions, keys: _Keys, key: Any, found: Anomalies) -> list[int]:
    """Who appended each element of the longest read: -1 if nobody did who may have committed."""
    order, holder = keys.longest[key]
    status = transactions.status
    writers = list(map(keys.writers.get(key, _NOBODY).get, order, repeat(-1)))
    if transactions.unknown:
        keys.seen.update(writer for writer in writers if writer >= 0 and status[writer] != OK)
    if -1 in writers or len(set(order)) < len(order):
        _judge_elements(transactions, keys, (holder, key, order), found)
    return writers


def _judge_elements(
    transactions: Transactions, keys: _Keys, read: tuple[int, Any, list[Any]], found: Anomalies
) -> None:
    """Report what a list must not hold: elements of failed transactions, of nobody, or twice."""
    row, key, values = read
    for value in values:
        if keys.writer(key, value) >= 0:
            continue
        source = keys.failed.get((key, value))
        if source is not None:
            text = f"{described(transactions, row)} read {short(value)} of failed {described(transactions, source)}"
            found.add("G1a", (source, row), text)
        else:
            text = f"{described(transactions, row)} read {short(value)} of {short(key)}, which nobody appended"
            found.add("garbage-read", (row,), text)
    if len(set(values)) < len(values):
        found.add("duplicate-elements", (row,), f"{described(transactions, row)} read an element twice")


def _could_be_once(transactions: Transactions, keys: _Keys, read: tuple[int, Any, list[Any]], found: Anomalies) -> None:
    """Two reads show what certainly committed in the same order, even if they also saw what was rolled back."""
    row, key, values = read
    _judge_elements(transactions, keys, read, found)
    order, holder = keys.longest.get(key, ([], row))
    certain = {value for value in (*values, *order) if _is_certain(transactions, keys, key, value)}
    one, other = ([value for value in some if value in certain] for some in (values, order))
    if one[: len(other)] != other[: len(one)]:
        text = f"{described(transactions, row)} and {described(transactions, holder)} read {short(key)}"
        found.add("garbage-version", (row, holder), f"{text} in two orders that cannot both have existed")


def _is_certain(transactions: Transactions, keys: _Keys, key: Any, value: Any) -> bool:
    writer = keys.writer(key, value)
    return writer >= 0 and transactions.status[writer] == OK


def _judge_several(
    transactions: Transactions, keys: _Keys, read: tuple[int, Any, list[Any]], found: Anomalies, *, is_odd: bool
) -> None:
    """A read that shows a later append of a transaction shows its earlier ones, before it.

    In an odd read, which is not in the graph, no other committed transaction's appends stand between its appends.
    """
    reader, key, values = read
    writers = [keys.writer(key, value) for value in values]
    certain = [writer for writer in writers if writer >= 0 and transactions.status[writer] == OK]
    for row in sorted(keys.several.get(key, ())):
        appended = [value for f, each, value in transactions.steps[row] if f == "append" and each == key]
        shown = [value for value, writer in zip(values, writers, strict=True) if writer == row]
        if shown != appended[: len(shown)]:
            text = (
                f"{described(transactions, reader)} read {short(shown)} of what {described(transactions, row)} "
                f"appended to {short(key)}, which begins differently"
            )
            # If it may have been rolled back, only read committed is ruled out, which forbids seeing it.
            kind = "garbage-version" if transactions.status[row] == OK else "incompatible-order"
            found.add(kind, (reader, row), text)
        if not is_odd or row not in certain:
            continue
        among = certain[certain.index(row) : len(certain) - certain[::-1].index(row)]
        other = next((each for each in among if each != row), None)
        if other is not None:
            what = f"what {described(transactions, other)} appended to {short(key)} among that of"
            text = f"{described(transactions, reader)} read {what} {described(transactions, row)}"
            found.add("G0", (reader, row, other), text)


def _order_of_key(
    transactions: Transactions,
    graph: DependencyGraph,
    found: Anomalies,
    keys: _Keys,
    key: Any,
    writers: list[int],
) -> None:
    """Add the edges that follow from the order of one key's versions."""
    # Edges are added by hand here, where nearly all of them come from: calls would take a tenth of the check.
    edges = graph.edges
    order, holder = keys.longest[key]
    appended = keys.writers.get(key, _NOBODY)
    appenders = set(appended.values())
    last_of = keys.several.get(key, _NOBODY)
    previous = -1
    for writer in writers:
        if writer >= 0:
            if previous >= 0 and writer != previous:
                targets = edges[previous]
                targets[writer] = targets.get(writer, 0) | WW
            previous = writer
    # What happened but is not in the longest read, or only in part, came after all that is.
    late: list[int] = []
    shown = set(order)
    if len(appended) > len(shown) or -1 in writers:
        for value, writer in appended.items():
            if value in shown:
                continue
            if (transactions.status[writer] == OK or writer in keys.seen) and writer not in late[-1:]:
                late.append(writer)
                if previous >= 0:
                    graph.add(previous, writer, WW)
    size = len(order)
    at_the_end: list[int] = []
    updates: dict[int, int] = {}
    for row, value, length in keys.reads[key]:
        if order[: len(value)] != value:
            text = (
                f"{described(transactions, row)} and {described(transactions, holder)} read {short(key)} in two "
                f"orders, neither of which extends the other"
            )
            found.add("incompatible-order", (row, holder), text)
            keys.odd.append((row, key, value))
            continue
        if length:
            writer = writers[length - 1]
            if writer >= 0 and writer != row:
                targets = edges[writer]
                targets[row] = targets.get(row, 0) | WR
                if last_of and last_of.get(writer, value[length - 1]) != value[length - 1]:
                    text = f"{described(transactions, row)} read the middle of {described(transactions, writer)}"
                    found.add("G1b", (writer, row), text)
        if length >= size:
            at_the_end.append(row)
        else:
            writer = writers[length]
            if writer >= 0 and writer != row:
                targets = edges[row]
                targets[writer] = targets.get(writer, 0) | RW
        if row in appenders:
            other = updates.setdefault(length, row)
            if other != row:
                found.add("lost-update", (other, row), _both_updated(transactions, (other, row), key, length))
    if late and at_the_end:
        graph.add_all(at_the_end, late, RW)


def _both_updated(transactions: Transactions, rows: tuple[int, int], key: Any, length: int) -> str:
    one, other = (described(transactions, row) for row in rows)
    return f"{one} and {other} both read {short(key)} at length {length} and both appended to it"
