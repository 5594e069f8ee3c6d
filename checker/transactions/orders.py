"""Is there any order of the transactions in which every read of a register finds what it saw?

Values of registers do not show in which order they were written, so inferred dependencies alone let some histories
pass that no order explains.  Here the orders themselves are searched, after Papadimitriou, "The serializability of
concurrent database updates" (JACM 26(4), 1979), whose polygraphs these are: who read a value comes after its writer,
and every other writer of the key comes before that writer or after the reader.  What follows from what is known is
added until nothing does (Tan et al., "Cobra", OSDI 2020, prune their search likewise); what is left open is tried.
NP-complete, so bounded: transactions as bits of ints, a limit on their number, and one on what is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from checker.history import NEVER, OK
from checker.transactions.anomalies import Transactions
from checker.transactions.graph import PROCESS, REALTIME

__all__ = ["MAX_TRANSACTIONS", "find_order", "smallest_without_order"]

#: Transactions beyond which no order is searched: a bit for every pair of them, and time that grows faster still.
MAX_TRANSACTIONS = 1_000
#: Open questions tried one way or the other.
MAX_TRIED = 2_000

#: Another writer, a writer and its reader: the first comes before the second or after the third.
Choice = tuple[int, int, int]


def find_order(
    transactions: Transactions, rows: Sequence[int], extra: int, is_over: Callable[[], Any] = lambda: None
) -> bool | None:
    """Whether some order of the committed transactions among ``rows`` explains their reads.

    Transactions of unknown outcome count where their writes were read.  ``extra`` holds the kinds of edges (PROCESS,
    REALTIME) that the order must respect too.  Values that nobody among ``rows`` wrote are taken to be of somebody
    else, at any time.  ``None`` when ``is_over`` or the limit stops the search.
    """
    nodes, choices, base = _compile(transactions, rows)
    order = _Order(len(nodes))
    edges = [*base, *_order_edges(transactions, nodes, extra)]
    if not all(order.add(source, target) for source, target in edges):
        return False
    invoked = transactions.history.invoked
    when = [invoked[row] if row >= 0 else -1 for row in nodes]
    stack: list[tuple[_Order, list[Choice], tuple[int, int] | None]] = [(order, choices, None)]
    tried = 0
    while stack:
        order, choices, edge = stack.pop()
        left = order.settle(choices) if edge is None or order.add(*edge) else None
        if left is None:
            continue
        if not left:
            return True
        tried += 1
        if tried > MAX_TRIED or is_over():
            return None
        other, writer, reader = left[0]
        ways = [(other, writer), (reader, other)]
        if when[other] < when[writer]:
            ways.reverse()
        stack.append((order.copy(), left, ways[0]))
        stack.append((order, left, ways[1]))
    return False


def smallest_without_order(
    transactions: Transactions, rows: Sequence[int], extra: int, is_over: Callable[[], Any]
) -> tuple[int, ...]:
    """Few of ``rows``, which have no order, that have none by themselves either.

    Leaving transactions out is sound: what they wrote and others read is then of somebody else, who may stand where
    they stood.  Large chunks first, then one by one, until ``is_over``.
    """
    kept = list(rows)
    chunk = len(kept) // 2
    while chunk and not is_over():
        at = 0
        while at < len(kept) and not is_over():
            smaller = kept[:at] + kept[at + chunk :]
            if find_order(transactions, smaller, extra, is_over) is False:
                kept = smaller
            else:
                at += chunk
        chunk //= 2
    return tuple(kept)


class _Order:
    """A partial order, transitively closed: for every node the bits of those after and before it."""

    __slots__ = ("after", "before")

    def __init__(self, count: int) -> None:
        self.after = [0] * count
        self.before = [0] * count

    def copy(self) -> _Order:
        twin = _Order(0)
        twin.after, twin.before = self.after.copy(), self.before.copy()
        return twin

    def add(self, source: int, target: int) -> bool:
        """Put ``source`` before ``target``; ``False`` if it is after it already."""
        after, before = self.after, self.before
        if source == target or after[target] >> source & 1:
            return False
        if after[source] >> target & 1:
            return True
        following = after[target] | 1 << target
        leading = before[source] | 1 << source
        for node in _bits(leading):
            after[node] |= following
        for node in _bits(following):
            before[node] |= leading
        return True

    def settle(self, choices: list[Choice]) -> list[Choice] | None:
        """Add all that follows; the choices still open, or ``None`` for a contradiction."""
        after = self.after
        changed = True
        while changed:
            changed = False
            left = []
            for choice in choices:
                other, writer, reader = choice
                if after[other] >> writer & 1 or after[reader] >> other & 1:
                    continue
                if after[writer] >> other & 1:
                    fits = self.add(reader, other)
                elif after[other] >> reader & 1:
                    fits = self.add(other, writer)
                else:
                    left.append(choice)
                    continue
                if not fits:
                    return None
                changed = True
            choices = left
        return choices


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _compile(
    transactions: Transactions, rows: Sequence[int]
) -> tuple[list[int], list[Choice], list[tuple[int, int]]]:
    """Rows of the nodes (-1: a writer outside of ``rows``), what must be chosen, and what comes before what."""
    wanted = set(rows)
    committed = [row for row in transactions.committed if row in wanted]
    reads: dict[tuple[Any, Any], list[int]] = {}
    writes: dict[tuple[Any, Any], int] = {}
    for row in committed:
        known: set[Any] = set()
        for f, key, value in transactions.steps[row]:
            if f == "r" and key not in known:
                reads.setdefault((key, value), []).append(row)
            known.add(key)
    for row in (*transactions.unknown, *committed):
        if row in wanted:
            writes.update({(key, value): row for f, key, value in transactions.steps[row] if f == "w"})
    happened = {row for version, row in writes.items() if version in reads or transactions.status[row] == OK}
    nodes = sorted({*committed, *happened})
    number = {row: at for at, row in enumerate(nodes)}
    writers: dict[Any, set[int]] = {}
    for (key, _), row in writes.items():
        if row in happened:
            writers.setdefault(key, set()).add(number[row])
    base: list[tuple[int, int]] = []
    choices: list[Choice] = []
    for (key, value), readers in reads.items():
        written = writers.get(key, set())
        if value is None:
            base += [(number[row], other) for row in readers for other in written if other != number[row]]
            continue
        writer = number.get(writes.get((key, value), -1), -1)
        if writer < 0:
            writer = len(nodes)
            nodes.append(-1)
        for row in readers:
            reader = number[row]
            if reader == writer:
                continue
            base.append((writer, reader))
            choices += [(other, writer, reader) for other in written if other not in (writer, reader)]
    return nodes, choices, base


def _order_edges(transactions: Transactions, nodes: Sequence[int], extra: int) -> Iterable[tuple[int, int]]:
    """Edges by process and real time, without most of those that follow from others."""
    history = transactions.history
    if not extra & (PROCESS | REALTIME):
        return
    last: dict[Any, int] = {}
    events = []
    for at, row in enumerate(nodes):
        if row >= 0:
            events.append((history.invoked[row], 0, at))
            if transactions.status[row] == OK and history.returned[row] != NEVER:
                events.append((history.returned[row], 1, at))
    frontier: dict[int, int] = {}
    for position, is_return, at in sorted(events):
        row = nodes[at]
        if is_return:
            # Whoever returned before this one was invoked is before everything that this one is before.
            frontier = {other: end for other, end in frontier.items() if end > history.invoked[row]}
            frontier[at] = position
            continue
        if extra & REALTIME:
            for other in frontier:
                yield other, at
        before = last.get(history.process[row])
        if before is not None and extra & PROCESS:
            yield before, at
        last[history.process[row]] = at
