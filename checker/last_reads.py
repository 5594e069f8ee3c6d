"""Final reads: whether each register and each log was read at the end, and which of these reads count.

A loss that no read could reveal leaves no trace in a history, so a verdict of valid depends on what was left unread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from checker.history import FAIL, INFO, NEVER, OK, History

__all__ = ["answered_since_changed", "last_final_reads", "without_earlier_tails", "without_full_polls"]


def answered_since_changed(history: History, f: str = "read") -> dict[Any, bool]:
    """Key -> whether some read ``f`` that began after the key's last acknowledged change was answered.  Only keys with
    such a read that has ended are included."""
    answered: dict[Any, bool] = {}
    for key, rows in history.rows_by_key().items():
        changes = (row for row in rows if history.f[row] != f and history.status[row] == OK)
        changed = max((history.returned[row] for row in changes), default=NEVER)
        later = (row for row in rows if history.f[row] == f and history.invoked[row] > changed)
        if ended := [history.status[row] == OK for row in later if _has_ended(history, row)]:
            answered[key] = any(ended)
    return answered


def last_final_reads(history: History) -> dict[Any, int | None]:
    """Log (a key) -> the row of its last ``final`` read that reached the end of the log.  ``None`` if none did, or if a
    later final read continued from there, because the reader was behind, and did not reach the end."""
    return {log: row for log, rows in history.rows_by_key().items() for row in _last_final_read(history, rows)}


def _last_final_read(history: History, rows: Iterable[int]) -> list[int | None]:
    """[row of the last such read], [None] if there is none, or [] if none of these reads is ``final``."""
    last: list[int | None] = []
    end: int | None = None
    for row in rows:
        asked = history.value[row]
        if history.f[row] != "read" or not isinstance(asked, Mapping) or not asked.get("final"):
            continue
        if (reached := _end_reached(history, row)) is not None:
            last, end = [row], reached
        elif not last or (_has_ended(history, row) and asked["offset"] == end):
            last = [None]
    return last


def without_earlier_tails(history: History) -> History:
    """The history without the tails of reads, which may be outdated, except for the last final read of each log."""
    kept = set(last_final_reads(history).values())
    results = [
        {**result, "tail": None} if name == "read" and history.status[row] == OK and row not in kept else result
        for row, (name, result) in enumerate(zip(history.f, history.result, strict=True))
    ]
    return replace(history, result=results)


def without_full_polls(history: History) -> History:
    """The history with reads that show no tail turned into failed ones: the near-linear test requires a tail of every
    read, and the messages of these reads are checked by the checker of a log's contents."""
    status = list(history.status)
    for row, name in enumerate(history.f):
        if name == "read" and status[row] == OK and history.result[row].get("tail") is None:
            status[row] = FAIL
    return replace(history, status=status)


def _has_ended(history: History, row: int) -> bool:
    """Whether the operation of a row has a completion; operations still open at the end of the history have none."""
    return history.status[row] != INFO or history.returned_ns[row] is not None


def _end_reached(history: History, row: int) -> int | None:
    """The end of a log according to a read that reached it; None for other reads."""
    result = history.result[row]
    if history.status[row] != OK or result.get("tail") is None:
        return None
    end = int(result["offset"]) + len(result["messages"])
    return end if end >= result["tail"] else None
