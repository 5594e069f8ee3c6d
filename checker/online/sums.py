"""Fetch-and-add as operations return: sums only grow, so they order the operations (see ``linearizability.sums``).

Every total below the greatest one known is the boundary of an addition, inside one, or in a gap that only additions
without an answer can have filled.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any

from checker.history import FAIL, OK
from checker.online.pairs import WINDOW, Call, Judge, Online
from checker.values import NUMBERS

__all__ = ["OnlineFetchAndAdd"]


class _Gap:
    """Totals from ``start`` to ``end`` that no answer explains; they had been passed at position ``since``."""

    __slots__ = ("end", "since", "start")

    def __init__(self, start: Any, end: Any, since: int) -> None:
        self.start, self.end, self.since = start, end, since


class _SumsJudge(Judge):
    """One sum.  A call's token is the sum that was reached for certain when it began."""

    def __init__(self, initial: Any) -> None:
        super().__init__()
        self._reached = initial
        #: Totals known to have been the sum at some time, as far back as open operations may still see them.
        self._totals: list[Any] = [initial]
        self._gaps: list[_Gap] = []
        #: Amounts of additions without an answer, by invocation.
        self._spare: dict[int, Any] = {}

    def held(self) -> int:
        return len(self._totals) + len(self._gaps) + len(self._spare)

    def begin(self, call: Call) -> None:
        call.token = self._reached
        if call.f != "read":
            amount = 1 if call.value is None else call.value
            self._spare[call.start] = amount
            self.is_judging = isinstance(amount, NUMBERS) and amount > 0

    def end(self, call: Call, outcome: str, result: Any, now: int, who: str) -> str | None:
        if outcome != OK:
            if outcome == FAIL and call.f != "read":
                del self._spare[call.start]
                return self._too_little(who)
            return None
        who = f"{who} -> {result}"
        if result < call.token:
            return f"{who} is below {call.token}, which had been reached before it began"
        problem = self._passed(result, now, who)
        if call.f != "read" and problem is None:
            problem = self._added(result, result + self._spare.pop(call.start), who)
        if problem is None:
            self._forget()
        return problem or self._too_little(who)

    def _passed(self, total: Any, now: int, who: str) -> str | None:
        """The sum was ``total`` at some time."""
        if total > self._reached:
            self._gaps.append(_Gap(self._reached, total, now))
            self._reached = total
            self._totals.append(total)
            return None
        at = bisect_left(self._totals, total)
        if at < len(self._totals) and self._totals[at] == total:
            return None
        gap = self._gap_at(total)
        if gap is None:
            return f"{who} is in the middle of an addition that got another sum"
        at = self._gaps.index(gap)
        self._gaps[at : at + 1] = [_Gap(gap.start, total, gap.since), _Gap(total, gap.end, gap.since)]
        insort(self._totals, total)
        return None

    def _added(self, start: Any, end: Any, who: str) -> str | None:
        """An addition brought the sum from ``start``, which is known as a total, to ``end``."""
        if start == self._reached:
            self._reached = end
            self._totals.append(end)
            return None
        gap = self._gap_at(start)
        if gap is None or gap.start != start or gap.end < end:
            return f"{who} overlaps an addition that got another sum"
        if gap.end == end:
            self._gaps.remove(gap)
        else:
            gap.start = end
            insort(self._totals, end)
        return None

    def _gap_at(self, total: Any) -> _Gap | None:
        at = bisect_right(self._gaps, total, key=lambda gap: gap.start) - 1
        gap = self._gaps[at] if at >= 0 else None
        return gap if gap is not None and total < gap.end else None

    def _too_little(self, who: str) -> str | None:
        """The violation if gaps are wider than all that could have filled them; exact if every addition adds one."""
        if not self._gaps:
            return None
        spare = iter(self._spare.items())
        began, amount = next(spare, (None, 0))
        wanted = available = 0
        for gap in self._gaps:
            wanted += gap.end - gap.start
            while began is not None and began < gap.since:
                available += amount
                began, amount = next(spare, (None, 0))
            if wanted > available:
                return f"{who}: no addition can have brought the sum from {gap.start} to {gap.end}"
        return None

    def _forget(self) -> None:
        """Drop totals that no open operation may still see."""
        if len(self._totals) > WINDOW:
            self.excuse_oldest()
        oldest = next(iter(self.open.values()), None)
        del self._totals[: bisect_left(self._totals, self._reached if oldest is None else oldest.token)]


class OnlineFetchAndAdd(Online):
    """A5 online: a :class:`checker.FetchAndAdd` that starts from ``initial``, with positive amounts.

    Exact if all amounts are 1, and whenever no addition is open or of unknown outcome; otherwise gaps are only compared
    with the sum of what may have filled them.  A key is no longer judged once an amount of zero or less is added to it.
    """

    def __init__(self, *, initial: Any = 0) -> None:
        super().__init__(lambda: _SumsJudge(initial))
