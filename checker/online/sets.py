"""Grow-only sets, read whole, as operations return: reads must form a chain (see ``linearizability.grow_only``)."""

from __future__ import annotations

from typing import Any

from checker.history import FAIL, OK
from checker.online.pairs import NOT_YET, WINDOW, Call, Judge, Online
from checker.words import short

__all__ = ["OnlineGrowOnlySet"]


class _Element:
    """An element that some later reads may lack: when its addition began, and since when it is certainly there."""

    __slots__ = ("added", "sure")

    def __init__(self, added: int) -> None:
        self.added = added
        self.sure = NOT_YET


class _SetJudge(Judge):
    """One set: elements that every later read must show (``settled``), and those not yet decided (``recent``)."""

    def __init__(self) -> None:
        super().__init__()
        self._settled: set[Any] = set()
        self._recent: dict[Any, _Element] = {}
        #: Acknowledged elements that no read has shown, in order of acknowledgement.
        self._unshown: dict[Any, _Element] = {}
        #: The recent elements that each read showed beyond those of smaller reads.
        self._chain: list[set[Any]] = []

    def held(self) -> int:
        return len(self._recent)

    def begin(self, call: Call) -> None:
        # An element that is certainly there already may be added again: that changes nothing.
        if call.f == "add" and call.value not in self._settled:
            self.is_judging = call.value not in self._recent
            call.token = self._recent[call.value] = _Element(call.start)

    def end(self, call: Call, outcome: str, result: Any, now: int, who: str) -> str | None:
        problem: str | None = None
        if call.f == "add":
            if call.token is not None:
                problem = self._added(call.value, outcome, now)
        elif outcome == OK:
            problem = self._shown(frozenset(result), call.start, now)
        if problem is not None:
            return f"{who} {problem}"
        self._settle(now)
        return None

    def _added(self, element: Any, outcome: str, now: int) -> str | None:
        known = self._recent.get(element)
        is_shown = known is None or any(element in step for step in self._chain)
        if outcome == FAIL:
            if is_shown:
                return f"of {short(element)} failed, but a read had shown it"
            del self._recent[element]
        elif outcome == OK and known is not None:
            known.sure = min(known.sure, now)
            if not is_shown:
                self._unshown[element] = known
        return None

    def _shown(self, elements: frozenset[Any], start: int, now: int) -> str | None:
        recent = self._recent
        if not self._settled <= elements:
            return f"lacks {short(min(self._settled - elements, key=repr))}, which was surely there before it began"
        new = elements - self._settled
        for element in new:
            if element not in recent:
                return f"shows {short(element)}, which nobody had added"
        # Whatever was there when one of these was added, or when the read began, is older than the read.
        latest = max((recent[element].added for element in new), default=start)
        for element, known in recent.items():
            if known.sure < max(start, latest) and element not in new:
                return f"lacks {short(element)}, which was surely there before it or before what it shows"
        problem = self._extend(set(new))
        for element in new:
            recent[element].sure = min(recent[element].sure, now)
            self._unshown.pop(element, None)
        return problem

    def _extend(self, left: set[Any]) -> str | None:
        """Place a read in the chain of earlier reads."""
        for at, step in enumerate(self._chain):
            if step <= left:
                left -= step
                continue
            common = step & left
            if left - common:
                lacking, showing = (short(min(some, key=repr)) for some in (step - common, left - common))
                return f"shows {showing} and lacks {lacking}, and another read the other way round"
            if common:
                self._chain[at : at + 1] = [common, step - common]
            return None
        if left:
            self._chain.append(left)
        return None

    def _settle(self, now: int) -> None:
        """Settle what was there before all open operations, in chain order: a later element implies the earlier."""
        if len(self._unshown) + sum(map(len, self._chain)) > WINDOW:
            self.excuse_oldest()
        oldest = self.oldest(now + 1)
        while self._chain:
            step = self._chain[0]
            self._move([element for element in step if self._recent[element].sure < oldest])
            step -= self._settled
            if step:
                return
            del self._chain[0]
        settled = []
        for element, known in self._unshown.items():
            if known.sure >= oldest:
                break
            settled.append(element)
        self._move(settled)

    def _move(self, elements: list[Any]) -> None:
        for element in elements:
            del self._recent[element]
            self._unshown.pop(element, None)
        self._settled.update(elements)


class OnlineGrowOnlySet(Online):
    """A5 online: a :class:`checker.GrowOnlySet`, read whole, every addition its own element.

    Besides open operations it holds one copy of the set, as every read does: judging a read takes no less.  A key is
    no longer judged once an element is added to it again before all reads must show it.
    """

    def __init__(self) -> None:
        super().__init__(_SetJudge)
