"""Versioned registers: the results number the operations, so that such a register is a log.

Linear time.
"""

from __future__ import annotations

from collections.abc import Sequence

from checker.history import OK, History
from checker.linearizability.log import check_log_order
from checker.linearizability.outcome import NotApplicable, Violation
from checker.models.logs import Log
from checker.models.registers import VersionedRegister

__all__ = ["check_versions"]


def check_versions(history: History, rows: Sequence[int], model: VersionedRegister) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`VersionedRegister`.

    Such a register is a log: version n is offset n-1, a read shows the last message and the tail.  Raises
    :class:`NotApplicable` for a write that got no version.
    """
    wrong = Violation(rows=tuple(rows), text="", minimal=False)
    log = history.part(rows)
    base = model.initial_version
    for at, row in enumerate(rows):
        value, result, status = history.value[row], history.result[row], history.status[row]
        if history.f[row] == "write":
            if status == OK:
                if result is None:
                    raise NotApplicable("a write got no version")
                if not isinstance(result, (int, float)) or result <= base:
                    return wrong
            log.f[at], log.result[at] = "append", [result - base - 1, value] if status == OK else None
        else:
            shown = None
            if status == OK:
                if not isinstance(result, (list, tuple)) or len(result) != 2:
                    return wrong
                version, seen = result
                if not isinstance(version, (int, float)):
                    return wrong
                tail = version - base
                if tail < 0 or (tail == 0 and seen != model.initial):
                    return wrong
                shown = {"offset": max(tail - 1, 0), "messages": [seen] if tail else [], "tail": tail}
            log.f[at], log.value[at], log.result[at] = "read", None, shown
    found = check_log_order(log, range(len(log)), Log())
    if found is None:
        return None
    return Violation(rows=tuple(rows[at] for at in found.rows), text="", minimal=False)
