"""Reduces a history to a small part that is still not linearizable, and describes it.

Every reduction used here preserves linearizability, so a remainder that is not linearizable proves that the whole
history is not.  The reductions are:

* cut the history to a prefix (what is open at the cut becomes "outcome unknown");
* drop what returned before some instant, if the rest fits no starting state at all (what is open at the instant
  becomes "outcome unknown");
* drop an operation that never changes the state;
* registers: drop a value altogether (its writes and its reads; a compare-and-set that expects it becomes a plain
  write), provided no refused compare-and-set is kept;
* queues, stacks and bags: drop a value altogether.

A witness always shows a subset of the operations as recorded, which can only be more contradictory than the relaxed
form for which the violation was proven.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checker.history import FAIL, INFO, NEVER, OK, History, freeze
from checker.linearizability.budget import Budget
from checker.linearizability.general import Search
from checker.linearizability.key_outcome import KeyOutcome
from checker.linearizability.outcome import NotApplicable
from checker.linearizability.problem import expected_bytes
from checker.models.base import UNKNOWN, Model
from checker.models.collections import FIFOQueue, PriorityQueue, Stack, UnorderedQueue
from checker.models.registers import CASRegister, Mutex, Register, is_refused
from checker.reducing import smallest
from checker.verdict import Edge, Witness
from checker.words import named, named_row, short

__all__ = ["contradicts_itself", "explain"]

#: A near-linear engine: a violation or ``None``; raises :class:`NotApplicable`.
Engine = Callable[[History, Sequence[int], Any], Any]

#: Search steps allowed to test one reduction; a reduction that needs more is not made.
STEPS_PER_TEST = 20_000
#: Search steps allowed to find where a history that is known to be wrong goes wrong.
STEPS_TO_FIND = 1_000_000
#: Memory that a test may take: a part that needs more explains nothing anyway.
EXPLAIN_BYTES = 64 << 20
#: Seconds an explanation may take when the check itself has no time limit.
EXPLAIN_TIMEOUT_S = 10.0
#: First window, in operations, when searching for the relevant part before a violation.
FIRST_WINDOW = 8
WINDOW_GROWTH = 4
#: Longer witnesses are cut for display: nobody reads more, and reports stay bounded.
MAX_WITNESS_OPERATIONS = 200


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a history.  ``crashed`` ones lose their return, ``weakened`` compare-and-sets their condition."""

    rows: tuple[int, ...]
    crashed: frozenset[int] = frozenset()
    weakened: frozenset[int] = frozenset()
    any_start: bool = False


def explain(history: History, model: Model, outcome: KeyOutcome, budget: Budget) -> Witness:
    """A witness for one key that was found not linearizable."""
    violation = outcome.violation
    if violation is not None and violation.minimal:
        return Witness(
            operations=history.operations(violation.rows),
            text=violation.text,
            key=freeze(outcome.key),
            edges=violation.edges,
            note=violation.note,
        )
    remaining = EXPLAIN_TIMEOUT_S
    if budget.timeout_s is not None:
        remaining = min(remaining, max(0.5, budget.timeout_s - budget.elapsed_s()))
    reducer = _Reducer(history, model, time.perf_counter() + remaining, outcome.special)
    if outcome.search is not None:
        culprit = outcome.search.deepest_row
        part = reducer.failing_prefix(outcome.rows, culprit)
        outcome.search = None
    elif violation is None:
        # Decided in another process, which does not return its search: find the culprit again.
        search = Search(history, outcome.rows, model)
        search.run_until(STEPS_TO_FIND, time.perf_counter() + remaining)
        part = reducer.failing_prefix(outcome.rows, search.deepest_row)
    else:
        part = _Part(violation.rows)
        if outcome.special is not None and len(violation.rows) == len(outcome.rows):
            part = reducer.shortest_prefix(outcome.rows, outcome.special)
        elif not reducer.fails(part):
            part = _Part(tuple(outcome.rows))
    part, complete = reducer.reduce(part)
    return _witness(history, model, outcome, part, complete)


def contradicts_itself(history: History, model: Model, rows: Sequence[int], culprit: int, timeout_s: float) -> bool:
    """Whether the operations up to the return of ``culprit`` fit no starting state at all, judging by a few windows.

    True proves that the rows are not linearizable; :func:`explain` finds the same part again.
    """
    if model.possible_states([]) is None:
        return False
    reducer = _Reducer(history, model, time.perf_counter() + timeout_s)
    part = reducer.prefix(rows, culprit)
    return reducer.window(part) is not None


class _Reducer:
    def __init__(self, history: History, model: Model, deadline: float, engine: Engine | None = None) -> None:
        self._history = history
        self._model = model
        self._deadline = deadline
        self._engine = engine
        self._out_of_time = False

    # -- tests ---------------------------------------------------------------------------------------------------

    def fails(self, part: _Part) -> bool:
        """Whether the part is certainly not linearizable."""
        if time.perf_counter() > self._deadline:
            self._out_of_time = True
            return False
        history = _extract(self._history, part)
        if self._engine is not None and not part.any_start:
            try:
                return self._engine(history, range(len(history)), self._model) is not None
            except NotApplicable:
                pass
        try:
            starts = self._model.possible_states(_triples(history)) if part.any_start else None
            if part.any_start and starts is None:
                return False
            starts = None if starts is None else list(starts)
            rows = range(len(history))
            if expected_bytes(history, rows) > EXPLAIN_BYTES:
                return False
            # Crashed operations may repeat without limit only if states cannot grow: a queue would fill up endlessly.
            few_states = isinstance(self._model, (Register, Mutex)) and INFO in history.status
            for unlimited in (True, False) if few_states else (False,):
                search = Search(history, rows, self._model, starts=starts, unlimited_crashes=unlimited)
                if search.run_until(STEPS_PER_TEST, self._deadline) is False:
                    return True
        except TypeError:
            pass
        return False

    # -- reductions ----------------------------------------------------------------------------------------------

    def prefix(self, rows: Sequence[int], culprit: int) -> _Part:
        """The operations invoked before the culprit returned."""
        history, model = self._history, self._model
        end = history.returned[culprit]
        kept, crashed = [], set()
        for row in rows:
            if history.invoked[row] > end:
                break
            if history.returned[row] > end:
                if history.f[row] in model.pure or history.status[row] == FAIL:
                    continue
                crashed.add(row)
            kept.append(row)
        return _Part(tuple(kept), frozenset(crashed))

    def failing_prefix(self, rows: Sequence[int], culprit: int | None) -> _Part:
        """The operations invoked before the culprit returned or, if these are still valid, before some later return.

        A search with lookahead backtracks before it reaches the return that makes the history invalid.
        """
        if culprit is None:
            return _Part(tuple(rows))
        history = self._history
        part = self.prefix(rows, culprit)
        # If a few operations before the culprit contradict each other, that is found soonest; the prefix may be long.
        if self._model.possible_states([]) is not None and self.window(part) is not None:
            return part
        if self.fails(part):
            return part
        first = history.returned[culprit]
        later = sorted((row for row in rows if first < history.returned[row] < NEVER), key=history.returned.__getitem__)
        best = _Part(tuple(rows))
        low, high = 0, len(later)
        while low < high and not self._out_of_time:
            middle = (low + high) // 2
            part = self.prefix(rows, later[middle])
            if self.fails(part):
                best, high = part, middle
            else:
                low = middle + 1
        return best

    def shortest_prefix(self, rows: Sequence[int], engine: Engine) -> _Part:
        """The shortest prefix that a special engine rejects, by bisection."""
        history = self._history
        ends = sorted((row for row in rows if history.returned[row] != NEVER), key=history.returned.__getitem__)
        low, high = 0, len(ends)
        while high - low > 1 and time.perf_counter() < self._deadline:
            middle = (low + high) // 2
            part = self.prefix(rows, ends[middle - 1])
            extracted = _extract(history, part)
            try:
                wrong = engine(extracted, range(len(extracted)), self._model) is not None
            except NotApplicable:
                wrong = False
            if wrong:
                high = middle
            else:
                low = middle
        return self.prefix(rows, ends[high - 1])

    def reduce(self, part: _Part) -> tuple[_Part, bool]:
        """Apply every reduction until none helps.  The flag is False if time ran out before that."""
        part = self._suffix(part)
        while not self._out_of_time:
            before = part
            part = self._drop_values(part)
            part = self._drop_pure(part)
            part = self._suffix(part)
            if part == before:
                break
        return part, not self._out_of_time

    def _suffix(self, part: _Part) -> _Part:
        """The shortest suffix of the part that fits no starting state."""
        if self._model.possible_states([]) is None:
            return part
        history = self._history
        events = sorted(history.invoked[row] for row in part.rows)
        size = self.window(part)
        if size is None:
            return part
        good, bad = len(events) - size, len(events) - size // WINDOW_GROWTH
        best = self._cut(part, events[good] if good else -1)
        while bad - good > 1:
            middle = (good + bad) // 2
            cut = self._cut(part, events[middle])
            if self.fails(cut):
                best, good = cut, middle
            else:
                bad = middle
        return best if len(best.rows) < len(part.rows) else part

    def window(self, part: _Part) -> int | None:
        """How many of the last invocations fail on their own, in growing windows; ``None`` if none is found."""
        events = sorted(self._history.invoked[row] for row in part.rows)
        size = FIRST_WINDOW
        while True:
            size = min(size, len(events))
            if self.fails(self._cut(part, events[len(events) - size] if size < len(events) else -1)):
                return size
            if size == len(events) or self._out_of_time:
                return None
            size *= WINDOW_GROWTH

    def _cut(self, part: _Part, instant: int) -> _Part:
        history, model = self._history, self._model
        kept, crashed = [], set(part.crashed)
        for row in part.rows:
            returned = NEVER if row in part.crashed else history.returned[row]
            if history.invoked[row] < instant:
                if returned < instant or history.f[row] in model.pure or history.status[row] == FAIL:
                    continue
                crashed.add(row)
            kept.append(row)
        return replace(part, rows=tuple(kept), crashed=frozenset(crashed).intersection(kept), any_start=True)

    def _drop_pure(self, part: _Part) -> _Part:
        history, model = self._history, self._model
        pure = [row for row in part.rows if history.status[row] == FAIL or model.is_pure(*_triple(history, row))]
        return self._drop_groups(part, [(row,) for row in pure])

    def _drop_groups(self, part: _Part, groups: list[tuple[int, ...]]) -> _Part:
        """Drop as many groups as possible."""
        in_groups = {row for group in groups for row in group}

        def only(kept: Sequence[tuple[int, ...]]) -> _Part:
            gone = in_groups.difference(*kept)
            return replace(part, rows=tuple(row for row in part.rows if row not in gone))

        return only(smallest(groups, lambda kept: self.fails(only(kept)), lambda: self._out_of_time))

    def _drop_values(self, part: _Part) -> _Part:
        model = self._model
        if isinstance(model, (FIFOQueue, Stack, PriorityQueue, UnorderedQueue)):
            return self._drop_queue_values(part)
        if type(model) in (Register, CASRegister):
            return self._drop_register_values(part)
        return part

    def _drop_queue_values(self, part: _Part) -> _Part:
        history = self._history
        groups: dict[Any, list[int]] = {}
        for row in part.rows:
            if history.f[row] in FIFOQueue.puts:
                groups.setdefault(history.value[row], []).append(row)
            elif history.status[row] == OK and history.result[row] is not None:
                groups.setdefault(history.result[row], []).append(row)
        return self._drop_groups(part, [tuple(rows) for rows in groups.values()])

    def _drop_register_values(self, part: _Part) -> _Part:
        history = self._history
        values: dict[Any, int] = {}
        for row in part.rows:
            value = history.value[row]
            if history.f[row] == "write":
                values[value] = values.get(value, 0) + 1
            elif history.f[row] == "cas" and not _says_nothing(history, row):
                values[value[1]] = values.get(value[1], 0) + 1
        for value in sorted(values, key=lambda v: -values[v]):
            smaller = self._without_register_value(part, value)
            if len(smaller.rows) < len(part.rows) and self.fails(smaller):
                part = smaller
        return part

    def _without_register_value(self, part: _Part, dropped: Any) -> _Part:
        history = self._history
        kept, weakened = [], set(part.weakened)
        for row in part.rows:
            f, value = history.f[row], history.value[row]
            if _says_nothing(history, row):
                continue
            if f == "cas":
                if value[1] == dropped:
                    continue
                if value[0] == dropped:
                    weakened.add(row)
            elif (value if f == "write" else history.result[row]) == dropped:
                continue
            kept.append(row)
        return replace(part, rows=tuple(kept), weakened=frozenset(weakened).intersection(kept))


def _says_nothing(history: History, row: int) -> bool:
    """Whether an operation wrote nothing and may therefore be dropped: it failed, or is a refused compare-and-set."""
    status = history.status[row]
    return status == FAIL or (status == OK and is_refused(history.f[row], history.result[row]))


def _triple(history: History, row: int) -> tuple[str, Any, Any]:
    status = history.status[row]
    result = history.result[row] if status == OK else UNKNOWN
    return history.f[row], history.value[row], result


def _triples(history: History) -> list[tuple[str, Any, Any]]:
    return [_triple(history, row) for row in range(len(history)) if history.status[row] != FAIL]


def _extract(history: History, part: _Part) -> History:
    """The part as a history of its own."""
    out = history.part(part.rows)
    out.key = [None] * len(out)
    for at, row in enumerate(part.rows):
        if row in part.crashed:
            out.status[at], out.returned[at] = INFO, NEVER
        if row in part.weakened:
            out.f[at], out.value[at] = "write", history.value[row][1]
    return out


def _witness(history: History, model: Model, outcome: KeyOutcome, part: _Part, complete: bool) -> Witness:
    culprit = max(
        (row for row in part.rows if row not in part.crashed and history.returned[row] != NEVER),
        key=history.returned.__getitem__,
        default=part.rows[-1],
    )
    # Operations invoked after the last return need not have taken effect.
    rows = tuple(row for row in part.rows if history.invoked[row] < history.returned[culprit])
    part = replace(part, rows=rows)
    shown = rows[-MAX_WITNESS_OPERATIONS:] if len(rows) > MAX_WITNESS_OPERATIONS else rows
    others = [row for row in rows if row != culprit]
    operations = history.operations(shown)
    note = "" if complete else "minimising was cut short by its time limit"
    if len(rows) > len(shown):
        note = f"the last {len(shown)} of {len(rows)} operations that no sound reduction removes"
    text = _sentence(history, model, part, culprit, others)
    violation = outcome.violation
    if violation is not None and violation.text and set(violation.named or violation.rows).issubset(rows):
        text = f"{violation.text} {text}"
    return Witness(
        operations=operations,
        text=text,
        key=freeze(outcome.key),
        edges=_real_time_edges(shown, history, part),
        minimal=complete and len(rows) == len(shown),
        note=note,
    )


def _sentence(history: History, model: Model, part: _Part, culprit: int, others: list[int]) -> str:
    what = named_row(history, culprit, model)
    before = "whatever state came before" if part.any_start else f"starting from {short(model.start())}"
    if not others:
        return f"{what} is not possible, {before}."
    start = history.invoked[culprit]
    first: list[int] = []
    during: list[int] = []
    for row in others:
        (first if row not in part.crashed and history.returned[row] < start else during).append(row)
    pieces = []
    for rows, words in (
        (first, "returned before it was invoked"),
        (during, "ran, or may have run, concurrently with it"),
    ):
        if rows:
            listed = "; ".join(named(operation, model) for operation in history.operations(rows[:6]))
            more = f"; and {len(rows) - 6} more" if len(rows) > 6 else ""
            pieces.append(f"{listed}{more} {words}")
    return (
        f"{what} is not possible: {', and '.join(pieces)}; "
        f"no order of these {len(part.rows)} operations explains it, {before}."
    )


def _real_time_edges(rows: Sequence[int], history: History, part: _Part) -> tuple[Edge, ...]:
    """Edges from operations that returned before others were invoked, without those implied by transitivity."""
    ordered = sorted(range(len(rows)), key=lambda i: history.invoked[rows[i]])
    edges = []
    for target in ordered:
        invoked = history.invoked[rows[target]]
        earlier = [i for i in ordered if rows[i] not in part.crashed and history.returned[rows[i]] < invoked]
        latest_start = max((history.invoked[rows[i]] for i in earlier), default=-1)
        for source in earlier:
            if history.returned[rows[source]] > latest_start:
                edges.append(
                    Edge(source=source, target=target, kind="realtime", reason="returned before the other was invoked")
                )
    return tuple(edges)
