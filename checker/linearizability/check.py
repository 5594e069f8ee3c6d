"""The facade: checks a history against a model and returns a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from checker.explain import explain
from checker.history import History, HistoryError, Operation, freeze
from checker.linearizability.booleans import distinguished, mixes_booleans
from checker.linearizability.budget import Budget, no_collection
from checker.linearizability.engine import KeyOutcome, Unhashable, decide
from checker.linearizability.parallel import decide_in_parallel
from checker.linearizability.steps import VALUE_ERRORS, is_ours, unusable
from checker.models.base import Model, ModelError
from checker.models.registry import parse_model
from checker.verdict import Result, Verdict, bounded, worst
from checker.words import short

__all__ = ["check"]

#: Keys listed by name in ``stats``: enough to inspect, and reports stay bounded.
MAX_LISTED = 10


@no_collection()
def check(
    history: History | Iterable[Mapping[str, Any]] | Iterable[Operation],
    model: Model | str,
    *,
    timeout_s: float | None = None,
    memory_mb: float | None = None,
    explained: bool = True,
    jobs: int = 1,
    first: bool = False,
) -> Result:
    """Check whether a history is linearizable with respect to a model.

    ``history`` is a :class:`History`, events of the history format, or :class:`Operation` objects; ``model`` a model or
    its name.  Each key is an independent object (linearizability is local).  ``timeout_s`` (seconds) and ``memory_mb``
    (MiB beyond what the process holds) bound the check; past either the verdict is ``unknown``.  ``explained=False``
    leaves out the witness of an invalid history.  ``jobs`` processes share the keys.  ``first`` ends the check at the
    first key that is found invalid.

    Raises :class:`HistoryError` for events that do not pair and for values that the model cannot be used with,
    :class:`ModelError` for operations that the model lacks.
    """
    budget = Budget(timeout_s=timeout_s, memory_mb=memory_mb)
    if isinstance(model, str):
        model = parse_model(model)
    history = given = History.of(history)
    try:
        if mixes_booleans(history, model):
            history, model = distinguished(history, model)
        elif history.booleans:
            history = given = replace(history, booleans=False)
        is_exact = history is not given and is_ours(model)
        try:
            result = _check(history, model, budget, explained, jobs, frozen=is_exact, first=first)
        except (TypeError, Unhashable):
            if is_exact:
                raise
            # Values that are lists or maps, which a history from a file holds as they were written.
            if is_ours(model):
                history, model = distinguished(history, model)
            else:
                values, results = map(freeze, history.value), map(freeze, history.result)
                history = replace(history, value=list(values), result=list(results))
            result = _check(history, model, budget, explained, jobs, frozen=True, first=first)
        return result if history is given else _as_recorded(result, given)
    except VALUE_ERRORS as error:
        if isinstance(error, (HistoryError, ModelError)) or not is_ours(model):
            raise
        raise unusable(given, model, error) from error


def _as_recorded(result: Result, history: History) -> Result:
    """The same result, with the operations of its witness as in the original history."""
    if result.witness is None:
        return result
    operations = history.operations(operation.index for operation in result.witness.operations)
    return replace(result, witness=replace(result.witness, operations=operations))


def _check(
    history: History, model: Model, budget: Budget, explained: bool, jobs: int, *, frozen: bool, first: bool
) -> Result:
    groups = history.rows_by_key()
    if jobs > 1:
        outcomes = decide_in_parallel(history, groups, model, budget, jobs=jobs, frozen=frozen, first=first)
    else:
        outcomes = decide(history, groups, model, budget, frozen=frozen, first=first)
    result = summarise(history, model, outcomes, budget, explained=explained)
    if first and len(groups) > 1 and result.verdict is Verdict.INVALID:
        stats = {**result.stats, "ended_at_first": True}
        return replace(result, stats=stats, reason=f"{result.reason} (The check stopped at this first violation.)")
    return result


def summarise(history: History, model: Model, outcomes: list[KeyOutcome], budget: Budget, *, explained: bool) -> Result:
    """Combine the outcomes of all keys into one result."""
    verdict = worst(outcome.verdict for outcome in outcomes)
    search_s = budget.elapsed_s()
    stats = _stats(history, model, outcomes, search_s)
    bad = [outcome for outcome in outcomes if outcome.verdict is Verdict.INVALID]
    if bad:
        smallest = min(bad, key=lambda outcome: (outcome.violation is None, len(outcome.rows)))
        witness = explain(history, model, smallest, budget) if explained else None
        where = "" if smallest.key is None else f"Key {short(smallest.key)}: "
        text = witness.text if witness else smallest.violation.text if smallest.violation else "not linearizable"
        more = f" ({len(bad)} of {len(outcomes)} keys are not linearizable.)" if len(bad) > 1 else ""
        stats["explain_s"] = round(budget.elapsed_s() - search_s, 6)
        return Result(verdict=verdict, witness=witness, stats=stats, reason=f"{where}{text}{more}")
    if verdict is Verdict.UNKNOWN:
        open_keys = [outcome for outcome in outcomes if outcome.verdict is Verdict.UNKNOWN]
        first = open_keys[0]
        where = "" if first.key is None else f"key {short(first.key)}: "
        more = f" ({len(open_keys)} of {len(outcomes)} keys undecided)" if len(outcomes) > 1 else ""
        return Result(verdict=verdict, stats=stats, reason=f"undecided: {where}{first.reason}{more}")
    keys = f", {len(outcomes)} keys" if len(outcomes) > 1 else ""
    return Result(
        verdict=verdict,
        stats=stats,
        reason=f"linearizable as a {model.name}: {len(history)} operations{keys}",
    )


def _stats(history: History, model: Model, outcomes: list[KeyOutcome], search_s: float) -> dict[str, Any]:
    count = history.status.count
    by_status = {status: count(status) for status in ("fail", "info", "ok") if status in history.status}
    engines: dict[str, int] = {}
    for outcome in outcomes:
        engines[outcome.engine] = engines.get(outcome.engine, 0) + 1
    skipped: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        for engine, reason in outcome.skipped.items():
            reasons = skipped.setdefault(engine, {})
            if reason in reasons or len(reasons) < MAX_LISTED:
                reasons[reason] = reasons.get(reason, 0) + 1
    stats: dict[str, Any] = {
        "model": model.name,
        "operations": len(history),
        "by_status": by_status,
        "keys": len(outcomes),
        "engines": engines,
        "not_applicable": skipped,
        "steps": sum(outcome.steps for outcome in outcomes),
        "search_s": round(search_s, 6),
    }
    for name, verdict in (("invalid_keys", Verdict.INVALID), ("unknown_keys", Verdict.UNKNOWN)):
        keys = [bounded(freeze(outcome.key)) for outcome in outcomes if outcome.verdict is verdict]
        stats[name] = len(keys)
        if keys and keys != [None]:
            stats[f"first_{name}"] = keys[:MAX_LISTED]
    if history.problems:
        stats["problems"] = history.problems[:MAX_LISTED]
    return stats
