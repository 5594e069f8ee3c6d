"""Dependency graphs between transactions, and which part of one can hold a cycle.

After Adya, "Weak consistency" (PhD thesis, 2000) and Kingsbury & Alvaro, "Elle" (VLDB 2020).  A history is first
consumed in topological order, real time included, which is all that a strictly serializable one needs: linear time.
What cannot be consumed from the front is then consumed from the end; the rest lies on a cycle or between two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from operator import neg

__all__ = [
    "KINDS",
    "PROCESS",
    "REALTIME",
    "RW",
    "VIA",
    "WR",
    "WW",
    "Adjacency",
    "DependencyGraph",
    "components",
    "cyclic",
]

WW, WR, RW, PROCESS, REALTIME, VIA = 1, 2, 4, 8, 16, 32
KINDS = {WW: "ww", WR: "wr", RW: "rw", PROCESS: "process", REALTIME: "realtime", VIA: "via"}

#: Some nodes, and the targets of their edges.
Adjacency = dict[int, list[int]]

#: A helper node is worth it if it saves more than this many edges between two sets of transactions.
SPARE_EDGES = 16


class DependencyGraph:
    """Edges between transactions 0..count-1 (and helper nodes beyond), each with the set of its kinds as bits."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.edges: list[dict[int, int]] = [{} for _ in range(count)]

    def add(self, source: int, target: int, kind: int) -> None:
        """Add an edge; several kinds between the same two nodes are kept together."""
        if source != target:
            targets = self.edges[source]
            targets[target] = targets.get(target, 0) | kind

    def add_all(self, sources: Sequence[int], targets: Sequence[int], kind: int) -> None:
        """Add an edge from each of ``sources`` to each other one of ``targets``, or paths instead.

        Many edges go through helper nodes, so that they take space for the sum of the two sizes, not the product.
        Nodes that are both all precede each other; of these only neighbours in a row get edges.
        """
        if len(sources) * len(targets) <= len(sources) + len(targets) + SPARE_EDGES:
            for source in sources:
                for target in targets:
                    self.add(source, target, kind)
            return
        targets_only = set(targets).difference(sources)
        both = set(targets).difference(targets_only)
        hub = self._new_node()
        for source in sources:
            self.add(source, hub, kind)
        for target in targets_only:
            self.add(hub, target, VIA)
        if not both:
            return
        hub = self._new_node()
        for source in sources:
            if source not in both:
                self.add(source, hub, kind)
        for target in both:
            self.add(hub, target, VIA)
        for one, other in pairwise(sorted(both)):
            self.add(one, other, kind)
            self.add(other, one, kind)

    def _new_node(self) -> int:
        self.edges.append({})
        return len(self.edges) - 1

    def leftover(self, invoked: Sequence[int], returned: Sequence[int]) -> list[int]:
        """Nodes on a cycle, real time included, or between two; empty for a strictly serializable order.

        A transaction may be taken once all that it depends on, and all that returned before its invocation, are taken;
        then, from the end, once all that depend on it, and all that were invoked after its return, are taken.
        """
        edges = self.edges
        behind = _consumed(range(len(edges)), edges, self.count, invoked, returned)
        if not behind:
            return []
        backward: list[list[int]] = [[] for _ in edges]
        for node in behind:
            for target in edges[node]:
                # If a node is behind a cycle, so is every node it leads to.
                backward[target].append(node)
        begin, end = list(map(neg, returned)), list(map(neg, invoked))
        return sorted(_consumed(behind, backward, self.count, begin, end))

    def on_or_behind_cycles(self, nodes: Collection[int]) -> list[int]:
        """Those of ``nodes`` on or behind a cycle of any edges; no path may leave ``nodes`` and return."""
        return _consumed(nodes, self.edges, 0, (), (), size=len(self.edges))

    def targets(self, nodes: Collection[int], kinds: int) -> Adjacency:
        """The edges of those kinds among those nodes."""
        inside = nodes if isinstance(nodes, (set, frozenset)) else set(nodes)
        edges = self.edges
        return {
            node: [target for target, bits in edges[node].items() if bits & kinds and target in inside]
            for node in nodes
        }

    def add_process_order(
        self, nodes: Collection[int], invoked: Sequence[int], returned: Sequence[int], process: Sequence[object]
    ) -> None:
        """Add an edge from each of those transactions to the next of its process.

        Nothing comes after a transaction of unknown outcome, even in its process: it may take effect later.
        """
        last: dict[object, int] = {}
        for node in sorted((node for node in nodes if node < self.count), key=invoked.__getitem__):
            before = last.get(process[node])
            if before is not None:
                self.add(before, node, PROCESS)
            if returned[node] < 1 << 62:
                last[process[node]] = node

    def add_time_order(self, nodes: Collection[int], invoked: Sequence[int], returned: Sequence[int]) -> list[int]:
        """Add real-time edges between those transactions through a chain of completions, whose nodes it returns."""
        chosen = [node for node in nodes if node < self.count]
        events = sorted([(invoked[n], 0, n) for n in chosen] + [(returned[n], 1, n) for n in chosen])
        barriers: list[int] = []
        for _, is_return, node in events:
            if is_return:
                if returned[node] >= 1 << 62:
                    break
                barrier = self._new_node()
                self.add(node, barrier, REALTIME)
                if barriers:
                    self.add(barriers[-1], barrier, REALTIME)
                barriers.append(barrier)
            elif barriers:
                self.add(barriers[-1], node, REALTIME)
        return barriers


def _consumed(
    nodes: Collection[int],
    targets: Sequence[Collection[int]] | Mapping[int, Collection[int]],
    count: int,
    invoked: Sequence[int] | Mapping[int, int],
    returned: Sequence[int] | Mapping[int, int],
    *,
    size: int | None = None,
) -> list[int]:
    """The nodes that cannot be taken in an order that respects the edges and, below ``count``, real time.

    ``size`` is greater than any node or target; by default one more than the greatest of ``nodes``.
    """
    if size is None:
        size = (max(nodes) + 1) if nodes else 0
    blockers = [0] * size
    for node in nodes:
        for target in targets[node]:
            blockers[target] += 1
    real = [node for node in nodes if node < count]
    order = sorted(real, key=invoked.__getitem__)
    completions = sorted(real, key=returned.__getitem__)
    total = len(real)
    started = [True] * size
    for node in real:
        started[node] = False
    taken = bytearray(size)
    ready = [node for node in nodes if node >= count and not blockers[node]]
    next_start = next_completion = 0
    horizon = returned[completions[0]] if total else 0
    while True:
        while next_start < total and invoked[order[next_start]] <= horizon:
            node = order[next_start]
            next_start += 1
            started[node] = True
            if not blockers[node]:
                ready.append(node)
        if not ready:
            break
        while ready:
            node = ready.pop()
            taken[node] = 1
            for target in targets[node]:
                blockers[target] -= 1
                if not blockers[target] and started[target]:
                    ready.append(target)
        while next_completion < total and taken[completions[next_completion]]:
            next_completion += 1
        horizon = returned[completions[next_completion]] if next_completion < total else 1 << 63
    return [node for node in nodes if not taken[node]]


def cyclic(targets: Adjacency) -> list[list[int]]:
    """The same as ``components``, but faster if most nodes are in none."""
    return components(targets, _consumed(targets, targets, 0, (), ()))


def components(targets: Adjacency, roots: Collection[int] | None = None) -> list[list[int]]:
    """Strongly connected components of more than one node (Tarjan, iterative)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    path: list[int] = []
    found: list[list[int]] = []
    done = len(targets) + 1
    for root in targets if roots is None else roots:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        path.append(root)
        work = [(root, iter(targets[root]))]
        while work:
            node, ahead = work[-1]
            for target in ahead:
                seen = index.get(target)
                if seen is None:
                    index[target] = low[target] = len(index)
                    path.append(target)
                    work.append((target, iter(targets[target])))
                    break
                if seen < low[node]:
                    # A node whose component is complete has a number greater than all others.
                    low[node] = seen
            else:
                work.pop()
                lowest = low[node]
                if work and lowest < low[work[-1][0]]:
                    low[work[-1][0]] = lowest
                if lowest == index[node]:
                    component = []
                    while True:
                        member = path.pop()
                        index[member] = done
                        component.append(member)
                        if member == node:
                            break
                    if len(component) > 1:
                        found.append(component)
    return found
