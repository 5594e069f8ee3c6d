"""Lookahead: which operations need one particular state, and which operations can still establish it.

If a model has few states, every kind of operation is tried once in each of them.  An operation that needs one
particular state can never take effect if no remaining open operation establishes that state, and none that is invoked
before it returns.  A search that used up the last such operation may backtrack at once, instead of when the operation
returns.  Establishing a state now is of no use to a later operation if the state must end in between.

An operation that leads to the same state from everywhere (a write) hides every other such operation that takes effect
right before it.  So once one of them has taken effect, the others that were open need not be placed: they may return as
they are, or take effect later.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice

from checker.history import NEVER
from checker.linearizability.problem import Problem, Transitions

__all__ = ["Lookahead"]

#: Maximum number of states, and of steps of all kinds of operation through all states, for lookahead.
MAX_STATES = 24
MAX_STEPS = 4_000
#: Number of operations after each return that are examined for when a state is needed and when it ends.
MAX_AHEAD = 200

#: A state; the operations that need it; the open operations that can establish it in time; (shift, field) of each
#: crashed operation that can; and the operations that must end the state before it is needed, if it holds now.
Need = tuple[int, int, int, list[tuple[int, int]], int]


class Lookahead:
    """Lookahead for one problem; :meth:`of` returns ``None`` for too many states or ambiguous crashed operations."""

    def __init__(self, problem: Problem, needs: dict[int, int], makes: dict[int, list[int]]) -> None:
        problem.complete()
        self._problem = problem
        self._needs = needs
        self._makes = makes
        self._needs_at: list[list[Need] | None] = [None] * len(problem.return_bit)
        self._makers: dict[int, list[int]] = {}
        self._starts = list(map(problem.invoked.__getitem__, problem.live_rows))
        self._users: dict[int, list[tuple[int, int]]] = {}
        #: A bit that no operation has; it stands for operations that will need a state but are not open yet.
        self._later = 1 << max(problem.return_bit).bit_length()
        #: Shift of the bits of open operations that mean "may have taken effect unseen" (see ``hidden``).
        self.width = self._later.bit_length()
        self._blind_at: list[int | None] = [None] * len(problem.return_bit)
        self._turns: dict[int, list[int]] = {}
        makers: list[list[list[int]]] = []
        users: list[list[tuple[int, int]] | None] = []
        for kind in problem.kinds:
            makers.append([self._makers.setdefault(state, []) for state in makes.get(id(kind), ())])
            needed = needs.get(id(kind))
            users.append(None if needed is None else self._users.setdefault(needed, []))
        ends = map(problem.returned.__getitem__, problem.live_rows)
        for start, end, number in zip(self._starts, ends, problem.live_kinds, strict=True):
            for starts in makers[number]:
                starts.append(start)
            user = users[number]
            if user is not None and end != NEVER:
                user.append((start, end))

    @classmethod
    def of(cls, problem: Problem) -> Lookahead | None:
        """Step every kind through every reachable state; mark kinds that are illegal in some state."""
        if problem.ambiguous:
            return None
        states = problem.space.states
        kinds = problem.kinds
        mutators = [transitions for transitions, is_pure in zip(kinds, problem.pure, strict=True) if not is_pure]
        done = 0
        while done < len(states):
            if len(states) > MAX_STATES or (done + 1) * len(kinds) > MAX_STEPS:
                return None
            for transitions in mutators:  # other kinds do not change the state
                transitions[done]
                if len(states) > MAX_STATES:
                    return None
            done += 1
        needs: dict[int, int] = {}
        makes: dict[int, list[int]] = {}
        for transitions in kinds:
            legal = [state for state in range(done) if transitions[state] >= 0]
            transitions.conditional = len(legal) < done
            transitions.blind = not transitions.conditional and len({transitions[state] for state in legal}) == 1
            if len(legal) == 1:
                needs[id(transitions)] = legal[0]
            makes[id(transitions)] = sorted({transitions[state] for state in legal if transitions[state] != state})
        return cls(problem, needs, makes)

    def hidden(self, at: int, mask: int) -> int:
        """The mask after a blind operation took effect: every other open one may have done so right before it, unseen.

        Such an operation may return as it is, or take effect later.
        """
        blind = self._blind_at[at]
        if blind is None:
            blind = 0
            for _, bit, _, transitions in self._problem.open_mutators[at]:
                if transitions.blind:
                    blind |= bit
            self._blind_at[at] = blind
        return mask & ((1 << self.width) - 1) | (blind & ~mask) << self.width

    def needs_at(self, at: int) -> list[Need]:
        """States that some operation, open or later, needs before any operation yet to come establishes them."""
        known = self._needs_at[at]
        if known is None:
            known = self._needs_at[at] = self._look_at(at)
        return known

    def _look_at(self, at: int) -> list[Need]:
        problem = self._problem
        needing: dict[int, list[tuple[int, int]]] = {}
        making: dict[int, list[tuple[int, int]]] = {}
        for bit, transitions in problem.open_pure[at]:
            if id(transitions) in self._needs:
                self._note_need(needing, transitions, bit, self._returns(bit, at))
        for position, bit, _, transitions in problem.open_mutators[at]:
            self._note_need(needing, transitions, bit, position)
            for state in self._makes.get(id(transitions), ()):
                making.setdefault(state, []).append((bit, position))
        now = problem.returned[problem.return_row[at]]
        out: list[Need] = []
        for state, users in self._users.items():
            makers = self._makers.get(state, [])
            following = bisect_right(makers, now)
            until = makers[following] if following < len(makers) else NEVER
            mask = sum(bit for bit, position in needing.get(state, ()) if position < until)
            ways = making.get(state, ())
            # Of later operations, the last one invoked before a new one establishes the state has the fewest options.
            last = -1
            coming = bisect_right(users, (now, NEVER))
            for start, end in islice(users, coming, coming + MAX_AHEAD):
                if start > until:
                    break
                if end < until:
                    last = start
            if mask or last >= 0:
                crashed = [
                    (shift, field)
                    for shift, field, _, transitions in problem.crashed
                    if state in self._makes.get(id(transitions), ())
                ]
                if mask:
                    out.append((state, mask, sum(bit for bit, _ in ways), crashed, 0))
                if last >= 0:
                    since = self._changed_since(at, state, last)
                    left = sum(bit for bit, end in ways if end > since)
                    ending = self._later if since >= 0 else self._changing_by(at, state, last)
                    out.append((state, self._later, left, crashed, ending))
        return out

    def _returns(self, bit: int, at: int) -> int:
        """The position at which the operation that has this bit at a return returns itself."""
        if not self._turns:
            for turn, taken in enumerate(self._problem.return_bit):
                self._turns.setdefault(taken, []).append(turn)
        turns = self._turns[bit]
        return self._problem.returned[self._problem.return_row[turns[bisect_left(turns, at)]]]

    def _changing_by(self, at: int, state: int, position: int) -> int:
        """Open operations that end the state and return before ``position``."""
        problem = self._problem
        changing: int = sum(
            bit
            for end, bit, _, transitions in problem.open_mutators[at]
            if end < position and transitions[state] != state
        )
        for bit, transitions in problem.open_pure[at]:
            if transitions[state] < 0 and self._returns(bit, at) < position:
                changing |= bit
        return changing

    def _changed_since(self, at: int, state: int, position: int) -> int:
        """The last invocation, after a return, of an operation that ends the state and returns before ``position``; -1
        if there is none.  Looks :data:`MAX_AHEAD` operations ahead: operations beyond that exclude nothing.
        """
        problem = self._problem
        now = problem.returned[problem.return_row[at]]
        since = -1
        first = bisect_right(self._starts, now)
        coming = slice(first, first + MAX_AHEAD)
        for row, number in zip(problem.live_rows[coming], problem.live_kinds[coming], strict=True):
            start = problem.invoked[row]
            if start > position:
                break
            if problem.returned[row] < position and problem.kinds[number][state] != state:
                since = start
        return since

    def _note_need(
        self, needing: dict[int, list[tuple[int, int]]], transitions: Transitions, bit: int, position: int
    ) -> None:
        state = self._needs.get(id(transitions))
        if state is not None:
            needing.setdefault(state, []).append((bit, position))
