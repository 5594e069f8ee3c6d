"""The general engine: depth-first just-in-time linearization, for any deterministic model.

After Wing & Gong ("Testing and verifying concurrent objects", 1993), Lowe ("Testing for linearizability", 2017) and
Horn & Kroening ("Faster linearizability checking via P-compositionality", 2015).  The search walks the returns in
time order.  A configuration is the next return, the state, which open operations have taken effect already, and how
many crashed operations of each kind were used.  Four things keep it fast here:

* states and kinds of operation are small ints, and every transition is computed once;
* open operations are bits of one int, whose positions are reused when operations return;
* identical crashed operations are only counted, in one packed int with a guard bit above every field, so that "used
  no more of any kind" is one subtraction and one mask;
* pure operations take effect as soon as they fit, which is always safe.

Worst case exponential in the number of operations open at once; linear on most valid histories.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from checker.history import INFO, NEVER, OK, History, freeze
from checker.models.base import FAILED, ILLEGAL, UNKNOWN, Model, ModelError

__all__ = ["Search"]

_STATE_BITS = 32

#: How far a configuration on the stack has been expanded; ``_FIRST + n`` is "candidate n comes next".
_ROOT, _FRESH, _OWN_TAKEN, _FIRST = range(4)

#: Steps without passing another return after which the search begins again in another order; each time by one part in
#: ``PATIENCE_GROWTH`` more, so that every search ends.
PATIENCE_STEPS = 600
PATIENCE_GROWTH = 2


def _hashable(value: Any) -> Any:
    """``freeze``, with a short way for the flat pairs that compare-and-sets carry."""
    if value.__class__ is list and len(value) == 2 and value[0].__class__ is int and value[1].__class__ is int:
        return value[0], value[1]
    return freeze(value)


class _Space:
    """Interned states."""

    __slots__ = ("ids", "states", "step")

    def __init__(self, model: Model) -> None:
        self.states: list[Hashable] = []
        self.ids: dict[Hashable, int] = {}
        self.step = model.step

    def intern(self, state: Hashable) -> int:
        number = self.ids.get(state)
        if number is None:
            number = self.ids[state] = len(self.states)
            self.states.append(state)
        return number


class _Row(dict[int, int]):
    """Transitions of one kind of operation: state to next state, -1 where illegal; filled on demand."""

    __slots__ = ("kind", "space")

    def __init__(self, space: _Space, kind: tuple[str, Any, Any]) -> None:
        self.space = space
        self.kind = kind

    def __missing__(self, state: int) -> int:
        space = self.space
        after = space.step(space.states[state], *self.kind)
        number = -1 if after is ILLEGAL else space.intern(after)
        self[state] = number
        return number


class Search:
    """A resumable search over some rows of a history.

    ``starts`` replaces the model's start state by several, any of which will do.  ``run`` may be called again until
    it answers; ``deepest_row`` then is the row whose return was the last that could not be explained.
    """

    def __init__(
        self, history: History, rows: Sequence[int], model: Model, *, starts: Iterable[Hashable] | None = None
    ) -> None:
        live, kinds, crashed_kinds = self._select(history, rows, model)
        model = model.specialised(kinds) if starts is None else model
        self._space = space = _Space(model)
        row_of = [_Row(space, kind) for kind in kinds]
        pure = [model.is_pure(*kind) for kind in kinds]
        #: False where a crashed operation could end in more than one state, which one ``step`` cannot say.
        self.deterministic = not any(model.is_ambiguous(kinds[number]) for number in crashed_kinds)
        self._compile(history, live, row_of, pure, crashed_kinds)
        self.steps = 0
        self.deepest = 0
        first = [model.start()] if starts is None else list(starts)
        self._roots = [(0, space.intern(state), 0, 0, _ROOT) for state in reversed(first)]
        self._stack: list[tuple[int, int, int, int, int]] = list(self._roots)
        self._shuffle: random.Random | None = None
        self._enabling = True
        self._restarts = self._stuck = self._reached = 0
        self._patience = PATIENCE_STEPS

    @staticmethod
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

    def _compile(
        self,
        history: History,
        live: list[tuple[int, int]],
        row_of: list[_Row],
        pure: list[bool],
        crashed_kinds: dict[int, int],
    ) -> None:
        """One entry per return: its bit, its transitions, and what is open there."""
        shift = 0
        unit_of: dict[int, int] = {}
        guards = 0
        self._crashed: list[tuple[int, int, int, _Row]] = []
        for number, count in crashed_kinds.items():
            width = count.bit_length()
            unit_of[number] = 1 << shift
            self._crashed.append((shift, (1 << width) - 1, 1 << shift, row_of[number]))
            guards |= 1 << (shift + width)
            shift += width + 1
        self._guards = guards

        invoked, returned = history.invoked, history.returned
        order = sorted(
            [(returned[row], row, number) for row, number in live if not crashed_kinds or returned[row] != NEVER]
        )
        self._return_bit: list[int] = []
        self._return_row: list[int] = [row for _, row, _ in order]
        self._own: list[_Row | None] = []
        self._closing: list[_Row] = [row_of[number] for _, _, number in order]
        self._new_pure: list[Any] = []
        self._open_pure: list[Any] = []
        self._open_mutators: list[Any] = []
        self._available: list[int] = []
        add_bit, add_own = self._return_bit.append, self._own.append
        add_new, add_pure = self._new_pure.append, self._open_pure.append
        add_mutators, add_available = self._open_mutators.append, self._available.append
        free: list[int] = []
        next_bit = 1
        bit_of: dict[int, int] = {}
        open_pure: dict[int, _Row] = {}
        open_mutators: dict[int, tuple[int, int, int, _Row]] = {}
        available = 0
        at, count = 0, len(live)
        none: tuple[Any, ...] = ()
        for position, row, number in order:
            new: list[tuple[int, _Row]] | None = None
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
                    transitions = open_pure[bit] = row_of[kind]
                    if new is None:
                        new = [(bit, transitions)]
                    else:
                        new.append((bit, transitions))
                else:
                    open_mutators[bit] = (closes, bit, kind, row_of[kind])
            bit = bit_of.pop(row)
            add_bit(bit)
            add_new(new or none)
            add_pure(tuple(open_pure.items()) if open_pure else none)
            add_mutators(tuple(open_mutators.values()) if open_mutators else none)
            add_available(available)
            if pure[number]:
                del open_pure[bit]
                add_own(None)
            else:
                del open_mutators[bit]
                add_own(row_of[number])
            free.append(bit)
        self._candidates: list[list[tuple[int, _Row, int]] | None] = [None] * len(order)
        self._seen: list[Any] = [None] * len(order)

    @property
    def returns(self) -> int:
        """How many returns there are to explain."""
        return len(self._return_bit)

    @property
    def deepest_row(self) -> int | None:
        """Row of the deepest return that the search reached without passing it."""
        return self._return_row[self.deepest] if self.deepest < len(self._return_row) else None

    def _sorted_candidates(self, at: int) -> list[tuple[int, _Row, int]]:
        """Open mutators at a return, earliest return first, each with the bits of identical ones before it."""
        same: dict[int, int] = {}
        out = []
        for _, bit, kind, transitions in sorted(self._open_mutators[at]):
            before = same.get(kind, 0)
            same[kind] = before | bit
            out.append((bit, transitions, before))
        if self._shuffle is not None and len(out) > 2:
            first = self._own[at] is not None
            rest = out[first:]
            self._shuffle.shuffle(rest)
            out[first:] = rest
        self._candidates[at] = out
        return out

    def _restart(self) -> None:
        """Begin again from the root, trying operations in another order, with all that is known to be dead.

        A depth-first search that made a wrong choice early spends nearly all its time beneath it.  Configurations on
        the stack are not finished, so they are forgotten; every other one seen leads nowhere, whatever the order.
        """
        for at, state, mask, used, choice in self._stack:
            known: Any = self._seen[at]
            if choice == _ROOT or known is None:
                continue
            key = mask << _STATE_BITS | state
            if not self._guards:
                known.discard(key)
            elif known.get(key) == used:
                del known[key]
            elif isinstance(known.get(key), list) and used in known[key]:
                known[key].remove(used)
        self._stack = list(self._roots)
        self._candidates[:] = [None] * len(self._candidates)
        self._restarts += 1
        self._enabling = self._restarts % 2 == 0
        if self._restarts > 1:
            self._shuffle = random.Random(self._restarts)
        self._stuck = self._reached = 0
        self._patience += self._patience // PATIENCE_GROWTH + 1

    def run(self, max_steps: int) -> bool | None:
        """Search on for at most ``max_steps`` stops.

        Returns ``True`` when a linearization was found, ``False`` when there is none, ``None`` when steps ran out.
        """
        while max_steps > 0:
            before = self.steps
            reached = self._reached
            done = self._run(min(max_steps, self._patience - self._stuck))
            self.deepest = max(self.deepest, self._reached)
            if done is not None:
                return done
            max_steps -= self.steps - before
            if self._reached > reached:
                self._stuck = 0
                continue
            self._stuck += self.steps - before
            if self._stuck >= self._patience:
                self._restart()
        return None

    def _run(self, max_steps: int) -> bool | None:
        stack, seen, guards, crashed = self._stack, self._seen, self._guards, self._crashed
        return_bit, own_row, new_pure, open_pure = self._return_bit, self._own, self._new_pure, self._open_pure
        candidates_at, available_at, closing = self._candidates, self._available, self._closing
        end = len(return_bit)
        enabling = self._enabling
        deepest = self._reached
        steps = 0
        pop, push = stack.pop, stack.append
        if end == 0:
            return True
        while stack:
            at, state, mask, used, choice = pop()
            moved = choice == _ROOT
            while True:
                if moved:
                    # A new state: every open pure operation gets a chance, then returns pass while they can.
                    for bit, row in open_pure[at]:
                        if not mask & bit and row[state] == state:
                            mask |= bit
                    bit = return_bit[at]
                    while mask & bit:
                        mask ^= bit
                        at += 1
                        if at == end:
                            self.steps += steps
                            self._reached = end
                            return True
                        for fresh, row in new_pure[at]:
                            if row[state] == state:
                                mask |= fresh
                        bit = return_bit[at]
                    if at > deepest:
                        deepest = at
                    steps += 1
                    key = mask << _STATE_BITS | state
                    known = seen[at]
                    if guards:
                        if known is None:
                            seen[at] = {key: used}
                        else:
                            before = known.get(key)
                            if before is None:
                                known[key] = used
                            elif before.__class__ is int:
                                guarded = used | guards
                                if (guarded - before) & guards == guards:
                                    break
                                known[key] = used if ((before | guards) - used) & guards == guards else [before, used]
                            else:
                                guarded = used | guards
                                for other in before:
                                    if (guarded - other) & guards == guards:
                                        break
                                else:
                                    before[:] = [o for o in before if ((o | guards) - used) & guards != guards]
                                    before.append(used)
                                    other = None
                                if other is not None:
                                    break
                    elif known is None:
                        seen[at] = {key}
                    elif key in known:
                        break
                    else:
                        known.add(key)
                    if steps >= max_steps:
                        push((at, state, mask, used, _FRESH))
                        self.steps += steps
                        self._reached = deepest
                        return None
                    choice = _FRESH
                if choice == _FRESH:
                    own = own_row[at]
                    if own is not None:
                        after = own[state]
                        if after >= 0:
                            push((at, state, mask, used, _OWN_TAKEN))
                            mask |= return_bit[at]
                            state = after
                            moved = True
                            continue
                candidates = candidates_at[at]
                if candidates is None:
                    candidates = self._sorted_candidates(at)
                size = len(candidates)
                twice = size + size
                moved = False
                if choice == _OWN_TAKEN:
                    choice = size
                    needed = None
                else:
                    choice = 0 if choice == _FRESH else choice - _FIRST
                    own = own_row[at]
                    # Where its own operation does not fit, those after which it would come first.
                    needed = closing[at] if enabling and (own is None or own[state] < 0) else None
                    if needed is None and choice < size:
                        choice = size
                    while choice < size:
                        bit, row, before = candidates[choice]
                        choice += 1
                        if mask & bit or before & ~mask:
                            continue
                        after = row[state]
                        if after >= 0 and needed is not None and needed[after] >= 0:
                            push((at, state, mask, used, choice + _FIRST))
                            mask |= bit
                            state = after
                            moved = True
                            break
                    if moved:
                        continue
                own_bit = return_bit[at]
                while choice < twice:
                    bit, row, before = candidates[choice - size]
                    choice += 1
                    if mask & bit or before & ~mask or bit == own_bit:
                        continue
                    after = row[state]
                    if after >= 0 and (needed is None or needed[after] < 0):
                        push((at, state, mask, used, choice + _FIRST))
                        mask |= bit
                        state = after
                        moved = True
                        break
                if moved:
                    continue
                if guards:
                    available = available_at[at]
                    for index in range(choice - twice, len(crashed)):
                        shift, field, unit, row = crashed[index]
                        if (used >> shift) & field < (available >> shift) & field:
                            after = row[state]
                            if after >= 0 and after != state:
                                push((at, state, mask, used, twice + index + 1 + _FIRST))
                                used += unit
                                state = after
                                moved = True
                                break
                    if moved:
                        continue
                break
        self.steps += steps
        self._reached = deepest
        return False
