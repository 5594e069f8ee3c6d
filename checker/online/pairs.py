"""Shared by online checkers: pairing of events, one judge per key, and its open operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from checker.history import FAIL, INFO, NEMESIS_NAMES, OK
from checker.values import exact

__all__ = ["NOT_YET", "WINDOW", "Call", "Judge", "Online"]

#: Completed operations remembered per key, in addition to open ones: far more than can be in flight at once.
WINDOW = 4096
#: Position of an event that has not happened: after every other.
NOT_YET = 1 << 62


@dataclass(slots=True, eq=False)
class Call:
    """An open operation: its name, value and position, and what its judge remembers of that moment."""

    f: str
    value: Any
    start: int
    token: Any = None
    excused: bool = False
    """Its completion will count as an unknown outcome, which weakens a history and never makes a valid one invalid."""


class Judge:
    """The online checker of one key.  A subclass handles invocations and completions.

    ``open`` holds the calls that have not completed, oldest first.  ``is_judging`` becomes false, permanently, when the
    method no longer applies (a value written twice, say).
    """

    def __init__(self) -> None:
        self.open: dict[int, Call] = {}
        self.is_judging = True

    def begin(self, call: Call) -> None:
        """Take an invocation."""
        raise TypeError(f"{type(self).__name__} does not say what an invocation means")

    def end(self, call: Call, outcome: str, result: Any, now: int, who: str) -> str | None:
        """Take a completion at position ``now``; returns a sentence beginning with ``who`` if that is a violation."""
        raise TypeError(f"{type(self).__name__} does not say what a completion means")

    def held(self) -> int:
        """Number of records held in addition to open calls."""
        raise TypeError(f"{type(self).__name__} does not count what it holds")

    def oldest(self, now: int) -> int:
        """The position at which the oldest open call began; ``now`` when none is open."""
        return next(iter(self.open), now)

    def excuse_oldest(self) -> None:
        """Stop judging the oldest open call, so that operations that returned concurrently may be forgotten."""
        start = next(iter(self.open), None)
        if start is not None:
            self.open.pop(start).excused = True


class Online:
    """Pairs events and passes them to the judge of their key."""

    def __init__(self, new_judge: Callable[[], Judge]) -> None:
        self._new_judge = new_judge
        self._judges: dict[Any, Judge] = {}
        self._open: dict[Any, tuple[Any, Judge, Call]] = {}
        self._position = 0

    def feed(self, event: Mapping[str, Any]) -> str | None:
        """Take the next event; returns a sentence if it completes a violation."""
        process = event.get("process")
        if process is None or process in NEMESIS_NAMES:
            return None
        self._position += 1
        if event["type"] == "invoke":
            self._begin(process, event)
            return None
        started = self._open.pop(process, None)
        if started is None:
            return None
        key, judge, call = started
        judge.open.pop(call.start, None)
        if not judge.is_judging:
            return None
        outcome = INFO if call.excused else event["type"]
        who = f"{'' if key is None else f'key {key!r}: '}process {process}'s {call.f}"
        result = exact(event.get("value")) if outcome == OK else None
        try:
            return judge.end(call, outcome if outcome in (OK, FAIL) else INFO, result, self._position, who)
        except (TypeError, ValueError, LookupError):
            # A result of an unexpected form, which the full check reports: this key cannot be judged any further.
            judge.is_judging = False
            return None

    def held(self) -> int:
        """Number of records held: open calls, keys, and what their judges remember of completed calls."""
        judges = self._judges.values()
        return len(self._open) + len(judges) + sum(judge.held() for judge in judges if judge.is_judging)

    def _begin(self, process: Any, event: Mapping[str, Any]) -> None:
        key = exact(event.get("key"))
        judge = self._judges.get(key)
        if judge is None:
            judge = self._judges[key] = self._new_judge()
        call = Call(str(event.get("f")), exact(event.get("value")), self._position)
        self._open[process] = key, judge, call
        if judge.is_judging:
            judge.open[call.start] = call
            judge.begin(call)
