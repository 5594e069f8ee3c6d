"""Chooses the engine for each key: the fastest that applies, and otherwise a search in rounds with doubling budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checker.explain import contradicts_itself
from checker.history import History
from checker.linearizability.bag import check_bag
from checker.linearizability.budget import Budget, LimitReached
from checker.linearizability.cas import check_cas
from checker.linearizability.counter import check_counter_bounds
from checker.linearizability.decompose import decompose
from checker.linearizability.fifo import check_fifo
from checker.linearizability.general import WEIGHT_PER_LOOK, Search
from checker.linearizability.grow_only import check_grow_only_set
from checker.linearizability.key_outcome import KeyOutcome, Special
from checker.linearizability.log import check_log_order
from checker.linearizability.numbered import check_versions
from checker.linearizability.outcome import NotApplicable, Violation
from checker.linearizability.priority import check_priority
from checker.linearizability.problem import expected_bytes
from checker.linearizability.register import check_register, impossible_read
from checker.linearizability.stack import check_stack
from checker.linearizability.steps import unknown_functions
from checker.linearizability.sums import check_fetch_and_add
from checker.models.base import Model
from checker.models.collections import FIFOQueue, GrowOnlySet, PriorityQueue, Stack, UnorderedQueue
from checker.models.counters import Counter, FetchAndAdd
from checker.models.logs import Log, Topic
from checker.models.registers import CASRegister, Register, VersionedRegister
from checker.verdict import Verdict

__all__ = ["GENERAL", "KeyOutcome", "Unhashable", "decide"]

GENERAL = "A1 just-in-time search"

#: Engine for one kind of violation, in keys that the general search does not decide at once.
IMPOSSIBLE_READ = "A1 just-in-time search, a read out of nowhere"

#: The same for contradictions among operations shortly before the first return that the search could not pass.
CONTRADICTION = "A1 just-in-time search, a part that fits no state"

#: Fraction of the time since the check began that may be spent looking for such a contradiction.
CONTRADICTION_SHARE = 0.25
#: Steps of the general search in a key's first round; each further round has twice as many.
FIRST_ROUND_STEPS = 1 << 12
#: Steps between two checks of time and memory: about 10 ms of search.
STEPS_BETWEEN_CHECKS = 1 << 12
#: Upper bound on the memory of a near-linear engine per operation, as measured on 300,000 operations of five clients;
#: models not named here take less than ``OTHER_LINEAR_BYTES``.
LINEAR_BYTES_PER_OPERATION: dict[type[Model], int] = {Register: 150, Log: 200, FIFOQueue: 320, UnorderedQueue: 320}
OTHER_LINEAR_BYTES = 600


class Unhashable(Exception):
    """Values are lists or maps: freeze the history and try again."""


#: The near-linear engine of each model.  A subclass of a model may step differently, so only exact types count.
SPECIAL_ENGINES: dict[type[Model], tuple[str, Special]] = {
    Register: ("A3 register zones", check_register),
    CASRegister: ("A4 compare-and-set chains", check_cas),
    Log: ("A5 ranks from offsets", check_log_order),
    VersionedRegister: ("A5 ranks from versions", check_versions),
    FetchAndAdd: ("A5 ranks from sums", check_fetch_and_add),
    GrowOnlySet: ("A5 ranks from whole reads", check_grow_only_set),
    FIFOQueue: ("A6 queue orders", check_fifo),
    Stack: ("A7 stack nesting", check_stack),
    PriorityQueue: ("A7 priority coverage", check_priority),
    UnorderedQueue: ("A7 bag coverage", check_bag),
    Counter: ("A7 counter bounds", check_counter_bounds),
}


def decide(
    history: History,
    groups: dict[Any, Sequence[int]],
    model: Model,
    budget: Budget,
    *,
    general_only: bool = False,
    frozen: bool = False,
    first: bool = False,
) -> list[KeyOutcome]:
    """Check every key; stops early only at the budget.  Invalid keys do not stop the others.

    With ``first`` they do: the outcomes are then those of the keys that were decided before, and of the invalid one.
    ``general_only`` leaves out the special engines, to compare them with the general one.  Raises :class:`Unhashable`
    if a special engine meets values that are lists or maps, unless the history is ``frozen`` already.
    """
    if model.functions and not model.functions.issuperset(history.f):
        raise unknown_functions(history, model)
    outcomes: list[KeyOutcome] = []
    undecided: list[KeyOutcome] = []
    asked = model
    if not general_only:
        history, groups, model = decompose(history, groups, model)
    engine = None if general_only else SPECIAL_ENGINES.get(type(model))
    for key, rows in groups.items():
        outcome = KeyOutcome(key=key, rows=rows, verdict=Verdict.UNKNOWN, engine=GENERAL)
        outcomes.append(outcome)
        is_decided = engine is not None and _try_special(history, outcome, *engine, model, budget, frozen)
        if model is not asked:
            outcome.special = None  # it expects another model's operations than those to be explained
        if not is_decided:
            undecided.append(outcome)
        elif first and outcome.verdict is Verdict.INVALID:
            return _decided(outcomes)
    _search_in_rounds(history, undecided, model, budget, first=first)
    return _decided(outcomes) if first and any(outcome.verdict is Verdict.INVALID for outcome in outcomes) else outcomes


def _decided(outcomes: list[KeyOutcome]) -> list[KeyOutcome]:
    return [outcome for outcome in outcomes if outcome.verdict is not Verdict.UNKNOWN]


def _try_special(
    history: History,
    outcome: KeyOutcome,
    name: str,
    engine: Special,
    model: Model,
    budget: Budget,
    frozen: bool,
) -> bool:
    """Let the special engine decide, or exhaust the budget; ``False`` if the general one has to decide."""
    per_row = LINEAR_BYTES_PER_OPERATION.get(type(model), OTHER_LINEAR_BYTES)
    try:
        with budget.watched(len(outcome.rows) * per_row):
            violation = engine(history, outcome.rows, model)
    except LimitReached as limit:
        outcome.engine, outcome.reason = name, f"{limit} by {name}, which decides nothing before it has finished"
        return True
    except NotApplicable as why:
        if isinstance(why.__cause__, TypeError) and not frozen:
            raise Unhashable(str(why)) from why
        outcome.skipped[name] = str(why)
        return False
    outcome.engine = name
    outcome.special = engine
    outcome.violation = violation
    outcome.verdict = Verdict.VALID if violation is None else Verdict.INVALID
    return True


def _search_in_rounds(
    history: History, waiting: list[KeyOutcome], model: Model, budget: Budget, *, first: bool = False
) -> None:
    """Round-robin over undecided keys, so that one key that explodes does not hide another's quick failure."""
    steps = FIRST_ROUND_STEPS
    stopped: str | None = None
    while waiting:
        left: list[KeyOutcome] = []
        for outcome in waiting:
            stopped = stopped or budget.late() or (budget.exhausted() if steps > FIRST_ROUND_STEPS else None)
            if stopped:
                left.append(outcome)
                continue
            done, stopped = _search(history, outcome, model, budget, steps)
            if stopped and outcome.reason:
                left.append(outcome)
                continue
            if done is None:
                outcome.violation = _quick_violation(history, outcome, model) if steps == FIRST_ROUND_STEPS else None
                if outcome.violation is not None:
                    outcome.engine, outcome.search, done = IMPOSSIBLE_READ, None, False
                elif not stopped and _contradicts_itself(history, outcome, model, budget):
                    outcome.engine, done = CONTRADICTION, False
                else:
                    left.append(outcome)
                    continue
            outcome.verdict = Verdict.VALID if done else Verdict.INVALID
            if done:
                outcome.search = None
            elif first:
                return
        if stopped:
            for outcome in left:
                outcome.reason = outcome.reason or _how_far(outcome, stopped)
            return
        waiting = left
        steps *= 2


def _search(
    history: History, outcome: KeyOutcome, model: Model, budget: Budget, steps: int
) -> tuple[bool | None, str | None]:
    """Search ``steps`` further.  Returns the answer, if one was found, and the limit that was exceeded, if one was."""
    if outcome.search is None:
        outcome.expected_bytes = expected_bytes(history, outcome.rows)
    # A topic gets here if messages may be in any queue; then each message may multiply the number of possible states.
    has_long_steps = isinstance(model, Topic)
    try:
        with budget.watched_anyway() if has_long_steps else budget.watched(outcome.expected_bytes):
            if outcome.search is None:
                outcome.search = Search(history, outcome.rows, model)
            done: bool | None = None
            stopped: str | None = None
            end = outcome.search.steps + steps
            between = max(1, min(STEPS_BETWEEN_CHECKS, WEIGHT_PER_LOOK // outcome.search.weight))
            while done is None and outcome.search.steps < end and not stopped:
                done = outcome.search.run(min(between, end - outcome.search.steps))
                if done is None:
                    stopped = budget.exhausted()
    except LimitReached as limit:
        # The search was interrupted within a step: it cannot be continued, only report how far it got.
        outcome.reason, outcome.search = _how_far(outcome, str(limit)), None
        return None, str(limit)
    outcome.steps = outcome.search.steps
    return done, stopped


def _quick_violation(history: History, outcome: KeyOutcome, model: Model) -> Violation | None:
    """A read that nothing before its return can explain; used for keys that the search does not decide at once."""
    if isinstance(model, Register) and type(model) in (Register, CASRegister):
        return impossible_read(history, outcome.rows, model)
    return None


def _contradicts_itself(history: History, outcome: KeyOutcome, model: Model, budget: Budget) -> bool:
    """Whether the last operations before the deepest point of the search fit no state.  Tried once for each point, and
    only if a whole round has not advanced the search: this costs more than a round that makes progress."""
    culprit = None if outcome.search is None else outcome.search.deepest_row
    is_stuck = culprit == outcome.reached
    outcome.reached = culprit
    if culprit is None or not is_stuck or culprit == outcome.tried:
        return False
    outcome.tried = culprit
    return contradicts_itself(history, model, outcome.rows, culprit, 0.1 + budget.elapsed_s() * CONTRADICTION_SHARE)


def _how_far(outcome: KeyOutcome, stopped: str) -> str:
    search = outcome.search
    if search is None:
        return f"{stopped} before the search of this key began"
    return f"{stopped} after {search.steps} steps, with {search.deepest} of {search.returns} returns explained"
