"""Transactions in, the strongest isolation level not ruled out."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

from checker.history import NEVER, History, Operation
from checker.linearizability.budget import Budget
from checker.transactions.anomalies import Anomalies, Transactions, described
from checker.transactions.graph import KINDS, PROCESS, REALTIME, RW, VIA, WR, WW, Cycle, DependencyGraph
from checker.transactions.list_append import build_list_append
from checker.transactions.rw_register import build_rw_register
from checker.verdict import Edge, Result, Verdict, Witness

__all__ = ["ISOLATION_LEVELS", "check_transactions"]

#: Levels from weak to strong, and the anomalies that rule each out (beside those of weaker ones).
#: Snapshot isolation allows G2 here: cycles of two or more anti-dependencies are not told apart further.
_RULED_OUT_BY: dict[str, tuple[str, ...]] = {
    "read-uncommitted": ("G0", "duplicate-elements", "incompatible-order"),
    "read-committed": ("G1a", "G1b", "G1c", "internal"),
    "snapshot-isolation": ("G-single", "lost-update"),
    "serializable": ("G2",),
    "strong-session-serializable": ("G0-process", "G1c-process", "G-single-process", "G2-process"),
    "strict-serializable": ("G0-realtime", "G1c-realtime", "G-single-realtime", "G2-realtime"),
}
ISOLATION_LEVELS = tuple(_RULED_OUT_BY)

#: Memory the graph of one transaction takes at most, as measured on 100,000 transactions of four steps.
BYTES_PER_TRANSACTION = 6_000

_MEANING = {
    WW: "the next version of a key that the former wrote is the latter's",
    WR: "the latter read what the former wrote",
    RW: "the former read a version that the latter replaced",
    PROCESS: "the same process did the former first",
    REALTIME: "the former returned before the latter was invoked",
}


def check_transactions(
    history: History | Iterable[Mapping[str, Any]] | Iterable[Operation],
    workload: str = "list-append",
    *,
    level: str = "strict-serializable",
    linearizable_keys: bool = False,
    timeout_s: float | None = None,
    memory_mb: float | None = None,
) -> Result:
    """Check a history of ``list-append`` or ``rw-register`` transactions against an isolation level.

    ``stats`` holds ``anomalies`` (counts), ``examples`` and ``strongest``: the strongest level that nothing found rules
    out.  ``linearizable_keys`` lets writes of one key be ordered by real time (``rw-register`` only).  Reads of values
    that nobody wrote are counted, not judged: a history may be an excerpt.  A history that appends or writes one value
    twice to one key is ``unknown``.  Raises ``ValueError`` for unknown names and steps.
    """
    if level not in ISOLATION_LEVELS:
        raise ValueError(f"no isolation level {level!r}; known: {', '.join(ISOLATION_LEVELS)}")
    if workload not in ("list-append", "rw-register"):
        raise ValueError(f"no transaction workload {workload!r}; known: list-append, rw-register")
    budget = Budget(timeout_s=timeout_s, memory_mb=memory_mb)
    collecting = gc.isenabled()
    gc.disable()
    try:
        history = History.of(history)
        refused = budget.refuses_bytes(len(history) * BYTES_PER_TRANSACTION)
        if refused:
            return Result(verdict=Verdict.UNKNOWN, reason=refused, stats={"operations": len(history)})
        transactions = Transactions(history)
        graph = DependencyGraph(len(history))
        found = Anomalies()
        if workload == "list-append":
            build_list_append(transactions, graph, found)
        else:
            build_rw_register(transactions, graph, found, linearizable_keys=linearizable_keys)
        stopped = budget.exhausted()
        cycles: dict[str, Cycle] = {}
        if not stopped:
            cycles, stopped = _cycles(transactions, graph, budget)
        return _result(transactions, found, cycles, level, workload, budget, stopped)
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


def _result(
    transactions: Transactions,
    found: Anomalies,
    cycles: dict[str, Cycle],
    level: str,
    workload: str,
    budget: Budget,
    stopped: str | None,
) -> Result:
    witnesses = {name: _cycle_witness(transactions, name, cycle) for name, cycle in cycles.items()}
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
        "model": workload,
        "operations": len(transactions.history),
        "committed": len(transactions.committed),
        "engines": {"A8 dependency graph": 1},
        "anomalies": dict(found.counts),
        "examples": {name: [text for _, text in examples] for name, examples in found.examples.items()},
        "strongest": strongest,
        "search_s": round(budget.elapsed_s(), 6),
    }
    wanted = ISOLATION_LEVELS[: ISOLATION_LEVELS.index(level) + 1]
    broken = [name for each in wanted for name in _RULED_OUT_BY[each] if name in found.counts]
    twice = [name for name in ("duplicate-append", "duplicate-write") if name in found.counts]
    if broken and not twice:
        witness = min((witnesses[name] for name in broken), key=lambda w: len(w.operations))
        holds = f"it may still be {strongest}" if strongest else "no level holds"
        return Result(
            verdict=Verdict.INVALID,
            witness=witness,
            stats=stats,
            reason=f"not {level}: {witness.text} Found: {', '.join(sorted(found.counts))}; {holds}.",
        )
    if stopped or twice:
        return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=stopped or found.examples[twice[0]][0][1])
    return Result(verdict=Verdict.VALID, stats=stats, reason=f"nothing rules out {strongest}")


def _cycle_witness(transactions: Transactions, name: str, cycle: Cycle) -> Witness:
    """The transactions of a cycle, helper nodes left out, and why each comes before the next."""
    history, count = transactions.history, len(transactions.history)
    steps: list[tuple[int, int]] = []
    for node, kind in cycle:
        if node < count:
            steps.append((node, kind))
        elif steps and kind != VIA:
            steps[-1] = (steps[-1][0], steps[-1][1] | kind)
    while cycle[0][0] >= count:
        cycle = [*cycle[1:], cycle[0]]
        return _cycle_witness(transactions, name, cycle)
    edges, sentences = [], []
    for position, (node, kinds) in enumerate(steps):
        target = (position + 1) % len(steps)
        kind = next(bit for bit in (WW, WR, RW, PROCESS, REALTIME) if kinds & bit)
        edges.append(Edge(source=position, target=target, kind=KINDS[kind], reason=_MEANING[kind]))
        sentences.append(f"T{node} -{KINDS[kind]}-> T{steps[target][0]} ({_MEANING[kind]})")
    listed = "; ".join(described(history, node, transactions.steps[node]) for node, _ in steps[:8])
    text = f"{name}: {'; '.join(sentences[:8])}; a circle. Here {listed}."
    return Witness(operations=history.operations([node for node, _ in steps]), text=text, edges=tuple(edges))
