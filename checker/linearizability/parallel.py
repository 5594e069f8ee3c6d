"""Keys checked by several processes: linearizability is local, so each process takes a share of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from checker.history import History
from checker.linearizability.budget import Budget
from checker.linearizability.engine import KeyOutcome, decide
from checker.models.base import Model
from checker.verdict import Verdict
from checker.workers import map_in_processes

__all__ = ["decide_in_parallel"]

#: Data shared by the processes; inherited by fork, so that no history is copied through a pipe.
_SHARED: dict[str, Any] = {}


def decide_in_parallel(
    history: History,
    groups: dict[Any, Sequence[int]],
    model: Model,
    budget: Budget,
    *,
    jobs: int,
    frozen: bool = False,
    first: bool = False,
) -> list[KeyOutcome]:
    """As :func:`decide`, with the keys distributed over at most ``jobs`` forked processes.

    Each process has the whole time limit and its share of the memory limit.  The keys of a process that is killed are
    undecided.  With ``first``, all processes end once one of them has found an invalid key.
    """
    shares = [list(groups)[at::jobs] for at in range(min(jobs, len(groups)))]
    if len(shares) < 2:
        return decide(history, groups, model, budget, frozen=frozen, first=first)
    _SHARED.update(
        history=history, groups=groups, model=model, budget=budget, jobs=len(shares), frozen=frozen, first=first
    )
    try:
        parts = map_in_processes(_decide_share, shares, len(shares), until=_is_invalid if first else None)
    finally:
        _SHARED.clear()
    if first and any(part is not None and _is_invalid(part) for part in parts):
        return [outcome for part in parts if part is not None for outcome in part]
    return [
        outcome
        for share, part in zip(shares, parts, strict=True)
        for outcome in (part if part is not None else _lost(share, groups))
    ]


def _is_invalid(outcomes: list[KeyOutcome]) -> bool:
    return any(outcome.verdict is Verdict.INVALID for outcome in outcomes)


def _lost(keys: Sequence[Any], groups: dict[Any, Sequence[int]]) -> list[KeyOutcome]:
    reason = "the process that checked it was killed"
    return [
        KeyOutcome(key=key, rows=groups[key], verdict=Verdict.UNKNOWN, engine="none", reason=reason) for key in keys
    ]


def _decide_share(keys: list[Any]) -> list[KeyOutcome]:
    groups, budget = _SHARED["groups"], _SHARED["budget"]
    left_s = None if budget.timeout_s is None else max(0.001, budget.timeout_s - budget.elapsed_s())
    own = Budget(timeout_s=left_s, memory_mb=budget.memory_bytes / _SHARED["jobs"] / (1 << 20))
    mine = {key: groups[key] for key in keys}
    frozen, first = _SHARED["frozen"], _SHARED["first"]
    outcomes = decide(_SHARED["history"], mine, _SHARED["model"], own, frozen=frozen, first=first)
    return [replace(outcome, search=None) for outcome in outcomes]
