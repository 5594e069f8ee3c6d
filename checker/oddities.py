"""Notes on features of a history that are allowed, but often indicate a mistake of the program that recorded it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from checker.history import INFO, History
from checker.values import NUMBERS
from checker.words import short

__all__ = ["oddities"]

#: Types of valid times.
_TIMES = frozenset({*NUMBERS, type(None)})


def oddities(history: History) -> list[str]:
    """One sentence for each kind of oddity."""
    return [*_some_without_key(history), *_times_that_are_none(history), *_going_on_after_info(history)]


def _some_without_key(history: History) -> Iterator[str]:
    count = history.key.count(None) if history.keyed else 0
    if count:
        which = f"{count} of {len(history)} operations have no 'key'"
        yield f"{which}: where keys are checked separately, these count as one more key"


def _times_that_are_none(history: History) -> Iterator[str]:
    if _TIMES.issuperset(map(type, history.invoked_ns)) and _TIMES.issuperset(map(type, history.returned_ns)):
        return
    odd = [time for time in chain(history.invoked_ns, history.returned_ns) if type(time) not in _TIMES]
    one = f"(one is {short(odd[0])})"
    yield f"{len(odd)} events have a 'time' that is not a number of nanoseconds {one}: it was ignored"


def _going_on_after_info(history: History) -> Iterator[str]:
    """Processes that continue after ``info``: a process has one operation open at a time, and that one stays open."""
    ended = {process for process, status in zip(history.process, history.status, strict=True) if status == INFO}
    if not ended:
        return
    over: set[Any] = set()
    gone_on: dict[Any, None] = {}
    for process, status in zip(history.process, history.status, strict=True):
        if process not in ended:
            continue
        if process in over:
            gone_on[process] = None
        elif status == INFO:
            over.add(process)
    if gone_on:
        first = next(iter(gone_on))
        which = f"process {short(first)}" + (f" (and {len(gone_on) - 1} more)" if len(gone_on) > 1 else "")
        yield f"{which} goes on after an operation that ended info: two processes may share one number"
