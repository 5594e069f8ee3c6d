"""Transactions in, the strongest isolation level not ruled out."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from checker.history import NEVER, History, Operation, freeze
from checker.linearizability.budget import Budget
from checker.transactions.anomalies import Anomalies, Transactions, described
from checker.transactions.evidence import evidence_for
from checker.transactions.graph import KINDS, PROCESS, REALTIME, RW, VIA, WR, WW, Cycle, DependencyGraph
from checker.transactions.list_append import build_list_append
from checker.transactions.orders import MAX_TRANSACTIONS, find_order, smallest_without_order
from checker.transactions.rw_register import build_rw_register
from checker.verdict import Edge, Result, Verdict, Witness

__all__ = ["ISOLATION_LEVELS", "check_transactions"]

#: Levels from weak to strong, and the anomalies that rule each out (beside those of weaker ones).
#: Snapshot isolation allows G2 here: cycles of two or more anti-dependencies are not told apart further.
_RULED_OUT_BY: dict[str, tuple[str, ...]] = {
    "read-uncommitted": ("G0", "duplicate-elements", "incompatible-order", "cyclic-versions"),
    "read-committed": ("G1a", "G1b", "G1c", "internal"),
    "snapshot-isolation": ("G-single", "lost-update"),
    "serializable": ("G2", "no-order"),
    "strong-session-serializable": ("G0-process", "G1c-process", "G-single-process", "G2-process", "no-order-process"),
    "strict-serializable": ("G0-realtime", "G1c-realtime", "G-single-realtime", "G2-realtime", "no-order-realtime"),
}
ISOLATION_LEVELS = tuple(_RULED_OUT_BY)
#: Levels that ask for one order of all transactions, strongest first, and what else the order must respect.
_ORDERED_LEVELS = (
    ("strict-serializable", "no-order-realtime", PROCESS | REALTIME),
    ("strong-session-serializable", "no-order-process", PROCESS),
    ("serializable", "no-order", 0),
)
#: Seconds that cutting down transactions without an order may take.
CUT_TIMEOUT_S = 5.0

#: Memory the graph of one transaction takes at most, as measured on 100,000 transactions of four steps.
BYTES_PER_TRANSACTION = 6_000

_MEANING = {
    WW: "the next version of a key that the former wrote is the latter's",
    WR: "the latter read what the former wrote",
    RW: "the former read a version that the latter replaced",
    PROCESS: "the same process did the former first",
    REALTIME: "the former returned before the latter was invoked",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    workload: str
    level: str
    linearizable_keys: bool
    sequential_keys: bool

    def names(self) -> list[str]:
        """The anomalies that rule out the level."""
        wanted = ISOLATION_LEVELS[: ISOLATION_LEVELS.index(self.level) + 1]
        return [name for level in wanted for name in _RULED_OUT_BY[level]]


class _Findings:
    """What was found in some transactions: anomalies, a cycle of each class, and whether an order was searched."""

    def __init__(self, history: History, question: _Question, budget: Budget) -> None:
        self.transactions = Transactions(history, "append" if question.workload == "list-append" else "w")
        self.anomalies = Anomalies()
        self.cycles: dict[str, Cycle] = {}
        self.order: str | None = None
        graph = DependencyGraph(len(history))
        if question.workload == "list-append":
            build_list_append(self.transactions, graph, self.anomalies)
        else:
            build_rw_register(
                self.transactions,
                graph,
                self.anomalies,
                linearizable_keys=question.linearizable_keys,
                sequential_keys=question.sequential_keys,
            )
        self.stopped = budget.exhausted()
        if not self.stopped:
            self.cycles, self.stopped = _cycles(self.transactions, graph, budget)
        if not self.stopped and question.workload == "rw-register":
            self.order = self._search_orders(budget)

    def has(self, names: Iterable[str]) -> bool:
        return any(name in self.anomalies.counts or name in self.cycles for name in names)

    def _search_orders(self, budget: Budget) -> str:
        """Look for the order that each level not ruled out yet asks for; how that ended."""
        transactions = self.transactions
        rows = sorted([*transactions.committed, *transactions.unknown])
        if len(rows) > MAX_TRANSACTIONS:
            return f"not searched: more than {MAX_TRANSACTIONS} transactions"
        for level, name, extra in _ORDERED_LEVELS:
            weaker = ISOLATION_LEVELS[: ISOLATION_LEVELS.index(level) + 1]
            if self.has(anomaly for each in weaker for anomaly in _RULED_OUT_BY[each]):
                continue
            is_possible = find_order(transactions, rows, extra, budget.exhausted)
            if is_possible is None:
                return "neither found nor excluded within the limits of the search"
            if is_possible:
                return f"found for {level}"
            cut = Budget(timeout_s=CUT_TIMEOUT_S)
            few = smallest_without_order(transactions, rows, extra, partial(_first_limit, budget, cut))
            told = "; ".join(described(transactions.history, row, transactions.steps[row]) for row in few[:8])
            self.anomalies.add(name, few, f"no order of these transactions explains what they read: {told}")
        return "excluded"


def _first_limit(*budgets: Budget) -> str | None:
    return next(filter(None, (budget.late() for budget in budgets)), None)


def check_transactions(
    history: History | Iterable[Mapping[str, Any]] | Iterable[Operation],
    workload: str = "list-append",
    *,
    level: str = "strict-serializable",
    linearizable_keys: bool = False,
    sequential_keys: bool = False,
    timeout_s: float | None = None,
    memory_mb: float | None = None,
) -> Result:
    """Check a history of ``list-append`` or ``rw-register`` transactions against an isolation level.

    ``stats`` holds ``anomalies`` (counts), ``examples`` and ``strongest``: the strongest level that nothing found rules
    out.  For ``rw-register``, ``linearizable_keys`` and ``sequential_keys`` say that every key by itself is known to be
    linearizable, or sequentially consistent, so that versions seen one after the other, by anybody or by one process,
    were written in that order; and ``order`` in ``stats`` says whether an order of the transactions that explains
    every read was found (see ``transactions.orders``).  Reads of values that nobody wrote are counted, not judged: a
    history may be an excerpt.  A history that appends or writes one value twice to one key is ``unknown``.  Raises
    ``ValueError`` for unknown names and steps, and where null is written.
    """
    if level not in ISOLATION_LEVELS:
        raise ValueError(f"no isolation level {level!r}; known: {', '.join(ISOLATION_LEVELS)}")
    if workload not in ("list-append", "rw-register"):
        raise ValueError(f"no transaction workload {workload!r}; known: list-append, rw-register")
    question = _Question(
        workload=workload, level=level, linearizable_keys=linearizable_keys, sequential_keys=sequential_keys
    )
    budget = Budget(timeout_s=timeout_s, memory_mb=memory_mb)
    collecting = gc.isenabled()
    gc.disable()
    try:
        history = History.of(history)
        refused = budget.refuses_bytes(len(history) * BYTES_PER_TRANSACTION)
        if refused:
            return Result(verdict=Verdict.UNKNOWN, reason=refused, stats={"operations": len(history)})
        try:
            return _result(_Findings(history, question, budget), question, budget)
        except TypeError:
            # Keys or values that are lists or maps, which the history of a file holds as they were written.
            values, results = map(freeze, history.value), map(freeze, history.result)
            history = replace(history, value=list(values), result=list(results))
            return _result(_Findings(history, question, budget), question, budget)
    finally:
        if collecting:
            gc.enable()


def _cycles(transactions: Transactions, graph: DependencyGraph, budget: Budget) -> tuple[dict[str, Cycle], str | None]:
    """One short cycle of every class that there is."""
    history = transactions.history
    returned = [
        position if status == "ok" else NEVER
        for position, status in zip(history.returned, history.status, strict=True)
    ]
    left = graph.leftover(history.invoked, returned)
    if not left:
        return {}, None
    real = [node for node in left if node < graph.count]
    graph.add_order(real, history.invoked, returned, history.process)
    nodes = [*left, *range(max(graph.count, max(left) + 1), len(graph.edges))]
    cycles: dict[str, Cycle] = {}
    for suffix, extra in (("", 0), ("-process", PROCESS), ("-realtime", PROCESS | REALTIME)):
        always = extra | VIA
        for name, through, back in (
            ("G0", WW, WW | always),
            ("G1c", WR, WW | WR | always),
            ("G-single", RW, WW | WR | always),
            ("G2", RW, WW | WR | RW | always),
        ):
            if name in cycles or f"{name}-process" in cycles:
                continue
            for component in graph.components(nodes, through | back):
                stopped = budget.exhausted()
                if stopped:
                    return cycles, stopped
                cycle = graph.shortest_cycle(component, through, back, needed=RW if name == "G2" else 0)
                known = cycles.get(f"{name}{suffix}")
                if cycle is not None and (known is None or len(cycle) < len(known)):
                    cycles[f"{name}{suffix}"] = cycle
    return cycles, None


def _result(findings: _Findings, question: _Question, budget: Budget) -> Result:
    transactions, found = findings.transactions, findings.anomalies
    witnesses = {name: _cycle_witness(transactions, name, cycle) for name, cycle in findings.cycles.items()}
    for name, witness in witnesses.items():
        found.add(name, [operation.index for operation in witness.operations], witness.text)
    for name, examples in found.examples.items():
        rows, text = examples[0]
        witnesses.setdefault(
            name, Witness(operations=transactions.history.operations(rows), text=f"{name}: {text}.")
        )
    strongest = None
    for candidate, names in _RULED_OUT_BY.items():
        if any(name in found.counts for name in names):
            break
        strongest = candidate
    stats: dict[str, Any] = {
        "model": question.workload,
        "operations": len(transactions.history),
        "committed": len(transactions.committed),
        "engines": {"A8 dependency graph": 1},
        "anomalies": dict(found.counts),
        "examples": {name: [text for _, text in examples] for name, examples in found.examples.items()},
        "strongest": strongest,
        "search_s": round(budget.elapsed_s(), 6),
    }
    if findings.order is not None:
        stats["order"] = findings.order
    broken = [name for name in question.names() if name in found.counts]
    twice = [name for name in ("duplicate-append", "duplicate-write") if name in found.counts]
    if broken and not twice:
        witness = min((witnesses[name] for name in broken), key=lambda w: len(w.operations))
        witness = _with_evidence(transactions, witness, question, budget)
        holds = f"it may still be {strongest}" if strongest else "no level holds"
        return Result(
            verdict=Verdict.INVALID,
            witness=witness,
            stats=stats,
            reason=f"not {question.level}: {witness.text} Found: {', '.join(sorted(found.counts))}; {holds}.",
        )
    if findings.stopped or twice:
        reason = findings.stopped or found.examples[twice[0]][0][1]
        return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=reason)
    order = "" if findings.order is None else f"; an order of the transactions that explains it was {findings.order}"
    return Result(verdict=Verdict.VALID, stats=stats, reason=f"nothing rules out {strongest}{order}")


def _with_evidence(transactions: Transactions, witness: Witness, question: _Question, budget: Budget) -> Witness:
    """The witness and whatever else it takes for it to be wrong by itself."""
    history = transactions.history
    names = question.names()

    def is_wrong(rows: Sequence[int]) -> bool:
        part = History.from_operations(history.operations(rows))
        return not budget.exhausted() and _Findings(part, question, budget).has(names)

    rows = evidence_for(transactions, [operation.index for operation in witness.operations], is_wrong)
    if rows is None:
        note = "that these depend on each other follows only from many other transactions"
        return replace(witness, minimal=False, note=note)
    if not rows:
        return witness
    told = "; ".join(described(history, row, transactions.steps[row]) for row in rows[:8])
    return replace(
        witness,
        operations=(*witness.operations, *history.operations(rows)),
        text=f"{witness.text} That order, or that it happened, is known from {told}.",
    )


def _cycle_witness(transactions: Transactions, name: str, cycle: Cycle) -> Witness:
    """The transactions of a cycle, helper nodes left out, and why each comes before the next."""
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
    listed = "; ".join(described(history, node, transactions.steps[node]) for node, _ in steps[:8])
    text = f"{name}: {'; '.join(sentences[:8])}; a circle. Here {listed}."
    return Witness(operations=history.operations([node for node, _ in steps]), text=text, edges=tuple(edges))
