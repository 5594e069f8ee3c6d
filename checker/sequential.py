"""Sequential consistency: one order of all operations that keeps the order of each process (Lamport 1979).

It is not local, so keys cannot be checked one by one: a state consists of the states of all keys.  Deciding is
NP-complete; the search is depth first over how far each process has come, and remembers visited configurations.

An operation of unknown outcome takes effect after what its process had completed before it, at any time or never: a
process that continues after it does not wait for it.  So every linearizable history is sequentially consistent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from checker.history import FAIL, INFO, History, HistoryError
from checker.linearizability.booleans import exact_model
from checker.linearizability.budget import Budget, LimitReached
from checker.linearizability.problem import state_bytes
from checker.linearizability.steps import VALUE_ERRORS, checked_step, is_ours, unknown_functions, unusable
from checker.models.base import ILLEGAL, UNKNOWN, Model, ModelError
from checker.models.logs import Topic
from checker.tally import Events, Tally
from checker.values import exact
from checker.verdict import Result, Verdict
from checker.words import named_row

__all__ = ["check_sequential"]

ENGINE = "sequential search"
#: About how much memory configurations may take between two looks at the budget: some ten milliseconds of search.
BYTES_PER_LOOK = 4 << 20
#: Memory of a configuration without its states, and of each process in it.
BYTES_OF_CONFIGURATION = 300
BYTES_OF_PLACE = 8

#: How many operations each process has completed, which crashed ones have taken effect (bits), the state of each key.
Configuration = tuple[tuple[int, ...], int, tuple[Any, ...]]


@dataclass(slots=True)
class _Program:
    """The operations by process.  An operation is its row, the number of its key, its name, value and result."""

    #: Completed operations of each process, in its order.
    lanes: list[list[tuple[int, int, str, Any, Any]]] = field(default_factory=list)
    #: Operations of unknown outcome: lane, how many operations of that lane come first, the operation with each result.
    crashed: list[tuple[int, int, list[tuple[int, int, str, Any, Any]]]] = field(default_factory=list)
    #: For each of them the previous identical one, which must take effect first, or None.
    twin: list[int | None] = field(default_factory=list)
    keys: int = 0
    model: Model = field(default_factory=Model)


def check_sequential(
    events: Events, model: Model, *, timeout_s: float | None = None, memory_mb: float | None = None
) -> Result:
    """Check whether a history is sequentially consistent with respect to a model.

    It is if the operations of all keys have an order that keeps the order of each process and that the model allows,
    with every key as a separate object.

    ``timeout_s`` (seconds) and ``memory_mb`` (MiB beyond what the process holds) bound the search; past either the
    verdict is ``unknown``.  Raises :class:`HistoryError` for values that the model cannot be used with, and
    :class:`ModelError` for operations that the model lacks.
    """
    history = History.of(events)
    budget = Budget(timeout_s=timeout_s, memory_mb=memory_mb)
    try:
        # If messages may be in any queue of a topic, a single step may take longer than all others.
        with budget.watched_anyway() if isinstance(model, Topic) else nullcontext():
            return _check(history, model, budget)
    except LimitReached as limit:
        stats = {"model": model.name, "operations": len(history), "engines": {ENGINE: 1}}
        return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=f"{limit} within a step")
    except VALUE_ERRORS as error:
        if isinstance(error, (HistoryError, ModelError)) or not is_ours(model):
            raise
        raise unusable(history, model, error) from error


def _check(history: History, model: Model, budget: Budget) -> Result:
    if is_ours(model):
        model = exact_model(model)
    program = _program_of(history, model)
    described, model = model, program.model
    stats: dict[str, Any] = {"model": model.name, "operations": len(history), "engines": {ENGINE: 1}}
    start: Configuration = ((0,) * len(program.lanes), 0, (model.start(),) * program.keys)
    stack, seen = [start], {_token(start, model)}
    step = checked_step(model)
    best = start[0]
    each = BYTES_OF_CONFIGURATION + BYTES_OF_PLACE * len(program.lanes)
    steps = made = 0
    while stack:
        places, used, states = stack.pop()
        if all(place == len(lane) for place, lane in zip(places, program.lanes, strict=True)):
            stats["steps"] = steps
            reason = f"sequentially consistent: {len(history)} operations"
            return Result(verdict=Verdict.VALID, stats=stats, reason=reason)
        if sum(places) > sum(best):
            best = places
        steps += 1
        if made >= BYTES_PER_LOOK:
            made = 0
            stopped = budget.exhausted()
            if stopped:
                stats["steps"] = steps
                return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=f"{stopped} after {steps} steps")
        for following, taken, (_, key, f, value, result) in _choices(program, places, used):
            after = step(states[key], f, value, result)
            made += each
            if after is ILLEGAL:
                continue
            moved = (following, taken, (*states[:key], after, *states[key + 1 :]))
            token = _token(moved, model)
            if token not in seen:
                made += state_bytes(after)
                seen.add(token)
                stack.append(moved)
    stats["steps"] = steps
    stuck = [lane[place][0] for place, lane in zip(best, program.lanes, strict=True) if place < len(lane)]
    tally = Tally(model.name, history, wrong=("not-sequential",), spans_keys=True)
    named = "; ".join(named_row(history, row, described) for row in stuck[:6])
    tally.add(
        "not-sequential", stuck[:12], f"no order that preserves each process's own order explains all of: {named}"
    )
    found = tally.result(fine="")
    return Result(verdict=found.verdict, witness=found.witness, stats={**found.stats, **stats}, reason=found.reason)


def _token(configuration: Configuration, model: Model) -> Any:
    """The form in which a configuration is remembered."""
    places, used, states = configuration
    return configuration if is_ours(model) else (places, used, exact(states))


def _choices(
    program: _Program, places: tuple[int, ...], used: int
) -> Iterator[tuple[tuple[int, ...], int, tuple[int, int, str, Any, Any]]]:
    """Every operation that may come next; crashed ones come first here, so that the search tries them last."""
    for number, (lane, after, results) in enumerate(program.crashed):
        twin = program.twin[number]
        if used >> number & 1 or places[lane] < after or (twin is not None and not used >> twin & 1):
            continue
        for operation in results:
            yield places, used | 1 << number, operation
    for lane, place in enumerate(places):
        if place < len(program.lanes[lane]):
            yield (*places[:lane], place + 1, *places[lane + 1 :]), used, program.lanes[lane][place]


def _program_of(history: History, model: Model) -> _Program:
    """The operations that took effect or may have, by process."""
    of_values = exact if is_ours(model) else _as_it_is
    program = _Program()
    lane_of: dict[Any, int] = {}
    key_of: dict[Any, int] = {}
    waiting: list[tuple[int, int, int]] = []
    kinds: list[tuple[str, Any, Any]] = []
    for row, status in enumerate(history.status):
        if status == FAIL:
            continue
        f, value = history.f[row], of_values(history.value[row])
        if model.functions and f not in model.functions:
            raise unknown_functions(history, model)
        lane = lane_of.setdefault(exact(history.process[row]), len(lane_of))
        key = key_of.setdefault(exact(history.key[row]), len(key_of))
        if lane == len(program.lanes):
            program.lanes.append([])
        if status == INFO:
            kinds.append((f, value, UNKNOWN))
            if f not in model.pure and not model.is_pure(f, value, UNKNOWN):
                waiting.append((row, lane, len(program.lanes[lane])))
            continue
        result = of_values(history.result[row])
        kinds.append((f, value, result))
        program.lanes[lane].append((row, key, f, value, result))
    program.keys = len(key_of)
    program.model = model = model.specialised(kinds)
    last_alike: dict[Any, int] = {}
    for number, (row, lane, after) in enumerate(waiting):
        f, value, key = history.f[row], of_values(history.value[row]), key_of[exact(history.key[row])]
        results = [(row, key, f, value, result) for result in model.outcomes(f, value, kinds)]
        program.crashed.append((lane, after, results))
        look = (lane, after, key, f, exact(value))
        program.twin.append(last_alike.get(look))
        last_alike[look] = number
    return program


def _as_it_is(value: Any) -> Any:
    return value
