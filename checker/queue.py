"""Queues as a whole: what went in must come out, whatever the order."""

from __future__ import annotations

from typing import Any

from checker.history import FAIL, INFO, NEVER, OK, History
from checker.models.collections import FIFOQueue
from checker.tally import Events, Tally
from checker.values import exact
from checker.verdict import Result
from checker.words import named_row, short

__all__ = ["check_total_queue"]


def check_total_queue(events: Events, *, allow_duplicates: bool = True) -> Result:
    """Check that every value whose enqueue was acknowledged came out, and none that nobody tried to enqueue.

    Operations: ``enqueue`` (or any name of :class:`FIFOQueue`), ``dequeue`` with a value or ``None``, ``drain`` with
    a list.  Counts ``lost``, ``unexpected``, ``duplicated`` and ``recovered`` (outcome unknown, but dequeued).
    Duplicates are wrong only without ``allow_duplicates``: queues that deliver at least once may repeat.  Unknown when
    values went in, nothing ever came out, and nobody looked for any of them after its acknowledgement.
    """
    history = History.of(events)
    wrong = ("lost", "unexpected") if allow_duplicates else ("lost", "unexpected", "duplicated")
    noted = ("recovered", "duplicated") if allow_duplicates else ("recovered",)
    tally = Tally("total-queue", history, wrong=wrong, noted=noted)
    acked: dict[Any, list[int]] = {}
    attempts: dict[Any, list[int]] = {}
    taken: dict[Any, list[int]] = {}
    last_look = -1
    for row, f in enumerate(history.f):
        status = history.status[row]
        if f in FIFOQueue.puts:
            value = exact(history.value[row])
            if status != FAIL:
                attempts.setdefault(value, []).append(row)
            if status == OK:
                acked.setdefault(value, []).append(row)
            continue
        if status != OK or (f not in FIFOQueue.takes and f != "drain"):
            continue
        last_look = max(last_look, history.invoked[row])
        result = history.result[row]
        for item in result if f == "drain" else [result]:
            if item is not None:
                taken.setdefault(exact(item), []).append(row)
    for value, rows in taken.items():
        tried = attempts.get(value, [])
        if not tried:
            tally.add("unexpected", rows[:1], f"{short(value)} came out by {named_row(history, rows[0])}, never put in")
            continue
        if len(rows) > len(tried):
            tally.add("duplicated", rows[:3], f"{short(value)} came out {len(rows)} times, put in {len(tried)} times")
        elif any(history.status[row] == INFO for row in tried) and value not in acked:
            tally.add("recovered", (tried[0], rows[0]), f"{short(value)} came out though its put had no answer")
    first_acked = min((history.returned[row] for rows in acked.values() for row in rows), default=NEVER)
    is_told = bool(taken) or last_look > first_acked
    for value, rows in acked.items() if is_told else ():
        missing = len(rows) - len(taken.get(value, ()))
        if missing > 0:
            text = f"{short(value)}, acknowledged to {named_row(history, rows[0])}, never came out"
            tally.add("lost", rows[:1], text)
    tally.extra.update(acknowledged=sum(map(len, acked.values())), dequeued=sum(map(len, taken.values())))
    nothing = None if is_told or not acked else "nothing was ever dequeued, so nothing can be said about loss"
    return tally.result(fine=f"all {len(acked)} acknowledged values came out", unknown=nothing)
