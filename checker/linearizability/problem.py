"""A history made ready for the general search: kinds of operation, transitions, and what is open at every return.

* states and kinds of operation are small ints, and every transition is computed once;
* open operations are bits of one int, whose positions are reused when operations return;
* identical crashed operations are only counted, in one packed int with a guard bit above every field, so that "used
  no more of any kind" is one subtraction and one mask.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from checker.history import INFO, NEVER, OK, History, freeze
from checker.models.base import FAILED, ILLEGAL, UNKNOWN, Model, ModelError

__all__ = ["Problem", "Space", "Transitions", "expected_bytes"]

#: Memory the compiled form of one operation takes, with a configuration; and of every operation open at a return.
BYTES_PER_ROW = 1_000
BYTES_PER_OPEN = 80
#: What no machine misses: not worth a closer look.
_SMALL_BYTES = 16 << 20


def expected_bytes(history: History, rows: Sequence[int]) -> int:
    """About how much memory a :class:`Problem` of these rows and a search that never turns back take."""
    count = len(rows)
    if count * (BYTES_PER_ROW + BYTES_PER_OPEN * count) < _SMALL_BYTES:
        return count * (BYTES_PER_ROW + BYTES_PER_OPEN * count)
    return count * BYTES_PER_ROW + _open_at_returns(history, rows) * BYTES_PER_OPEN


def _open_at_returns(history: History, rows: Sequence[int]) -> int:
    """How many operations are open at each return, summed."""
    invoked, returned = history.invoked, history.returned
    ends = sorted(returned[row] for row in rows if returned[row] != NEVER)
    return sum(bisect_left(ends, returned[row]) - bisect_left(ends, invoked[row]) for row in rows)


def _hashable(value: Any) -> Any:
    """``freeze``, with a short way for the flat pairs that compare-and-sets carry."""
    if value.__class__ is list and len(value) == 2 and value[0].__class__ is int and value[1].__class__ is int:
        return value[0], value[1]
    return freeze(value)


class Space:
    """Interned states."""

    __slots__ = ("ids", "states", "step")

    def __init__(self, model: Model) -> None:
        self.states: list[Hashable] = []
        self.ids: dict[Hashable, int] = {}
        self.step = model.step

    def intern(self, state: Hashable) -> int:
        try:
            number = self.ids.get(state)
            token = state
        except TypeError:  # a map or a list, as the values of a history may be
            token = freeze(state)
            number = self.ids.get(token)
        if number is None:
            number = self.ids[token] = len(self.states)
            self.states.append(state)
        return number


class Transitions(dict[int, int]):
    """Transitions of one kind of operation: state to next state, -1 where illegal; filled on demand.

    ``conditional`` says that some state is known to make it illegal, ``blind`` that it leads to one certain state from
    everywhere (see ``foresight``).
    """

    __slots__ = ("blind", "conditional", "kind", "space")

    def __init__(self, space: Space, kind: tuple[str, Any, Any]) -> None:
        self.space = space
        self.kind = kind
        self.conditional = False
        self.blind = False

    def __missing__(self, state: int) -> int:
        space = self.space
        after = space.step(space.states[state], *self.kind)
        number = -1 if after is ILLEGAL else space.intern(after)
        self[state] = number
        return number


class Problem:
    """The compiled form of some rows of a history.

    ``starts`` replaces the model's start state by several, any of which will do.  For every return, in time order:
    its bit and row, the transitions of its operation (``own``: ``None`` where pure; ``closing``: always), the pure
    operations newly open, all pure ones and all others open, and how many crashed ones were invoked by then.

    With ``unlimited_crashes`` a crashed operation may take effect any number of times: far fewer configurations, and if
    even that admits no linearization then there is none.
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
        live, kinds, crashed_kinds = _select(history, rows, model)
        model = model.specialised(kinds) if starts is None else model
        self.space = space = Space(model)
        self.kinds = [Transitions(space, kind) for kind in kinds]
        pure = [model.is_pure(*kind) for kind in kinds]
        self.starts = [space.intern(state) for state in ([model.start()] if starts is None else starts)]
        self.live = live
        self.invoked, self.returned = history.invoked, history.returned
        #: Whether a crashed operation may have had one of several results.
        self.ambiguous = False
        self._count_crashed(model, kinds, crashed_kinds, unlimited_crashes)
        self._compile(pure, crashed_kinds)

    def _count_crashed(
        self, model: Model, kinds: list[tuple[str, Any, Any]], crashed_kinds: dict[int, int], unlimited: bool
    ) -> None:
        """A field and its guard bit for every kind of crashed operation; one entry for every result it may have had."""
        shift = 0
        self._unit_of: dict[int, int] = {}
        self.guards = 0
        self.crashed: list[tuple[int, int, int, Transitions]] = []
        for number, count in crashed_kinds.items():
            width = count.bit_length()
            self._unit_of[number] = 1 << shift
            f, value, _ = kinds[number]
            for result in model.outcomes(f, value, kinds):
                row = self.kinds[number]
                if result is not UNKNOWN:
                    self.ambiguous = True
                    row = Transitions(self.space, (f, value, result))
                self.crashed.append((shift, (1 << width) - 1, 0 if unlimited else 1 << shift, row))
            self.guards |= 1 << (shift + width)
            shift += width + 1

    def _compile(self, pure: list[bool], crashed_kinds: dict[int, int]) -> None:
        """One entry per return: its bit, its transitions, and what is open there."""
        live, row_of, unit_of = self.live, self.kinds, self._unit_of
        invoked, returned = self.invoked, self.returned
        order = sorted(
            [(returned[row], row, number) for row, number in live if not crashed_kinds or returned[row] != NEVER]
        )
        #: How many operations are open at each return, summed.
        self.open_in_all = 0
        self.return_bit: list[int] = []
        self.return_row: list[int] = [row for _, row, _ in order]
        self.own: list[Transitions | None] = []
        self.closing: list[Transitions] = [row_of[number] for _, _, number in order]
        self.new_pure: list[Any] = []
        self.open_pure: list[Any] = []
        self.open_mutators: list[Any] = []
        self.available: list[int] = []
        add_bit, add_own = self.return_bit.append, self.own.append
        add_new, add_pure = self.new_pure.append, self.open_pure.append
        add_mutators, add_available = self.open_mutators.append, self.available.append
        free: list[int] = []
        next_bit = 1
        bit_of: dict[int, int] = {}
        open_pure: dict[int, tuple[int, Transitions]] = {}
        open_mutators: dict[int, tuple[int, int, int, Transitions]] = {}
        available = 0
        at, count = 0, len(live)
        none: tuple[Any, ...] = ()
        for position, row, number in order:
            new: list[tuple[int, Transitions]] | None = None
            while at < count:
                opened, kind = live[at]
                if invoked[opened] > position:
                    break
                at += 1
                closes = returned[opened]
                if closes == NEVER:
                    available += unit_of[kind]
                    continue
                if free:
                    bit = free.pop()
                else:
                    bit = next_bit
                    next_bit <<= 1
                bit_of[opened] = bit
                if pure[kind]:
                    pair = open_pure[bit] = (bit, row_of[kind])
                    if new is None:
                        new = [pair]
                    else:
                        new.append(pair)
                else:
                    open_mutators[bit] = (closes, bit, kind, row_of[kind])
            bit = bit_of.pop(row)
            add_bit(bit)
            add_new(new or none)
            self.open_in_all += len(open_pure) + len(open_mutators)
            add_pure(tuple(open_pure.values()) if open_pure else none)
            add_mutators(tuple(open_mutators.values()) if open_mutators else none)
            add_available(available)
            if pure[number]:
                del open_pure[bit]
                add_own(None)
            else:
                del open_mutators[bit]
                add_own(row_of[number])
            free.append(bit)


def _select(
    history: History, rows: Sequence[int], model: Model
) -> tuple[list[tuple[int, int]], list[tuple[str, Any, Any]], dict[int, int]]:
    """The rows that matter with their kinds, the kinds, and how many crashed operations each kind has."""
    fs, values, results, statuses = history.f, history.value, history.result, history.status
    pure, asserts, functions, errors = model.pure, model.failures_that_assert(), model.functions, history.errors
    kinds: list[tuple[str, Any, Any]] = []
    ids: dict[Any, int] = {}
    live: list[tuple[int, int]] = []
    crashed: dict[int, int] = {}
    add = live.append
    for row in rows:
        f = fs[row]
        status = statuses[row]
        if status is OK or status == OK:
            kind = (f, values[row], results[row])
        elif status == INFO:
            if f in pure:
                continue
            kind = (f, values[row], UNKNOWN)
        else:
            if f not in asserts or row in errors:
                continue
            kind = (f, values[row], FAILED)
        try:
            number = ids.get(kind)
            token: Any = kind
        except TypeError:
            token = (f, _hashable(kind[1]), _hashable(kind[2]))
            number = ids.get(token)
        if number is None:
            if functions and f not in functions:
                raise ModelError(
                    f"model {model.name} knows {', '.join(sorted(functions))}; the history has {f!r} (row {row})"
                )
            number = ids[token] = len(kinds)
            kinds.append(kind)
        if status == INFO:
            if model.is_pure(*kind):
                continue
            crashed[number] = crashed.get(number, 0) + 1
        add((row, number))
    return live, kinds, crashed

