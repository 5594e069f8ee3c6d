"""Checkers for message brokers: delays, transactional messages, consumer progress, agreement of replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from checker.history import FAIL, INFO, OK, History
from checker.tally import Events, Tally
from checker.values import exact, number
from checker.verdict import Result
from checker.words import named_row, of_key, short

__all__ = ["check_consumer_progress", "check_delay", "check_replicas", "check_transaction_visibility"]


def _received(history: History, row: int) -> list[Any]:
    """The messages a ``receive`` returned: one, or a list."""
    result = history.result[row]
    return [exact(item) for item in result] if isinstance(result, list) else [] if result is None else [exact(result)]


def _shows_all(history: History, row: int) -> bool:
    """Whether a ``receive`` shows all available messages: it returned a list, or ``None`` for none."""
    return history.result[row] is None or isinstance(history.result[row], list)


def _taken_unseen(history: History, rows: Sequence[int], received: Sequence[int], redelivers: bool) -> float:
    """How many messages receives of unknown outcome may have taken; any number if receives return lists."""
    if redelivers:
        return 0
    crashed = sum(history.f[row] == "receive" and history.status[row] == INFO for row in rows)
    takes_many = any(isinstance(history.result[row], list) for row in received)
    return math.inf if crashed and takes_many else crashed


class _Missing:
    """Messages of one key that no receive showed."""

    def __init__(self) -> None:
        self._looked_for: list[tuple[int, str]] = []
        self._others: list[tuple[int, str]] = []

    def add(self, row: int, text: str, *, is_looked_for: bool) -> None:
        """Add a message.  ``is_looked_for``: a later receive was certain to show it, if it was still there."""
        (self._looked_for if is_looked_for else self._others).append((row, text))

    def judge(self, tally: Tally, kind: str, unseen: float, of_queue: str) -> str | None:
        """Count messages that were looked for under ``kind``, unless receives may have taken all of them ``unseen``;
        count all others as missing.  Returns why the fate of some is not known, if it is not."""
        is_certain = len(self._looked_for) > unseen
        for row, text in self._looked_for:
            tally.add(kind if is_certain else "missing", (row,), text)
        for row, text in self._others:
            tally.add("missing", (row,), text)
        if self._others:
            return f"{self._others[0][1]}, and no receive found the queue{of_queue} empty afterwards"
        if self._looked_for and not is_certain:
            return f"{self._looked_for[0][1]}, and receives{of_queue} of unknown outcome may have taken it"
        return None


def check_delay(
    events: Events,
    *,
    tolerance_ms: float = 1000.0,
    resolution_ms: float = 0.0,
    late_is_wrong: bool = True,
    redelivers: bool = False,
) -> Result:
    """Check that delayed messages arrived no earlier than due, and not much later.

    Operations: ``send`` of ``{"message": m, "delay_ms": d}``, ``receive`` of a message or a list of them.  Each key has
    its own messages.  A delivery is ``early`` when its receive returned before the send's invocation plus the delay, by
    more than ``resolution_ms`` (a system with times in whole milliseconds truncates up to one).  It is ``late`` when
    the first receive of the message returned more than ``tolerance_ms`` after the send's return plus the delay.  A
    message is ``lost`` when its send was acknowledged, it was due with its tolerance before the last receive began that
    showed all available messages (as a list, or ``None``), and it was never received.  It is ``missing``, and the
    answer unknown, if later receives showed only single messages, or if receives of unknown outcome may have taken it,
    unless the system ``redelivers`` unacknowledged messages.  A message is ``unexpected`` if it was received although
    all its sends failed, or none was invoked.  With ``late_is_wrong`` false, late deliveries are counted but valid: a
    system under faults may deliver afterwards.  Also unknown without times, if no receive completed, or none for a key
    with an acknowledged send.
    """
    history = History.of(events)
    wrong, noted = ["lost", "early", "unexpected"], ["delivered", "pending", "missing"]
    (wrong if late_is_wrong else noted).append("late")
    tally = Tally("delay", history, wrong=wrong, noted=noted)
    looked, unknown = False, None
    for key, rows in history.rows_by_key().items():
        received = [row for row in rows if history.f[row] == "receive" and history.status[row] == OK]
        sent = [row for row in rows if history.f[row] == "send" and history.status[row] != FAIL]
        looked = looked or bool(received)
        if not received and any(history.status[row] == OK for row in sent):
            unknown = unknown or f"no receive{of_key(key)} completed"
        missing, unseen = _Missing(), _taken_unseen(history, rows, received, redelivers)
        untimed = _check_delays(history, sent, received, tally, missing, tolerance_ms, resolution_ms)
        unknown = missing.judge(tally, "lost", unseen, of_key(key)) or unknown
        if untimed is not None:
            unknown = f"{named_row(history, untimed)} has no times, so delays cannot be judged"
    late = f", {tally.counts['late']} of them late" if tally.counts["late"] else " in time"
    if not looked:
        unknown = unknown or "no receive completed"
    return tally.result(fine=f"{tally.counts['delivered']} delayed messages arrived{late}", unknown=unknown)


def _check_delays(
    history: History,
    sent: Sequence[int],
    received: Sequence[int],
    tally: Tally,
    missing: _Missing,
    tolerance_ms: float,
    resolution_ms: float,
) -> int | None:
    """Judge the sends and receives of one key.  Returns one of them that lacks a necessary time, if any does."""
    first: dict[Any, int] = {}
    untimed = next((row for row in received if history.invoked_ns[row] is None), None)
    last_start_ns = max((history.invoked_ns[row] or 0 for row in received), default=-1)
    tellers = [row for row in received if _shows_all(history, row)]
    last_told_ns = max((history.invoked_ns[row] or 0 for row in tellers), default=-1)
    lacking: int | None = None
    for row in received:
        for message in _received(history, row):
            if message not in first or history.returned[row] < history.returned[first[message]]:
                first[message] = row
    known = {exact(history.value[row]["message"]) for row in sent}
    for message, row in first.items():
        if message not in known:
            tally.add("unexpected", (row,), f"{named_row(history, row)} got {short(message)}, which was never sent")
    for row in sent:
        started, ended = history.invoked_ns[row], history.returned_ns[row]
        if started is None or (ended is None and history.status[row] == OK):
            lacking = row
            continue
        message = exact(history.value[row]["message"])
        delay_ns = number(history.value[row]["delay_ms"]) * 1e6
        due_ns = (started if ended is None else ended) + delay_ns + tolerance_ms * 1e6
        if message in first:
            receive = first[message]
            seen_ns = history.returned_ns[receive]
            tally.counts["delivered"] += 1
            if seen_ns is None:
                lacking = receive
            elif seen_ns < started + delay_ns - resolution_ms * 1e6:
                early_ms = (started + delay_ns - seen_ns) / 1e6
                text = f"{named_row(history, receive)} was {early_ms:.1f} ms early for {named_row(history, row)}"
                tally.add("early", (row, receive), text)
            elif history.status[row] == OK and seen_ns > due_ns:
                late_ms = (seen_ns - due_ns) / 1e6 + tolerance_ms
                text = f"{named_row(history, receive)} was {late_ms:.1f} ms late for {named_row(history, row)}"
                tally.add("late", (row, receive), text)
        elif history.status[row] == OK:
            if due_ns < last_start_ns:
                text = f"{short(message)} of {named_row(history, row)} never arrived"
                missing.add(row, text, is_looked_for=due_ns < last_told_ns)
            else:
                tally.counts["pending"] += 1
                lacking = lacking if untimed is None else untimed
    return lacking


def check_transaction_visibility(events: Events, *, redelivers: bool = False) -> Result:
    """Check that transactional messages were received if they were committed, and only then.

    Operations, each with the message as its value: ``prepare``, ``commit``, ``rollback``; and ``receive`` of a message
    or a list.  Each key has its own messages.  Counts ``rolled-back-seen``, ``prepared-seen`` (received before any
    commit was invoked, or without one), ``committed-lost`` (a commit was acknowledged, a later receive showed all
    available messages, as a list or ``None``, and no receive ever showed this one) and ``unexpected`` (received, but
    never prepared, committed or rolled back).  Unknown if no receive completed, or none for a key with an acknowledged
    commit, or if a committed message is ``missing``: later receives showed only single messages, or receives of unknown
    outcome may have taken it, unless the system ``redelivers`` unacknowledged messages.
    """
    history = History.of(events)
    tally = Tally(
        "transaction-visibility",
        history,
        wrong=("committed-lost", "rolled-back-seen", "prepared-seen", "unexpected"),
        noted=("committed", "rolled-back", "missing"),
    )
    looked, unknown = False, None
    for key, rows in history.rows_by_key().items():
        received = [row for row in rows if history.f[row] == "receive" and history.status[row] == OK]
        looked = looked or bool(received)
        missing, unseen = _Missing(), _taken_unseen(history, rows, received, redelivers)
        if _check_visibility(history, rows, received, tally, missing) and not received:
            unknown = unknown or f"no receive{of_key(key)} completed"
        unknown = missing.judge(tally, "committed-lost", unseen, of_key(key)) or unknown
    if not looked:
        unknown = unknown or "no receive completed"
    return tally.result(fine=f"{tally.counts['committed']} committed messages seen, nothing else", unknown=unknown)


def _check_visibility(
    history: History, rows: Sequence[int], received: Sequence[int], tally: Tally, missing: _Missing
) -> int:
    """Judge the messages of one key.  Returns how many of them were certainly committed."""
    asked: dict[Any, int] = {}  # message -> its first commit that did not fail
    committed: dict[Any, int] = {}  # message -> its commit, first attempt or retry, that was acknowledged first
    rolled_back: dict[Any, int] = {}
    known: set[Any] = set()
    for row in rows:
        f = history.f[row]
        if f in ("prepare", "commit", "rollback"):
            message = exact(history.value[row])
            known.add(message)
            if f == "commit" and history.status[row] != FAIL:
                asked.setdefault(message, row)
            if f != "prepare" and history.status[row] == OK:
                ends = committed if f == "commit" else rolled_back
                ends[message] = min(ends.get(message, row), row, key=history.returned.__getitem__)
    seen: set[Any] = set()
    last_start = last_told = -1
    # The receive that returned first is the one that may have been too early.
    for row in sorted(received, key=history.returned.__getitem__):
        last_start = max(last_start, history.invoked[row])
        if _shows_all(history, row):
            last_told = max(last_told, history.invoked[row])
        for message in _received(history, row):
            if message in seen:
                continue
            seen.add(message)
            if message not in known:
                text = f"{named_row(history, row)} saw {short(message)}, which nobody prepared"
                tally.add("unexpected", (row,), text)
                continue
            commit, rollback = asked.get(message), rolled_back.get(message)
            if commit is None and rollback is not None:
                text = f"{named_row(history, row)} saw {short(message)} of {named_row(history, rollback)}"
                tally.add("rolled-back-seen", (rollback, row), text)
            elif commit is None or history.invoked[commit] > history.returned[row]:
                text = f"{named_row(history, row)} saw {short(message)}, prepared but not committed by then"
                tally.add("prepared-seen", (row,), text)
    for message, row in committed.items():
        if message not in seen and history.returned[row] < last_start:
            text = f"{short(message)} of {named_row(history, row)} was never received"
            missing.add(row, text, is_looked_for=history.returned[row] < last_told)
    tally.counts["committed"] += len(committed)
    tally.counts["rolled-back"] += len(rolled_back)
    return len(committed)


def check_consumer_progress(events: Events) -> Result:
    """Check that the offsets that consumers commit or fetch never go backwards.

    Operations with a result (or value) ``{"group", "queue", "offset"}``: ``commit`` stores an offset, ``fetch`` returns
    the stored one.  Each key has its own offsets.  A ``fetch`` of an offset below one that an acknowledged commit or
    another fetch had shown before it was invoked is a ``regression``; a process that commits less than it committed
    before goes ``backward``.  Both are counted and invalid.  Unknown if no commit and no fetch completed.  Raises
    TypeError for offsets that are not numbers.
    """
    history = History.of(events)
    tally = Tally("consumer-progress", history, wrong=("regression", "backward"), noted=("commits", "fetches"))
    groups: dict[Any, list[int]] = {}
    for row, f in enumerate(history.f):
        if f in ("commit", "fetch") and history.status[row] == OK:
            about = _progress(history, row)
            place = (exact(history.key[row]), exact(about.get("group")), exact(about.get("queue")))
            groups.setdefault(place, []).append(row)
    for rows in groups.values():
        done = sorted(rows, key=history.returned.__getitem__)
        reached: Any = None
        by, at = -1, 0
        own: dict[Any, int] = {}
        for row in sorted(rows, key=history.invoked.__getitem__):
            while at < len(done) and history.returned[done[at]] < history.invoked[row]:
                offset = _offset(history, done[at])
                if reached is None or offset > reached:
                    reached, by = offset, done[at]
                at += 1
            offset = _offset(history, row)
            if history.f[row] == "fetch":
                tally.counts["fetches"] += 1
                if reached is not None and offset < reached:
                    text = (
                        f"{named_row(history, row)} went back to offset {offset}, after {reached} in "
                        f"{named_row(history, by)}"
                    )
                    tally.add("regression", (by, row), text)
                continue
            tally.counts["commits"] += 1
            before = own.get(history.process[row])
            if before is not None and _offset(history, before) > offset:
                tally.add(
                    "backward", (before, row), f"{named_row(history, row)} committed a smaller offset than before"
                )
            own[history.process[row]] = row
    return tally.result(
        fine=f"{tally.counts['commits']} commits and {tally.counts['fetches']} fetches, none backwards",
        unknown=None if groups else "no commit and no fetch completed",
    )


def _progress(history: History, row: int) -> Mapping[str, Any]:
    result = history.result[row]
    if history.f[row] == "fetch" and not isinstance(result, Mapping):
        return {**(history.value[row] or {}), "offset": -1 if result is None else result}
    found = result if isinstance(result, Mapping) else history.value[row]
    return dict(found)


def _offset(history: History, row: int) -> Any:
    return number(_progress(history, row)["offset"])


def check_replicas(logs: Mapping[str, Sequence[Any]], committed: Mapping[str, int] | None = None) -> Result:
    """Check that replicas hold the same committed entries.

    ``logs`` maps a node to its entries (or digests of them) from the first, ``committed`` to how many of them it knows
    to be committed (default: all).  Counts ``diverged`` pairs, each with its first differing index, and ``missing``:
    nodes that claim more committed entries than they hold.  Either is invalid; without any log the answer is unknown.
    """
    tally = Tally("replicas", History(), wrong=("diverged", "missing"), noted=("replicas",))
    tally.counts["replicas"] = len(logs)
    sizes: dict[str, int] = {}
    for node, log in logs.items():
        claimed = len(log) if committed is None else committed.get(node, len(log))
        if claimed > len(log):
            tally.add("missing", (), f"{node} claims {claimed} committed entries and holds {len(log)}")
        sizes[node] = min(claimed, len(log))
    longest = max(logs, key=lambda node: sizes[node], default=None)
    for node, log in logs.items():
        if longest is None or node == longest:
            continue
        size = sizes[node]
        if list(map(exact, log[:size])) != list(map(exact, logs[longest][:size])):
            index = next(i for i in range(size) if exact(log[i]) != exact(logs[longest][i]))
            entries = f"{short(log[index])} and {short(logs[longest][index])}"
            text = f"{node} and {longest} differ at index {index}: {entries}"
            tally.add("diverged", (), text)
    unknown = None if logs else "no logs to compare"
    return tally.result(fine=f"{len(logs)} replicas agree on their committed entries", unknown=unknown)
