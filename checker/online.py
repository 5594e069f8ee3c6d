"""Checkers that are fed while the test runs and stop it at the first violation.

Each takes the events of one history in order and answers ``None`` or a sentence.  Memory is bounded by the number of
open operations (those of unknown outcome stay open) and keys; for logs also by a window of offsets.  They never cry
wolf; what a bounded memory cannot see, the full check at the end does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from checker.history import freeze
from checker.words import short

__all__ = ["OnlineLog", "OnlineRegister"]

Event = Mapping[str, Any]

#: Offsets and values per queue that are remembered: far more than can be in flight at once.
WINDOW = 4096
#: Values looked at, at most, each time something may be forgotten; they pass one by one, so few are ever waiting.
FORGET_AT_ONCE = 8
#: Positions outside of any history.
BEFORE_ALL, NOT_YET = -1, 1 << 62


class _Pairs:
    """Pairs events; keeps only what is open."""

    def __init__(self) -> None:
        self._open: dict[Any, tuple[Mapping[str, Any], int, Any]] = {}
        self.position = 0

    def feed(self, event: Mapping[str, Any]) -> str | None:
        """Take the next event; a sentence when it completes a violation."""
        process = event.get("process")
        if process.__class__ is not int:
            return None
        self.position += 1
        if event["type"] == "invoke":
            key = freeze(event.get("key"))
            self._open[process] = (event, self.position, self.invoked(key, event))
            return None
        started = self._open.pop(process, None)
        if started is None:
            return None
        invoke, position, token = started
        return self.completed(freeze(invoke.get("key")), invoke, event, position, token)

    def invoked(self, key: Any, event: Mapping[str, Any]) -> Any:
        """What to remember of an invocation until it completes."""
        raise TypeError("an online checker says what to remember of an invocation")

    def completed(self, key: Any, invoke: Event, event: Event, start: int, token: Any) -> str | None:
        """Judge a completed operation that was invoked at ``start``."""
        raise TypeError("an online checker says how to judge a completion")


class _Zone:
    """One register value: its first return and last invocation among its write and reads so far."""

    __slots__ = ("failed", "first_return", "last_invoke", "value", "written")

    def __init__(self, value: Any, written: int) -> None:
        self.value = value
        self.written = written
        self.first_return = NOT_YET
        self.last_invoke = -1
        self.failed = False


class _Values:
    """The zones of one key; those with a return also in order of it."""

    __slots__ = ("by_return", "judged", "zones")

    def __init__(self, initial: Any) -> None:
        first = _Zone(initial, BEFORE_ALL)
        first.first_return = BEFORE_ALL
        self.zones: dict[Any, _Zone] = {initial: first}
        self.by_return: list[_Zone] = [first]
        self.judged = True


class OnlineRegister(_Pairs):
    """Register zones as operations return, for writes of different values.

    Two values contradict each other when each has a return before the other's last invocation (see
    ``linearizability.register``).  Few values are ever kept, so each new return is compared with all of them: a value
    is forgotten when another certainly followed it before the oldest open operation began, for whoever still returns
    it is wrong.  A key on which a value is written twice is no longer judged.
    """

    def __init__(self, *, initial: Any = None) -> None:
        super().__init__()
        self._initial = freeze(initial)
        self._keys: dict[Any, _Values] = {}

    def invoked(self, key: Any, event: Mapping[str, Any]) -> Any:
        values = self._keys.get(key)
        if values is None:
            values = self._keys[key] = _Values(self._initial)
        if event.get("f") == "write":
            value = freeze(event.get("value"))
            if value in values.zones:
                values.judged = False
            values.zones[value] = _Zone(value, self.position)
        return None

    def completed(self, key: Any, invoke: Event, event: Event, start: int, token: Any) -> str | None:
        values = self._keys[key]
        f, outcome = invoke.get("f"), event["type"]
        value = freeze(invoke.get("value") if f == "write" else event.get("value"))
        zone = values.zones.get(value)
        if not values.judged:
            return None
        who = f"{'' if key is None else f'key {key!r}: '}process {event['process']}'s {f} of {short(value)}"
        if outcome != "ok":
            if f == "write" and outcome == "fail" and zone is not None:
                zone.failed = True
                if zone.first_return != NOT_YET:
                    return f"{who} failed, but the value had been read"
            return None
        if zone is None:
            return f"{who} returned a value that nobody had written, or that had been overwritten for certain"
        if zone.failed:
            return f"{who} returned a value whose write had failed"
        if zone.first_return == NOT_YET:
            zone.first_return = self.position
            values.by_return.append(zone)
        zone.last_invoke = max(zone.last_invoke, start, zone.written)
        problem = self._conflict(values, zone, who)
        if problem is None:
            self._forget(values)
        return problem

    @staticmethod
    def _conflict(values: _Values, zone: _Zone, who: str) -> str | None:
        first, last = zone.first_return, zone.last_invoke
        for other in values.by_return:
            if other.first_return >= last:
                break
            if first < other.last_invoke and other is not zone:
                return f"{who}: it and {short(other.value)} must each have come before the other"
        return None

    def _forget(self, values: _Values) -> None:
        """Drop values at the old end that were certainly followed before anything still open began."""
        oldest = next((position for _, position, _ in self._open.values()), self.position)
        by_return = values.by_return
        dropped = 0
        for at in range(min(len(by_return) - 1, FORGET_AT_ONCE)):
            old = by_return[at]
            if not any(
                later.last_invoke > old.first_return and later.first_return < oldest
                for later in by_return[at + 1 : at + 1 + FORGET_AT_ONCE]
            ):
                break
            del values.zones[old.value]
            dropped += 1
        if dropped:
            del by_return[:dropped]


class OnlineLog(_Pairs):
    """Log ranks and contents, as operations return: stale tails, reordered appends, two values at one offset,
    one value at two, values that nobody appended."""

    def __init__(self) -> None:
        super().__init__()
        self._reached: dict[Any, int] = {}
        self._content: dict[Any, OrderedDict[int, Any]] = {}
        self._place: dict[Any, OrderedDict[Any, int]] = {}
        self._pending: dict[Any, OrderedDict[Any, bool]] = {}
        self._forgotten: set[Any] = set()

    def invoked(self, key: Any, event: Mapping[str, Any]) -> Any:
        if event.get("f") == "append":
            pending = self._pending.setdefault(key, OrderedDict())
            pending[freeze(event.get("value"))] = True
            if len(pending) > WINDOW:
                pending.popitem(last=False)
                self._forgotten.add(key)
        return self._reached.get(key, 0)

    def completed(self, key: Any, invoke: Event, event: Event, start: int, token: Any) -> str | None:
        f, outcome = invoke.get("f"), event["type"]
        if outcome != "ok":
            if f == "append" and outcome == "fail":
                self._pending.setdefault(key, OrderedDict())[freeze(invoke.get("value"))] = False
            return None
        result: Any = event.get("value")
        who = ("" if key is None else f"key {key!r}: ") + f"process {event['process']}'s {f}"
        if f == "append":
            offset, tail = result[0], result[0] + 1
            if offset < token:
                return f"{who} of {short(invoke.get('value'))} got offset {offset}, below the tail {token} seen before"
            problem = self._holds(key, offset, freeze(invoke.get("value")), who)
        else:
            tail = result if f == "tail" else result.get("tail")
            if tail is not None and tail < token:
                return f"{who} saw a tail of {tail}, below the {token} messages that were there before it began"
            problem = None
            if f == "read":
                for offset, value in enumerate(result["messages"], result["offset"]):
                    problem = problem or self._holds(key, offset, freeze(value), who)
        if tail is not None and tail > self._reached.get(key, 0):
            self._reached[key] = tail
        return problem

    def _holds(self, key: Any, offset: int, value: Any, who: str) -> str | None:
        content = self._content.setdefault(key, OrderedDict())
        known = content.get(offset, content)
        if known is not content:
            return None if known == value else f"{who}: offset {offset} holds {short(value)}, but held {short(known)}"
        allowed = self._pending.get(key, {}).get(value)
        if allowed is None and key not in self._forgotten:
            return f"{who} shows {short(value)} at offset {offset}, which nobody had appended"
        if allowed is False:
            return f"{who} shows {short(value)} at offset {offset}, whose append had failed"
        place = self._place.setdefault(key, OrderedDict())
        if place.setdefault(value, offset) != offset:
            return f"{who}: {short(value)} is at offset {offset} and at offset {place[value]}"
        content[offset] = value
        if len(content) > WINDOW:
            content.popitem(last=False)
            place.popitem(last=False)
        return None
