"""Every order of a handful of transactions, for histories whose values do not show which write a read saw.

An element appended twice, or null written to a register, leaves dependencies open.  For few transactions all orders
can be tried instead (depth first, never twice from the same set of transactions and the same values): an exact answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from checker.history import NEVER, OK
from checker.transactions.anomalies import Step, Transactions
from checker.transactions.graph import PROCESS, REALTIME

__all__ = ["MAX_TRANSACTIONS", "find_serial_order"]

#: Transactions above which there are too many orders to try.
MAX_TRANSACTIONS = 24
#: Most positions (a set of transactions done, with the values they leave) that the search goes through.
MAX_PLACES = 20_000

_State = dict[Any, Any]


def find_serial_order(
    transactions: Transactions, rows: Sequence[int], extra: int, is_over: Callable[[], Any] = lambda: None
) -> bool | None:
    """Whether some order of the committed transactions among ``rows``, and of any others there, explains all reads.

    ``extra`` holds what else the order must respect (PROCESS, REALTIME).  ``None`` when ``is_over`` or a limit stops
    the search.
    """
    if len(rows) > MAX_TRANSACTIONS:
        return None
    is_list = transactions.write == "append"
    before = [_before(transactions, rows, at, extra) for at in range(len(rows))]
    certain = sum(1 << at for at, row in enumerate(rows) if transactions.status[row] == OK)
    seen: set[tuple[int, frozenset[tuple[Any, Any]]]] = set()
    stack: list[tuple[int, _State]] = [(0, {})]
    while stack:
        done, state = stack.pop()
        if done & certain == certain:
            return True
        place = (done, frozenset(state.items()))
        if place in seen:
            continue
        seen.add(place)
        if len(seen) > MAX_PLACES or is_over():
            return None
        ways = []
        for at, row in enumerate(rows):
            if done >> at & 1 or before[at] & ~done:
                continue
            after = _after(transactions.steps[row], state, is_list, is_certain=bool(certain >> at & 1))
            if after is None:
                continue
            if certain >> at & 1 and all(f == "r" for f, _, _ in transactions.steps[row]):
                # It writes nothing, so whatever could come next without it can come next after it.
                ways = [(done | 1 << at, after)]
                break
            ways.append((done | 1 << at, after))
        stack += reversed(ways)
    return False


def _before(transactions: Transactions, rows: Sequence[int], at: int, extra: int) -> int:
    """The transactions that must come before one, as bits."""
    history, status = transactions.history, transactions.status
    row, bits = rows[at], 0
    for number, other in enumerate(rows):
        if status[other] != OK or history.returned[other] == NEVER or not extra & (PROCESS | REALTIME):
            continue
        if history.returned[other] < history.invoked[row] and (
            extra & REALTIME or history.process[other] == history.process[row]
        ):
            bits |= 1 << number
    return bits


def _after(steps: Sequence[Step], state: _State, is_list: bool, *, is_certain: bool) -> _State | None:
    """The values after a transaction, or ``None`` if it would have read different ones than it did."""
    after = dict(state)
    for f, key, value in steps:
        if f == "append":
            after[key] = (*after.get(key, ()), value)
        elif f == "w":
            after[key] = value
        elif is_certain:
            held = after.get(key)
            if (tuple(value or ()) != (held or ())) if is_list else value != held:
                return None
    return after
