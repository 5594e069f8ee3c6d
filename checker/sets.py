"""Sets: what was added must be present when the set is read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from checker.history import FAIL, INFO, OK, History
from checker.models.collections import elements_shown
from checker.tally import Events, Tally
from checker.values import exact
from checker.verdict import Result
from checker.words import named_row, of_key, short

__all__ = ["check_set", "check_set_full"]


def check_set(events: Events) -> Result:
    """Check that the last read of a set shows all elements whose ``add`` was acknowledged, and no other.

    Each key is a set.  Invalid with the counts ``lost`` (acknowledged before that read, and absent) and ``unexpected``
    (never added before); ``recovered`` elements (added with an unknown outcome, and present) are only counted.  Unknown
    when no read completed, or none of a key with an acknowledged ``add``.
    """
    history = History.of(events)
    tally = Tally("set", history, wrong=("lost", "unexpected"), noted=("recovered",))
    elements, read, unknown = 0, 0, None
    for key, rows in history.rows_by_key().items():
        reads = [row for row in rows if history.f[row] == "read" and history.status[row] == OK]
        if reads:
            read += 1
            elements += _last_elements(history, rows, max(reads, key=history.invoked.__getitem__), tally)
        elif any(history.f[row] == "add" and history.status[row] == OK for row in rows):
            unknown = unknown or f"no read{of_key(key)} completed"
    if not read:
        unknown = unknown or "no read completed"
    what = "the last read holds" if read == 1 else f"the last reads of {read} keys hold"
    return tally.result(fine=f"{what} all that was acknowledged: {elements} elements", unknown=unknown)


def _last_elements(history: History, rows: Sequence[int], last: int, tally: Tally) -> int:
    """Judge the last read of a set.  Returns how many elements it shows."""
    shown = set(map(exact, elements_shown(history.result[last])))
    attempted: set[Any] = set()
    for row in rows:
        status = history.status[row]
        if history.f[row] != "add" or status == FAIL or history.invoked[row] > history.returned[last]:
            continue
        value = exact(history.value[row])
        attempted.add(value)
        if status == OK and value not in shown and history.returned[row] < history.invoked[last]:
            text = f"{short(value)}, acknowledged to {named_row(history, row)}, is absent from the last read"
            tally.add("lost", (row, last), text)
        elif status == INFO and value in shown:
            tally.add("recovered", (row, last), f"{short(value)} is there although its add was never acknowledged")
    for value in sorted(shown - attempted, key=repr):
        tally.add("unexpected", (last,), f"{short(value)} is in the last read, but nobody had added it")
    return len(shown)


def _shown(result: Any) -> Collection[Any]:
    return () if result is None else elements_shown(result)


def check_set_full(events: Events, *, linearizable: bool = False) -> Result:
    """Check, with reads of the whole set, that no element disappears once it is known, and that none was made up.

    Each key is a set.  An element is known once its add was acknowledged or a read showed it, whoever added it.
    ``lost``: the element is absent from a read that was invoked after it was known and after the return of every read
    that shows it.  ``stale``: it is absent from a read that was invoked after it was known, but a later or concurrent
    read shows it; wrong only if ``linearizable``.  ``never-read``: acknowledged, but no read began afterwards.
    ``visible_ms``: quantiles of the time from acknowledgement to the first read from which on it was never absent.  An
    element twice in one read is ``duplicated`` and wrong.  So is an ``unexpected`` one: nobody had tried to add it, or
    its add failed.  Unknown when no read of a key began after any of its elements was known.
    """
    history = History.of(events)
    wrong = ("lost", "unexpected", "duplicated", *(("stale",) if linearizable else ()))
    noted = ("never-read", *(() if linearizable else ("stale",)))
    tally = Tally("set-full", history, wrong=wrong, noted=noted)
    latencies: list[float] = []
    stable, unknown = 0, None
    for key, rows in history.rows_by_key().items():
        found, unread = _elements(history, rows, tally, latencies)
        stable += found
        if unread and not found:
            unknown = unknown or f"no read{of_key(key)} began after any of its elements was known to be added"
    latencies.sort()
    if latencies:
        last = len(latencies) - 1
        tally.extra["visible_ms"] = {
            name: round(latencies[int(last * share)], 3) for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
        }
    tally.extra["stable"] = stable
    return tally.result(fine=f"{stable} elements stayed visible", unknown=unknown)


def _elements(history: History, rows: Any, tally: Tally, latencies: list[float]) -> tuple[int, int]:
    """Judge the elements of a set.  Returns how many stayed visible, and how many were known but never read afterwards.

    For each element only the reads that show it are examined, so that the time is proportional to what was read.
    Otherwise many reads of few elements, together with many lost elements, would take the product of the two.
    """
    invoked, returned = history.invoked, history.returned
    adds: dict[Any, int] = {}
    refused: dict[Any, int] = {}
    acked: set[Any] = set()
    known: dict[Any, int] = {}
    shown_until: dict[Any, int] = {}
    reads = [row for row in rows if history.f[row] == "read" and history.status[row] == OK]
    place = {row: at for at, row in enumerate(sorted(reads, key=invoked.__getitem__))}
    shown_at: dict[Any, list[int]] = {}
    for row in rows:
        if history.f[row] == "add" and history.status[row] != FAIL:
            value = exact(history.value[row])
            adds.setdefault(value, row)
            if history.status[row] == OK:
                acked.add(value)
                known[value] = min(known.get(value, returned[row]), returned[row])
        elif history.f[row] == "add":
            refused.setdefault(exact(history.value[row]), row)
        elif row in place:
            items = [exact(item) for item in _shown(history.result[row])]
            shown = dict.fromkeys(items)  # in the read's own order: the first witness must not depend on hashes
            if len(shown) < len(items):
                tally.add("duplicated", (row,), f"{named_row(history, row)} shows an element twice")
            for value in shown:
                known[value] = min(known.get(value, returned[row]), returned[row])
                shown_until[value] = max(shown_until.get(value, -1), returned[row])
                shown_at.setdefault(value, []).append(place[row])
    in_order = list(place)
    _unexpected(history, in_order, shown_at, adds, refused, tally)
    begun = [invoked[row] for row in in_order]
    stable = unread = 0
    for value, since in known.items():
        source = [adds[value]] if value in adds else []
        first_later = bisect_right(begun, since)
        if first_later == len(in_order):
            unread += 1
            if value in acked:
                tally.add("never-read", source, f"no read began after {short(value)} was acknowledged")
            continue
        last_absent = _last_without(shown_at.get(value, ()), len(in_order))
        is_absent = last_absent >= first_later
        row = in_order[last_absent]
        if is_absent and invoked[row] > shown_until.get(value, -1):
            text = ""
            if tally.wants("lost"):  # the text of a read takes time for everything that it shows
                text = (
                    f"{short(value)} was known to be added, but {named_row(history, row)[:200]} and every later read "
                    "lacks it"
                )
            tally.add("lost", (*source, row), text)
            continue
        stable += 1
        if is_absent:
            tally.add(
                "stale", (*source, row), f"{short(value)} was known to be added, but a later read lacks it for a while"
            )
        visible = max(first_later, last_absent + 1)
        if visible == len(in_order):  # the last read without it and the last read that shows it are concurrent
            continue
        start_ns = history.returned_ns[adds[value]] if value in adds else None
        seen_ns = history.invoked_ns[in_order[visible]]
        if start_ns is not None and seen_ns is not None:
            latencies.append(max(0.0, (seen_ns - start_ns) / 1e6) if is_absent else 0.0)
    return stable, unread


def _unexpected(
    history: History,
    reads: Sequence[int],
    shown_at: Mapping[Any, Sequence[int]],
    adds: Mapping[Any, int],
    refused: Mapping[Any, int],
    tally: Tally,
) -> None:
    """Elements in a read that returned before any add of them was invoked that was not refused."""
    for value, places in shown_at.items():
        row = min((reads[place] for place in places), key=history.returned.__getitem__)
        if value in adds and history.invoked[adds[value]] < history.returned[row]:
            continue
        source, text = [refused[value]] if value in refused else [], ""
        if tally.wants("unexpected"):
            who = f"only {named_row(history, refused[value])}" if source else "nobody"
            text = f"{named_row(history, row)[:200]} shows {short(value)}, which {who} had tried to add"
        tally.add("unexpected", (*source, row), text)


def _last_without(places: Sequence[int], count: int) -> int:
    """The largest number below ``count`` that is not among ``places``; -1 if all are."""
    last = count - 1
    for at in sorted(places, reverse=True):
        if at != last:
            break
        last -= 1
    return last
