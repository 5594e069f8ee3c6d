"""Read atomicity and causal consistency: does a transaction read the latest versions among those that it must see?

After Biswas & Enea, "On the complexity of checking transactional consistency" (OOPSLA 2019).  Some order of all commits
has to exist, which puts every writer before its readers, and in which every read finds the latest version of its key
among the writers that the reader sees.  Under read atomicity it sees those from which it reads ("no fractured reads",
Bailis et al., "RAMP", SIGMOD 2014); under causal consistency also what these saw and what its process ran before.

So if T3 reads the version that T1 wrote, and sees T2, which wrote that key too, then T2 committed before T1.  The level
holds if and only if those commits, together with the dependencies that are known, form no cycle: nothing that is
concluded leads to further conclusions.  As in Møldrup & Pavlogiannis, "AWDIT" (PLDI 2025), only the last write of each
process that a transaction sees is considered, found by vector clocks: time for the reads of a key times the processes
that write it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

from checker.history import OK
from checker.linearizability.budget import Budget
from checker.transactions.anomalies import MAX_EXAMPLES, Anomalies, Step, Transactions, described
from checker.transactions.cycles import shortest_cycle
from checker.transactions.graph import WR, WW, Adjacency, DependencyGraph, cyclic
from checker.words import short

__all__ = ["CAUSAL_VIOLATION", "FRACTURED_READ", "MAX_CLOCK_ENTRIES", "find_unseen"]

FRACTURED_READ = "fractured-read"
CAUSAL_VIOLATION = "causal-violation"

#: What a key holds before all writes, and its writer.
_FIRST, _NOBODY = object(), -1
#: Dependencies that put one commit before another.
_KNOWN = WR | WW
#: Transactions between two looks at the clock.
_BETWEEN_LOOKS = 1_000
#: Transactions times sessions, above which causal violations are not sought: so many entries may all clocks together
#: have, in the worst case some 400 MB; and computing one takes some 50 ns.
MAX_CLOCK_ENTRIES = 50_000_000

#: Why one transaction committed before another: a third, which saw the first, read this key as the second left it.
_Reason = tuple[int, Any]
#: Conclusions: which transaction committed before which, and why.
_Conclusions = dict[tuple[int, int], _Reason]


def find_unseen(
    transactions: Transactions,
    graph: DependencyGraph,
    rows: Collection[int],
    found: Anomalies,
    budget: Budget,
    *,
    is_cyclic: bool,
) -> tuple[str | None, str | None]:
    """Add fractured reads among ``rows`` to ``found``, or causal violations.

    Returns the limit of time or memory that ended the search, and why causal violations were not sought, if so.
    ``graph`` holds the dependencies of all transactions.  If it ``is_cyclic`` without anti-dependencies, that cycle,
    which is reported as such, is no violation of its own.  Causal violations are sought if no read is fractured.
    """
    accesses = _Accesses(transactions, graph, rows)
    _judge(accesses, FRACTURED_READ, _fractured(accesses), accesses.direct, found, is_cyclic=True)
    stopped = budget.exhausted()
    if stopped or FRACTURED_READ in found.counts:
        return stopped, None
    sessions = _Sessions(accesses)
    concluded: _Conclusions = {}
    if sessions.ordered is not None:
        if sessions.count * len(accesses.rows) > MAX_CLOCK_ENTRIES:
            return (
                None,
                f"not searched: {len(accesses.rows):,} transactions of {sessions.count:,} sessions are too many",
            )
        stopped = _unseen_causes(accesses, sessions, sessions.ordered, budget, concluded)
    if not stopped:
        _judge(accesses, CAUSAL_VIOLATION, concluded, sessions.before, found, is_cyclic=is_cyclic)
    return stopped, None


class _Accesses:
    """Who read whose version of which key, and who wrote which keys, among some transactions that happened."""

    def __init__(self, transactions: Transactions, graph: DependencyGraph, rows: Iterable[int]) -> None:
        self.transactions, self.graph = transactions, graph
        happened = {row for row in rows if transactions.status[row] == OK}
        maybe = set(rows).intersection(transactions.unknown)
        if maybe:
            # One whose writes were seen has dependencies.
            pairs = (
                (row, after) for row in (*happened, *maybe) for after, bits in graph.edges[row].items() if bits & _KNOWN
            )
            happened |= maybe.intersection(chain.from_iterable(pairs))
        #: In the order of invocation.
        self.rows = sorted(happened, key=transactions.history.invoked.__getitem__)
        #: Of each transaction, the keys that it wrote.
        self.written: dict[int, set[Any]] = {}
        writer: dict[tuple[Any, Any], int] = {}
        write, steps = transactions.write, transactions.steps
        for row in self.rows:
            keys = set()
            for f, key, value in steps[row]:
                if f == write:
                    keys.add(key)
                    writer[key, value] = row
            self.written[row] = keys
        #: Of each transaction, the keys that it read, each with the writer of the version; without what it read of its
        #: own writes, or of transactions that are left out.
        self.reads: dict[int, list[tuple[Any, int]]] = {}
        #: Of each transaction, those from which it reads.
        self.direct: dict[int, list[int]] = {}
        versions_of = _lists_read if write == "append" else _registers_read
        for row in self.rows:
            reads = []
            if transactions.status[row] == OK:
                for key, value in versions_of(steps[row]):
                    other = _NOBODY if value is _FIRST else writer.get((key, value), row)
                    if other != row:
                        reads.append((key, other))
            self.reads[row] = reads
            self.direct[row] = list({other for _, other in reads if other >= 0})


def _lists_read(steps: Iterable[Step]) -> list[tuple[Any, Any]]:
    """Keys that a transaction read, each with the last element that it did not append itself."""
    read = []
    own: dict[Any, list[Any]] = {}
    for f, key, value in steps:
        if f == "append":
            own.setdefault(key, []).append(value)
            continue
        mine, seen = own.get(key, ()), value or []
        if not mine or seen[-len(mine) :] == mine:
            read.append((key, seen[-len(mine) - 1] if len(seen) > len(mine) else _FIRST))
    return read


def _registers_read(steps: Iterable[Step]) -> list[tuple[Any, Any]]:
    """Keys that a transaction read before it wrote them, each with the value."""
    read = []
    own = set()
    for f, key, value in steps:
        if f == "w":
            own.add(key)
        elif key not in own:
            read.append((key, _FIRST if value is None else value))
    return read


def _fractured(accesses: _Accesses) -> _Conclusions:
    """What follows if a transaction sees all writes of those from which it reads."""
    concluded: _Conclusions = {}
    for row, reads in accesses.reads.items():
        seen = accesses.direct[row]
        if len(seen) > 1 or (seen and any(writer != seen[0] for _, writer in reads)):
            for key, writer in reads:
                for other in seen:
                    if other != writer and key in accesses.written[other]:
                        concluded.setdefault((other, writer), (row, key))
    return concluded


class _Sessions:
    """The order of each process, and what each transaction sees through it and through its reads."""

    def __init__(self, accesses: _Accesses) -> None:
        history, status = accesses.transactions.history, accesses.transactions.status
        last: dict[Any, int] = {}
        #: Of each transaction, those that it sees immediately.
        self.before = {row: list(seen) for row, seen in accesses.direct.items()}
        #: The session of each transaction, and its position there.
        self.place: dict[int, tuple[int, int]] = {}
        self.count = 0
        for row in accesses.rows:
            before = last.get(history.process[row])
            if before is not None:
                self.before[row].append(before)
            if status[row] != OK:
                # Nothing follows it, even in its process: it may take effect later.
                self.place[row] = (self._new(), 0)
                continue
            self.place[row] = (self._new(), 0) if before is None else (self.place[before][0], self.place[before][1] + 1)
            last[history.process[row]] = row
        self.after: Adjacency = {row: [] for row in accesses.rows}
        for row, seen in self.before.items():
            for other in seen:
                self.after[other].append(row)
        self.ordered = self._topological(accesses.rows)

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def _topological(self, rows: list[int]) -> list[int] | None:
        """The transactions, each after those that it sees; ``None`` if two see each other."""
        waiting = {row: len(self.before[row]) for row in rows}
        ready = deque(row for row in rows if not waiting[row])
        ordered = []
        while ready:
            row = ready.popleft()
            ordered.append(row)
            for other in self.after[row]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        return ordered if len(ordered) == len(rows) else None


def _by_session(accesses: _Accesses, sessions: _Sessions) -> dict[Any, list[tuple[int, list[int], list[int]]]]:
    """By key: each session that writes it, the positions of the writers there, and these."""
    writers: dict[Any, dict[int, tuple[int, list[int], list[int]]]] = {}
    for row in accesses.rows:
        session, position = sessions.place[row]
        for key in accesses.written[row]:
            _, positions, those = writers.setdefault(key, {}).setdefault(session, (session, [], []))
            positions.append(position)
            those.append(row)
    return {key: list(of_key.values()) for key, of_key in writers.items()}


def _unseen_causes(
    accesses: _Accesses, sessions: _Sessions, ordered: list[int], budget: Budget, concluded: _Conclusions
) -> str | None:
    """Add what follows if a transaction sees all that came causally before it; returns a limit that was reached."""
    writers = _by_session(accesses, sessions)
    nothing = [-1] * sessions.count
    #: Of each session, the last position that a transaction sees, itself included; kept while others need it.
    clocks: dict[int, list[int]] = {}
    needed = {row: len(after) for row, after in sessions.after.items()}
    for number, row in enumerate(ordered):
        if not number % _BETWEEN_LOOKS and (stopped := budget.exhausted()):
            return stopped
        clock = nothing.copy()
        for other in sessions.before[row]:
            session, position = sessions.place[other]
            if clock[session] < position:
                clock = list(map(max, clock, clocks[other]))
        for key, writer in accesses.reads.get(row, ()):
            by_writer = clocks[writer] if writer >= 0 else nothing
            for session, positions, those in writers.get(key, ()):
                # What the writer itself saw committed before it in any case.
                if by_writer[session] < positions[-1] and positions[0] <= clock[session]:
                    at = bisect_right(positions, clock[session]) - 1
                    if by_writer[session] < positions[at]:
                        concluded.setdefault((those[at], writer), (row, key))
        session, position = sessions.place[row]
        clock[session] = position
        if needed[row]:
            clocks[row] = clock
        for other in sessions.before[row]:
            needed[other] -= 1
            if not needed[other]:
                del clocks[other]
    return None


def _judge(
    accesses: _Accesses,
    name: str,
    concluded: _Conclusions,
    seen: Mapping[int, Collection[int]],
    found: Anomalies,
    *,
    is_cyclic: bool,
) -> None:
    """Add an anomaly for every writer whose key a transaction that saw it read before all writes, or for one cycle.

    ``seen`` holds what each transaction sees immediately.  A cycle without any conclusion counts unless ``is_cyclic``.
    """
    for (other, writer), (reader, key) in concluded.items():
        if writer == _NOBODY:
            is_shown = found.counts.get(name, 0) < MAX_EXAMPLES
            text = f"{described(accesses.transactions, reader)} read {short(key)} before all writes, but saw "
            path = _path(seen, other, reader) if is_shown else (other, reader)
            found.add(name, path, f"{text}{described(accesses.transactions, other)}")
    if name in found.counts or (is_cyclic and not concluded):
        return
    ways = accesses.graph.targets(set(accesses.rows), _KNOWN)
    for row, others in seen.items():
        for other in others:
            ways[other].append(row)
    for before, after in concluded:
        ways[before].append(after)
    apart = cyclic(ways)
    if not apart:
        return
    component = {node: at for at, nodes in enumerate(apart) for node in nodes}
    steps = [pair for pair in concluded if pair[0] in component and component[pair[0]] == component.get(pair[1])]
    # Without a conclusion it is a cycle of what transactions saw and of versions that are known.
    starts = steps or [
        (node, after) for node, at in component.items() for after in ways[node] if component.get(after) == at
    ]
    cycle = shortest_cycle(ways, starts)
    if cycle is not None and (steps or not is_cyclic):
        _add_cycle(accesses, name, cycle, concluded, seen, found)


def _add_cycle(
    accesses: _Accesses,
    name: str,
    cycle: list[int],
    concluded: _Conclusions,
    seen: Mapping[int, Collection[int]],
    found: Anomalies,
) -> None:
    transactions = accesses.transactions
    rows, sentences = list(cycle), []
    for at, before in enumerate(cycle):
        after = cycle[(at + 1) % len(cycle)]
        reason = concluded.get((before, after))
        if before in seen.get(after, ()):
            sentences.append(f"T{after} saw T{before}")
        elif reason is None or accesses.graph.edges[before].get(after, 0) & WW:
            sentences.append(f"T{after} wrote a version that follows T{before}'s")
        else:
            reader, key = reason
            rows += _path(seen, before, reader)
            sentences.append(
                f"T{before} committed before T{after}, because T{reader} saw T{before}, which wrote {short(key)}, and "
                f"read T{after}'s version of it"
            )
    rows = list(dict.fromkeys(rows))
    listed = "; ".join(described(transactions, row) for row in rows[:8])
    found.add(name, rows, f"{'; '.join(sentences[:8])}; this is a cycle. Here {listed}")


def _path(seen: Mapping[int, Collection[int]], source: int, target: int) -> list[int]:
    """A shortest way by which ``target`` sees ``source``, both included."""
    came = {target: target}
    queue = deque([target])
    while source not in came:
        row = queue.popleft()
        for other in seen[row]:
            if other not in came:
                came[other] = row
                queue.append(other)
    path = [source]
    while path[-1] != target:
        path.append(came[path[-1]])
    return path
