"""Is there any order of the transactions in which every read finds what it saw?

Values of registers do not show in which order they were written, so inferred dependencies alone let some histories
pass that no order explains.  Here the orders themselves are searched, using the polygraphs of Papadimitriou, "The
serializability of concurrent database updates" (JACM 26(4), 1979): the reader of a value comes after its writer, and
every other writer of the key comes before that writer or after the reader.  What follows from what is known is added
until nothing more does (as Tan et al., "Cobra", OSDI 2020, prune their search); the questions left open are tried.
The problem is NP-complete, so the number of transactions, which are bits of ints, and the number of tries are limited.

Snapshot isolation requires an order of starts and commits: a transaction starts after the commits of those it depends
on, and before the commit of any that replaced a version it read; and of two that write the same key one commits before
the other starts.  The same search decides it, with two nodes per transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

from checker.history import NEVER, OK
from checker.transactions.anomalies import Transactions
from checker.transactions.graph import PROCESS, REALTIME, RW, VIA, WR, WW, DependencyGraph

__all__ = ["MAX_SNAPSHOTS", "MAX_TRANSACTIONS", "find_order", "find_snapshot_order"]

#: Transactions above which no order is searched: it takes a bit for every pair, and time that grows faster still.
MAX_TRANSACTIONS = 1_000
#: The same for orders of starts and commits, where any two writers of a key are an open question.
MAX_SNAPSHOTS = 200
#: Open questions that are tried one way and the other.
MAX_TRIED = 2_000

#: Four nodes: the first comes before the second, or the third before the fourth.
Choice = tuple[int, int, int, int]
#: One node, another that comes after it, and whether that is only because the one read what the other replaced.
Edge = tuple[int, int, bool]


def find_order(
    transactions: Transactions, rows: Sequence[int], extra: int, is_over: Callable[[], Any] = lambda: None
) -> bool | None:
    """Whether some order of the committed transactions among ``rows`` explains their reads.

    Transactions of unknown outcome count if their writes were read.  ``extra`` holds the kinds of edges (PROCESS,
    REALTIME) that the order must respect too.  Values that none of ``rows`` wrote are assumed to have been written by
    others at any time.  ``None`` when ``is_over`` or the limit stops the search.
    """
    nodes, choices, base = _registers(transactions, rows)
    edges = [(source, target) for source, target, _ in base]
    edges += _order_edges(transactions, nodes, extra)
    return _search(transactions, nodes, edges, choices, is_over)


def find_snapshot_order(
    transactions: Transactions, graph: DependencyGraph, extra: int, is_over: Callable[[], Any] = lambda: None
) -> bool | None:
    """Whether some order of starts and commits explains the reads under snapshot isolation.

    ``graph`` holds the dependencies of list-append transactions, whose reads show the order of all versions except
    the last ones.  The rest is as in ``find_order``.
    """
    if transactions.write == "append":
        nodes, pairs, base = _lists(transactions, graph)
        choices: list[Choice] = []
    else:
        nodes, choices, base = _registers(transactions, sorted([*transactions.committed, *transactions.unknown]))
        pairs = {(min(other, writer), max(other, writer)) for other, writer, _, _ in choices}
        pairs |= _writers_of_one_key(transactions, nodes)
    # Node n starts at 2n and commits at 2n + 1.
    edges = [(2 * node, 2 * node + 1) for node in range(len(nodes))]
    edges += [(2 * one, 2 * other + 1) if is_rw else (2 * one + 1, 2 * other) for one, other, is_rw in base]
    edges += [(2 * one + 1, 2 * other) for one, other in _order_edges(transactions, nodes, extra)]
    apart = [(2 * other + 1, 2 * writer, 2 * reader, 2 * other + 1) for other, writer, reader, _ in choices]
    apart += [(2 * one + 1, 2 * other, 2 * other + 1, 2 * one) for one, other in sorted(pairs)]
    return _search(transactions, [row for row in nodes for _ in range(2)], edges, apart, is_over)


def _search(
    transactions: Transactions,
    nodes: Sequence[int],
    edges: Iterable[tuple[int, int]],
    choices: list[Choice],
    is_over: Callable[[], Any],
) -> bool | None:
    order = _Order(len(nodes))
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
        first, second, third, fourth = left[0]
        ways = [(first, second), (third, fourth)]
        if when[first] < when[second]:
            ways.reverse()
        stack.append((order.copy(), left, ways[0]))
        stack.append((order, left, ways[1]))
    return False


class _Order:
    """A partial order, transitively closed: for every node, those after and before it as bits."""

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
        """Add all that follows; returns the choices still open, or ``None`` for a contradiction."""
        after = self.after
        changed = True
        while changed:
            changed = False
            left = []
            for choice in choices:
                first, second, third, fourth = choice
                if after[first] >> second & 1 or after[third] >> fourth & 1:
                    continue
                if after[second] >> first & 1:
                    fits = self.add(third, fourth)
                elif after[fourth] >> third & 1:
                    fits = self.add(first, second)
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


def _lists(transactions: Transactions, graph: DependencyGraph) -> tuple[list[int], set[tuple[int, int]], list[Edge]]:
    """Rows of the nodes, any two that append to one key, and what comes before what."""
    count = graph.count
    kinds = WW | WR | RW | VIA
    base: list[Edge] = []
    happened = set(transactions.committed)
    for source in range(count):
        for target, bits in graph.edges[source].items():
            if bits & kinds:
                ends = [target] if target < count else graph.edges[target]
                base += [(source, end, not bits & (WW | WR)) for end in ends]
                happened.update((source, *ends))
    nodes = sorted(happened)
    number = {row: at for at, row in enumerate(nodes)}
    return (
        nodes,
        _writers_of_one_key(transactions, nodes),
        [(number[one], number[other], is_rw) for one, other, is_rw in base],
    )


def _writers_of_one_key(transactions: Transactions, nodes: Sequence[int]) -> set[tuple[int, int]]:
    """Any two nodes that write the same key."""
    writers: dict[Any, list[int]] = {}
    for at, row in enumerate(nodes):
        if row >= 0:
            for key in {key for f, key, _ in transactions.steps[row] if f != "r"}:
                writers.setdefault(key, []).append(at)
    return {pair for some in writers.values() for pair in combinations(some, 2)}


def _registers(transactions: Transactions, rows: Sequence[int]) -> tuple[list[int], list[Choice], list[Edge]]:
    """Rows of the nodes (-1: a writer outside ``rows``), what must be chosen, and what comes before what."""
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
    base: list[Edge] = []
    choices: list[Choice] = []
    for (key, value), readers in reads.items():
        written = writers.get(key, set())
        if value is None:
            base += [(number[row], other, True) for row in readers for other in written if other != number[row]]
            continue
        writer = number.get(writes.get((key, value), -1), -1)
        if writer < 0:
            writer = len(nodes)
            nodes.append(-1)
        for row in readers:
            reader = number[row]
            if reader == writer:
                continue
            base.append((writer, reader, False))
            choices += [(other, writer, reader, other) for other in written if other not in (writer, reader)]
    return nodes, choices, base


def _order_edges(transactions: Transactions, nodes: Sequence[int], extra: int) -> Iterable[tuple[int, int]]:
    """Edges for process order and real time, without most of those that follow from others."""
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
            # Those that returned before this one was invoked come before everything that this one comes before.
            frontier = {other: end for other, end in frontier.items() if end > history.invoked[row]}
            frontier[at] = position
            # Only here, at a return: one of unknown outcome may take effect after what its process did next.
            last[history.process[row]] = at
            continue
        if extra & REALTIME:
            for other in frontier:
                yield other, at
        before = last.get(history.process[row])
        if before is not None and extra & PROCESS:
            yield before, at
