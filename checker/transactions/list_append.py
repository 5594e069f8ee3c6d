"""Lists that transactions append to and read: every read shows the whole order of versions so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from checker.history import OK
from checker.transactions.anomalies import Anomalies, Transactions, described
from checker.transactions.graph import RW, WR, WW, DependencyGraph
from checker.words import short

__all__ = ["build_list_append"]

#: A read: its row, the list it saw, and how much of it others had appended.
_Read = tuple[int, list[Any], int]


class _Keys:
    """Per key: who appended what, the longest read, and who read how much of it."""

    def __init__(self) -> None:
        self.writer: dict[tuple[Any, Any], int] = {}
        self.final: dict[tuple[int, Any], Any] = {}
        self.failed: dict[tuple[Any, Any], int] = {}
        self.longest: dict[Any, tuple[list[Any], int]] = {}
        self.reads: dict[Any, list[_Read]] = {}
        self.appends: dict[Any, list[Any]] = {}
        #: Transactions that appended more than one element to a key.
        self.several: set[tuple[int, Any]] = set()
        #: Reads that contradict their own transaction, or the longest one: row, key and list.
        self.odd: list[tuple[int, Any, list[Any]]] = []
        #: Transactions of unknown outcome that somebody saw something of: they happened, all of them.
        self.seen: set[int] = set()


def _keys_appended_twice(transactions: Transactions, found: Anomalies) -> set[Any]:
    """Keys to which one element was appended twice: nobody can tell which of the two a read shows."""
    writer: dict[tuple[Any, Any], int] = {}
    keys = set()
    for rows in (transactions.unknown, transactions.committed):
        for row in rows:
            for f, key, value in transactions.steps[row]:
                if f == "append":
                    if (key, value) in writer:
                        text = f"{short(value)} is appended twice to {short(key)}: the history cannot be judged by it"
                        found.add("duplicate-append", (writer[key, value], row), text)
                        keys.add(key)
                    writer[key, value] = row
    return keys


def build_list_append(transactions: Transactions, graph: DependencyGraph, found: Anomalies) -> None:
    """Fill ``graph`` with ww, wr and rw edges, and ``found`` with what single reads contradict."""
    keys = _Keys()
    if not _index(transactions, keys):
        transactions.leave_out(_keys_appended_twice(transactions, found))
        keys = _Keys()
        _index(transactions, keys)
    for row in transactions.committed:
        _read_steps(transactions, row, keys, found)
    writers = {key: _writers(transactions, keys, key, found) for key in keys.longest}
    several: dict[Any, list[int]] = {}
    for row, key in sorted(keys.several, key=lambda pair: pair[0]):
        several.setdefault(key, []).append(row)
    for key in several.keys() & writers.keys():
        order, holder = keys.longest[key]
        _keeps_their_order(transactions, keys, (holder, key, order), several[key], found)
    for key, rows in writers.items():
        _order_of_key(transactions, graph, found, keys, key, rows)
    for read in keys.odd:
        _could_be_once(transactions, keys, read, found)
        _keeps_their_order(transactions, keys, read, several.get(read[1], ()), found)
        _keeps_apart(transactions, keys, read, several.get(read[1], ()), found)


def _index(transactions: Transactions, keys: _Keys) -> bool:
    """Who appended what; ``False`` if one element was appended twice to a key."""
    writer, final, appends = keys.writer, keys.final, keys.appends
    for row in transactions.failed:
        for f, key, value in transactions.steps[row]:
            if f == "append":
                keys.failed[key, value] = row
    known = finals = 0
    for rows in (transactions.unknown, transactions.committed):
        for row in rows:
            for f, key, value in transactions.steps[row]:
                if f == "append":
                    known += 1
                    finals += 1
                    writer[key, value] = row
                    final[row, key] = value
                    if len(writer) < known:
                        return False
                    if len(final) < finals:
                        finals -= 1
                        keys.several.add((row, key))
                    try:
                        appends[key].append(value)
                    except KeyError:
                        appends[key] = [value]
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
            text = f"{_words(transactions, row)} does not see its own appends to {short(key)}"
            found.add("internal", (row,), text)
            keys.odd.append((row, key, value))
            continue
        if known is None:
            known = {}
        elif key in known:
            if known[key] == value:
                continue
            text = f"{_words(transactions, row)} should have read {short(known[key])} of {short(key)}"
            found.add("non-repeatable-read", (row,), text)
            _saw_no_future(transactions, row, key, [each for each in known[key] if each not in (mine or ())], found)
        known[key] = value
        reads.setdefault(key, []).append((row, value, len(value) if mine is None else len(value) - len(mine)))
        best = longest.get(key)
        if best is None or len(value) > len(best[0]):
            longest[key] = (value, row)


def _saw_no_future(transactions: Transactions, row: int, key: Any, values: list[Any], found: Anomalies) -> None:
    """What a transaction read without having appended it yet is of somebody else."""
    for f, each, value in transactions.steps[row]:
        if f == "append" and each == key and value in values:
            text = f"{_words(transactions, row)} read {short(value)} of {short(key)} before it appended it"
            found.add("internal", (row,), text)


def _writers(transactions: Transactions, keys: _Keys, key: Any, found: Anomalies) -> list[int]:
    """Who appended each element of the longest read: -1 where that is nobody who may have committed."""
    order, holder = keys.longest[key]
    writer_of, status = keys.writer, transactions.status
    writers = [writer_of.get((key, value), -1) for value in order]
    if transactions.unknown:
        keys.seen.update(writer for writer in writers if writer >= 0 and status[writer] != OK)
    if -1 in writers or len(set(order)) < len(order):
        _judge_elements(transactions, keys, (holder, key, order), found)
    return writers


def _judge_elements(
    transactions: Transactions, keys: _Keys, read: tuple[int, Any, list[Any]], found: Anomalies
) -> None:
    """What a list must not hold: elements of failed transactions, of nobody, or twice."""
    row, key, values = read
    for value in values:
        if (key, value) in keys.writer:
            continue
        source = keys.failed.get((key, value))
        if source is not None:
            text = f"{_words(transactions, row)} read {short(value)} of failed {_words(transactions, source)}"
            found.add("G1a", (source, row), text)
        else:
            text = f"{_words(transactions, row)} read {short(value)} of {short(key)}, which nobody appended"
            found.add("garbage-read", (row,), text)
    if len(set(values)) < len(values):
        found.add("duplicate-elements", (row,), f"{_words(transactions, row)} read an element twice")


def _could_be_once(transactions: Transactions, keys: _Keys, read: tuple[int, Any, list[Any]], found: Anomalies) -> None:
    """Of what certainly committed two reads show the same order, even if they saw more that was rolled back."""
    row, key, values = read
    _judge_elements(transactions, keys, read, found)
    order, holder = keys.longest.get(key, ([], row))
    certain = {value for value in (*values, *order) if _is_certain(transactions, keys, key, value)}
    one, other = ([value for value in some if value in certain] for some in (values, order))
    if one[: len(other)] != other[: len(one)]:
        text = f"{_words(transactions, row)} and {_words(transactions, holder)} read {short(key)}"
        found.add("garbage-version", (row, holder), f"{text} in orders of which only one can ever have been there")


def _is_certain(transactions: Transactions, keys: _Keys, key: Any, value: Any) -> bool:
    writer = keys.writer.get((key, value), -1)
    return writer >= 0 and transactions.status[writer] == OK


def _keeps_apart(
    transactions: Transactions,
    keys: _Keys,
    read: tuple[int, Any, list[Any]],
    several: Iterable[int],
    found: Anomalies,
) -> None:
    """No element of one that committed stands among those of another, in a read of which the graph knows nothing."""
    reader, key, values = read
    writers = [keys.writer[key, value] for value in values if _is_certain(transactions, keys, key, value)]
    for row in several:
        if row in writers:
            among = writers[writers.index(row) : len(writers) - writers[::-1].index(row)]
            other = next((each for each in among if each != row), None)
            if other is not None:
                what = f"what {_words(transactions, other)} appended to {short(key)} among that of"
                text = f"{_words(transactions, reader)} read {what} {_words(transactions, row)}"
                found.add("G0", (reader, row, other), text)


def _keeps_their_order(
    transactions: Transactions,
    keys: _Keys,
    read: tuple[int, Any, list[Any]],
    several: Iterable[int],
    found: Anomalies,
) -> None:
    """Whoever saw a later append of a transaction saw its earlier ones, before it."""
    reader, key, values = read
    for row in several:
        appended = [value for f, each, value in transactions.steps[row] if f == "append" and each == key]
        shown = [value for value in values if keys.writer.get((key, value)) == row]
        if shown != appended[: len(shown)]:
            text = (
                f"{_words(transactions, reader)} read {short(shown)} of what {_words(transactions, row)} appended to "
                f"{short(key)}, which begins otherwise"
            )
            # Of one that did not commit as a whole no more is known than that nobody may see it.
            kind = "garbage-version" if transactions.status[row] == OK else "incompatible-order"
            found.add(kind, (reader, row), text)


def _order_of_key(
    transactions: Transactions,
    graph: DependencyGraph,
    found: Anomalies,
    keys: _Keys,
    key: Any,
    writers: list[int],
) -> None:
    """The edges that the order of one key's versions gives."""
    # Edges are put in by hand here, where nearly all of them come from: a call for each takes a tenth of the check.
    edges, final = graph.edges, keys.final
    order, holder = keys.longest[key]
    previous = -1
    for writer in writers:
        if writer >= 0:
            if previous >= 0 and writer != previous:
                targets = edges[previous]
                targets[writer] = targets.get(writer, 0) | WW
            previous = writer
    # What happened and is not, or not all, in the longest read came after all that is.
    shown = set(order)
    late: list[int] = []
    for value in keys.appends.get(key, ()):
        if value not in shown:
            writer = keys.writer[key, value]
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
                f"{_words(transactions, row)} and {_words(transactions, holder)} read {short(key)} in orders that "
                f"neither extends the other"
            )
            found.add("incompatible-order", (row, holder), text)
            keys.odd.append((row, key, value))
            continue
        if length:
            writer = writers[length - 1]
            if writer >= 0 and writer != row:
                targets = edges[writer]
                targets[row] = targets.get(row, 0) | WR
                if final[writer, key] != value[length - 1]:
                    text = f"{_words(transactions, row)} read the middle of {_words(transactions, writer)}"
                    found.add("G1b", (writer, row), text)
        if length >= size:
            at_the_end.append(row)
        else:
            writer = writers[length]
            if writer >= 0 and writer != row:
                targets = edges[row]
                targets[writer] = targets.get(writer, 0) | RW
        if (row, key) in final:
            other = updates.setdefault(length, row)
            if other != row:
                found.add("lost-update", (other, row), _both_updated(transactions, (other, row), key, length))
    if late and at_the_end:
        graph.add_all(at_the_end, late, RW)


def _both_updated(transactions: Transactions, rows: tuple[int, int], key: Any, length: int) -> str:
    one, other = (_words(transactions, row) for row in rows)
    return f"{one} and {other} both read {short(key)} at length {length} and both appended to it"


def _words(transactions: Transactions, row: int) -> str:
    return described(transactions.history, row, transactions.steps[row])
