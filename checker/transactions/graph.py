"""Dependency graphs between transactions: is there a cycle, and if so which is the gravest.

After Adya, "Weak consistency" (PhD thesis, 2000) and Kingsbury & Alvaro, "Elle" (VLDB 2020).  A history is first
consumed in topological order, real time included, which is all that a strictly serializable one needs: linear time.
Only what cannot be consumed is searched for cycles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["KINDS", "PROCESS", "REALTIME", "RW", "VIA", "WR", "WW", "Cycle", "DependencyGraph"]

WW, WR, RW, PROCESS, REALTIME, VIA = 1, 2, 4, 8, 16, 32
KINDS = {WW: "ww", WR: "wr", RW: "rw", PROCESS: "process", REALTIME: "realtime", VIA: "via"}

#: A cycle: nodes in order and the kind of the edge that leaves each.
Cycle = list[tuple[int, int]]

#: Edges tried as the start of a shortest cycle, per component and class: more would find shorter, not other, cycles.
MAX_STARTS = 200


class DependencyGraph:
    """Edges between transactions 0..count-1 (and helper nodes beyond), each with the set of its kinds as bits."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.edges: list[dict[int, int]] = [{} for _ in range(count)]

    def add(self, source: int, target: int, kind: int) -> None:
        """An edge; several kinds between the same two nodes are kept together."""
        if source != target:
            targets = self.edges[source]
            targets[target] = targets.get(target, 0) | kind

    def new_node(self) -> int:
        """A helper node, so that "all of these precede all of those" takes edges in their sum, not their product."""
        self.edges.append({})
        return len(self.edges) - 1

    def leftover(self, invoked: list[int], returned: list[int]) -> list[int]:
        """Nodes on or behind a cycle, real time included; empty for a strictly serializable order.

        A transaction may be taken once all that it depends on are taken and all that returned before its invocation.
        """
        edges, count, total = self.edges, self.count, len(self.edges)
        blockers = [0] * total
        for targets in edges:
            for target in targets:
                blockers[target] += 1
        order = sorted(range(count), key=invoked.__getitem__)
        completions = sorted(range(count), key=returned.__getitem__)
        started = [False] * total
        for node in range(count, total):
            started[node] = True
        taken = [False] * total
        ready = [node for node in range(count, total) if not blockers[node]]
        next_start = next_completion = 0
        horizon = returned[completions[0]] if count else 0
        while True:
            while next_start < count and invoked[order[next_start]] < horizon:
                node = order[next_start]
                next_start += 1
                started[node] = True
                if not blockers[node]:
                    ready.append(node)
            if not ready:
                break
            while ready:
                node = ready.pop()
                taken[node] = True
                for target in edges[node]:
                    blockers[target] -= 1
                    if not blockers[target] and started[target]:
                        ready.append(target)
            while next_completion < count and taken[completions[next_completion]]:
                next_completion += 1
            horizon = returned[completions[next_completion]] if next_completion < count else 1 << 63
        return [node for node in range(total) if not taken[node]]

    def add_order(self, nodes: Iterable[int], invoked: list[int], returned: list[int], process: list[object]) -> None:
        """Process and real-time edges between those transactions, by way of a chain of completions."""
        chosen = list(nodes)
        last: dict[object, int] = {}
        events = sorted([(invoked[n], 0, n) for n in chosen] + [(returned[n], 1, n) for n in chosen])
        tip = -1
        for position, is_return, node in events:
            if is_return:
                if position >= 1 << 62:
                    continue
                barrier = self.new_node()
                self.add(node, barrier, REALTIME)
                if tip >= 0:
                    self.add(tip, barrier, REALTIME)
                tip = barrier
            else:
                if tip >= 0:
                    self.add(tip, node, REALTIME)
                before = last.get(process[node])
                if before is not None:
                    self.add(before, node, PROCESS)
                last[process[node]] = node

    def components(self, nodes: Iterable[int], kinds: int) -> list[list[int]]:
        """Strongly connected components of more than one node, over edges of those kinds (Tarjan, iterative)."""
        inside = set(nodes)
        index: dict[int, int] = {}
        low: dict[int, int] = {}
        on_path: set[int] = set()
        path: list[int] = []
        found: list[list[int]] = []
        for root in sorted(inside):
            if root in index:
                continue
            work = [(root, iter(self._targets(root, kinds, inside)))]
            index[root] = low[root] = len(index)
            path.append(root)
            on_path.add(root)
            while work:
                node, targets = work[-1]
                for target in targets:
                    if target not in index:
                        index[target] = low[target] = len(index)
                        path.append(target)
                        on_path.add(target)
                        work.append((target, iter(self._targets(target, kinds, inside))))
                        break
                    if target in on_path:
                        low[node] = min(low[node], index[target])
                else:
                    work.pop()
                    if work:
                        parent = work[-1][0]
                        low[parent] = min(low[parent], low[node])
                    if low[node] == index[node]:
                        component = []
                        while True:
                            member = path.pop()
                            on_path.discard(member)
                            component.append(member)
                            if member == node:
                                break
                        if len(component) > 1:
                            found.append(component)
        return found

    def _targets(self, node: int, kinds: int, inside: set[int]) -> list[int]:
        return [target for target, bits in self.edges[node].items() if bits & kinds and target in inside]

    def shortest_cycle(self, component: list[int], through: int, back: int, *, needed: int = 0) -> Cycle | None:
        """A short cycle of one edge of kind ``through``, closed by a shortest path over edges of kinds ``back``.

        With ``needed``, that path takes at least one edge of that kind, and only for that.
        """
        inside = set(component)
        best: Cycle | None = None
        tried = 0
        for source in component:
            for target, bits in self.edges[source].items():
                if target not in inside or not bits & through:
                    continue
                tried += 1
                if tried > MAX_STARTS and best is not None:
                    return best
                limit = None if best is None else len(best) - 2
                if needed:
                    way = self._path_with(target, source, back, needed, inside, limit)
                else:
                    way = self._path(target, source, back, inside, limit)
                if way is not None:
                    best = [(source, bits & through), *way]
                    if len(best) == 2:
                        return best
        return best

    def _path(self, source: int, target: int, kinds: int, inside: set[int], limit: int | None) -> Cycle | None:
        """The shortest path as (node, kind of its outgoing edge), without its last node; at most ``limit`` edges."""
        came: dict[int, tuple[int, int]] = {source: (-1, 0)}
        queue = deque([(source, 0)])
        while queue:
            node, length = queue.popleft()
            if node == target:
                steps: Cycle = []
                while node != source:
                    previous, kind = came[node]
                    steps.append((previous, kind))
                    node = previous
                return steps[::-1]
            if limit is not None and length >= limit:
                continue
            for after, bits in self.edges[node].items():
                if bits & kinds and after in inside and after not in came:
                    came[after] = (node, bits & kinds)
                    queue.append((after, length + 1))
        return None

    def _path_with(
        self, source: int, target: int, kinds: int, needed: int, inside: set[int], limit: int | None
    ) -> Cycle | None:
        """The same with at least one edge that is of a ``needed`` kind alone; ``None`` too where a node comes twice."""
        first = (source, False)
        came: dict[tuple[int, bool], tuple[tuple[int, bool], int]] = {}
        queue = deque([(first, 0)])
        while queue:
            place, length = queue.popleft()
            node, done = place
            if node == target and done:
                steps: Cycle = []
                while place != first:
                    place, kind = came[place]
                    steps.append((place[0], kind))
                nodes = [step[0] for step in steps]
                return steps[::-1] if len({*nodes, target}) == len(nodes) + 1 else None
            if limit is not None and length >= limit:
                continue
            for after, bits in self.edges[node].items():
                bits &= kinds
                if not bits or after not in inside:
                    continue
                only = bits & ~needed
                following = (after, done or not only)
                if following not in came and following != first:
                    came[following] = (place, only or bits)
                    queue.append((following, length + 1))
        return None
