"""Queues as a whole: every value that was enqueued must come out, in any order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from checker.history import FAIL, INFO, OK, History
from checker.models.collections import FIFOQueue
from checker.tally import Events, Tally
from checker.values import exact
from checker.verdict import Result
from checker.words import named_row, of_key, short

__all__ = ["check_total_queue"]

_NOTHING_THERE = frozenset(("empty", "exhausted"))


def check_total_queue(events: Events, *, allow_duplicates: bool = True, redelivers: bool = False) -> Result:
    """Check that every value whose enqueue was acknowledged came out, and no value that nobody tried to enqueue.

    Operations: ``enqueue`` (or any name of :class:`FIFOQueue`), ``dequeue`` with a value or ``None``, ``drain`` with
    a list of all that was left.  Each key is a queue.  Counts ``lost``, ``unexpected``, ``duplicated`` and
    ``recovered`` (outcome unknown, but dequeued).  Duplicates are wrong only without ``allow_duplicates``, because
    at-least-once delivery may repeat values.  Unknown if values are ``missing`` from a queue that was not found empty
    (by a ``None``, a ``drain`` or, with Jepsen's clients, a take that failed with ``exhausted`` or ``empty``) after
    they were acknowledged: they may still be in it; and if no more are missing than takes of unknown outcome may have
    taken, unless the queue ``redelivers`` unacknowledged values: then such a take took nothing.
    """
    history = History.of(events)
    wrong = ("lost", "unexpected") if allow_duplicates else ("lost", "unexpected", "duplicated")
    noted = ("recovered", "missing", "duplicated") if allow_duplicates else ("recovered", "missing")
    tally = Tally("total-queue", history, wrong=wrong, noted=noted)
    tally.extra.update(acknowledged=0, dequeued=0)
    values, unknown = 0, None
    for key, rows in history.rows_by_key().items():
        acked, why = _check_queue(history, rows, tally, redelivers, of_key(key))
        values += acked
        unknown = unknown or why
    return tally.result(fine=f"all {values} acknowledged values came out", unknown=unknown)


def _check_queue(
    history: History, rows: Sequence[int], tally: Tally, redelivers: bool, of_queue: str
) -> tuple[int, str | None]:
    """Judge one queue.  Returns how many values were acknowledged, and why the fate of some is unknown, if it is."""
    acked: dict[Any, list[int]] = {}
    attempts: dict[Any, list[int]] = {}
    taken: dict[Any, list[int]] = {}
    last_empty = -1
    unseen: float = 0
    for row in rows:
        f, status = history.f[row], history.status[row]
        if f in FIFOQueue.puts:
            value = exact(history.value[row])
            if status != FAIL:
                attempts.setdefault(value, []).append(row)
            if status == OK:
                acked.setdefault(value, []).append(row)
            continue
        if f not in FIFOQueue.takes and f != "drain":
            continue
        if status == INFO:
            if not redelivers:
                unseen += math.inf if f == "drain" else 1
            continue
        result = history.result[row]
        says_nothing = _says_nothing_was_there(result) or _says_nothing_was_there(history.errors.get(row))
        if status == FAIL:
            if says_nothing:
                last_empty = max(last_empty, history.invoked[row])
            continue
        if f == "drain" or result is None:
            last_empty = max(last_empty, history.invoked[row])
        if f == "drain" and says_nothing:  # the values that it took are recorded as separate operations
            continue
        for item in result if f == "drain" else [result]:
            if item is not None:
                taken.setdefault(exact(item), []).append(row)
    _judge_taken(history, tally, attempts, acked, taken)
    tally.extra["acknowledged"] += sum(map(len, acked.values()))
    tally.extra["dequeued"] += sum(map(len, taken.values()))
    return len(acked), _judge_missing(history, tally, acked, taken, last_empty, unseen, of_queue)


def _says_nothing_was_there(answer: Any) -> bool:
    """Whether this is the result, or error, of Jepsen's clients for an empty queue (``:exhausted``)."""
    return isinstance(answer, str) and answer.removeprefix(":") in _NOTHING_THERE


def _judge_taken(
    history: History,
    tally: Tally,
    attempts: dict[Any, list[int]],
    acked: dict[Any, list[int]],
    taken: dict[Any, list[int]],
) -> None:
    """Judge the values that came out."""
    for value, takes in taken.items():
        tried = attempts.get(value, [])
        if not tried:
            text = f"{short(value)} came out by {named_row(history, takes[0])}, never put in"
            tally.add("unexpected", takes[:1], text)
            continue
        early = _before_it_was_put_in(history, takes, tried)
        if early is not None and early[1] == tried[0]:
            text = f"{short(value)} came out by {named_row(history, early[0])}, before {named_row(history, early[1])}"
            tally.add("unexpected", early, text)
        elif len(takes) > len(tried):
            text = f"{short(value)} came out {_times(len(takes))}, put in {_times(len(tried))}"
            tally.add("duplicated", takes[:3], text)
        elif early is not None:
            take, put = (named_row(history, row) for row in early)
            tally.add("duplicated", early, f"{short(value)} came out once more by {take}, before {put}")
        elif any(history.status[row] == INFO for row in tried) and value not in acked:
            tally.add(
                "recovered", (tried[0], takes[0]), f"{short(value)} came out although its put was never acknowledged"
            )


def _before_it_was_put_in(history: History, takes: Sequence[int], tried: Sequence[int]) -> tuple[int, int] | None:
    """(take, put) for the first n such that the nth take of a value returned before its nth put was invoked."""
    in_order = takes if len(takes) == 1 else sorted(takes, key=history.returned.__getitem__)
    for take, put in zip(in_order, tried, strict=False):
        if history.returned[take] < history.invoked[put]:
            return take, put
    return None


def _judge_missing(
    history: History,
    tally: Tally,
    acked: dict[Any, list[int]],
    taken: dict[Any, list[int]],
    last_empty: int,
    unseen: float,
    of_queue: str,
) -> str | None:
    """Judge values that did not come out: ``lost`` if a take that began later, at ``last_empty``, found the queue empty
    and the ``unseen`` takes cannot account for all.  Returns why values may not be lost, if any are missing."""
    gone: dict[Any, int] = {}
    unlooked = 0
    for value, puts in acked.items():
        left = len(puts) - len(taken.get(value, ()))
        if left <= 0:
            continue
        gone[value] = max(0, left - sum(history.returned[row] > last_empty for row in puts))
        unlooked += left - gone[value]
    missing = sum(gone.values())
    for value, times in gone.items():
        text = f"{short(value)}, acknowledged to {named_row(history, acked[value][0])}, never came out"
        tally.add("lost" if times and missing > unseen else "missing", acked[value][:1], text)
    if unlooked:
        if not taken and last_empty < 0:
            return f"nothing{of_queue} was ever dequeued, so nothing can be said about loss"
        what, which = ("1 value", "it was") if unlooked == 1 else (f"{unlooked} values", "they were")
        return f"{what}{of_queue} never came out, and no take found the queue empty after {which} acknowledged"
    if missing:
        what, which = ("1 value", "it") if missing == 1 else (f"{missing} values", "them")
        return f"{what}{of_queue} never came out, and takes of unknown outcome may have taken {which}"
    return None


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
