"""What takes of unknown outcome may have taken from a container, if all puts put different values.

Such a take may have taken any value that never came out, from its invocation on, or nothing, or may not have happened.
For bags and FIFO queues counting is enough (:func:`never_empty`: exact and near-linear).  For stacks and priority
queues assignments are tried (:func:`with_crashed_takes`): in every explanation of the history, the first value of each
contradiction was taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from checker.history import INFO, NEVER, History
from checker.linearizability.flows import Flows, found_nothing
from checker.linearizability.outcome import NotApplicable, Violation
from checker.models.collections import FIFOQueue, UnorderedQueue

__all__ = ["never_empty", "with_crashed_takes"]

TESTS_PER_TAKE = 4
SPARE_TESTS = 64
"""Limits on the near-linear tests of a history, per take of unknown outcome and in addition, before the general search
has to decide.  The first guess is usually right; then one test per take suffices, plus a logarithmic number per take to
find out which takes are early enough."""


def never_empty(
    history: History, rows: Sequence[int], flows: Flows, model: FIFOQueue | UnorderedQueue
) -> Violation | None:
    """A take that found nothing, although takes of unknown outcome cannot have emptied the container, or ``None``."""
    starts, ends = _free_spans(flows)
    for row, invoked, returned in flows.empties:
        index = bisect_right(starts, returned - 1) - 1
        if index < 0 or ends[index] <= invoked:
            inside = [v for v, put in flows.into.items() if v not in flows.out and put[2] < returned]
            inside += [v for v, took in flows.out.items() if flows.into[v][2] < returned and took[1] > invoked]
            violation = found_nothing(history, flows, model, row, inside)
            crashed = [r for r in rows if history.status[r] == INFO and history.f[r] in model.takes]
            crashed = [r for r in crashed if history.invoked[r] < returned]
            involved = tuple(sorted({*violation.rows, *crashed}))
            return Violation(rows=involved, text=violation.text, minimal=False, named=violation.rows)
    return None


def _free_spans(flows: Flows) -> tuple[list[int], list[int]]:
    """Starts and ends of the time spans, in order, in which the container can have been empty.

    These are the instants at which no value that is known to have come out is certainly inside, and at most as many
    values that never came out had been put as takes of unknown outcome had begun.  By Hall's theorem those takes can
    then be assigned so that every such instant is free.  Overtaken values in a FIFO queue are then gone in time, too,
    if that is possible at all: a value that overtook one put after such an instant also overtook all those put before.
    """
    changes: list[tuple[int, int, int]] = [(invoked, 0, -1) for invoked in flows.crashed_takes]
    for value, (_, _, returned) in flows.into.items():
        taken = flows.out.get(value)
        if taken is None:
            if returned != NEVER:
                changes.append((returned, 0, 1))
        elif returned < taken[1]:
            changes += [(returned, 1, 0), (taken[1], -1, 0)]
    changes.sort()
    starts: list[int] = [-1]
    ends: list[int] = []
    inside = owed = 0
    free = True
    for position, more_inside, more_owed in changes:
        inside += more_inside
        owed += more_owed
        now = inside == 0 and owed <= 0
        if now != free:
            (starts if now else ends).append(position)
            free = now
    if free:
        ends.append(NEVER)
    return starts, ends


Test = Callable[[Flows], Violation | None]


def with_crashed_takes(history: History, flows: Flows, test: Test) -> Violation | None:
    """The result of ``test`` for flows with takes of unknown outcome.

    Such takes may not have happened: if there is no violation without them, there is none.  If there is one even when
    every value that never came out may leave as soon as the first of them began, the history is invalid.  Otherwise
    values are assigned to takes until no contradiction is left.  Raises :class:`NotApplicable` after too many tests.
    """
    violation = test(flows)
    if violation is None or not flows.crashed_takes:
        return violation
    flows.surely_until = min(flows.crashed_takes)
    relaxed = test(flows)
    flows.surely_until = NEVER
    if relaxed is not None:
        return relaxed
    deal = _Deal(history, flows, test)
    return None if deal.is_guessed() else deal.settle(violation)


class _Deal:
    """Assigns values that never came out to takes of unknown outcome until a history is explained or cannot be.

    The rows of a violation contradict each other whatever happened to all other values.  Of its values that never came
    out, the one put first stays inside from then on, so that it contradicts the rest on its own even if all the others
    were taken: in every explanation it was taken.  The take is guessed first: the value that is due first gets the take
    that began first.  If that does not explain the history, all assignments are tried: each value gets the last take
    early enough for it and the values known to have come out, then earlier takes, which others may need more.
    """

    def __init__(self, history: History, flows: Flows, test: Test) -> None:
        self._flows = flows
        self._test = test
        self._known = dict(flows.out)
        self._takes = sorted(flows.crashed_takes)
        self._rows = {
            invoked: row
            for row, (invoked, status) in enumerate(zip(history.invoked, history.status, strict=True))
            if status == INFO
        }
        self._involved: set[int] = {self._rows[invoked] for invoked in self._takes}
        self._in_time: dict[Any, int] = {}
        each = TESTS_PER_TAKE + len(self._takes).bit_length()
        self._tests_left = each * len(self._takes) + SPARE_TESTS

    def is_guessed(self) -> bool:
        """Whether the history is explained if the takes, in order of invocation, took values in order of deadline.

        The flows are left unchanged."""
        flows, takes = self._flows, self._takes
        taken: list[Any] = []
        while len(taken) < len(takes):
            violation = self._tested(flows)
            value = None if violation is None else self._first_to_go(violation)
            self._take_back()
            if value is None:
                return violation is None
            taken.append(value)
            taken.sort(key=self._early_enough)
            for each, invoked in zip(taken, takes, strict=False):
                self._give(each, invoked)
        is_explained = self._tested(flows) is None
        self._take_back()
        return is_explained

    def _give(self, value: Any, invoked: int) -> None:
        self._flows.crashed_takes.remove(invoked)
        self._flows.out[value] = (self._rows[invoked], invoked, NEVER)

    def _take_back(self) -> None:
        """Leave all takes of unknown outcome without a value."""
        self._flows.out = dict(self._known)
        self._flows.crashed_takes = list(self._takes)

    def settle(self, violation: Violation) -> Violation | None:
        """A violation if no assignment explains the history, ``None`` if one does."""
        flows = self._flows
        given: list[Any] = []
        waiting = [self._ways(violation)]
        while waiting:
            if len(given) == len(waiting):
                flows.crashed_takes.append(flows.out.pop(given.pop())[1])
            way = next(waiting[-1], None)
            if way is None:
                waiting.pop()
                continue
            value, invoked = way
            self._give(value, invoked)
            given.append(value)
            contradiction = self._tested(flows)
            if contradiction is None:
                return None
            waiting.append(self._ways(contradiction))
        self._involved.update(violation.rows)
        involved = tuple(sorted(self._involved))
        return Violation(rows=involved, text=violation.text, minimal=False, named=violation.rows)

    def _tested(self, flows: Flows) -> Violation | None:
        if self._tests_left <= 0:
            raise NotApplicable("the verdict depends on what takes of unknown outcome have taken")
        self._tests_left -= 1
        violation = self._test(flows)
        if violation is not None:
            self._involved.update(violation.rows)
        return violation

    def _ways(self, violation: Violation) -> Iterator[tuple[Any, int]]:
        """The value of a violation that must have been taken, with each unused take that is early enough for it."""
        value = self._first_to_go(violation)
        if value is None:
            return
        for invoked in reversed(self._takes[: self._early_enough(value)]):
            if invoked in self._flows.crashed_takes:
                yield value, invoked

    def _first_to_go(self, violation: Violation) -> Any | None:
        """The value in a violation that was put first among those that never came out; None if there is none."""
        rows, out = set(violation.rows), self._flows.out
        never_out = (
            (returned, value)
            for value, (row, _, returned) in self._flows.into.items()
            if row in rows and returned != NEVER and value not in out
        )
        first = min(never_out, key=lambda pair: pair[0], default=None)
        return None if first is None else first[1]

    def _early_enough(self, value: Any) -> int:
        """How many of all takes, sorted by invocation, may have taken a value, ignoring other values that never came
        out: the later a take begins, the more it contradicts."""
        if value not in self._in_time:
            low, high = 0, len(self._takes)
            while low < high:
                middle = (low + high) // 2
                if self._tested(self._alone(value, self._takes[middle])) is None:
                    low = middle + 1
                else:
                    high = middle
            self._in_time[value] = low
        return self._in_time[value]

    def _alone(self, value: Any, invoked: int) -> Flows:
        """The flows of the values known to have come out, and of one value that a take of unknown outcome took."""
        alone = Flows()
        into = self._flows.into
        alone.into = {each: into[each] for each in into if each in self._known or each == value}
        alone.out = {**self._known, value: (self._rows[invoked], invoked, NEVER)}
        alone.empties = self._flows.empties
        return alone
