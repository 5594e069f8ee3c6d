"""Registers that transactions write and read, every write of a key its own value.

Values do not show the order of versions, so only what must hold is used: the initial ``None`` comes first, a
transaction that read one version and then wrote replaced it with a later one, and, where keys are said to be
linearizable by themselves, a write that returned before another was invoked came first.
"""

from __future__ import annotations

from typing import Any

from checker.history import NEVER
from checker.transactions.anomalies import Anomalies, Transactions, described
from checker.transactions.graph import RW, VIA, WR, WW, DependencyGraph
from checker.words import short

__all__ = ["build_rw_register"]


def build_rw_register(
    transactions: Transactions, graph: DependencyGraph, found: Anomalies, *, linearizable_keys: bool = False
) -> None:
    """Fill ``graph`` with ww, wr and rw edges, and ``found`` with what single reads contradict."""
    writer: dict[tuple[Any, Any], int] = {}
    final: dict[tuple[int, Any], Any] = {}
    failed: dict[tuple[Any, Any], int] = {}
    writers: dict[Any, list[tuple[int, Any]]] = {}
    for row in transactions.failed:
        failed.update({(key, value): row for f, key, value in transactions.steps[row] if f == "w"})
    for row in (*transactions.unknown, *transactions.committed):
        for f, key, value in transactions.steps[row]:
            if f == "w":
                if writer.get((key, value), row) != row:
                    text = f"{short(value)} is written twice to {short(key)}: the history cannot be judged by it"
                    found.add("duplicate-write", (writer[key, value], row), text)
                writer[key, value] = row
                final[row, key] = value
    for (row, key), value in final.items():
        writers.setdefault(key, []).append((row, value))
    readers: dict[tuple[Any, Any], list[int]] = {}
    replaced: dict[tuple[Any, Any], list[int]] = {}
    for row in transactions.committed:
        state: dict[Any, Any] = {}
        for f, key, value in transactions.steps[row]:
            if f == "r":
                if key in state:
                    if state[key] != value:
                        text = f"{_words(transactions, row)} should have read {short(state[key])} of {short(key)}"
                        found.add("internal", (row,), text)
                    continue
                readers.setdefault((key, value), []).append(row)
                if (row, key) in final:
                    replaced.setdefault((key, value), []).append(row)
            state[key] = value
    for (key, value), rows in readers.items():
        _seen(transactions, graph, found, (key, value), rows, writer, final, failed)
    for (key, value), rows in replaced.items():
        source = writer.get((key, value))
        for row in rows:
            if source is not None:
                graph.add(source, row, WW)
            for reader in readers[key, value]:
                graph.add(reader, row, RW)
        if len(rows) > 1:
            what = f"{short(value)} of {short(key)}"
            text = f"{_words(transactions, rows[0])} and {_words(transactions, rows[1])} both replaced {what}"
            found.add("lost-update", rows[:2], text)
    _from_initial(transactions, graph, readers, writers)
    if linearizable_keys:
        _by_time(transactions, graph, writers, readers)


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
                origin = _words(transactions, failed[version])
                text = f"{_words(transactions, row)} read {short(value)} of failed {origin}"
                found.add("G1a", (failed[version], row), text)
            else:
                text = f"{_words(transactions, row)} read {short(value)} of {short(key)}, which nobody wrote"
                found.add("unwritten-read", (row,), text)
        return
    middle = final[source, key] != value
    for row in rows:
        if row == source:
            text = f"{_words(transactions, row)} read {short(value)} of {short(key)} before it wrote it"
            found.add("internal", (row,), text)
        graph.add(source, row, WR)
        if middle and row != source:
            text = f"{_words(transactions, row)} read the middle of {_words(transactions, source)}"
            found.add("G1b", (source, row), text)


def _from_initial(
    transactions: Transactions,
    graph: DependencyGraph,
    readers: dict[tuple[Any, Any], list[int]],
    writers: dict[Any, list[tuple[int, Any]]],
) -> None:
    """Whoever read the initial nothing came before whoever wrote."""
    for key, written in writers.items():
        early = readers.get((key, None), [])
        late = [row for row, value in written if transactions.status[row] == "ok" or (key, value) in readers]
        if not early or not late:
            continue
        if len(early) * len(late) <= len(early) + len(late) + 16:
            for reader in early:
                for row in late:
                    graph.add(reader, row, RW)
            continue
        both = set(early) & set(late)
        hub = graph.new_node()
        for reader in early:
            if reader not in both:
                graph.add(reader, hub, RW)
        for row in late:
            if row not in both:
                graph.add(hub, row, VIA)
        for row in both:
            for reader in early:
                graph.add(reader, row, RW)


def _by_time(
    transactions: Transactions,
    graph: DependencyGraph,
    writers: dict[Any, list[tuple[int, Any]]],
    readers: dict[tuple[Any, Any], list[int]],
) -> None:
    """Writes of one key that did not overlap, in their order; only neighbours, the rest follows."""
    history = transactions.history
    for key, written in writers.items():
        done = sorted(
            (history.returned[row], row, value) for row, value in written if history.returned[row] != NEVER
        )
        starts = sorted((history.invoked[row], row) for row, _ in written if transactions.status[row] == "ok")
        at = 0
        latest: tuple[int, Any] | None = None
        for invoked, row in starts:
            while at < len(done) and done[at][0] < invoked:
                latest = (done[at][1], done[at][2])
                at += 1
            if latest is not None and latest[0] != row:
                graph.add(latest[0], row, WW)
                for reader in readers.get((key, latest[1]), ()):
                    graph.add(reader, row, RW)


def _words(transactions: Transactions, row: int) -> str:
    return described(transactions.history, row, transactions.steps[row])
