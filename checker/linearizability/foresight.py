"""What can be known before trying: which operations need one certain state, and what can still bring it about.

Where a model has few states, all of them are stepped through once.  An operation that needs one state, which no open
operation is left to bring about and none that is invoked before it returns, can never take effect: a search that used
up the last way there may turn back at once, instead of when that operation returns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from checker.history import NEVER
from checker.linearizability.problem import Problem, Transitions

__all__ = ["Foresight"]

#: States, and steps of all kinds of operation through all of them, beyond which there is no foresight.
MAX_STATES = 24
MAX_STEPS = 4_000

#: A state, who needs it, who open can bring it about, and which crashed operations can: (shift, field) of each.
Need = tuple[int, int, int, list[tuple[int, int]]]


class Foresight:
    """For one problem; :meth:`of` answers ``None`` where states are too many or crashed operations ambiguous."""

    def __init__(self, problem: Problem, needs: dict[int, int], makes: dict[int, list[int]]) -> None:
        self._problem = problem
        self._needs = needs
        self._makes = makes
        self._needs_at: list[list[Need] | None] = [None] * len(problem.return_bit)
        self._makers: dict[int, list[int]] = {}
        self._users: dict[int, tuple[list[int], list[int]]] = {}
        #: A bit that no operation has: stands for those that will need a state but are not open yet.
        self._later = 1 << max(bit.bit_length() for bit in problem.return_bit)
        self._turns: dict[int, list[int]] = {}
        for at, bit in enumerate(problem.return_bit):
            self._turns.setdefault(bit, []).append(at)
        invoked = problem.invoked
        makes_of = [makes.get(id(row), ()) for row in problem.kinds]
        needs_of = [needs.get(id(row)) for row in problem.kinds]
        returned = problem.returned
        for row, number in problem.live:
            for state in makes_of[number]:
                self._makers.setdefault(state, []).append(invoked[row])
            needed = needs_of[number]
            if needed is not None and returned[row] != NEVER:
                users = self._users.setdefault(needed, ([], []))
                users[0].append(invoked[row])
                users[1].append(returned[row])
        for _, ends in self._users.values():
            ends[:] = list(accumulate(reversed(ends), min))[::-1]

    @classmethod
    def of(cls, problem: Problem) -> Foresight | None:
        """Steps every kind through every state that can be reached; marks kinds that some state makes illegal."""
        if problem.ambiguous:
            return None
        states = problem.space.states
        kinds = problem.kinds
        done = 0
        while done < len(states):
            if len(states) > MAX_STATES or (done + 1) * len(kinds) > MAX_STEPS:
                return None
            for row in kinds:
                row[done]
            done += 1
        needs: dict[int, int] = {}
        makes: dict[int, list[int]] = {}
        for row in kinds:
            legal = [state for state in range(done) if row[state] >= 0]
            row.conditional = len(legal) < done
            if len(legal) == 1:
                needs[id(row)] = legal[0]
            makes[id(row)] = sorted({row[state] for state in legal if row[state] != state})
        return cls(problem, needs, makes)

    def needs_at(self, at: int) -> list[Need]:
        """States that some operation, open or later, needs before anything that is not open yet brings them about."""
        known = self._needs_at[at]
        if known is None:
            known = self._needs_at[at] = self._look_at(at)
        return known

    def _look_at(self, at: int) -> list[Need]:
        problem = self._problem
        needing: dict[int, list[tuple[int, int]]] = {}
        making: dict[int, int] = {}
        for bit, row in problem.open_pure[at]:
            if id(row) in self._needs:
                turns = self._turns[bit]
                returns = turns[bisect_left(turns, at)]
                self._note_need(needing, row, bit, problem.returned[problem.return_row[returns]])
        for position, bit, _, row in problem.open_mutators[at]:
            self._note_need(needing, row, bit, position)
            for state in self._makes.get(id(row), ()):
                making[state] = making.get(state, 0) | bit
        now = problem.returned[problem.return_row[at]]
        out: list[Need] = []
        for state, (starts, ends) in self._users.items():
            makers = self._makers.get(state, [])
            following = bisect_right(makers, now)
            until = makers[following] if following < len(makers) else NEVER
            mask = 0
            for bit, position in needing.get(state, ()):
                if position < until:
                    mask |= bit
            later = bisect_right(starts, now)
            if later < len(starts) and ends[later] < until:
                mask |= self._later
            if mask:
                crashed = [
                    (shift, field)
                    for shift, field, _, row in problem.crashed
                    if state in self._makes.get(id(row), ())
                ]
                out.append((state, mask, making.get(state, 0), crashed))
        return out

    def _note_need(self, needing: dict[int, list[tuple[int, int]]], row: Transitions, bit: int, position: int) -> None:
        state = self._needs.get(id(row))
        if state is not None:
            needing.setdefault(state, []).append((bit, position))
