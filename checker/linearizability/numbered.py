"""Objects whose results number the operations: versioned registers, grow-only sets read whole.

Each is brought to ranks (see ``ranks``): linear time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checker.history import FAIL, NEVER, OK, History
from checker.linearizability.log import check_log_order
from checker.linearizability.outcome import NotApplicable, Violation
from checker.linearizability.ranks import rank_conflict
from checker.models.collections import GrowOnlySet
from checker.models.logs import Log
from checker.models.registers import VersionedRegister

__all__ = ["check_grow_only_set", "check_versions"]


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


def check_grow_only_set(history: History, rows: Sequence[int], model: GrowOnlySet) -> Violation | None:
    """A violation, or ``None`` for a linearizable history of a :class:`GrowOnlySet`.

    The sets that were read must form a chain, and each element belongs where the chain first shows it.  Raises
    :class:`NotApplicable` where an element is added twice.
    """
    adds: dict[Any, tuple[int, int]] = {}
    reads: list[tuple[frozenset[Any], int, int]] = []
    count = 0
    bad = Violation(rows=tuple(rows), text="", minimal=False)
    for row in rows:
        f, status = history.f[row], history.status[row]
        if status == FAIL:
            continue
        if f == "add":
            count += 1
            adds[history.value[row]] = (history.invoked[row], history.returned[row])
        elif status == OK:
            reads.append((frozenset(history.result[row]), history.invoked[row], history.returned[row]))
    if len(adds) != count:
        raise NotApplicable("an element is added twice")
    reads.sort(key=lambda read: len(read[0]))
    last_invoke: dict[int, int] = {}
    first_return: dict[int, int] = {}

    def place(rank: int, invoked: int, returned: int) -> None:
        last_invoke[rank] = max(last_invoke.get(rank, -1), invoked)
        first_return[rank] = min(first_return.get(rank, NEVER), returned)

    level = 0
    shown: frozenset[Any] = frozenset()
    for elements, invoked, returned in reads:
        if len(elements) > len(shown):
            if not shown <= elements:
                return bad
            level += 1
            for element in elements - shown:
                if element not in adds:
                    return bad
                place(2 * level - 1, *adds[element])
            shown = elements
        elif elements != shown:
            return bad
        place(2 * level, invoked, returned)
    for element, (invoked, returned) in adds.items():
        if element not in shown and returned != NEVER:
            place(2 * level + 1, invoked, returned)
    return bad if rank_conflict(first_return, last_invoke) is not None else None
