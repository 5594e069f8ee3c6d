"""Logs and versioned registers, judged as operations return: ranks from offsets (see ``linearizability.log``).

An operation that begins after the log was seen to hold n messages sees those n, or is placed after them.  An offset
below the tail that no operation has shown or got must belong to an append that is open or of unknown outcome, and that
was invoked before the offset was first passed: there must be one for each (Hall's theorem, on nested candidate sets).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from checker.history import FAIL, OK
from checker.online.pairs import WINDOW, Call, Judge, Online
from checker.values import exact
from checker.words import short

__all__ = ["OnlineLog", "OnlineVersionedRegister"]


class _Append:
    """An append without a known offset, or one whose offset a read showed before it returned."""

    __slots__ = ("least", "offset", "start")

    def __init__(self, start: int, least: int) -> None:
        self.start = start
        self.least = least
        self.offset: int | None = None


class _Places:
    """The messages of one log by offset, as far as they were seen, and the appends that may fill its holes."""

    def __init__(self) -> None:
        #: How many messages the log is known to have held.
        self.reached = 0
        self._content: OrderedDict[int, Any] = OrderedDict()
        self._place: dict[Any, int] = {}
        self._appends: dict[Any, _Append] = {}
        #: Invocations of appends without an offset; offsets below ``reached`` without a message, and since when.
        self._spare: list[int] = []
        self._holes: list[int] = []
        self._since: list[int] = []

    def held(self) -> int:
        return len(self._content) + len(self._appends) + len(self._holes)

    def begin(self, value: Any, start: int) -> bool:
        """An append is invoked; ``False`` if its value is already known."""
        if value in self._appends or value in self._place:
            return False
        self._appends[value] = _Append(start, self.reached)
        self._spare.append(start)
        return True

    def fail(self, value: Any) -> str | None:
        """An append did not happen."""
        append = self._appends.pop(value)
        if append.offset is not None:
            return f"failed, but the value had been seen at offset {append.offset}"
        del self._spare[bisect_left(self._spare, append.start)]
        return self._too_few(append.start)

    def give_up(self, value: Any) -> None:
        """The outcome of an append stays unknown."""
        if self._appends[value].offset is not None:
            del self._appends[value]

    def acknowledge(self, value: Any, offset: int, now: int) -> str | None:
        """An append got its offset."""
        append = self._appends[value]
        if append.offset is not None:
            del self._appends[value]
            return None if append.offset == offset else f"got offset {offset}, but had been seen at {append.offset}"
        problem = self.reach(offset + 1, now) or self._put(value, offset) or self._too_few(append.start)
        self._appends.pop(value, None)
        return problem

    def reach(self, tail: int, now: int) -> str | None:
        """The log held ``tail`` messages; those not seen yet must belong to appends without an offset."""
        missing = tail - self.reached
        if missing <= 0:
            return None
        if len(self._holes) + missing > len(self._spare):
            return f"implies {tail} messages, more than there can be"
        self._holes.extend(range(self.reached, tail))
        self._since.extend([now] * missing)
        self.reached = tail
        return None

    def show(self, start: int, messages: tuple[Any, ...], tail: int, now: int) -> str | None:
        """A read returned, which showed ``messages`` from offset ``start`` on."""
        if messages and (start < 0 or start + len(messages) > tail):
            return f"showed messages beyond the tail {tail}"
        problem = self.reach(tail, now)
        first = now
        for offset, value in enumerate(messages, start):
            if problem:
                return problem
            known = self._content.get(offset, self)
            if known is not self:
                if known != value:
                    return f"showed {short(value)} at offset {offset}, which held {short(known)}"
                continue
            if self._is_hole(offset):
                append = self._appends.get(value)
                if append is None:
                    return f"showed {short(value)} at offset {offset}, where no append can have put it"
                first = min(first, append.start)
                problem = self._put(value, offset)
            # An offset that is neither known nor a hole was forgotten.
        return problem or self._too_few(first - 1)

    def forget_below(self, offset: int) -> None:
        """Forget messages below ``offset``, which no open operation may show."""
        content = self._content
        while content:
            lowest = next(iter(content))
            if lowest >= offset:
                break
            self._drop(lowest)

    def _is_hole(self, offset: int) -> bool:
        at = bisect_left(self._holes, offset)
        return at < len(self._holes) and self._holes[at] == offset

    def _put(self, value: Any, offset: int) -> str | None:
        """Assign an offset to an append that has none."""
        append = self._appends[value]
        if append.offset is not None:
            return f"puts {short(value)} at offset {offset}, but it had been seen at {append.offset}"
        if offset < append.least:
            return f"puts {short(value)} at offset {offset}, below the {append.least} messages seen before"
        if not self._is_hole(offset):
            holder = self._content.get(offset, self)
            what = "another message" if holder is self else short(holder)
            return f"puts {short(value)} at offset {offset}, which held {what}"
        at = bisect_left(self._holes, offset)
        del self._holes[at], self._since[at]
        del self._spare[bisect_left(self._spare, append.start)]
        append.offset = offset
        self._content[offset] = value
        self._place[value] = offset
        if len(self._content) > WINDOW:
            self._drop(next(iter(self._content)))
        return None

    def _drop(self, offset: int) -> None:
        self._place.pop(self._content.pop(offset), None)

    def _too_few(self, changed: int) -> str | None:
        """The problem if holes outnumber the appends that may fill them; only holes since after ``changed`` can."""
        spare, since = self._spare, self._since
        for at in range(bisect_right(since, changed), len(since)):
            if bisect_left(spare, since[at]) <= at:
                return f"leaves no append that can be at offset {self._holes[at]}"
        return None


class _PlacesJudge(Judge):
    """Shared by logs and versioned registers.  A call's token is the number of messages known when it began."""

    #: The operation that appends.
    appends = "append"

    def __init__(self) -> None:
        super().__init__()
        self._places = _Places()

    def held(self) -> int:
        return self._places.held()

    def begin(self, call: Call) -> None:
        call.token = self._places.reached
        if call.f == self.appends:
            self.is_judging = self._places.begin(call.value, call.start)

    def end(self, call: Call, outcome: str, result: Any, now: int, who: str) -> str | None:
        problem: str | None = None
        if call.f == self.appends:
            who = f"{who} of {short(call.value)}"
            if outcome == FAIL:
                problem = self._places.fail(call.value)
            elif outcome != OK:
                self._places.give_up(call.value)
            else:
                problem = self._acknowledged(call, result, now)
        elif outcome == OK:
            problem = self._view(call, result, now)
        return problem and f"{who} {problem}"

    def _acknowledged(self, call: Call, result: Any, now: int) -> str | None:
        """The problem with the offset that an append got, if any."""
        raise TypeError(f"{type(self).__name__} does not say where an append gets its place")

    def _view(self, call: Call, result: Any, now: int) -> str | None:
        """The problem with a read, if any."""
        raise TypeError(f"{type(self).__name__} does not say what a read shows")


class _LogJudge(_PlacesJudge):
    """One key's log."""

    def _acknowledged(self, call: Call, result: Any, now: int) -> str | None:
        if result is None or result[0] is None:
            # The offset is not known: it is wherever the message was seen, or will be.
            self._places.give_up(call.value)
            return None
        return self._places.acknowledge(call.value, result[0], now)

    def _view(self, call: Call, result: Any, now: int) -> str | None:
        start, messages, tail = 0, (), result
        if call.f == "read":
            answer = result if isinstance(result, Mapping) else dict(result)
            start, messages, tail = answer["offset"], answer["messages"], answer.get("tail")
        if tail is None:
            tail = max(start + len(messages), call.token) if messages else call.token
        if tail < call.token:
            return f"saw a tail of {tail}, below the {call.token} messages that were there before it began"
        return self._places.show(start, messages, tail, now)


class OnlineLog(Online):
    """A5 online: a :class:`checker.Log` in which every append has a different value.

    Messages older than a window are not compared again.  A key to which a remembered value is appended again is no
    longer judged.
    """

    def __init__(self) -> None:
        super().__init__(_LogJudge)


class _VersionsJudge(_PlacesJudge):
    """One versioned register: version n is offset n-1 of a log, a read shows its last message and the tail."""

    appends = "write"

    def __init__(self, initial: Any, base: int) -> None:
        super().__init__()
        self._initial, self._base = initial, base

    def end(self, call: Call, outcome: str, result: Any, now: int, who: str) -> str | None:
        problem = super().end(call, outcome, result, now, who)
        oldest = next(iter(self.open.values()), None)
        self._places.forget_below(self._places.reached - 1 if oldest is None else oldest.token - 1)
        return problem

    def _acknowledged(self, call: Call, result: Any, now: int) -> str | None:
        if result is None:
            self._places.give_up(call.value)
            return None
        if result <= self._base:
            return f"got version {result}, though versions begin after {self._base}"
        return self._places.acknowledge(call.value, result - self._base - 1, now)

    def _view(self, call: Call, result: Any, now: int) -> str | None:
        version, value = result
        at = version - self._base
        if at < call.token:
            return f"saw version {version}, below {self._base + call.token}, which was there before it began"
        if at == 0:
            is_first = value == self._initial
            return None if is_first else f"saw {short(value)} of version {version}, which is {short(self._initial)}"
        return self._places.show(at - 1, (value,), at, now)


class OnlineVersionedRegister(Online):
    """A5 online: a :class:`checker.VersionedRegister` in which every write has a different value; fields as there.

    A version is forgotten once a later one is known and no open operation began before that; sentences give versions
    as offsets of the log of writes, from 0.  A key to which a remembered value is written again is no longer judged.
    """

    def __init__(self, *, initial: Any = None, initial_version: int = 0) -> None:
        value = exact(initial)
        super().__init__(lambda: _VersionsJudge(value, initial_version))
