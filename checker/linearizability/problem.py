"""A history prepared for the general search: kinds of operation, transitions, and open operations at every return.

* states and kinds of operation are small ints, and every transition is computed once;
* open operations are bits of one int, whose positions are reused when operations return;
* identical crashed operations are only counted, in one packed int with a guard bit above every field, so that the test
  "used no more of any kind" is one subtraction and one mask.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import compress, count, repeat
from typing import Any, NamedTuple

from checker.history import FAIL, INFO, NEVER, OK, History, columns
from checker.linearizability.steps import checked_step, unknown_functions
from checker.models.base import ILLEGAL, UNKNOWN, Model
from checker.values import exact

__all__ = ["Problem", "Space", "Transitions", "expected_bytes", "state_bytes"]

#: Memory of the compiled form of one operation with a configuration, and of every operation open at a return.
BYTES_PER_ROW = 1_000
BYTES_PER_OPEN = 80
#: Memory of a state without its parts, and of each part.
BYTES_OF_STATE = 100
BYTES_OF_PART = 16
#: So little memory that a more precise estimate is not worthwhile.
_SMALL_BYTES = 16 << 20
#: Returns compiled at a time, and returns sampled to estimate how many operations are open at each.
CHUNK_RETURNS = 16
SAMPLED_RETURNS = 256


def expected_bytes(history: History, rows: Sequence[int]) -> int:
    """About how much memory a :class:`Problem` of these rows and a search that never backtracks take."""
    count = len(rows)
    if count * (BYTES_PER_ROW + BYTES_PER_OPEN * count) < _SMALL_BYTES:
        return count * (BYTES_PER_ROW + BYTES_PER_OPEN * count)
    return count * BYTES_PER_ROW + _open_at_returns(history, rows) * BYTES_PER_OPEN


def _open_at_returns(history: History, rows: Sequence[int]) -> int:
    """How many operations are open at each return, summed."""
    invoked, returned = columns(history, rows, "invoked", "returned")
    ends = list(filter(NEVER.__ne__, returned))
    count_ends = len(ends)
    # For each return: operations invoked before it, minus those that returned before it, minus itself.
    if len(rows) == len(history) and max(max(ends, default=0), invoked[-1]) == len(rows) + count_ends - 1:
        return int(sum(ends)) - count_ends * count_ends  # every position is an event of these rows
    ends.sort()
    return sum(map(bisect_left, repeat(sorted(invoked)), ends)) - count_ends * (count_ends + 1) // 2


def state_bytes(state: Any) -> int:
    """About how much memory a state that shares its parts takes: little for a register, for a log by its length."""
    if isinstance(state, (tuple, frozenset)):
        inner = sum(len(part) for part in state if part.__class__ is tuple)
        return BYTES_OF_STATE + BYTES_OF_PART * (len(state) + inner)
    return BYTES_OF_STATE + (len(state) if isinstance(state, str) else 0)


def _tuples(values: Sequence[Any]) -> list[Any]:
    """The values with lists as tuples: as :func:`freeze`, for values nested no deeper than a flat list."""
    return [tuple(value) if value.__class__ is list else value for value in values]


class Space:
    """Interned states; compared as in JSON if values may be booleans (``booleans``)."""

    __slots__ = ("booleans", "ids", "states", "step")

    def __init__(self, model: Model, *, booleans: bool = False) -> None:
        self.states: list[Hashable] = []
        self.ids: dict[Hashable, int] = {}
        self.step = checked_step(model)
        self.booleans = booleans

    def intern(self, state: Hashable) -> int:
        token = exact(state) if self.booleans else state
        try:
            number = self.ids.get(token)
        except TypeError:  # a map or a list, as the values of a history may be
            token = exact(state)
            number = self.ids.get(token)
        if number is None:
            number = self.ids[token] = len(self.states)
            self.states.append(state)
        return number


class Transitions(dict[int, int]):
    """Transitions of one kind of operation: state -> next state, -1 if illegal; filled on demand.

    ``conditional``: it is known to be illegal in some state.  ``blind``: it leads to the same state from everywhere
    (see ``lookahead``).
    """

    blind = False
    conditional = False

    def __init__(self, space: Space, kind: tuple[str, Any, Any]) -> None:
        self.space = space
        self.kind = kind

    def __missing__(self, state: int) -> int:
        space = self.space
        after = space.step(space.states[state], *self.kind)
        if after is ILLEGAL:
            number = -1
        elif space.booleans:
            number = space.intern(after)
        else:
            try:
                number = space.ids[after]
            except (KeyError, TypeError):
                number = space.intern(after)
        self[state] = number
        return number


class Problem:
    """The compiled form of some rows of a history.

    ``starts`` replaces the model's start state by several, any of which will do.  For every return, in time order, it
    has: bit and row; the transitions of the operation (``own``: ``None`` if pure; ``closing``: always); the pure
    operations newly open; all open pure and all other open operations; and how many crashed ones were invoked by then.

    With ``unlimited_crashes`` a crashed operation may take effect any number of times.  That gives far fewer
    configurations, and if even then there is no linearization, there is none at all.
    """

    def __init__(
        self,
        history: History,
        rows: Sequence[int],
        model: Model,
        starts: Iterable[Hashable] | None = None,
        *,
        unlimited_crashes: bool = False,
    ) -> None:
        self.live_rows, self.live_kinds, kinds, crashed_kinds = _select(history, rows, model)
        model = model.specialised(kinds) if starts is None else model
        self.space = space = Space(model, booleans=bool(history.booleans))
        self.kinds = [Transitions(space, kind) for kind in kinds]
        self.pure = [model.is_pure(*kind) for kind in kinds]
        self.starts = [space.intern(state) for state in ([model.start()] if starts is None else starts)]
        self.invoked, self.returned = history.invoked, history.returned
        #: Whether a crashed operation may have had one of several results.
        self.ambiguous = False
        self._count_crashed(model, kinds, crashed_kinds, unlimited_crashes)
        self._prepare(bool(crashed_kinds))

    def _prepare(self, crashed: bool) -> None:
        """Compute everything about the returns except the open operations."""
        rows, numbers = self.live_rows, self.live_kinds
        ends = list(map(self.returned.__getitem__, rows))
        self._order = order = sorted(range(len(ends)), key=ends.__getitem__)
        if crashed:
            del order[len(order) - ends.count(NEVER) :]
        closing = list(map(numbers.__getitem__, order))
        own = [None if pure else transitions for pure, transitions in zip(self.pure, self.kinds, strict=True)]
        returns = len(order)
        self.return_row: list[int] = list(map(rows.__getitem__, order))
        self.own: list[Transitions | None] = list(map(own.__getitem__, closing))
        self.closing: list[Transitions] = list(map(self.kinds.__getitem__, closing))
        self.return_bit = [0] * returns
        self.new_pure: list[Sequence[tuple[int, Transitions]]] = [()] * returns
        self.open_pure: list[Sequence[tuple[int, Transitions]]] = [()] * returns
        self.open_mutators: list[Sequence[tuple[int, int, int, Transitions]]] = [()] * returns
        self.available = [0] * returns
        #: How many returns are compiled.
        self.ready = 0
        # The generator must not refer to this object: a reference cycle would keep everything alive for too long.
        source = _Source(
            numbers=numbers,
            starts=[*map(self.invoked.__getitem__, rows), NEVER],
            ends=ends,
            order=order,
            pure=self.pure,
            transitions=list(map(self.kinds.__getitem__, numbers)),
            unit_of=self._unit_of,
        )
        out = _Compiled(self.return_bit, self.new_pure, self.open_pure, self.open_mutators, self.available)
        self._chunks = _compile(source, out)

    def open_at_returns(self) -> int:
        """About how many operations are open at a return, by a sample of the compiled returns."""
        apart = self.ready // SAMPLED_RETURNS + 1
        sampled = range(0, self.ready, apart)
        opened = sum(len(self.open_pure[at]) + len(self.open_mutators[at]) for at in sampled)
        return opened // max(1, len(sampled))

    def _count_crashed(
        self, model: Model, kinds: list[tuple[str, Any, Any]], crashed_kinds: dict[int, int], unlimited: bool
    ) -> None:
        """Lay out a field and a guard bit per kind of crashed operation, with an entry for each possible result."""
        shift = 0
        self._unit_of: dict[int, int] = {}
        self.guards = 0
        self.crashed: list[tuple[int, int, int, Transitions]] = []
        for number, times in crashed_kinds.items():
            width = times.bit_length()
            self._unit_of[number] = 1 << shift
            f, value, _ = kinds[number]
            for result in model.outcomes(f, value, kinds):
                transitions = self.kinds[number]
                if result is not UNKNOWN:
                    self.ambiguous = True
                    transitions = Transitions(self.space, (f, value, result))
                self.crashed.append((shift, (1 << width) - 1, 0 if unlimited else 1 << shift, transitions))
            self.guards |= 1 << (shift + width)
            shift += width + 1

    def more(self) -> int:
        """Compile some more returns.  Returns how many are ready now: as before if there are no more."""
        self.ready = next(self._chunks, self.ready)
        return self.ready

    def complete(self) -> None:
        """Compile all returns."""
        for ready in self._chunks:
            self.ready = ready


class _Source(NamedTuple):
    """The input of `_compile`: the operations in order of invocation.

    ``starts`` ends with :data:`NEVER`; ``order`` lists those that returned by their returns; ``numbers`` are kinds.
    """

    numbers: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    order: Sequence[int]
    pure: Sequence[bool]
    transitions: Sequence[Transitions]
    unit_of: dict[int, int]


class _Compiled(NamedTuple):
    """The output of `_compile`, for every return; see :class:`Problem`."""

    return_bit: list[int]
    new_pure: list[Any]
    open_pure: list[Any]
    open_mutators: list[Any]
    available: list[int]


def _compile(source: _Source, out: _Compiled) -> Iterator[int]:
    """Fills in the operations open at each return, in time order; yields how many returns are ready, chunk by chunk.

    A violation is often found long before the last return, and then the rest is not compiled.
    """
    numbers, starts, ends, order, pure, transitions, unit_of = source
    return_bit, new_pure, open_pure, open_mutators, available_at = out
    entries: list[Any] = [None] * len(numbers)
    pure_now: list[tuple[int, Transitions]] = []
    mutators_now: list[tuple[int, int, int, Transitions]] = []
    pure_then: tuple[Any, ...] = ()
    mutators_then: tuple[Any, ...] = ()
    pure_changed = mutators_changed = False
    free: list[int] = []
    next_bit, available, at, ready = 1, 0, 0, 0
    next_chunk = CHUNK_RETURNS
    start = starts[0]
    for index in order:
        ending = ends[index]
        if start <= ending:
            new: list[tuple[int, Transitions]] | None = None
            while start <= ending:
                closes, number = ends[at], numbers[at]
                if closes == NEVER:
                    available += unit_of[number]
                else:
                    if free:
                        bit = free.pop()
                    else:
                        bit, next_bit = next_bit, next_bit << 1
                    if pure[number]:
                        pair = entries[at] = (bit, transitions[at])
                        if new is None:
                            new = [pair]
                        else:
                            new.append(pair)
                    else:
                        entry = entries[at] = (closes, bit, number, transitions[at])
                        mutators_now.append(entry)
                        mutators_changed = True
                at += 1
                start = starts[at]
            if new is not None:
                new_pure[ready] = new
                pure_now += new
                pure_changed = True
        if unit_of:
            available_at[ready] = available
        if pure_changed:
            pure_then, pure_changed = tuple(pure_now), False
        if mutators_changed:
            mutators_then, mutators_changed = tuple(mutators_now), False
        open_pure[ready], open_mutators[ready] = pure_then, mutators_then
        closing = entries[index]
        if pure[numbers[index]]:
            return_bit[ready] = bit = closing[0]
            pure_now.remove(closing)
            pure_changed = True
        else:
            return_bit[ready] = bit = closing[1]
            mutators_now.remove(closing)
            mutators_changed = True
        free.append(bit)
        ready += 1
        if ready == next_chunk:
            yield ready
            next_chunk = ready + CHUNK_RETURNS
    yield ready


def _alike(
    fs: Sequence[str], values: Sequence[Any], results: Sequence[Any], statuses: Sequence[str], *, booleans: bool
) -> tuple[dict[Any, int], list[int]]:
    """(look of an operation -> first operation with it, for each operation the first one that looks like it)."""
    first_alike: dict[Any, int] = {}
    if not booleans:
        try:
            alike = list(map(first_alike.setdefault, zip(fs, values, results, statuses, strict=True), count()))
        except TypeError:  # a map or a list, as the values of a history may be
            first_alike = {}
        else:
            return first_alike, alike
        try:
            looks = zip(fs, _tuples(values), _tuples(results), statuses, strict=True)
            return first_alike, list(map(first_alike.setdefault, looks, count()))
        except TypeError:  # a map or a list within a list
            first_alike = {}
    looks = zip(fs, map(exact, values), map(exact, results), statuses, strict=True)
    return first_alike, list(map(first_alike.setdefault, looks, count()))


def _select(
    history: History, rows: Sequence[int], model: Model
) -> tuple[Sequence[int], list[int], list[tuple[str, Any, Any]], dict[int, int]]:
    """The relevant rows, the kind of each, the kinds, and how many crashed operations each kind has."""
    pure, functions = model.pure, model.functions
    fs, values, results, statuses = columns(history, rows, "f", "value", "result", "status")
    if FAIL in statuses:
        kept = list(map(FAIL.__ne__, statuses))
        rows, fs, values, results, statuses = (
            list(compress(column, kept)) for column in (rows, fs, values, results, statuses)
        )
    # Identical operations are one kind, represented by the first of them: found without Python code for each one.
    first_alike, alike = _alike(fs, values, results, statuses, booleans=bool(history.booleans))
    kinds: list[tuple[str, Any, Any]] = []
    ids: dict[Any, int] = {}
    number_of: dict[int, int] = {}
    crashed_numbers: dict[int, int] = {}
    is_complete = True
    for (f, token, answer, status), first in first_alike.items():
        result = results[first]
        number = -1
        if functions and f not in functions:
            raise unknown_functions(history, model)
        if status == INFO:
            if f not in pure and not model.is_pure(f, values[first], UNKNOWN):
                result = answer = UNKNOWN
                number = 0
        elif status == OK:
            number = 0
        if number < 0:
            is_complete = False
        else:
            name = (f, token, answer)
            number = ids.setdefault(name, len(kinds))
            if number == len(kinds):
                kinds.append((f, values[first], result))
            if status == INFO:
                crashed_numbers[first] = number
        number_of[first] = number
    numbers = list(map(number_of.__getitem__, alike))
    crashed: dict[int, int] = {}
    if crashed_numbers:
        for first in alike:
            if first in crashed_numbers:
                number = crashed_numbers[first]
                crashed[number] = crashed.get(number, 0) + 1
    if is_complete:
        return rows, numbers, kinds, crashed
    live = [row for row, number in zip(rows, numbers, strict=True) if number >= 0]
    return live, [number for number in numbers if number >= 0], kinds, crashed
