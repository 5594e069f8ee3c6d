"""Small checkers: unique ids, counter bounds, mutual exclusion, bank totals, long forks."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

from checker.history import FAIL, NEVER, OK, History
from checker.linearizability.counter import read_bounds
from checker.models.counters import Counter
from checker.tally import Events, Tally
from checker.values import NUMBERS, exact, number
from checker.verdict import Result
from checker.words import named_row, short

__all__ = ["check_bank", "check_counter", "check_exclusion", "check_long_fork", "check_unique_ids"]


def check_unique_ids(events: Events) -> Result:
    """Check that no two completed operations (``generate``) of a key returned the same id.

    Invalid with the count ``duplicated``, unknown if none completed, else valid.
    """
    history = History.of(events)
    tally = Tally("unique-ids", history, wrong=("duplicated",))
    given = 0
    for rows in history.rows_by_key().values():
        seen: dict[Any, int] = {}
        for row in rows:
            if history.status[row] != OK:
                continue
            value = exact(history.result[row])
            first = seen.setdefault(value, row)
            if first != row:
                text = f"id {short(value)} was given to {named_row(history, first)} and {named_row(history, row)}"
                tally.add("duplicated", (first, row), text)
        given += len(seen)
    unknown = None if given else "no operation completed, so there is no id"
    return tally.result(fine=f"{given} ids, all different", unknown=unknown)


def check_counter(events: Events, *, initial: int = 0) -> Result:
    """Check that every read of a counter lies between the least and the greatest sum that the additions allow.

    Each key is a counter with the value ``initial`` at first.  Invalid with the count ``out-of-bounds``, else valid.
    Raises TypeError for amounts that are not numbers.
    """
    history = History.of(events)
    tally = Tally("counter", history, wrong=("out-of-bounds",))
    reads = 0
    for every in history.rows_by_key().values():
        rows = [row for row in every if history.f[row] in Counter.functions]
        slack = _rounding([number(initial), *(history.value[row] for row in rows if history.f[row] != "read")])
        for row, low, high in read_bounds(history, rows, initial):
            reads += 1
            result = exact(history.result[row])
            if not isinstance(result, NUMBERS) or not low - slack <= result <= high + slack:
                tally.add("out-of-bounds", (row,), f"{named_row(history, row)} is not within {low} to {high}")
    return tally.result(fine=f"{reads} reads within their bounds")


def _rounding(numbers: list[Any]) -> float:
    """How far sums of some of these numbers may differ if added up in different orders; 0 without floats."""
    if not any(isinstance(number, float) for number in numbers):
        return 0
    total: float = sum(abs(1 if number is None else number) for number in numbers)
    return 2 * len(numbers) * sys.float_info.epsilon * total


def check_exclusion(events: Events) -> Result:
    """Check that no two processes certainly held one lock at the same time.

    A lock is held from the return of ``acquire`` to the invocation of ``release``; the key, if any, names the lock.
    Invalid with the count ``overlapping``, unknown if nobody took a lock, else valid.  A process whose ``release`` has
    an unknown outcome counts as not holding the lock from that invocation on; one whose ``release`` failed still holds
    it, whether or not it acquires the lock again.
    """
    history = History.of(events)
    tally = Tally("exclusion", history, wrong=("overlapping",))
    held = 0
    for rows in history.rows_by_key().values():
        open_holds: dict[Any, int] = {}
        holds: list[tuple[int, int, int]] = []
        for row in rows:
            process = history.process[row]
            if history.f[row] == "acquire" and history.status[row] == OK:
                open_holds.setdefault(process, row)
            elif history.f[row] == "release" and history.status[row] != FAIL and process in open_holds:
                acquired = open_holds.pop(process)
                holds.append((history.returned[acquired], history.invoked[row], acquired))
        holds += [(history.returned[row], NEVER, row) for row in open_holds.values()]
        holds.sort()
        held += len(holds)
        until, holder = -1, -1
        for start, end, row in holds:
            if start < until:
                text = f"{named_row(history, row)} took a lock while {named_row(history, holder)} still held it"
                tally.add("overlapping", (holder, row), text)
            if end > until:
                until, holder = end, row
    unknown = None if held else "no lock was taken"
    return tally.result(fine=f"{held} holds, none overlapping", unknown=unknown)


def check_bank(events: Events, *, total: int | None = None, allow_negative: bool = False) -> Result:
    """Check that every read of all accounts has the same total and shows no negative balance.

    A read returns a map of balances, or ``[account, balance]`` pairs.  Each key is a bank; ``total`` is taken from its
    first read unless given, and floats may differ from it by rounding.  Invalid with the counts ``wrong-total`` and
    ``negative`` (valid with ``allow_negative``), unknown if no read completed.  Raises TypeError for balances that are
    not numbers.
    """
    history = History.of(events)
    given = None if total is None else number(total)
    tally = Tally("bank", history, wrong=("wrong-total", "negative"))
    totals: dict[Any, None] = {}
    reads = 0
    for rows in history.rows_by_key().values():
        expected = given
        for row in rows:
            if history.f[row] != "read" or history.status[row] != OK:
                continue
            reads += 1
            result = history.result[row]
            balances = list(result.values()) if isinstance(result, dict) else [pair[1] for pair in result]
            known = [number(balance) for balance in balances if balance is not None]
            found = sum(known)
            if expected is None:
                expected = found
            totals.setdefault(expected)
            # Balances may be added up in different orders, and each transfer has rounded as well.
            if found != expected and not abs(found - expected) <= len(rows) * _rounding([*known, expected]):
                tally.add("wrong-total", (row,), f"{named_row(history, row)[:200]} sums to {found}, not {expected}")
            if not allow_negative and min(known, default=0) < 0:
                tally.add("negative", (row,), f"{named_row(history, row)[:200]} shows a negative balance")
    shown = f"total {next(iter(totals), None)}" if len(totals) < 2 else "the total of its key"
    return tally.result(fine=f"{reads} reads, each with {shown}", unknown=None if reads else "no read completed")


def check_long_fork(events: Events) -> Result:
    """Check that no two reads of the same keys, each key written once, saw two writes in opposite orders.

    Reads carry ``[r, key, value]`` steps, ``None`` if not yet written.  Two reads that each see a write that the other
    lacks are a ``fork``, which is counted and invalid: parallel snapshot isolation allows it, snapshot isolation does
    not.  If operations have keys besides those of the steps, each of these is a separate store.  Unknown if no such
    read completed, or if a key may have two values: a read that shows one tells nothing about the other.
    """
    history = History.of(events)
    tally = Tally("long-fork", history, wrong=("fork",))
    groups: dict[tuple[Any, frozenset[Any]], list[tuple[frozenset[Any], int]]] = {}
    for row, status in enumerate(history.status):
        steps = history.result[row]
        if status != OK or not isinstance(steps, (list, tuple)) or not steps:
            continue
        if any(step[0] not in ("r", "read") for step in steps):
            continue
        keys = frozenset(exact(step[1]) for step in steps)
        seen = frozenset(exact(step[1]) for step in steps if step[2] is not None)
        groups.setdefault((exact(history.key[row]), keys), []).append((seen, row))
    reads = 0
    for views in groups.values():
        reads += len(views)
        distinct: dict[frozenset[Any], int] = {}
        for seen, row in views:
            distinct.setdefault(seen, row)
        ordered = sorted(distinct.items(), key=lambda view: (len(view[0]), view[1]))
        for (smaller, first), (larger, second) in pairwise(ordered):
            if not smaller <= larger:
                text = (
                    f"{named_row(history, first)} sees {short(sorted(smaller - larger, key=repr))} but not "
                    f"{short(sorted(larger - smaller, key=repr))}; {named_row(history, second)} sees the opposite"
                )
                tally.add("fork", (first, second), text)
    unknown = _written_again(history) if reads else "no read of [r, key, value] steps completed"
    return tally.result(fine=f"{reads} reads, no two forked", unknown=unknown)


def _written_again(history: History) -> str | None:
    """A sentence about the first key that may have been given two different values, if there is one."""
    first: dict[Any, tuple[Any, int]] = {}
    for row, steps in enumerate(history.value):
        if history.status[row] == FAIL or not isinstance(steps, (list, tuple)):
            continue
        for step in steps:
            if not isinstance(step, (list, tuple)) or len(step) < 3 or step[0] not in ("w", "write"):
                continue
            value, writer = first.setdefault((exact(history.key[row]), exact(step[1])), (exact(step[2]), row))
            if value != exact(step[2]):
                rows = f"{named_row(history, writer)} and {named_row(history, row)}"
                return f"{short(step[1])} was written twice, by {rows}: each key is to be written once"
    return None
