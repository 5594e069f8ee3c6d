"""Registers that transactions write and read, every write of a key with its own value.

Values do not show the order of versions, so only what must hold is used: the initial ``None`` comes first, and a
transaction that read one version and then wrote replaced it with a later one.  If keys on their own are said to be
linearizable, a version that a transaction saw or wrote before another was invoked is no later than what the other sees
or writes; if they are said to be sequentially consistent, the same holds within one process.  These are the sources of
Kingsbury & Alvaro, "Elle" (VLDB 2020), section 5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from checker.history import OK
from checker.transactions.anomalies import Anomalies, Transactions, described
from checker.transactions.graph import RW, WR, WW, DependencyGraph
from checker.words import short

__all__ = ["Versions", "build_rw_register"]


class Versions(NamedTuple):
    """The versions of all keys, each a key and a value."""

    writer: dict[tuple[Any, Any], int]
    """Who wrote each, unless it failed."""
    final: dict[tuple[int, Any], Any]
    """The last value that a transaction wrote to a key; earlier ones are nobody else's to see."""
    readers: dict[tuple[Any, Any], list[int]]
    happened: set[int]
    """Writers that took effect: they committed, or something that they wrote was read."""
    are_known: bool
    """Whether each of ``happened`` read every key before it wrote it: then reads show the order of all versions."""


def build_rw_register(
    transactions: Transactions,
    graph: DependencyGraph,
    found: Anomalies,
    *,
    linearizable_keys: bool = False,
    sequential_keys: bool = False,
) -> Versions:
    """Fill ``graph`` with ww, wr and rw edges, and ``found`` with what single reads contradict."""
    transactions.leave_out(_ambiguous_keys(transactions, found))
    writer: dict[tuple[Any, Any], int] = {}
    final: dict[tuple[int, Any], Any] = {}
    failed = transactions.failed_writes()
    for row, key, value in transactions.writes((*transactions.unknown, *transactions.committed)):
        writer[key, value] = row
        final[row, key] = value
    readers: dict[tuple[Any, Any], list[int]] = {}
    replaced: dict[tuple[Any, Any], list[int]] = {}
    odd: dict[tuple[Any, Any], list[int]] = {}
    for row in transactions.committed:
        _read_steps(transactions, row, found, final, readers, replaced, odd)
    for (key, value), rows in readers.items():
        _seen(transactions, graph, found, (key, value), rows, writer, final, failed)
    for (key, value), rows in odd.items():
        if value is not None and (key, value) not in writer:
            _seen(transactions, graph, found, (key, value), rows, writer, final, failed)
    for (key, value), rows in replaced.items():
        source = writer.get((key, value))
        for row in rows:
            if source is not None:
                graph.add(source, row, WW)
        graph.add_all(readers[key, value], rows, RW)
        if len(rows) > 1:
            what = f"{short(value)} of {short(key)}"
            text = f"{described(transactions, rows[0])} and {described(transactions, rows[1])} both replaced {what}"
            found.add("lost-update", rows[:2], text)
    happened = {row for version, row in writer.items() if transactions.status[row] == OK or version in readers}
    writers: dict[Any, list[int]] = {}
    for row, key in final:
        if row in happened:
            writers.setdefault(key, []).append(row)
    for key, late in writers.items():
        # Those that read the initial ``None`` came before all that wrote.
        graph.add_all(readers.get((key, None), ()), late, RW)
    replacing = {(row, key) for (key, _), rows in replaced.items() for row in rows}
    are_known = all(row not in happened or (row, key) in replacing for row, key in final)
    versions = Versions(writer, final, readers, happened, are_known)
    if linearizable_keys or sequential_keys:
        visits = _Visits(transactions, graph, found, versions)
        if linearizable_keys:
            visits.order_by_time()
        if sequential_keys:
            visits.order_by_process()
    return versions


def _ambiguous_keys(transactions: Transactions, found: Anomalies) -> set[Any]:
    """Keys whose reads do not show whose write they saw: a value was written twice, or null was written and read."""
    keys = transactions.keys_written_twice(found)
    rows = (*transactions.unknown, *transactions.committed)
    nulls = {key: row for row, key, value in transactions.writes(rows) if value is None}
    if not nulls:
        return keys
    for row in transactions.committed:
        for f, key, value in transactions.steps[row]:
            if f == "r" and value is None and key in nulls and key not in keys:
                text = (
                    f"{short(key)} was read as null, which was also its value before "
                    f"{described(transactions, nulls[key])}"
                )
                found.add("null-write", (nulls[key], row), text)
                keys.add(key)
    return keys


def _read_steps(
    transactions: Transactions,
    row: int,
    found: Anomalies,
    final: dict[tuple[int, Any], Any],
    readers: dict[tuple[Any, Any], list[int]],
    replaced: dict[tuple[Any, Any], list[int]],
    odd: dict[tuple[Any, Any], list[int]],
) -> None:
    """Internal consistency of one transaction, its external and odd reads, and which version it replaced."""
    state: dict[Any, Any] = {}
    own = set()
    for f, key, value in transactions.steps[row]:
        if f == "w":
            own.add(key)
        elif key in state:
            if state[key] == value:
                continue
            text = f"{described(transactions, row)} should have read {short(state[key])} of {short(key)}"
            found.add("internal" if key in own else "non-repeatable-read", (row,), text)
            if key in own:
                odd.setdefault((key, value), []).append(row)
                continue
            readers.setdefault((key, value), []).append(row)
        else:
            readers.setdefault((key, value), []).append(row)
            if (row, key) in final:
                replaced.setdefault((key, value), []).append(row)
        state[key] = value


def _seen(
    transactions: Transactions,
    graph: DependencyGraph,
    found: Anomalies,
    version: tuple[Any, Any],
    rows: list[int],
    writer: dict[tuple[Any, Any], int],
    final: dict[tuple[int, Any], Any],
    failed: dict[tuple[Any, Any], int],
) -> None:
    """Edges and anomalies of one version that was read."""
    key, value = version
    if value is None:
        return
    source = writer.get(version)
    if source is None:
        for row in rows:
            if version in failed:
                origin = described(transactions, failed[version])
                text = f"{described(transactions, row)} read {short(value)} of failed {origin}"
                found.add("G1a", (failed[version], row), text)
            else:
                text = f"{described(transactions, row)} read {short(value)} of {short(key)}, which nobody wrote"
                found.add("garbage-read", (row,), text)
        return
    middle = final[source, key] != value
    for row in rows:
        if row == source:
            text = f"{described(transactions, row)} read {short(value)} of {short(key)} before it wrote it"
            found.add("internal", (row,), text)
        graph.add(source, row, WR)
        if middle and row != source:
            text = f"{described(transactions, row)} read the middle of {described(transactions, source)}"
            found.add("G1b", (source, row), text)


class _Visit(NamedTuple):
    """A transaction on one key: its row, the version that its first step read or wrote, and the one it left."""

    row: int
    met: Any
    left: Any
    has_read: bool


class _Visits:
    """The order of versions of keys that are known to be consistent on their own, from the order of visits."""

    def __init__(
        self, transactions: Transactions, graph: DependencyGraph, found: Anomalies, versions: Versions
    ) -> None:
        self._transactions = transactions
        self._graph, self._found = graph, found
        self._writer, self._readers, final = versions.writer, versions.readers, versions.final
        self._visits: dict[Any, list[_Visit]] = {}
        for row in transactions.committed:
            first: dict[Any, tuple[Any, bool]] = {}
            for f, key, value in transactions.steps[row]:
                first.setdefault(key, (value, f == "r"))
            for key, (value, has_read) in first.items():
                visit = _Visit(row, value, final.get((row, key), value), has_read)
                self._visits.setdefault(key, []).append(visit)

    def order_by_time(self) -> None:
        """A visit that returned before another was invoked left no later version than that one met."""
        history = self._transactions.history
        for key, visits in self._visits.items():
            events = [(history.invoked[visit.row], 0, at) for at, visit in enumerate(visits)]
            events += [(history.returned[visit.row], 1, at) for at, visit in enumerate(visits)]
            latest: dict[int, int] = {}
            for position, is_return, at in sorted(events):
                if is_return:
                    # The others returned before this one was invoked, so all they imply follows from this one.
                    begun = history.invoked[visits[at].row]
                    latest = {other: end for other, end in latest.items() if end > begun}
                    latest[at] = position
                    continue
                for other in latest:
                    self._follow(key, visits[other], visits[at])

    def order_by_process(self) -> None:
        """The same within each process."""
        history = self._transactions.history
        for key, visits in self._visits.items():
            last: dict[Any, _Visit] = {}
            for visit in sorted(visits, key=lambda visit: history.invoked[visit.row]):
                process = history.process[visit.row]
                if process in last:
                    self._follow(key, last[process], visit)
                last[process] = visit

    def _follow(self, key: Any, one: _Visit, other: _Visit) -> None:
        """The version that ``one`` left is the one that ``other`` met, or an earlier one."""
        old, new = one.left, other.met
        if old == new or old is None:
            return
        if new is None and other.has_read:
            text = f"{described(self._transactions, one.row)} came before {described(self._transactions, other.row)}"
            self._found.add("cyclic-versions", (one.row, other.row), f"{text}, which saw {short(key)} without a value")
            return
        source, target = self._writer.get((key, old)), self._writer.get((key, new))
        if target is None:
            return
        if source is not None:
            self._graph.add(source, target, WW)
        for reader in self._readers.get((key, old), ()):
            self._graph.add(reader, target, RW)
