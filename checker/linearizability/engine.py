"""Which engine decides, and why: the fastest that applies, per key, keys in rounds with doubling budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from checker.history import History
from checker.linearizability.budget import Budget
from checker.linearizability.general import Search
from checker.linearizability.log import check_log_order
from checker.linearizability.outcome import NotApplicable, Violation
from checker.linearizability.register import check_register
from checker.models.base import Model, ModelError
from checker.models.logs import Log
from checker.models.registers import Register
from checker.verdict import Verdict

__all__ = ["GENERAL", "KeyOutcome", "decide"]

GENERAL = "A1 just-in-time search"

#: Stops of the general search in a key's first round; each next round has twice as many.
FIRST_ROUND_STEPS = 1 << 12
#: Stops between two looks at the clock and the memory: about 10 ms of search.
STEPS_BETWEEN_CHECKS = 1 << 12
#: Memory a near-linear engine takes per operation at most, measured on a million operations.
LINEAR_BYTES_PER_OPERATION = 600

Special = Callable[[History, Sequence[int], Any], "Violation | None"]


@dataclass(kw_only=True, slots=True)
class KeyOutcome:
    """What was found for one key."""

    key: Any
    rows: Sequence[int]
    verdict: Verdict
    engine: str
    skipped: dict[str, str] = field(default_factory=dict)
    violation: Violation | None = None
    search: Search | None = None
    reason: str = ""
    steps: int = 0


def special_engines(model: Model) -> list[tuple[str, Special]]:
    """The near-linear engines for a model, fastest first."""
    if type(model) is Register:
        return [("A3 register zones", check_register)]
    if type(model) is Log:
        return [("A5 ranks from offsets", check_log_order)]
    return []


def decide(history: History, groups: dict[Any, Sequence[int]], model: Model, budget: Budget) -> list[KeyOutcome]:
    """Check every key; stops early only at the budget.  Invalid keys do not stop the others."""
    functions = model.functions
    if functions and not functions.issuperset(history.f):
        unknown = sorted(set(history.f) - functions)
        raise ModelError(
            f"model {model.name} knows {', '.join(sorted(functions))}; the history has {', '.join(map(repr, unknown))}"
        )
    outcomes: list[KeyOutcome] = []
    undecided: list[KeyOutcome] = []
    engines = special_engines(model)
    for key, rows in groups.items():
        outcome = KeyOutcome(key=key, rows=rows, verdict=Verdict.UNKNOWN, engine=GENERAL)
        outcomes.append(outcome)
        if not _try_special(history, outcome, engines, model, budget):
            undecided.append(outcome)
    _search_in_rounds(history, undecided, model, budget)
    return outcomes


def _try_special(
    history: History, outcome: KeyOutcome, engines: list[tuple[str, Special]], model: Model, budget: Budget
) -> bool:
    for name, engine in engines:
        refused = budget.refuses_bytes(len(outcome.rows) * LINEAR_BYTES_PER_OPERATION)
        if refused:
            outcome.skipped[name] = refused
            continue
        try:
            violation = engine(history, outcome.rows, model)
        except NotApplicable as why:
            outcome.skipped[name] = str(why)
            continue
        outcome.engine = name
        outcome.violation = violation
        outcome.verdict = Verdict.VALID if violation is None else Verdict.INVALID
        return True
    return False


def _search_in_rounds(history: History, waiting: list[KeyOutcome], model: Model, budget: Budget) -> None:
    """Round-robin over undecided keys: one key that explodes does not hide another's quick failure."""
    steps = FIRST_ROUND_STEPS
    stopped: str | None = None
    while waiting:
        left: list[KeyOutcome] = []
        for outcome in waiting:
            stopped = stopped or budget.exhausted()
            if stopped:
                left.append(outcome)
                continue
            if outcome.search is None:
                outcome.search = Search(history, outcome.rows, model)
            done: bool | None = None
            spent = 0
            while done is None and spent < steps and not stopped:
                done = outcome.search.run(min(STEPS_BETWEEN_CHECKS, steps - spent))
                spent += STEPS_BETWEEN_CHECKS
                if done is None:
                    stopped = budget.exhausted()
            outcome.steps = outcome.search.steps
            if done is None:
                left.append(outcome)
                continue
            outcome.verdict = Verdict.VALID if done else Verdict.INVALID
            if done:
                outcome.search = None
        if stopped:
            for outcome in left:
                outcome.reason = _how_far(outcome, stopped)
            return
        waiting = left
        steps *= 2


def _how_far(outcome: KeyOutcome, stopped: str) -> str:
    search = outcome.search
    if search is None:
        return f"{stopped} before the search of this key began"
    return f"{stopped} after {search.steps} steps, with {search.deepest} of {search.returns} returns explained"
