"""Checks transactions against isolation levels, and finds the strongest level not ruled out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from checker.history import History, HistoryError, Operation
from checker.linearizability.budget import Budget, LimitReached, no_collection
from checker.reducing import smallest
from checker.transactions.anomalies import Anomalies, Step, Transactions, described
from checker.transactions.cycles import Cycle, find_cycles, on_cycles_by_process
from checker.transactions.evidence import evidence_for
from checker.transactions.graph import KINDS, PROCESS, REALTIME, RW, VIA, WR, WW, DependencyGraph
from checker.transactions.list_append import build_list_append
from checker.transactions.orders import MAX_SNAPSHOTS, MAX_TRANSACTIONS, find_order, find_snapshot_order
from checker.transactions.rw_register import Versions, build_rw_register
from checker.transactions.serial import find_serial_order
from checker.transactions.strict_order import has_strict_order
from checker.transactions.visibility import CAUSAL_VIOLATION, FRACTURED_READ, find_unseen
from checker.verdict import Edge, Result, Verdict, Witness
from checker.words import short

__all__ = ["ISOLATION_LEVELS", "check_transactions"]

_GRAVE = ("G0", "G1c", "G-single", "G-nonadjacent")
#: Classes of cycles of which some hold a cycle with one anti-dependency at most, without real time.
_WITH_SINGLE = frozenset(f"{name}{suffix}" for name in _GRAVE for suffix in ("", "-process"))

#: For each level, the anomalies that rule it out besides those of weaker levels, and the next weaker levels.
_LEVELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "read-uncommitted": (("G0", "duplicate-elements", "garbage-read", "garbage-version", "cyclic-versions"), ()),
    # Of two orders of one list only one can have been committed.
    "read-committed": (("G1a", "G1b", "G1c", "internal", "incompatible-order"), ("read-uncommitted",)),
    "read-atomic": ((FRACTURED_READ, "non-repeatable-read"), ("read-committed",)),
    # Of versions and of what each process ran.
    "causal": (("G0-process", "G1c-process", CAUSAL_VIOLATION), ("read-atomic",)),
    "snapshot-isolation": (("G-single", "G-nonadjacent", "lost-update", "no-snapshot-order"), ("read-atomic",)),
    "strong-session-snapshot-isolation": (
        (*(f"{name}-process" for name in _GRAVE), "no-snapshot-order-process"), ("snapshot-isolation", "causal")
    ),
    "strong-snapshot-isolation": (
        (*(f"{name}-realtime" for name in _GRAVE), "no-snapshot-order-realtime"),
        ("strong-session-snapshot-isolation",),
    ),
    "serializable": (("G2", "no-order"), ("snapshot-isolation",)),
    "strong-session-serializable": (
        ("G2-process", "no-order-process"), ("serializable", "strong-session-snapshot-isolation")
    ),
    "strict-serializable": (
        ("G2-realtime", "no-order-realtime"), ("strong-session-serializable", "strong-snapshot-isolation")
    ),
}  # fmt: skip
ISOLATION_LEVELS = tuple(_LEVELS)
#: Levels each stronger than the one before; the one reported as strongest is one of these.
_CHAIN = (
    "read-uncommitted",
    "read-committed",
    "read-atomic",
    "snapshot-isolation",
    "serializable",
    "strong-session-serializable",
    "strict-serializable",
)
#: Levels that require one order of all transactions, strongest first, and what else the order must respect.
_ORDERED_LEVELS = (
    ("strict-serializable", "no-order-realtime", PROCESS | REALTIME),
    ("strong-session-serializable", "no-order-process", PROCESS),
    ("serializable", "no-order", 0),
)
#: Snapshot levels, strongest first, what the order must respect, and the serializable level that implies each.
_SNAPSHOT_LEVELS = (
    ("strong-snapshot-isolation", "no-snapshot-order-realtime", PROCESS | REALTIME, "strict-serializable"),
    ("strong-session-snapshot-isolation", "no-snapshot-order-process", PROCESS, "strong-session-serializable"),
    ("snapshot-isolation", "no-snapshot-order", 0, "serializable"),
)
_OF_SNAPSHOTS = frozenset(level for level, *_ in _SNAPSHOT_LEVELS)
_OF_ORDERS = frozenset(level for level, *_ in _ORDERED_LEVELS)
_NOT_FOUND = "neither found nor excluded within the limits of the search"
#: Anomalies that leave open whose write a read saw.
_AMBIGUOUS = ("duplicate-append", "duplicate-write", "null-write")
#: Seconds that reducing a set of transactions without an order may take.
CUT_TIMEOUT_S = 5.0

#: Most memory the graph takes per transaction, as measured on 100,000 transactions of four steps; others take a tenth.
#: If that much is not allowed, actual use is watched.
BYTES_PER_TRANSACTION = 6_000

_MEANING = {
    WW: "the latter wrote the version of a key that follows the former's",
    WR: "the latter read what the former wrote",
    RW: "the former read a version that the latter replaced",
    PROCESS: "the same process ran the former first",
    REALTIME: "the former returned before the latter was invoked",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    workload: str
    level: str
    linearizable_keys: bool
    sequential_keys: bool
    excerpt: bool

    def names(self, level: str) -> tuple[str, ...]:
        """The anomalies that rule out a level, the gravest first."""
        direct, weaker = _LEVELS[level]
        names = dict.fromkeys(name for each in weaker for name in self.names(each))
        names |= dict.fromkeys(direct)
        if self.excerpt:
            names.pop("garbage-read", None)
        if level == "read-uncommitted" and self.workload == "rw-register" and not self._has_known_versions:
            # A transaction that reads a version and then writes puts its own later only from read committed up.
            del names["G0"]
        elif level == "read-committed":
            names.setdefault("G0")
        return tuple(names)

    @property
    def _has_known_versions(self) -> bool:
        return self.linearizable_keys or self.sequential_keys


class _Findings:
    """What was found in some transactions: anomalies, a cycle of each class, and what a search for an order found.

    ``open`` says in words what could not be judged; ``proven`` is the strongest level for which an order was found
    even so.  Raises :class:`LimitReached` if a limit ends building the graph, before which nothing is known.
    """

    def __init__(self, history: History, question: _Question, budget: Budget) -> None:
        self._question = question
        self.cycles: dict[str, Cycle] = {}
        self.order: str | None = None
        self.snapshots: str | None = None
        self.causal: str | None = None
        self._few_before: list[int] = []
        self.open: str | None = None
        self.proven: str | None = None
        with budget.watched(len(history) * BYTES_PER_TRANSACTION):
            self.transactions, graph, self.anomalies, steps, versions = _built(history, question)
        self.stopped = budget.exhausted()
        if not self.stopped:
            self.cycles, left, self.stopped = find_cycles(self.transactions, graph, budget)
        if not self.stopped:
            self._look_for_unseen(graph, left, budget)
        if question.excerpt and "garbage-read" in self.anomalies.counts:
            self.open = self.anomalies.examples["garbage-read"][0][1] + ", as far as this excerpt shows"
        ambiguous = next((name for name in _AMBIGUOUS if name in self.anomalies.counts), None)
        if ambiguous and not self.open:
            self.open = self.anomalies.examples[ambiguous][0][1]
        if not self.open:
            self.open = self.transactions.altered
        if self.stopped:
            return
        if ambiguous:
            self._try_every_order(steps, budget)
            return
        if versions is not None:
            is_open = "garbage-read" in self.anomalies.counts
            if versions.are_known and not is_open:
                self._take_from_graph()
                return
            if left or is_open or not self._finds_strict_order(versions, budget):
                self._search_orders(budget)
        self._search_snapshots(graph, budget)

    def _look_for_unseen(self, graph: DependencyGraph, left: list[int], budget: Budget) -> None:
        """Look for reads that miss what their transaction must see.

        Lists show the order of their versions: so it is on a cycle with a single anti-dependency, and the versions that
        were read too late are those of direct dependencies.
        """
        rows: Collection[int] = range(graph.count)
        is_cyclic = not left or any(name in self.cycles for name in ("G0", "G1c", "G0-process", "G1c-process"))
        if self._question.workload == "list-append":
            if self.cycles.keys().isdisjoint(_WITH_SINGLE):
                return
            inside = on_cycles_by_process(self.transactions, graph, left)
            rows = {
                row
                for row in range(graph.count)
                if row in inside or any(bits & WR and after in inside for after, bits in graph.edges[row].items())
            }
        transactions, found = self.transactions, self.anomalies
        self.stopped, self.causal = find_unseen(transactions, graph, rows, found, budget, is_cyclic=is_cyclic)

    def has(self, names: Iterable[str]) -> bool:
        return any(name in self.anomalies.counts or name in self.cycles for name in names)

    def _take_from_graph(self) -> None:
        """Reads show the order of all versions, so a graph without the cycles that a level rules out has its order."""
        is_free = [level for level, *_ in _ORDERED_LEVELS if not self.has(self._question.names(level))]
        self.order = f"found for {is_free[0]}" if is_free else "excluded"
        is_free = [level for level, *_ in _SNAPSHOT_LEVELS if not self.has(self._question.names(level))]
        if is_free:
            self.snapshots = f"found for {is_free[0]}"

    def _finds_strict_order(self, versions: Versions, budget: Budget) -> bool:
        """Whether an order of all transactions that respects real time was found; then every level holds."""
        level = _ORDERED_LEVELS[0][0]
        if self.has(self._question.names(level)) or not has_strict_order(self.transactions, versions, budget.exhausted):
            return False
        self.order = f"found for {level}"
        return True

    def _search_orders(self, budget: Budget) -> None:
        """Look for the order that each level not yet ruled out requires; one that respects real time was sought before.

        If there is none, only a few of the transactions are shown.  Leaving out the others is sound: what they wrote
        and these read then comes from an unknown writer, which may take their place in the order.
        """
        transactions = self.transactions
        rows = sorted([*transactions.committed, *transactions.unknown])
        if len(rows) > MAX_TRANSACTIONS:
            is_ruled_out = self.has(self._question.names(_ORDERED_LEVELS[0][0]))
            self.order = f"not searched: more than {MAX_TRANSACTIONS} transactions" if is_ruled_out else _NOT_FOUND
            return
        for level, name, extra in _ORDERED_LEVELS:
            if self.has(self._question.names(level)):
                continue
            is_possible = find_order(transactions, rows, extra, budget.exhausted)
            if is_possible is None:
                self.order = _NOT_FOUND
                self._stop_at(budget, _OF_ORDERS)
                return
            if is_possible:
                self.order = f"found for {level}"
                return
            limits = partial(_first_limit, budget, Budget(timeout_s=CUT_TIMEOUT_S))
            self._add_no_order(name, self._few_of(rows, partial(_has_no_order, transactions, extra, limits), limits))
        self.order = "excluded"

    def _search_snapshots(self, graph: DependencyGraph, budget: Budget) -> None:
        """Look for the order of starts and commits that each level of snapshot isolation not yet ruled out requires.

        A level that some serial order shows to hold needs no search.  The graph alone decides unless nothing shows the
        order of some versions: the last appends to a list, or the values of a register.
        """
        transactions = self.transactions
        rows = sorted([*transactions.committed, *transactions.unknown])
        is_list = self._question.workload == "list-append"
        for level, name, extra, serial in _SNAPSHOT_LEVELS:
            is_serial = not self.has(self._question.names(serial)) if is_list else self.order == f"found for {serial}"
            if is_serial:
                return
            if self.has(self._question.names(level)):
                continue
            if len(rows) > MAX_SNAPSHOTS:
                self.snapshots = f"not searched: more than {MAX_SNAPSHOTS} transactions"
                return
            is_possible = find_snapshot_order(transactions, graph, extra, budget.exhausted)
            if is_possible is None:
                self.snapshots = _NOT_FOUND
                self._stop_at(budget, _OF_SNAPSHOTS)
                return
            if is_possible:
                self.snapshots = f"found for {level}"
                return
            limits = partial(_first_limit, budget, Budget(timeout_s=CUT_TIMEOUT_S))
            self._add_no_order(name, self._few_of(rows, partial(self._has_no_snapshots, extra, limits), limits))

    def _stop_at(self, budget: Budget, levels: Collection[str]) -> None:
        """Record a limit of time or memory that ended the search, if the level asked for is one of these; the limit on
        tries is the checker's own."""
        limit = budget.exhausted()
        if limit and self._question.level in levels:
            self.stopped = f"{limit} before an order of the transactions that explains them was found or excluded"

    def _few_of(self, rows: list[int], is_enough: Callable[[list[int]], bool], is_over: Callable[[], Any]) -> list[int]:
        """A few transactions that are enough, sought first among those that were enough at the previous level."""
        before = self._few_before
        self._few_before = smallest(before if before and is_enough(before) else rows, is_enough, is_over)
        return self._few_before

    def _has_no_snapshots(self, extra: int, is_over: Callable[[], Any], rows: Sequence[int]) -> bool:
        part = History.from_operations(self.transactions.history.operations(rows))
        transactions, graph, found, *_ = _built(part, replace(self._question, excerpt=True))
        if not found.counts.keys() <= {"garbage-read"}:
            return False
        return find_snapshot_order(transactions, graph, extra, is_over) is False

    def _try_every_order(self, steps: list[list[Step]], budget: Budget) -> None:
        """Look for an order if reads do not show whose writes they saw: a handful of transactions, in all orders."""
        transactions = self.transactions
        transactions.steps = steps
        rows = sorted([*transactions.committed, *transactions.unknown])
        if self._question.excerpt and "garbage-read" in self.anomalies.counts:
            return
        for level, name, extra in _ORDERED_LEVELS:
            if self.has(self._question.names(level)):
                continue
            is_possible = find_serial_order(transactions, rows, extra, budget.exhausted)
            if is_possible is None:
                return
            if is_possible:
                self.order, self.proven = f"found for {level}", level
                return
            self._add_no_order(name, rows)
        self.order = "excluded"

    def _add_no_order(self, name: str, rows: Sequence[int]) -> None:
        transactions = self.transactions
        readers = "; ".join(described(transactions, row) for row in rows[:8])
        self.anomalies.add(name, rows, f"no order of these transactions explains what they read: {readers}")


def _built(
    history: History, question: _Question
) -> tuple[Transactions, DependencyGraph, Anomalies, list[list[Step]], Versions | None]:
    """The transactions, their dependencies, the anomalies of single ones, all steps, including those not judged, and
    the versions of registers."""
    transactions = Transactions(history, "append" if question.workload == "list-append" else "w")
    graph, found, steps = DependencyGraph(len(history)), Anomalies(), transactions.steps
    if question.workload == "list-append":
        build_list_append(transactions, graph, found)
        versions = None
    else:
        versions = build_rw_register(
            transactions,
            graph,
            found,
            linearizable_keys=question.linearizable_keys,
            sequential_keys=question.sequential_keys,
        )
    return transactions, graph, found, steps, versions


def _has_no_order(transactions: Transactions, extra: int, is_over: Callable[[], Any], rows: Sequence[int]) -> bool:
    return find_order(transactions, rows, extra, is_over) is False


def _first_limit(*budgets: Budget) -> str | None:
    return next(filter(None, (budget.late() for budget in budgets)), None)


@no_collection()
def check_transactions(
    history: History | Iterable[Mapping[str, Any]] | Iterable[Operation],
    workload: str = "list-append",
    *,
    level: str = "strict-serializable",
    linearizable_keys: bool = False,
    sequential_keys: bool = False,
    excerpt: bool = False,
    timeout_s: float | None = None,
    memory_mb: float | None = None,
) -> Result:
    """Check a history of ``list-append`` or ``rw-register`` transactions against an isolation level.

    ``stats`` holds ``anomalies`` (counts), ``examples``, ``levels``: those not ruled out, and ``strongest``: the
    strongest of them, apart from ``causal`` and the session and real-time variants of snapshot isolation.  For
    ``rw-register``, ``linearizable_keys`` and ``sequential_keys`` say that every key on its own is known to be
    linearizable, or sequentially consistent, so that versions seen one after the other, by any process or by the same
    one, were written in that order; and ``order`` in ``stats`` says whether an order of the transactions that explains
    every read was found (see ``transactions.orders``).  Values compare as in JSON: ``true`` is not 1, 1 equals 1.0, and
    null may be written like any other.

    A read of a value that nobody wrote rules out every level, unless the history is an ``excerpt`` (the value may have
    been written outside it; a history whose reader noted ``problems`` is one too): then the answer is ``unknown``.
    Keys to which a value was written twice, and registers that null was both written to and read from, are left out,
    and the answer is ``unknown`` unless the others contradict themselves or there are so few transactions that all
    their orders could be tried (see ``transactions.serial``).  Raises ``ValueError`` for unknown names and steps, and
    :class:`HistoryError` for operations with a key of their own: the keys of a transaction are those of its steps.
    """
    if level not in ISOLATION_LEVELS:
        raise ValueError(f"no isolation level {level!r}; known: {', '.join(ISOLATION_LEVELS)}")
    if workload not in ("list-append", "rw-register"):
        raise ValueError(f"no transaction workload {workload!r}; known: list-append, rw-register")
    budget = Budget(timeout_s=timeout_s, memory_mb=memory_mb)
    history = History.of(history)
    if history.keyed:
        key = next(key for key in history.key if key is not None)
        raise HistoryError(
            f"transactions have their keys in their steps: an operation must have none of its own, such as {short(key)}"
        )
    question = _Question(
        workload=workload,
        level=level,
        linearizable_keys=linearizable_keys,
        sequential_keys=sequential_keys,
        excerpt=excerpt or bool(history.problems),
    )
    try:
        findings = _Findings(history, question, budget)
    except LimitReached as limit:
        reason = f"{limit} before the graph of the transactions was made"
        return Result(verdict=Verdict.UNKNOWN, reason=reason, stats={"operations": len(history)})
    return _result(findings, question, budget)


def _result(findings: _Findings, question: _Question, budget: Budget) -> Result:
    transactions, found = findings.transactions, findings.anomalies
    witnesses = {name: _cycle_witness(transactions, name, cycle) for name, cycle in findings.cycles.items()}
    for name, witness in witnesses.items():
        found.add(name, [operation.index for operation in witness.operations], witness.text)
    for name, examples in found.examples.items():
        rows, text = examples[0]
        witnesses.setdefault(name, Witness(operations=transactions.history.operations(rows), text=f"{name}: {text}."))
    levels = [level for level in ISOLATION_LEVELS if found.counts.keys().isdisjoint(question.names(level))]
    strongest = next((level for level in reversed(_CHAIN) if level in levels), None)
    stats: dict[str, Any] = {
        "model": question.workload,
        "operations": len(transactions.history),
        "committed": len(transactions.committed),
        "engines": {"A8 dependency graph": 1},
        "anomalies": dict(found.counts),
        "examples": {name: [text for _, text in examples] for name, examples in found.examples.items()},
        "levels": levels,
        "strongest": strongest,
        "search_s": round(budget.elapsed_s(), 6),
    }
    if findings.order is not None:
        stats["order"] = findings.order
    if findings.snapshots is not None:
        stats["snapshot_order"] = findings.snapshots
    broken = [name for name in question.names(question.level) if name in found.counts]
    if broken:
        # Of equally small ones, one that is drawn as a cycle.
        witness = min((witnesses[name] for name in broken), key=lambda w: (len(w.operations), not w.edges))
        witness = _with_evidence(transactions, witness, question, budget)
        holds = f"it may still be {strongest}" if strongest else "no level holds"
        return Result(
            verdict=Verdict.INVALID,
            witness=witness,
            stats=stats,
            reason=f"not {question.level}: {witness.text} Found: {', '.join(sorted(found.counts))}; {holds}.",
        )
    if findings.causal is not None:
        stats["causal"] = findings.causal
        if question.level == "causal":
            reason = f"a cause that a transaction did not see was {findings.causal}"
            return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=findings.stopped or findings.open or reason)
    is_proven = findings.proven is not None and question.level in _with_weaker(findings.proven)
    if findings.stopped or (findings.open and not is_proven):
        return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=findings.stopped or findings.open or "")
    order = "" if findings.order is None else f"; an order of the transactions that explains it was {findings.order}"
    if findings.snapshots is not None and question.level in _OF_SNAPSHOTS:
        order += f"; an order of starts and commits that explains it was {findings.snapshots}"
    shown = strongest if strongest and question.level in _with_weaker(strongest) else question.level
    return Result(verdict=Verdict.VALID, stats=stats, reason=f"nothing rules out {shown}{order}")


def _with_weaker(level: str) -> set[str]:
    return {level}.union(*map(_with_weaker, _LEVELS[level][1]))


def _with_evidence(transactions: Transactions, witness: Witness, question: _Question, budget: Budget) -> Witness:
    """The witness, with the other transactions it needs to be wrong on its own."""
    history = transactions.history
    # What none of those few wrote may have been written by others.
    alone = replace(question, excerpt=question.excerpt or "garbage-read: " not in witness.text)
    names = alone.names(question.level)

    def is_wrong(rows: Sequence[int]) -> bool:
        part = History.from_operations(history.operations(rows))
        try:
            return not budget.exhausted() and _Findings(part, alone, budget).has(names)
        except LimitReached:
            return False

    rows = evidence_for(transactions, [operation.index for operation in witness.operations], is_wrong)
    if rows is None:
        note = "that these depend on each other follows only from many other transactions"
        return replace(witness, minimal=False, note=note)
    if not rows:
        return witness
    readers = "; ".join(described(transactions, row) for row in rows[:8])
    return replace(
        witness,
        operations=(*witness.operations, *history.operations(rows)),
        text=f"{witness.text} That order, or that these committed, follows from {readers}.",
    )


def _cycle_witness(transactions: Transactions, name: str, cycle: Cycle) -> Witness:
    """The transactions of a cycle without helper nodes, and why each comes before the next."""
    history, count = transactions.history, len(transactions.history)
    first = next(at for at, (node, _) in enumerate(cycle) if node < count)
    steps: list[tuple[int, int]] = []
    for node, kind in [*cycle[first:], *cycle[:first]]:
        if node < count:
            steps.append((node, kind))
        elif kind != VIA:
            steps[-1] = (steps[-1][0], steps[-1][1] | kind)
    edges, sentences = [], []
    for position, (node, kinds) in enumerate(steps):
        target = (position + 1) % len(steps)
        kind = next(bit for bit in (WW, WR, RW, PROCESS, REALTIME) if kinds & bit)
        edges.append(Edge(source=position, target=target, kind=KINDS[kind], reason=_MEANING[kind]))
        sentences.append(f"T{node} -{KINDS[kind]}-> T{steps[target][0]} ({_MEANING[kind]})")
    listed = "; ".join(described(transactions, node) for node, _ in steps[:8])
    text = f"{name}: {'; '.join(sentences[:8])}; this is a cycle. Here {listed}."
    return Witness(operations=history.operations([node for node, _ in steps]), text=text, edges=tuple(edges))
