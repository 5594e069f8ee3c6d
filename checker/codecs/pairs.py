"""Independent ``[key value]`` pairs as in Jepsen, where the value of an operation contains the key."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from checker.codecs.source import FormatError
from checker.history import INFO, NEVER, OK, History, freeze
from checker.values import exact

__all__ = ["looks_keyed", "split_keys", "unanswered", "with_keys"]


def looks_keyed(history: History, open_rows: Container[int]) -> bool:
    """Whether every value is such a pair, and some operation was invoked with ``[key nil]``, as reads of a key are.

    The rows of ``open_rows`` need no result; fail and info events may have the reason as their value
    (``:value :timed-out``).  An ``insert`` of write skew has a position for each of two tables, one of which is
    ``nil``: that is not evidence of a key.
    """
    found = False
    for row, value in enumerate(history.value):
        if not _is_pair(value) or isinstance(value[0], (list, dict)):
            return False
        result = history.result[row]
        if (
            history.status[row] == OK
            and row not in open_rows
            and (not _is_pair(result) or isinstance(result[0], (list, dict)))
        ):
            return False
        found = found or (value[1] is None and history.f[row] != "insert")
    return found


def with_keys(history: History, source: str, *, lenient: bool) -> History:
    """The history of a file or table that is not EDN, split by key if it names no keys and its values are ``[key,
    value]`` pairs, as in Jepsen's independent tests: correct registers would be invalid if read as a single one."""
    first = history.value[0] if len(history) else None
    if not history.keyed and isinstance(first, list) and looks_keyed(history, unanswered(history)):
        split_keys(history, source, lenient=lenient)
    return history


def unanswered(history: History) -> set[int]:
    """The rows without a result: in our own format, recorders may omit a value that adds nothing."""
    return {row for row, result in enumerate(history.result) if result is None}


def split_keys(history: History, source: str, *, lenient: bool) -> None:
    """Split the pairs.  Raises :class:`FormatError` for a result with another key than the operation's, which a lenient
    reader leaves out; a pair in an event that did not succeed may be its error (``[:timed-out "..."]``).
    """
    for row, value in enumerate(history.value):
        result = history.result[row]
        if _is_pair(value):
            history.key[row], history.value[row] = freeze(value[0]), value[1]
            history.keyed = True
            if _is_pair(result) and result[0] != value[0] and exact(result[0]) != exact(value[0]):
                if history.status[row] != OK:
                    continue
                asked = f"{history.f[row]!r} of process {history.process[row]} was invoked on key {value[0]!r}"
                problem = f"operation {row}: {asked}, and completed with key {result[0]!r}"
                if not lenient:
                    raise FormatError(source, None, problem, can_be_left_out=True)
                history.leave_out(f"{source}: {problem}")
                history.status[row], history.returned[row], history.result[row] = INFO, NEVER, None
                continue
        if _is_pair(result):
            history.result[row] = result[1]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2
