"""Timers and events by their times, in insertion order for each time.

The times are in a heap, each once; a mapping has what is due at each. Comparing numbers is faster than comparing tuples
that start with a number, which matters: everything that is sent, written or waited for goes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

__all__ = ["Timetable"]

MIN_CANCELLED_TIMERS = 512
"""Fewer cancelled timers than this are not worth a cleanup."""


class Timetable:
    """Timers, and events of the simulation itself."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """A heap, without duplicates."""
        self.due: dict[float, list[Any]] = {}
        """Time -> what is due then, as a flat list with two items for each: callback and arguments for an event, timer
        and None for a timer."""
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
        """Called by a timer that was cancelled before it was due; removes such timers occasionally."""
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
        """Remove the first item that is due, which is a cancelled timer."""
        self._cancelled_timers -= 1
        del items[:2]
        if not items:
            heappop(self.times)
            del self.due[when]

    def _put_back(self, when: float, items: list[Any]) -> None:
        """Put back items that were taken out and did not run, before those that were added since."""
        if items:
            if when not in self.due:
                heappush(self.times, when)
            self.due[when] = items + self.due.get(when, [])


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(items[::2], items[1::2], strict=True)
