"""Lists that transactions append to and read: every read shows the whole order of versions so far."""

from __future__ import annotations

from typing import Any

from checker.transactions.anomalies import Anomalies, Transactions, described
from checker.transactions.graph import RW, WR, WW, DependencyGraph
from checker.words import short

__all__ = ["build_list_append"]


class _Keys:
    """Per key: who appended what, the longest read, and who read how much of it."""

    def __init__(self) -> None:
        self.writer: dict[tuple[Any, Any], int] = {}
        self.final: dict[tuple[int, Any], Any] = {}
        self.failed: dict[tuple[Any, Any], int] = {}
        self.longest: dict[Any, tuple[list[Any], int]] = {}
        self.reads: dict[Any, list[tuple[int, list[Any]]]] = {}
        self.appends: dict[Any, list[int]] = {}


def build_list_append(transactions: Transactions, graph: DependencyGraph, found: Anomalies) -> None:
    """Fill ``graph`` with ww, wr and rw edges, and ``found`` with what single reads contradict."""
    keys = _Keys()
    _index(transactions, keys, found)
    for row in transactions.committed:
        _read_steps(transactions, row, keys, found)
    for key, (order, holder) in keys.longest.items():
        _order_of_key(transactions, graph, found, keys, key, order, holder)


def _index(transactions: Transactions, keys: _Keys, found: Anomalies) -> None:
    writer, final, appends = keys.writer, keys.final, keys.appends
    for row in transactions.failed:
        for f, key, value in transactions.steps[row]:
            if f == "append":
                keys.failed[key, value] = row
    for rows in (transactions.unknown, transactions.committed):
        for row in rows:
            for f, key, value in transactions.steps[row]:
                if f == "append":
                    if (key, value) in writer:
                        text = f"{short(value)} is appended twice to {short(key)}: the history cannot be judged by it"
                        found.add("duplicate-append", (writer[key, value], row), text)
                    writer[key, value] = row
                    final[row, key] = value
                    appends.setdefault(key, []).append(row)


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
                known[key] = [*known[key], value]
            continue
        if value is None:
            value = []
        mine = own.get(key) if own is not None else None
        if known is not None and key in known:
            if known[key] != value:
                text = f"{_words(transactions, row)} should have read {short(known[key])} of {short(key)}"
                found.add("internal", (row,), text)
            continue
        if mine is not None:
            if value[-len(mine) :] != mine:
                text = f"{_words(transactions, row)} does not see its own appends to {short(key)}"
                found.add("internal", (row,), text)
                continue
            outside = value[: -len(mine)]
        else:
            outside = value
        if known is None:
            known = {}
        known[key] = value
        reads.setdefault(key, []).append((row, outside))
        best = longest.get(key)
        if best is None or len(value) > len(best[0]):
            longest[key] = (value, row)


def _order_of_key(
    transactions: Transactions,
    graph: DependencyGraph,
    found: Anomalies,
    keys: _Keys,
    key: Any,
    order: list[Any],
    holder: int,
) -> None:
    writers: list[int] = []
    writer_of, failed = keys.writer, keys.failed
    add = graph.add
    for value in order:
        writer = writer_of.get((key, value), -1)
        writers.append(writer)
        if writer < 0:
            if (key, value) in failed:
                source = failed[key, value]
                text = f"{_words(transactions, holder)} read {short(value)} of failed {_words(transactions, source)}"
                found.add("G1a", (source, holder), text)
            else:
                text = f"{_words(transactions, holder)} read {short(value)} of {short(key)}, which nobody appended"
                found.add("unwritten-read", (holder,), text)
    if len(set(order)) < len(order):
        found.add("duplicate-elements", (holder,), f"{_words(transactions, holder)} read an element twice")
    previous = -1
    for writer in writers:
        if previous >= 0 and writer >= 0 and writer != previous:
            add(previous, writer, WW)
        previous = writer if writer >= 0 else previous
    size = len(order)
    # What was committed and is not in the longest read came after all that is.
    shown = set(writers)
    after_last = [
        w for w in dict.fromkeys(keys.appends.get(key, ())) if w not in shown and transactions.status[w] == "ok"
    ]
    if previous >= 0:
        for writer in after_last:
            add(previous, writer, WW)
    updates: dict[int, int] = {}
    for row, value in keys.reads[key]:
        length = len(value)
        if order[:length] != value:
            text = (
                f"{_words(transactions, row)} and {_words(transactions, holder)} read {short(key)} in orders that "
                f"neither extends the other"
            )
            found.add("incompatible-order", (row, holder), text)
            continue
        if length:
            writer = writers[length - 1]
            if writer >= 0 and writer != row:
                add(writer, row, WR)
                if keys.final[writer, key] != value[-1]:
                    text = f"{_words(transactions, row)} read the middle of {_words(transactions, writer)}"
                    found.add("G1b", (writer, row), text)
        if length < size:
            writer = writers[length]
            if writer >= 0 and writer != row:
                add(row, writer, RW)
        else:
            for writer in after_last:
                add(row, writer, RW)
        if (row, key) in keys.final:
            other = updates.setdefault(length, row)
            if other != row:
                text = (
                    f"{_words(transactions, other)} and {_words(transactions, row)} both read {short(key)} at length "
                    f"{length} and both appended to it"
                )
                found.add("lost-update", (other, row), text)


def _words(transactions: Transactions, row: int) -> str:
    return described(transactions.history, row, transactions.steps[row])
