"""Reads when all was over: whether each register and each log was read then, and which of the reads count.

A loss that nobody looked for leaves no trace in a history: whoever calls it valid asks here first what was left unread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from checker.history import FAIL, INFO, NEVER, OK, History

__all__ = ["answered_since_changed", "last_final_reads", "without_earlier_tails", "without_full_polls"]


def answered_since_changed(history: History, f: str = "read") -> dict[Any, bool]:
    """Key -> whether a read ``f`` was answered that began after the key's last change was acknowledged; of the keys of
    which a read that began then has ended."""
    answered: dict[Any, bool] = {}
    for key, rows in history.rows_by_key().items():
        changes = (row for row in rows if history.f[row] != f and history.status[row] == OK)
        changed = max((history.returned[row] for row in changes), default=NEVER)
        later = (row for row in rows if history.f[row] == f and history.invoked[row] > changed)
        if ended := [history.status[row] == OK for row in later if _has_ended(history, row)]:
            answered[key] = any(ended)
    return answered


def last_final_reads(history: History) -> dict[Any, int | None]:
    """Log (a key) -> the row of the last of its reads that say ``final`` which came to its end.  ``None`` where none
    did, and where it was asked for more from there on, as it was behind, and these reads came to none."""
    return {log: row for log, rows in history.rows_by_key().items() for row in _last_final_read(history, rows)}


def _last_final_read(history: History, rows: Iterable[int]) -> list[int | None]:
    """The last of these, or that there is none; nothing where no read of these says ``final``."""
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
    """The same with reads that say nothing of a log's end, which may be old, but for the last final one of each log."""
    kept = set(last_final_reads(history).values())
    results = [
        {**result, "tail": None} if name == "read" and history.status[row] == OK and row not in kept else result
        for row, (name, result) in enumerate(zip(history.f, history.result, strict=True))
    ]
    return replace(history, result=results)


def without_full_polls(history: History) -> History:
    """The same, and reads that saw no end say nothing: the near-linear test wants an end of every read, and what such a
    read holds is looked at by the checker of a log's contents."""
    status = list(history.status)
    for row, name in enumerate(history.f):
        if name == "read" and status[row] == OK and history.result[row].get("tail") is None:
            status[row] = FAIL
    return replace(history, status=status)


def _has_ended(history: History, row: int) -> bool:
    """Whether the operation of a row has a completion: what was open when the history ended says nothing."""
    return history.status[row] != INFO or history.returned_ns[row] is not None


def _end_reached(history: History, row: int) -> int | None:
    """Where a log ends by a read that came to its end."""
    result = history.result[row]
    if history.status[row] != OK or result.get("tail") is None:
        return None
    end = int(result["offset"]) + len(result["messages"])
    return end if end >= result["tail"] else None
