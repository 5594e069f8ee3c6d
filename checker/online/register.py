"""Register zones as operations return (see ``linearizability.register``)."""

from __future__ import annotations

from itertools import islice
from typing import Any

from checker.history import FAIL, OK
from checker.online.pairs import NOT_YET, WINDOW, Call, Judge, Online
from checker.values import exact
from checker.words import short

__all__ = ["OnlineRegister"]

#: Position of the initial value: before every event.
BEFORE_ALL = -1


class _Zone:
    """One value: its first return and last invocation among its write and reads so far."""

    __slots__ = ("first_return", "last_invoke", "value", "written")

    def __init__(self, value: Any, written: int) -> None:
        self.value = value
        self.written = written
        self.first_return = NOT_YET
        self.last_invoke = BEFORE_ALL


class _RegisterJudge(Judge):
    """The zones of one key; those with a return also in order of their first return."""

    def __init__(self, initial: Any) -> None:
        super().__init__()
        first = _Zone(initial, BEFORE_ALL)
        first.first_return = BEFORE_ALL
        self._none_counts = initial is None
        self._zones: dict[Any, _Zone] = {initial: first}
        self._by_return: list[_Zone] = [first]

    def held(self) -> int:
        return len(self._zones)

    def begin(self, call: Call) -> None:
        if call.f == "write":
            if call.value in self._zones:
                self.is_judging = False
            self._zones[call.value] = _Zone(call.value, call.start)

    def end(self, call: Call, outcome: str, result: Any, now: int, who: str) -> str | None:
        value = call.value if call.f == "write" else result
        zone = self._zones.get(value)
        who = f"{who} of {short(value)}"
        if outcome != OK:
            if call.f == "write" and outcome == FAIL:
                if zone is None or zone.first_return != NOT_YET:
                    return f"{who} failed, but the value had been read"
                del self._zones[value]
            return None
        if call.f == "read" and result is None and not self._none_counts:
            return None
        if zone is None:
            return f"{who} returned a value that nobody had written, or that had certainly been overwritten"
        if zone.first_return == NOT_YET:
            zone.first_return = now
            self._by_return.append(zone)
        zone.last_invoke = max(zone.last_invoke, call.start, zone.written)
        problem = self._conflict(zone, who)
        if problem is None:
            self._forget(now)
        return problem

    def _conflict(self, zone: _Zone, who: str) -> str | None:
        """Two values contradict each other when each has a return before the other's last invocation."""
        first, last = zone.first_return, zone.last_invoke
        for other in self._by_return:
            if other.first_return >= last:
                break
            if first < other.last_invoke and other is not zone:
                return f"{who}: it and {short(other.value)} must each have come before the other"
        return None

    def _forget(self, now: int) -> None:
        """Drop values at the old end that were certainly followed before anything still open began."""
        by_return = self._by_return
        if len(by_return) > WINDOW:
            self.excuse_oldest()
        oldest = self.oldest(now)
        dropped = 0
        while dropped < len(by_return) - 1 and self._is_followed(dropped, oldest):
            del self._zones[by_return[dropped].value]
            dropped += 1
        if dropped:
            del by_return[:dropped]

    def _is_followed(self, at: int, oldest: int) -> bool:
        """Whether another value came after that one for certain, before position ``oldest``."""
        first = self._by_return[at].first_return
        for later in islice(self._by_return, at + 1, None):
            if later.first_return >= oldest:
                return False
            if later.last_invoke > first:
                return True
        return False


class OnlineRegister(Online):
    """A3 online: a :class:`checker.Register` that starts from ``initial``, every write its own value.

    Few values are ever kept, so each new return is compared with all of them: a value is forgotten once another
    certainly followed it before the oldest open operation began, since a read that still returns it is wrong.  A key
    is no longer judged once a remembered value is written to it again.
    """

    def __init__(self, *, initial: Any = None) -> None:
        value = exact(initial)
        super().__init__(lambda: _RegisterJudge(value))
