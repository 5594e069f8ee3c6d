"""Which classes of cycles a dependency graph has, and a short one of each.

Snapshot isolation allows a history if and only if every cycle of its dependencies has two anti-dependencies (rw) in a
row: ``(SO u WR u WW) ; RW?`` is acyclic (Cerone & Gotsman, "Analysing snapshot isolation", JACM 65(2), 2018).  That is
one search for strongly connected components in a graph of two layers: a dependency leads from either layer to the lower
one, an anti-dependency only from the lower layer to the upper one.  So every class is decided in linear time, and only
the choice of a short cycle to show is limited in effort.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from checker.history import NEVER, OK
from checker.linearizability.budget import Budget
from checker.transactions.anomalies import Transactions
from checker.transactions.graph import (
    PROCESS,
    REALTIME,
    RW,
    VIA,
    WR,
    WW,
    Adjacency,
    DependencyGraph,
    components,
    cyclic,
)

__all__ = ["Cycle", "find_cycles", "on_cycles_by_process", "shortest_cycle"]

#: A cycle: nodes in order and the kind of the edge that leaves each.
Cycle = list[tuple[int, int]]

#: Nodes visited in search of the shortest cycle of a class; some cycle is found in any case.
MAX_VISITS = 100_000
#: Transactions on or between cycles above which classes that rule out no further level are skipped.
MAX_LISTED = 2_000

#: Anti-dependencies against real time that are followed in a large history before all of it is searched.
MAX_FOLLOWED = 10

_NAME = {WW: "G0", WR: "G1c", RW: "G-single"}
#: Classes that rule out everything from snapshot isolation up, with the same suffix.
_GRAVE = ("G0", "G1c", "G-single", "G-nonadjacent")


def find_cycles(
    transactions: Transactions, graph: DependencyGraph, budget: Budget
) -> tuple[dict[str, Cycle], list[int], str | None]:
    """A short cycle of every class that occurs, the transactions on or between cycles, real time included, and the
    limit that ended the search, if any.

    Adds process order and real time to ``graph``.  Classes of cycles that need process order end in ``-process``,
    those that need real time in ``-realtime``; such a class is reported only if it does not occur without.
    """
    search = _Search(transactions, graph)
    left = [node for node in search.left if node < graph.count]
    if not left:
        return {}, [], None
    search.classes(search.left, "", 0)
    stopped = budget.exhausted()
    if stopped:
        return search.cycles, left, stopped
    search.against_time()
    for suffix, extra in (("-process", PROCESS), ("-realtime", PROCESS | REALTIME)):
        is_large = len(search.left) > MAX_LISTED
        if is_large and search.is_settled(suffix):
            continue
        search.add_order(extra)
        if is_large:
            search.follow(suffix, extra)
            if search.is_settled(suffix):
                continue
        search.classes(search.left, suffix, extra)
        stopped = budget.exhausted()
        if stopped:
            break
    return search.cycles, left, stopped


def on_cycles_by_process(transactions: Transactions, graph: DependencyGraph, left: Collection[int]) -> set[int]:
    """The nodes on cycles of dependencies and process order, among those on or between cycles of real time too."""
    history = transactions.history
    graph.add_process_order(left, history.invoked, _returned(transactions), history.process)
    inside = set(left).union(range(graph.count, len(graph.edges)))
    found = cyclic(graph.targets(inside, WW | WR | RW | VIA | PROCESS))
    return {node for nodes in found for node in nodes if node < graph.count}


def _returned(transactions: Transactions) -> list[int]:
    history = transactions.history
    return [
        position if status == OK else NEVER for position, status in zip(history.returned, history.status, strict=True)
    ]


class _Search:
    def __init__(self, transactions: Transactions, graph: DependencyGraph) -> None:
        self._history, self._graph = transactions.history, graph
        self._returned = _returned(transactions)
        self.left = graph.leftover(self._history.invoked, self._returned)
        self.cycles: dict[str, Cycle] = {}
        #: Some anti-dependencies on transactions that had returned before.
        self._stale: list[tuple[int, int]] = []

    def is_settled(self, suffix: str) -> bool:
        """Whether no cycle of that order could rule out another level."""
        orders = ("", "-process", "-realtime")
        weaker = orders[: orders.index(suffix) + 1]
        return any(f"{name}{each}" in self.cycles for name in _GRAVE for each in weaker)

    def add_order(self, extra: int) -> None:
        """Add process order or real time to the graph."""
        history, graph = self._history, self._graph
        if extra & REALTIME:
            self.left += graph.add_time_order(self.left, history.invoked, self._returned)
        else:
            graph.add_process_order(self.left, history.invoked, self._returned, history.process)

    def follow(self, suffix: str, extra: int) -> None:
        """Look for a path back from what a transaction should have seen, before searching the whole graph."""
        for source, target in self._stale:
            walk = _walk(self._graph, WW | WR | extra, 2 * target + 1, 2 * source)
            if walk is not None:
                self._keep_walk([2 * source, *walk], suffix, extra)
                return

    def against_time(self) -> None:
        """Cycles of two: a transaction depends on one that was invoked only after it had returned."""
        history, graph, returned = self._history, self._graph, self._returned
        for node in self.left:
            if node >= graph.count:
                continue
            begun = history.invoked[node]
            for target, bits in graph.edges[node].items():
                if target < graph.count and returned[target] < begun:
                    kind = next(each for each in (WW, WR, RW) if bits & each)
                    is_same = history.process[node] == history.process[target]
                    back = (target, PROCESS if is_same else REALTIME)
                    if kind == RW and len(self._stale) < MAX_FOLLOWED:
                        self._stale.append((node, target))
                    self._keep(_NAME[kind], "-process" if is_same else "-realtime", [(node, kind), back])

    def classes(self, nodes: Collection[int], suffix: str, extra: int) -> None:
        """Look for cycles of every class among those nodes, with the edges ``extra`` besides dependencies."""
        graph = self._graph
        everything = WW | WR | RW | VIA | extra
        whole = cyclic(graph.targets(set(graph.on_or_behind_cycles(nodes)), everything))
        if not whole:
            return
        members = {node for component in whole for node in component}
        lazy = _Layers(graph, members, extra)
        layers = {place: lazy[place] for node in members for place in (2 * node, 2 * node + 1)}
        apart = components(layers)
        grave = {place >> 1 for component in apart for place in component}
        for name, through in (("G0", WW), ("G1c", WR)):
            back = (WW | extra) if through == WW else (WW | WR | extra)
            ways = graph.targets(grave, back)
            self._keep(
                name, suffix, self._shown(shortest_cycle(ways, self._edges(cyclic(ways), through)), back, through)
            )
        self._not_adjacent(apart, layers, suffix, extra)
        rest = [component for component in whole if grave.isdisjoint(component)]
        ways = graph.targets({node for component in rest for node in component}, everything)
        self._keep("G2", suffix, self._shown(shortest_cycle(ways, self._edges(rest, RW)), everything, RW))

    def _not_adjacent(self, apart: list[list[int]], layers: Adjacency, suffix: str, extra: int) -> None:
        """A cycle with one anti-dependency, and one with several, no two of them in a row."""
        starts = []
        for component in apart:
            inside = set(component)
            starts += [
                (place, target)
                for place in component
                if not place & 1
                for target in layers[place]
                if target & 1 and target in inside
            ]
        if not starts:
            return
        back = WW | WR | VIA | extra
        ways = self._graph.targets({place >> 1 for component in apart for place in component}, back)
        single = shortest_cycle(ways, ((source >> 1, target >> 1) for source, target in starts))
        self._keep("G-single", suffix, self._shown(single, back, RW))
        walk = shortest_cycle(layers, starts)
        if walk is not None:
            self._keep_walk(walk, suffix, extra)

    def _keep_walk(self, walk: list[int], suffix: str, extra: int) -> None:
        """Keep the cycle of transactions that corresponds to a cycle in the two layers."""
        edges, back = self._graph.edges, WW | WR | VIA | extra
        places = _without_detours(walk)
        cycle = []
        for at, place in enumerate(places):
            after = places[(at + 1) % len(places)]
            bits = edges[place >> 1][after >> 1]
            cycle.append((place >> 1, bits & (RW | VIA) if after & 1 else bits & back))
        several = sum(kinds == RW for _, kinds in cycle)
        if several:
            self._keep("G-single" if several == 1 else "G-nonadjacent", suffix, cycle)

    def _edges(self, found: list[list[int]], kind: int) -> Iterator[tuple[int, int]]:
        for component in found:
            inside = set(component)
            for node in component:
                for target, bits in self._graph.edges[node].items():
                    if bits & kind and target in inside:
                        yield node, target

    def _shown(self, nodes: list[int] | None, back: int, through: int) -> Cycle | None:
        """A cycle with the kinds of its edges; that of the first is ``through``."""
        if nodes is None:
            return None
        edges = self._graph.edges
        cycle = []
        for at, node in enumerate(nodes):
            bits = edges[node][nodes[(at + 1) % len(nodes)]]
            cycle.append((node, through if not at else bits & back))
        return cycle

    def _keep(self, name: str, suffix: str, cycle: Cycle | None) -> None:
        if cycle is None or name in self.cycles or (suffix == "-realtime" and f"{name}-process" in self.cycles):
            return
        known = self.cycles.get(f"{name}{suffix}")
        if known is None or len(cycle) < len(known):
            self.cycles[f"{name}{suffix}"] = cycle


class _Layers:
    """The graph of two layers: node n is 2n in the lower and 2n + 1 in the upper, which no anti-dependency leaves."""

    def __init__(self, graph: DependencyGraph, members: set[int], extra: int) -> None:
        self._edges, self._members, self._depending = graph.edges, members, WW | WR | extra

    def __getitem__(self, place: int) -> list[int]:
        depending, members, is_above = self._depending, self._members, place & 1
        out = []
        for target, bits in self._edges[place >> 1].items():
            if target in members:
                if bits & depending:
                    out.append(2 * target)
                elif bits & (VIA if is_above else RW):
                    out.append(2 * target + 1)
        return out


def shortest_cycle(ways: Adjacency, starts: Iterable[tuple[int, int]]) -> list[int] | None:
    """The nodes of a short cycle that begins with one of the edges ``starts`` and continues along ``ways``."""
    best: list[int] | None = None
    visits = 0
    for source, target in starts:
        path, visited = _path(ways, target, source, None if best is None else len(best) - 2)
        visits += visited
        if path is not None:
            best = [source, *path]
            if len(best) == 2:
                break
        if visits > MAX_VISITS:
            break
    return best


def _path(ways: Adjacency | _Layers, source: int, target: int, limit: int | None) -> tuple[list[int] | None, int]:
    """The nodes of a shortest path of at most ``limit`` edges, without the last, and how many nodes were visited."""
    came = {source: -1}
    queue = deque([(source, 0)])
    while queue:
        node, length = queue.popleft()
        if limit is not None and length >= limit:
            break
        for after in ways[node]:
            if after == target:
                path = [node]
                while path[-1] != source:
                    path.append(came[path[-1]])
                return path[::-1], len(came)
            if after not in came:
                came[after] = node
                queue.append((after, length + 1))
    return None, len(came)


def _walk(graph: DependencyGraph, depending: int, source: int, target: int) -> list[int] | None:
    """The path that :func:`_path` would find in two layers of the whole graph, in a loop of its own: in a large history
    it visits nearly everything.
    """
    edges = graph.edges
    came = [-1] * (2 * len(edges))
    came[source] = source
    queue = [source]
    for place in queue:
        to_upper = VIA if place & 1 else RW
        for node, bits in edges[place >> 1].items():
            if bits & depending:
                after = 2 * node
            elif bits & to_upper:
                after = 2 * node + 1
            else:
                continue
            if after == target:
                walk = [place]
                while walk[-1] != source:
                    walk.append(came[walk[-1]])
                return walk[::-1]
            if came[after] < 0:
                came[after] = place
                queue.append(after)
    return None


def _without_detours(places: list[int]) -> list[int]:
    """A cycle in two layers without the path from a node's lower place round to its upper one.

    Every edge from the upper place also leaves the lower one, so the rest is a cycle with fewer anti-dependencies.
    """
    while True:
        upper = next((place for place in places if place & 1 and place - 1 in places), None)
        if upper is None:
            return places
        turned = places.index(upper)
        places = [*places[turned:], *places[:turned]]
        places = [upper - 1, *places[1 : places.index(upper - 1)]]
