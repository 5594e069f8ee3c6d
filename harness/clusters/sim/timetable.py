"""What will happen at which time, in the order in which it was put there.

The times alone are a heap, each once; what is due at a time is in a mapping. Numbers are compared more quickly than
records with a number in front are, which counts: everything that is sent, written or waited for goes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

__all__ = ["Timetable"]

MIN_CANCELLED_TIMERS = 512
"""Fewer cancelled timers than this are not worth a clean-up."""


class Timetable:
    """Timers, and events of the simulation itself."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """A heap."""
        self.due: dict[float, list[Any]] = {}
        """What is due at each of the times, two items a piece: a callback and its arguments, which is an event, or a
        timer and None."""
        self._cancelled_timers = 0

    def event_at(self, when: float, callback: Callable[..., object], *args: object) -> None:
        """Call back at a time, outside every lane. For the simulation itself; cannot be cancelled."""
        due = self.due
        if when in due:
            due[when] += (callback, args)
        else:
            due[when] = [callback, args]
            heappush(self.times, when)

    def timer_cancelled(self) -> None:
        """Called by a timer that was cancelled before it was due; clears away such timers now and then."""
        self._cancelled_timers += 1
        if self._cancelled_timers > MIN_CANCELLED_TIMERS and self._cancelled_timers * 2 > len(self.times):
            for when, items in list(self.due.items()):
                kept = [pair for pair in _pairs(items) if pair[1] is not None or not pair[0]._cancelled]
                if kept:
                    self.due[when] = [each for pair in kept for each in pair]
                else:
                    del self.due[when]
            self.times[:] = self.due
            heapify(self.times)
            self._cancelled_timers = 0

    def _drop_first(self, when: float, items: list[Any]) -> None:
        """Take away what is due first, a timer that was cancelled."""
        self._cancelled_timers -= 1
        del items[:2]
        if not items:
            heappop(self.times)
            del self.due[when]

    def _put_back(self, when: float, items: list[Any]) -> None:
        """What was taken out and did not happen comes before what was put there since."""
        if items:
            if when not in self.due:
                heappush(self.times, when)
            self.due[when] = items + self.due.get(when, [])


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(items[::2], items[1::2], strict=True)
