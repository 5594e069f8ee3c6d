"""Counters: bounds on every read, as a fast way to find a violation.  Linear after sorting."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from checker.history import FAIL, INFO, OK, History
from checker.linearizability.outcome import NotApplicable, Violation
from checker.models.counters import Counter
from checker.values import NUMBERS, number
from checker.words import named_row

__all__ = ["amount_of", "check_counter_bounds", "read_bounds"]


def amount_of(history: History, row: int) -> int:
    """What an operation adds.  Raises TypeError for a boolean."""
    value = history.value[row]
    amount = 1 if value is None else number(value)
    return -amount if history.f[row] == "decrement" else amount


class _Sums:
    """Sum of all amounts with a position before a given one."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        pairs.sort()
        self._positions = [position for position, _ in pairs]
        self._sums = [0, *accumulate(amount for _, amount in pairs)]

    def before(self, position: int) -> int:
        return self._sums[bisect_left(self._positions, position)]


def read_bounds(history: History, rows: Sequence[int], initial: int) -> list[tuple[int, int, int]]:
    """For every completed read: its row, and the least and the greatest sum that it can have seen."""
    done_up: list[tuple[int, int]] = []
    may_up: list[tuple[int, int]] = []
    done_down: list[tuple[int, int]] = []
    may_down: list[tuple[int, int]] = []
    for row in rows:
        status = history.status[row]
        if history.f[row] == "read" or status == FAIL:
            continue
        amount = amount_of(history, row)
        certain, possible = (done_up, may_up) if amount >= 0 else (done_down, may_down)
        possible.append((history.invoked[row], amount))
        if status == OK:
            certain.append((history.returned[row], amount))
    sure_up, maybe_up, sure_down, maybe_down = map(_Sums, (done_up, may_up, done_down, may_down))
    out = []
    for row in rows:
        if history.f[row] == "read" and history.status[row] == OK:
            start, end = history.invoked[row], history.returned[row]
            low = initial + sure_up.before(start) + maybe_down.before(end)
            high = initial + maybe_up.before(end) + sure_down.before(start)
            out.append((row, low, high))
    return out


def check_counter_bounds(history: History, rows: Sequence[int], model: Counter) -> Violation | None:
    """A violation: a read outside the bounds that additions allow; ``None`` if the bounds leave each read one answer.

    That is the case if no addition ran concurrently with a read.  Raises :class:`NotApplicable` if one did or crashed
    and every read lies within its bounds, and for floats: bounds alone prove nothing then.
    """
    if any(isinstance(number, float) for number in (model.initial, *(history.value[row] for row in rows))):
        raise NotApplicable("sums of floats depend on the order of what is added")
    is_open = False
    # Of several wrong reads, report the one that returned first: the explanation ends with it.
    for row, low, high in sorted(read_bounds(history, rows, model.initial), key=lambda read: history.returned[read[0]]):
        result = history.result[row]
        if not isinstance(result, NUMBERS) or not low <= result <= high:
            text = f"{named_row(history, row, model)} is outside the range that additions allow: {low} to {high}."
            return Violation(rows=tuple(rows), text=text, minimal=False, named=(row,))
        is_open = is_open or low != high
    if is_open:
        raise NotApplicable("an addition was concurrent with a read, so bounds are not enough")
    if any(history.status[row] == INFO and history.f[row] != "read" for row in rows):
        raise NotApplicable("an addition crashed, so bounds are not enough")
    return None
