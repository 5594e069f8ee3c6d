"""The general engine: depth-first just-in-time linearization, for any deterministic model.

After Wing & Gong ("Testing and verifying concurrent objects", 1993), Lowe ("Testing for linearizability", 2017) and
Horn & Kroening ("Faster linearizability checking via P-compositionality", 2015).  The search walks the returns in
time order.  A configuration is the next return, the state, the open operations that have taken effect already, and
the number of crashed operations of each kind that were used (see ``problem``).  Pure operations take effect as soon
as they fit, which is always safe.  A search that gets stuck restarts with ``lookahead``, and then in other orders.

The worst case is exponential in the number of concurrently open operations; most valid histories take linear time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from checker.history import History
from checker.linearizability.lookahead import Lookahead, Need
from checker.linearizability.problem import Problem, Transitions, state_bytes
from checker.models.base import Model

__all__ = ["Search"]

_STATE_BITS = 32

#: What to do with an entry of the stack: advance through returns first; expand it; expand it without the operation that
#: returns next; nothing (its children are above it on the stack); or, from ``_CRASHED`` on, let the crashed operation
#: of that number or a later one take effect.
_ROOT, _FRESH, _OWN_TAKEN, _EXPANDED, _CRASHED = range(5)

#: Steps without passing another return after which a search without lookahead gives way to one with it; few, because
#: the former is only fast if hardly any choice is wrong.
NAIVE_PATIENCE_STEPS = 60
#: The same before a restart in another order, with lookahead and without; it grows each time by one part in
#: ``PATIENCE_GROWTH``, so that every search ends.
PATIENCE_STEPS = 300
BLIND_PATIENCE_STEPS = 600
PATIENCE_GROWTH = 2
#: Steps without passing another return before lookahead is used: it costs more than a few steps.
EASE_STEPS = 20
#: Operations examined between two checks of the clock.
WEIGHT_PER_LOOK = 1 << 16
#: Bytes of states that may be created between two checks of memory, and steps before the size of states is known.
BYTES_PER_LOOK = 4 << 20
FIRST_STEPS = 32

#: Next return, state, open operations that took effect (and in higher bits those that may have, see ``lookahead``),
#: crashed operations used, what to do.
Entry = tuple[int, int, int, int, int]


class Search:
    """A resumable search over some rows of a history.

    ``starts`` and ``unlimited_crashes`` are those of :class:`Problem`.  ``run`` may be called repeatedly until it
    returns an answer; ``deepest_row`` is then the row of the last return that could not be explained.
    """

    def __init__(
        self,
        history: History,
        rows: Sequence[int],
        model: Model,
        *,
        starts: Iterable[Hashable] | None = None,
        unlimited_crashes: bool = False,
    ) -> None:
        self._problem = problem = Problem(history, rows, model, starts, unlimited_crashes=unlimited_crashes)
        self.steps = 0
        self.deepest = 0
        self._roots: list[Entry] = [(0, state, 0, 0, _ROOT) for state in reversed(problem.starts)]
        self._stack: list[Entry] = list(self._roots)
        self._candidates: list[list[tuple[int, Transitions, int]] | None] = [None] * len(problem.return_bit)
        self._rivals: list[list[tuple[int, Transitions]] | None] = [None] * len(problem.return_bit)
        self._seen: list[Any] = [None] * len(problem.return_bit)
        self._shuffle: random.Random | None = None
        self._lookahead: Lookahead | None = None
        self._enabling = True
        self._looked_ahead = self._hiding = False
        self._restarts = self._stuck = self._reached = 0
        self._patience = NAIVE_PATIENCE_STEPS

    @property
    def weight(self) -> int:
        """About how many operations each step has to examine."""
        return 1 + self._problem.open_at_returns() + len(self._problem.crashed)

    def run_until(self, max_steps: int, deadline: float) -> bool | None:
        """:meth:`run`, but no further than ``deadline`` (seconds of ``time.perf_counter``)."""
        slice_steps = 1 + WEIGHT_PER_LOOK // self.weight
        done: bool | None = None
        while done is None and max_steps > 0 and time.perf_counter() < deadline:
            done = self.run(min(slice_steps, max_steps))
            max_steps -= slice_steps
        return done

    @property
    def returns(self) -> int:
        """How many returns there are to explain."""
        return len(self._problem.return_bit)

    @property
    def deepest_row(self) -> int | None:
        """Row of the deepest return that the search reached without passing it."""
        rows = self._problem.return_row
        return rows[self.deepest] if self.deepest < len(rows) else None

    def run(self, max_steps: int) -> bool | None:
        """Continue the search for at most ``max_steps`` steps.

        Returns ``True`` when a linearization was found, ``False`` when there is none, ``None`` when steps ran out, or
        when states are so large that the caller should check time and memory earlier.  (A log grows with every step,
        and a step copies it, so at most as many steps are made at once as were made before.)
        """
        states = self._problem.space.states
        bytes_left = BYTES_PER_LOOK
        while max_steps > 0 and bytes_left > 0:
            before = self.steps
            reached = self._reached
            size = state_bytes(states[-1] if states else None)
            some = min(max(before, FIRST_STEPS), bytes_left // size + 1)
            done = self._run(min(max_steps, some, self._patience - self._stuck))
            self.deepest = max(self.deepest, self._reached)
            if done is not None:
                return done
            max_steps -= self.steps - before
            bytes_left -= (self.steps - before) * size
            if self._reached > reached:
                self._stuck = 0
                continue
            self._stuck += self.steps - before
            if self._stuck >= self._patience and not self._goes_on_as_it_is():
                self._restart()
        return None

    def _goes_on_as_it_is(self) -> bool:
        """Set up lookahead, the first time.  True if there are too many states for it: then more steps are allowed."""
        if self._looked_ahead:
            return False
        self._looked_ahead = True
        self._lookahead = Lookahead.of(self._problem)
        if self._lookahead is None:
            self._patience = BLIND_PATIENCE_STEPS
        return self._lookahead is None

    def _restart(self) -> None:
        """Restart from the root in another order, keeping the configurations that are known to be dead.

        A depth-first search that made a wrong choice early spends nearly all its time below it.  Configurations on the
        stack are not finished, so they are forgotten; all others that were seen lead nowhere, whatever the order.
        """
        guards = self._problem.guards
        for at, state, mask, used, choice in self._stack:
            known: Any = self._seen[at]
            if choice == _ROOT or known is None:
                continue
            key = mask << _STATE_BITS | state
            if not guards:
                if known.__class__ is int:
                    self._seen[at] = None if known == key else known
                else:
                    known.discard(key)
            elif known.get(key) == used:
                del known[key]
            elif isinstance(known.get(key), list) and used in known[key]:
                known[key].remove(used)
        self._stack = list(self._roots)
        self._candidates[:] = [None] * len(self._candidates)
        self._restarts += 1
        if self._lookahead is None:
            self._enabling = self._restarts % 2 == 0
        else:
            # Some histories are decided sooner with hidden operations, some without; those with crashes never were.
            self._hiding = self._restarts % 2 == 0 and not guards
        if self._restarts == 1:
            self._patience = BLIND_PATIENCE_STEPS if self._lookahead is None else PATIENCE_STEPS
        else:
            self._shuffle = random.Random(self._restarts)
        self._patience += self._patience // PATIENCE_GROWTH + 1
        self._stuck = self._reached = 0

    def _sorted_candidates(self, at: int) -> list[tuple[int, Transitions, int]]:
        """Open mutators at a return, earliest return first, each with the bits of identical ones before it."""
        same: dict[int, int] = {}
        out = []
        for _, bit, kind, transitions in sorted(self._problem.open_mutators[at]):
            before = same.get(kind, 0)
            same[kind] = before | bit
            out.append((bit, transitions, before))
        if self._shuffle is not None and len(out) > 2:
            first = self._problem.own[at] is not None
            rest = out[first:]
            self._shuffle.shuffle(rest)
            out[first:] = rest
        self._candidates[at] = out
        return out

    def _expand(self, at: int, state: int, mask: int, used: int, own_taken: bool) -> None:
        """Push the operations that may take effect next, the most promising last, above an entry for the configuration
        itself.  Without lookahead, operations that enable the next one to return are preferred; with it, operations
        that few states allow are preferred to those that are always possible.
        """
        problem = self._problem
        candidates = self._candidates[at]
        if candidates is None:
            candidates = self._sorted_candidates(at)
        own, own_bit, closing = problem.own[at], problem.return_bit[at], problem.closing[at]
        lookahead = self._lookahead
        hiding = lookahead if self._hiding else None
        looks_ahead = lookahead is not None
        own_fits = own is not None and own[state] >= 0
        own_free = own is not None and not own.conditional
        first: list[Entry] = []
        second: list[Entry] = []
        third: list[Entry] = []
        last: list[Entry] = []
        for bit, transitions, before in candidates:
            if mask & bit or before & ~mask:
                continue
            after = transitions[state]
            if after < 0:
                continue
            taken = mask | bit
            if hiding is not None and transitions.blind:
                taken = hiding.hidden(at, taken)
            entry = (at, after, taken, used, _ROOT)
            if bit == own_bit:
                if not own_taken:
                    second.append(entry)
            elif own_fits:
                (first if looks_ahead and own_free and transitions.conditional else last).append(entry)
            elif self._enabling and closing[after] >= 0:
                (first if not looks_ahead or transitions.conditional else third).append(entry)
            else:
                (second if looks_ahead and transitions.conditional else last).append(entry)
        if problem.guards and problem.available[at] != used:
            last.append((at, state, mask, used, _CRASHED))
        if hiding is not None and mask >> hiding.width & own_bit:
            # It may have taken effect unseen, and can then return without further effect.
            first.insert(0, (at, state, mask ^ (own_bit << hiding.width | own_bit), used, _ROOT))
        order = first + second + third + last
        if order:
            order.append((at, state, mask, used, _EXPANDED))
            order.reverse()
            self._stack += order

    def _next_crashed(self, at: int, state: int, used: int, number: int) -> tuple[int, int, int] | None:
        """The next crashed operation that can take effect: its number, the next state, and the new ``used``."""
        available = self._problem.available[at]
        crashed = self._problem.crashed
        while number < len(crashed):
            shift, field, unit, transitions = crashed[number]
            if (used >> shift) & field < (available >> shift) & field:
                after = transitions[state]
                if after >= 0 and after != state:
                    return number, after, used + unit
            number += 1
        return None

    def _has_rival(self, at: int, state: int, mask: int) -> bool:
        """Whether an open operation fits that only some states allow: these go before operations that always fit."""
        rivals = self._rivals[at]
        if rivals is None:
            opened = self._problem.open_mutators[at]
            rivals = self._rivals[at] = [(bit, kind) for _, bit, _, kind in opened if kind.conditional]
        return bool(rivals) and any(not mask & bit and transitions[state] >= 0 for bit, transitions in rivals)

    @staticmethod
    def _is_dead_end(needs: list[Need], state: int, mask: int, used: int, available: int, width: int) -> bool:
        """Whether some operation, open or later, needs a state that no remaining operation can establish in time.

        An operation that may have taken effect unseen need not end a state.
        """
        done = mask | mask >> width
        for needed, waiting, makers, crashed, frozen in needs:
            if waiting & ~mask and not makers & ~mask and (needed != state or frozen & ~done):
                for shift, field in crashed:
                    if (used >> shift) & field < (available >> shift) & field:
                        break
                else:
                    return True
        return False

    def _run(self, max_steps: int) -> bool | None:
        """Search for at most ``max_steps`` steps: the innermost loop of the checker, kept in one function for speed."""
        problem, stack, push = self._problem, self._stack, self._stack.append
        own_transitions, return_bit = problem.own, problem.return_bit
        new_pure, open_pure, available_at = problem.new_pure, problem.open_pure, problem.available
        lookahead = self._lookahead
        needs_at, width = (None, 0) if lookahead is None else (lookahead.needs_at, lookahead.width)
        guards, seen = problem.guards, self._seen
        next_crashed, is_dominated = self._next_crashed, self._is_dominated
        end = problem.ready or problem.more()
        deepest = self._reached
        steps = 0
        prune_from = EASE_STEPS if self._stuck == 0 else 0
        if end == 0:
            return True
        while stack:
            at, state, mask, used, choice = stack.pop()
            if choice >= _EXPANDED:
                if choice == _EXPANDED:
                    continue
                taken = next_crashed(at, state, used, choice - _CRASHED)
                if taken is None:
                    continue
                push((at, state, mask, used, taken[0] + 1 + _CRASHED))
                _, state, used = taken
                choice = _ROOT
            moved = choice == _ROOT
            while True:
                if moved:
                    # A new state: try every open pure operation, then advance through returns while possible.
                    for bit, transitions in open_pure[at]:
                        if not mask & bit and transitions[state] == state:
                            mask |= bit
                    bit = return_bit[at]
                    while mask & bit:
                        mask ^= bit
                        at += 1
                        if at == end:
                            end = problem.more()
                            if at == end:
                                self.steps += steps
                                self._reached = end
                                return True
                        for fresh, transitions in new_pure[at]:
                            if transitions[state] == state:
                                mask |= fresh
                        bit = return_bit[at]
                    steps += 1
                    if at > deepest:
                        deepest = at
                        prune_from = steps + EASE_STEPS
                    key = mask << _STATE_BITS | state
                    known = seen[at]
                    if guards:
                        if known is None:
                            seen[at] = {key: used}
                        elif key not in known:
                            known[key] = used
                        elif is_dominated(known, key, used):
                            break
                    elif known is None:
                        seen[at] = key
                    elif known.__class__ is int:
                        if known == key:
                            break
                        seen[at] = {known, key}
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
                if (
                    needs_at is not None
                    and steps > prune_from
                    and self._is_dead_end(needs_at(at), state, mask, used, available_at[at], width)
                ):
                    break
                if choice == _FRESH and not self._hiding:
                    own = own_transitions[at]
                    if own is not None:
                        after = own[state]
                        if after >= 0 and (needs_at is None or own.conditional or not self._has_rival(at, state, mask)):
                            push((at, state, mask, used, _OWN_TAKEN))
                            mask |= return_bit[at]
                            state = after
                            moved = True
                            continue
                self._expand(at, state, mask, used, choice == _OWN_TAKEN)
                break
        self.steps += steps
        self._reached = deepest
        return False

    def _is_dominated(self, known: dict[int, Any], key: int, used: int) -> bool:
        """Whether a seen configuration with this key used no more of any crashed kind; otherwise adds this one."""
        guards = self._problem.guards
        before = known[key]
        guarded = used | guards
        if before.__class__ is int:
            if (guarded - before) & guards == guards:
                return True
            known[key] = used if ((before | guards) - used) & guards == guards else [before, used]
        else:
            for other in before:
                if (guarded - other) & guards == guards:
                    return True
            before[:] = [other for other in before if ((other | guards) - used) & guards != guards]
            before.append(used)
        return False
