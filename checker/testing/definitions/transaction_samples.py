"""Random histories of transactions that make trouble.

A correct database runs them first: one at a time, from snapshots, or reading whatever is committed.  They fail, crash
before or after their commit, and processes go on after a crash.  Then, in most histories, one or two events are
falsified: a read is replaced or moved within its transaction, or a committed transaction is reported as failed or of
unknown outcome.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from checker.testing.definitions.samples import ERRORS, PROCESSES, Sample
from checker.testing.definitions.values import canonical

__all__ = ["draw_transactions"]

KEYS: tuple[tuple[Any, ...], ...] = (("x", "y"), ("x", "y"), ("x",), ("x", "y", "z"), (1, "1"), (0, 1))
TRICKY = (True, False, 0, 1, 1.5, "1", "", "true", "x")
"""Values of which no two are equal, each written at most once."""


@dataclass
class _Transaction:
    """A transaction under way: ``plan`` as requested, ``done`` with what its reads found so far."""

    process: Any
    plan: list[list[Any]]
    snapshot: dict[Any, Any]
    done: list[list[Any]] = field(default_factory=list)
    is_committed: bool = False


class _Database:
    """Transactions of some clients against one correct database."""

    def __init__(self, lists: bool, rng: random.Random) -> None:
        self.lists, self.rng = lists, rng
        self.mode = rng.choice(("serial", "serial", "snapshot", "committed"))
        self.keys = rng.choice(KEYS)
        self.tricky = list(TRICKY) if rng.random() < 0.3 else []
        rng.shuffle(self.tricky)
        self.nulls = rng.choice((0, 0, 0, 1))
        self.reads_first = not lists and rng.random() < 0.3
        self.used = 0
        self.committed: dict[Any, Any] = {}
        self.idle = list(rng.choice(PROCESSES)[: rng.randint(1, 4)])
        self.open: list[_Transaction] = []
        self.crash_rate = rng.choice((0.0, 0.1, 0.3))
        self.fail_rate = rng.choice((0.0, 0.1, 0.3))
        self.events: list[dict[str, Any]] = []

    def run(self, transactions: int) -> list[dict[str, Any]]:
        """The events of up to that many transactions."""
        asked = 0
        while self.open or (asked < transactions and self.idle):
            if asked < transactions and self.idle and (not self.open or self.rng.random() < 0.4):
                asked += 1
                self._begin()
            else:
                self._advance(self.rng.choice(self.open))
        return self.events

    def _begin(self) -> None:
        process = self.idle.pop(self.rng.randrange(len(self.idle)))
        plan = [self._step() for _ in range(self.rng.choice((1, 2, 2, 3)))]
        if self.reads_first:
            plan = [each for step in plan for each in ([step] if step[0] == "r" else [["r", step[1], None], step])]
        self.open.append(_Transaction(process, plan, dict(self.committed)))
        self._event(process, "invoke", plan)

    def _step(self) -> list[Any]:
        key = self.rng.choice(self.keys)
        if self.rng.random() < 0.5:
            return ["r", key, None]
        self.used += 1
        value = self.tricky.pop() if self.tricky else self.used + 10
        if self.nulls and self.rng.random() < 0.4:
            self.nulls, value = 0, None
        return ["append" if self.lists else "w", key, value]

    def _event(self, process: Any, kind: str, value: Any) -> None:
        event = {"process": process, "type": kind, "f": "txn", "value": value}
        if kind in ("fail", "info") and self.rng.random() < 0.5:
            event["error"] = self.rng.choice(ERRORS)
        self.events.append(event)

    def _advance(self, running: _Transaction) -> None:
        draw = self.rng.random()
        if draw < self.crash_rate / 2:
            self._end(running, "info")
        elif draw < (self.crash_rate + self.fail_rate) / 2 and not running.is_committed:
            self._end(running, "fail")
        elif running.is_committed:
            self._end(running, "ok")
        elif self.mode == "serial":
            running.snapshot = dict(self.committed)
            self._commit(running)
        elif self.mode == "snapshot":
            written = {canonical(step[1]) for step in running.plan if step[0] != "r"}
            if any(self._seen(self.committed, key) != self._seen(running.snapshot, key) for key in written):
                self._end(running, "fail")
            else:
                self._commit(running)
        else:
            self._commit(running)

    def _seen(self, contents: dict[Any, Any], key: Any) -> Any:
        return contents.get(key, [] if self.lists else None)

    def _commit(self, running: _Transaction) -> None:
        """Execute the steps on the snapshot; in mode ``committed`` each may read what is committed at that moment."""
        base = running.snapshot
        own: dict[Any, Any] = {}
        for kind, name, value in running.plan:
            key = canonical(name)
            if self.mode == "committed" and key not in own and self.rng.random() < 0.5:
                base = {**base, key: self._seen(self.committed, key)}
            if kind == "r":
                running.done.append([kind, name, own.get(key, self._seen(base, key))])
                continue
            before = own.get(key, self._seen(self.committed, key))
            own[key] = [*before, value] if self.lists else value
            running.done.append([kind, name, value])
        self.committed.update(own)
        running.is_committed = True

    def _end(self, running: _Transaction, kind: str) -> None:
        self.open.remove(running)
        if kind == "info":
            if not running.is_committed and self.rng.random() < 0.5:
                self._commit(running)
            if self.rng.random() < 0.3:
                return
            self._event(running.process, kind, running.plan if self.rng.random() < 0.5 else None)
            self.idle += [running.process] if self.rng.random() < 0.7 else []
            return
        self._event(running.process, kind, running.done if kind == "ok" else running.plan)
        self.idle.append(running.process)


def _lie(database: _Database, rng: random.Random) -> None:
    """Change one completion, or one of its reads."""
    completed = [event for event in database.events if event["type"] == "ok"]
    if not completed:
        return
    event = rng.choice(completed)
    reads = [place for place, step in enumerate(event["value"]) if step[0] == "r"]
    draw = rng.random()
    if draw < 0.15 or not reads:
        event["type"] = rng.choice(("fail", "info"))
        return
    steps = [list(step) for step in event["value"]]
    place = rng.choice(reads)
    if draw < 0.3:
        steps = _swapped(database, event, steps, place, rng)
    else:
        steps[place][2] = _other_read(database, steps[place], rng)
    event["value"] = steps


def _swapped(
    database: _Database, event: dict[str, Any], steps: list[list[Any]], place: int, rng: random.Random
) -> list[list[Any]]:
    """Move the read to another place in its transaction, also in the invocation: it then shows another moment."""
    order = list(range(len(steps)))
    order.insert(rng.randrange(len(order)), order.pop(place))
    for invocation in database.events:
        if invocation["type"] == "invoke" and canonical(invocation["process"]) == canonical(event["process"]):
            begun = invocation
        if invocation is event:
            break
    begun["value"] = [begun["value"][old] for old in order]
    return [steps[old] for old in order]


def _other_read(database: _Database, step: list[Any], rng: random.Random) -> Any:
    """Another value for a read: a shorter, longer or reordered list, another written value, or one nobody wrote."""
    asked = [
        other[2]
        for event in database.events
        if event["type"] == "invoke"
        for other in event["value"]
        if other[0] != "r" and canonical(other[1]) == canonical(step[1])
    ]
    nobodys = 99 if rng.random() < 0.15 else None
    if not database.lists:
        return rng.choice([*asked, None]) if nobodys is None else nobodys
    read = list(step[2] or [])
    kind = rng.randrange(4)
    if kind == 0 and read:
        return read[: rng.randrange(len(read))]
    if kind == 1 and len(read) > 1:
        rng.shuffle(read)
        return read
    if kind == 2 and read:
        del read[rng.randrange(len(read))]
        return read
    fresh = [value for value in asked if canonical(value) not in map(canonical, read)]
    if nobodys is not None:
        return [*read, nobodys]
    return [*read, rng.choice(fresh)] if fresh else read


def draw_transactions(name: str, rng: random.Random, *, most_transactions: int = 5) -> Sample:
    """A history of up to that many transactions; ``name`` is ``list-append`` or ``rw-register``."""
    database = _Database(name == "list-append", rng)
    database.run(rng.randint(2, most_transactions))
    for _ in range(rng.choice((0, 1, 1, 2))):
        _lie(database, rng)
    events = database.events
    if rng.random() < 0.2:
        events = events[: rng.randint(1, len(events))]
    return Sample(name, {}, events)
