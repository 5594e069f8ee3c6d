"""Queues as a whole: what went in must come out, whatever the order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from checker.history import FAIL, INFO, NEVER, OK, History
from checker.models.collections import FIFOQueue
from checker.tally import Events, Tally
from checker.values import exact
from checker.verdict import Result
from checker.words import named_row, of_key, short

__all__ = ["check_total_queue"]


def check_total_queue(events: Events, *, allow_duplicates: bool = True, redelivers: bool = False) -> Result:
    """Check that every value whose enqueue was acknowledged came out, and none that nobody tried to enqueue.

    Operations: ``enqueue`` (or any name of :class:`FIFOQueue`), ``dequeue`` with a value or ``None``, ``drain`` with
    a list.  Counts ``lost``, ``unexpected``, ``duplicated`` and ``recovered`` (outcome unknown, but dequeued).
    Duplicates are wrong only without ``allow_duplicates``: queues that deliver at least once may repeat.  Each key is a
    queue.  Unknown when values went into one, nothing ever came out, and nobody looked for any of them after its
    acknowledgement; and when no more values are ``missing`` from one than takes of unknown outcome may have taken,
    unless it ``redelivers`` what was taken and not acknowledged: then such a take took nothing.
    """
    history = History.of(events)
    wrong = ("lost", "unexpected") if allow_duplicates else ("lost", "unexpected", "duplicated")
    noted = ("recovered", "missing", "duplicated") if allow_duplicates else ("recovered", "missing")
    tally = Tally("total-queue", history, wrong=wrong, noted=noted)
    tally.extra.update(acknowledged=0, dequeued=0)
    values, unknown = 0, None
    for key, rows in history.rows_by_key().items():
        missing = tally.counts["missing"]
        acked, is_told = _check_queue(history, rows, tally, redelivers)
        values += acked
        if acked and not is_told:
            unknown = unknown or f"nothing{of_key(key)} was ever dequeued, so nothing can be said about loss"
        elif missing := tally.counts["missing"] - missing:
            what, which = ("1 value", "it") if missing == 1 else (f"{missing} values", "them")
            why = f"{what}{of_key(key)} never came out, and takes of unknown outcome may have taken {which}"
            unknown = unknown or why
    return tally.result(fine=f"all {values} acknowledged values came out", unknown=unknown)


def _check_queue(history: History, rows: Sequence[int], tally: Tally, redelivers: bool) -> tuple[int, bool]:
    """Judge one queue: how many values were acknowledged, and whether anything tells what became of them."""
    acked: dict[Any, list[int]] = {}
    attempts: dict[Any, list[int]] = {}
    taken: dict[Any, list[int]] = {}
    last_look = -1
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
        if status != OK:
            if status != FAIL and not redelivers:
                unseen += math.inf if f == "drain" else 1
            continue
        last_look = max(last_look, history.invoked[row])
        result = history.result[row]
        for item in result if f == "drain" else [result]:
            if item is not None:
                taken.setdefault(exact(item), []).append(row)
    for value, takes in taken.items():
        tried = attempts.get(value, [])
        if not tried:
            text = f"{short(value)} came out by {named_row(history, takes[0])}, never put in"
            tally.add("unexpected", takes[:1], text)
            continue
        if len(takes) > len(tried):
            tally.add("duplicated", takes[:3], f"{short(value)} came out {len(takes)} times, put in {len(tried)} times")
        elif any(history.status[row] == INFO for row in tried) and value not in acked:
            tally.add("recovered", (tried[0], takes[0]), f"{short(value)} came out though its put had no answer")
    first_acked = min((history.returned[row] for puts in acked.values() for row in puts), default=NEVER)
    is_told = bool(taken) or last_look > first_acked
    gone = [value for value, puts in acked.items() if is_told and len(puts) > len(taken.get(value, ()))]
    missing = sum(len(acked[value]) - len(taken.get(value, ())) for value in gone)
    for value in gone:
        text = f"{short(value)}, acknowledged to {named_row(history, acked[value][0])}, never came out"
        tally.add("lost" if missing > unseen else "missing", acked[value][:1], text)
    tally.extra["acknowledged"] += sum(map(len, acked.values()))
    tally.extra["dequeued"] += sum(map(len, taken.values()))
    return len(acked), is_told
