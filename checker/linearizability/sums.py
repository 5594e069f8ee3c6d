"""Fetch-and-add, whose every result is the sum so far: with positive amounts the sums order the operations.

An addition that returned s comes after all operations that saw less, and after reads of s; none sees a sum between s
and the sum that it makes.  So two operations contradict each other by their results alone, or by their results and
times, whatever additions of unknown outcome did.  Otherwise the history is linearizable iff each sum leads to the next,
by additions of unknown outcome if necessary.  O(n log n) time, O(n) memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from checker.history import FAIL, INFO, NEVER, History
from checker.linearizability.outcome import NotApplicable, Violation
from checker.linearizability.ranks import rank_conflict
from checker.models.counters import FetchAndAdd
from checker.verdict import Edge
from checker.words import named_row

__all__ = ["check_fetch_and_add"]


class _Crashed(NamedTuple):
    """An addition of unknown outcome."""

    invoked: int
    amount: int
    row: int


class _Seen(NamedTuple):
    """An operation that completed: the sum before it, and the sum after it (the same for a read)."""

    before: int
    after: int
    row: int


def check_fetch_and_add(history: History, rows: Sequence[int], model: FetchAndAdd) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`FetchAndAdd`.

    Raises :class:`NotApplicable` for amounts that are not positive whole numbers, for an initial sum that is not a
    whole number, and if additions of unknown outcome, with different amounts, would have to fill a gap.
    """
    if not isinstance(model.initial, int):
        raise NotApplicable("the initial sum is not a whole number")
    seen: list[_Seen] = []
    wrong: list[int] = []
    crashed: list[_Crashed] = []
    for row in rows:
        f, value, status = history.f[row], history.value[row], history.status[row]
        if status == FAIL or (f == "read" and status == INFO):
            continue
        amount = 0 if f == "read" else 1 if value is None else value
        if f != "read" and (amount.__class__ is not int or amount <= 0):  # adding to a large float may not change it
            raise NotApplicable("an amount is not a positive whole number")
        if status == INFO:
            crashed.append(_Crashed(history.invoked[row], amount, row))
        elif (before := _whole(history.result[row])) is None or before < model.initial:
            wrong.append(row)
        else:
            seen.append(_Seen(before, before + amount, row))
    if wrong:
        first = min(wrong, key=history.returned.__getitem__)
        text = f"{named_row(history, first, model)} returned a sum that additions to {model.initial} cannot produce."
        return Violation(rows=(first,), text=text)
    seen.sort()
    return _beside(history, seen, model) or _out_of_order(history, seen, model) or _gap(history, seen, crashed, model)


def _whole(result: Any) -> int | None:
    """A sum as an int, or ``None`` if it is not a whole number.  2.0 is 2, as it is for the model."""
    try:
        whole = int(result)
    except (TypeError, ValueError, OverflowError):
        return None
    return whole if whole == result else None


def _beside(history: History, seen: Sequence[_Seen], model: FetchAndAdd) -> Violation | None:
    """A violation by two additions that saw the same sum, or an operation that saw a sum within an addition."""
    for last, each in pairwise(seen):  # a read of the sum that an addition saw comes before the addition
        if each.before < last.after:
            both = f"{named_row(history, last.row, model)} and {named_row(history, each.row, model)}"
            if each.after == each.before:
                text = f"{both}: the addition leads from {last.before} directly to {last.after}."
            elif each.before == last.before:
                text = f"{both} returned the same sum, although each of them adds to it."
            else:
                text = f"{both}: the former leads from {last.before} directly to {last.after}."
            return Violation(rows=tuple(sorted((last.row, each.row))), text=text)
    return None


def _out_of_order(history: History, seen: Sequence[_Seen], model: FetchAndAdd) -> Violation | None:
    """A violation by an operation that returned before one that saw less was invoked."""
    first_return: dict[int, int] = {}
    last_invoke: dict[int, int] = {}
    for before, after, row in seen:
        rank = 2 * before + (after > before)
        first_return[rank] = min(first_return.get(rank, NEVER), history.returned[row])
        last_invoke[rank] = max(last_invoke.get(rank, -1), history.invoked[row])
    conflict = rank_conflict(first_return, last_invoke)
    if conflict is None:
        return None
    low, high = conflict
    early = next(each.row for each in seen if history.returned[each.row] == first_return[high])
    late = next(each.row for each in seen if history.invoked[each.row] == last_invoke[low])
    reason = f"{named_row(history, early, model)} returned before {named_row(history, late, model)} was invoked"
    order = "has a smaller sum" if low // 2 < high // 2 else "has the sum that the former added to"
    edges = (
        Edge(source=0, target=1, kind="realtime", reason=reason),
        Edge(source=1, target=0, kind="value", reason=f"the latter {order}"),
    )
    return Violation(rows=(early, late), text=f"{reason}, but the latter {order}.", edges=edges)


def _gap(history: History, seen: Sequence[_Seen], crashed: Sequence[_Crashed], model: FetchAndAdd) -> Violation | None:
    """A violation by an operation that saw a sum that cannot be reached, even by additions of unknown outcome.

    Each of these must have begun before any operation that saw more returned; with one amount they fill the gaps iff
    there are enough for all gaps up to each one.  Raises :class:`NotApplicable` for several amounts.
    """
    began = sorted(crashed)
    added = list(accumulate((each.amount for each in began), initial=0))
    amounts = {each.amount for each in began}
    deadlines = list(accumulate((history.returned[each.row] for each in reversed(seen)), min))[::-1]
    start = _Seen(model.initial, model.initial, -1)
    wanted = 0
    for (last, each), deadline in zip(pairwise((start, *seen)), deadlines, strict=True):
        gap = each.before - last.after
        if not gap:
            continue
        wanted += gap
        in_time = bisect_left(began, (deadline,))
        if wanted <= added[in_time]:
            if len(amounts) > 1:
                raise NotApplicable("additions of unknown outcome, with different amounts, would have to fill a gap")
            if gap % min(amounts) == 0:
                continue
        makes = f"all additions that saw a smaller sum lead to {last.after}"
        if last.row >= 0:
            makes += f" ({named_row(history, last.row, model)} is the last)"
        involved = {last.row, each.row} - {-1}
        if began:
            soonest = next(one.row for one in seen if history.returned[one.row] == deadline)
            involved |= {soonest, *(one.row for one in began)}
            by = "it" if soonest == each.row else named_row(history, soonest, model)
            makes += f", and those of unknown outcome invoked before {by} returned, {added[in_time]} in total, do not"
            makes += f" add up to what is missing by then, {wanted} in total"
        return Violation(rows=tuple(sorted(involved)), text=f"{named_row(history, each.row, model)}, but {makes}.")
    return None
