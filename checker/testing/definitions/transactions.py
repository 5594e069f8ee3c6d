"""Isolation levels by trying every order of the transactions.

A history holds transactions of ``["r", key, found]`` with ``["append", key, element]`` (lists) or ``["w", key, value]``
(registers).  A failed transaction did not happen.  One of unknown outcome committed or did not: both are tried; what it
read is unknown.  A register holds null at first, a list is empty, and a list read as null is empty.

* strict-serializable, strong-session-serializable, serializable: an order of the committed transactions in which each,
  executed at once, reads what it returned; the order respects real time, the order of each process, or nothing.
* snapshot-isolation (Berenson et al. 1995, Adya's PL-SI, without real time or sessions): an order of starts and
  commits.  A transaction reads what was committed at its start and its own writes, and commits only if nothing that it
  wrote was committed since.
* causal, read-atomic (Biswas & Enea 2019): an order of commits in which each read finds the version of the last writer
  of its key among those that the transaction sees.  It sees those from which it reads; under causal also what these saw
  and what its process completed before, which the order respects.
* read-committed (Adya's PL-2): an order of the committed transactions, which is that of the versions, in which each
  read finds a version of its key that was committed before it.  An order exists exactly where G0 and G1 do not occur.
* read-uncommitted (Adya's PL-1): an order of the committed transactions with which the order of the elements in every
  list that was read agrees.  Registers never contradict it.

The weak levels have two answers, because Adya's PL-1 does not constrain reads, which alone show the order of the
writes, because it is disputed whether PL-2 requires a transaction to see its own writes, and because a list that a
transaction has appended to can show what it saw before or what it appended to.  ``strict`` constrains all of these,
otherwise they are free; values that nobody wrote contradict every strict level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from checker.testing.definitions.objects import Object, Outcome, State
from checker.testing.definitions.orders import Call, acknowledged, has_order, is_linearizable, is_reached, is_sequential
from checker.testing.definitions.values import canonical

__all__ = ["LEVELS", "Database", "has_repeated_writes", "is_possible", "reads_of_nobody"]

LEVELS = (
    "read-uncommitted",
    "read-committed",
    "read-atomic",
    "snapshot-isolation",
    "serializable",
    "strong-session-serializable",
    "strict-serializable",
)
"""From the weakest to the strongest; each allows all that the next one allows.  Beside them, causal is between
read-atomic and strong-session-serializable."""

Contents = dict[Any, Any]


class Database(Object):
    """All keys of a database of lists or of registers, used by one transaction at a time."""

    def __init__(self, *, lists: bool) -> None:
        self.empty: Any = ("array",) if lists else ("null",)

    def start(self) -> State:
        return frozenset()

    def outcomes(self, state: State, f: str, value: Any) -> list[Outcome]:
        contents = dict(state)
        read = list(self.execute(contents, value))
        return [(read, frozenset(contents.items()))]

    def execute(self, contents: Contents, steps: Any) -> Iterator[Any]:
        """What each read of the transaction finds; ``contents`` is changed by its writes."""
        for kind, name, value in steps:
            key = canonical(name)
            if kind == "append":
                contents[key] = (*contents.get(key, self.empty), canonical(value))
            elif kind == "w":
                contents[key] = canonical(value)
            else:
                yield contents.get(key, self.empty)

    def agrees(self, f: str, value: Any, answer: Any, result: Any) -> bool:
        return bool(answer == self.answered(result))

    def answered(self, steps: Any) -> list[Any]:
        """What the reads of a completed transaction returned."""
        return [
            self.empty if value is None else canonical(value) for kind, _, value in steps if kind not in ("append", "w")
        ]


def _written(calls: Sequence[Call]) -> list[Any]:
    return [
        (canonical(name), canonical(value))
        for call in calls
        for kind, name, value in call.value
        if kind in ("append", "w")
    ]


def has_repeated_writes(calls: Sequence[Call]) -> bool:
    """Whether a value was written twice to the same key, so that its writer is unknown."""
    written = _written(calls)
    return len(written) != len(set(written))


def reads_of_nobody(calls: Sequence[Call]) -> bool:
    """Whether some read returned a value that no transaction of the history asked to write."""
    answered = [
        (canonical(name), canonical(value))
        for call in calls
        if call.status == "ok"
        for kind, name, read in call.result
        if kind not in ("append", "w")
        for value in (read if isinstance(read, list | tuple) else [read])
        if value is not None
    ]
    return not set(_written(calls)).issuperset(answered)


def is_possible(calls: Sequence[Call], level: str, *, lists: bool, strict: bool = True) -> bool:
    """Whether a database with that isolation level allows the transactions.  Raises KeyError for unknown levels."""
    database = Database(lists=lists)
    if level == "strict-serializable":
        return is_linearizable(calls, database)
    if level == "strong-session-serializable":
        return is_sequential(calls, database)
    if strict and reads_of_nobody(calls):
        return False
    if level == "read-uncommitted":
        return _has_writes(calls, database, strict)
    happened = [call for call in calls if call.status != "fail"]
    if level == "serializable":
        return has_order(happened, [[False] * len(happened) for _ in happened], database)
    if level in ("read-atomic", "causal"):
        return _has_visible_versions(happened, database, strict, is_causal=level == "causal")
    search = {"snapshot-isolation": _has_snapshots, "read-committed": _has_versions}[level]
    return search(happened, database, strict)


def _keys_written(call: Call) -> set[Any]:
    return {canonical(name) for kind, name, _ in call.value if kind in ("append", "w")}


def _keys_amended(call: Call) -> set[Any]:
    """Keys whose lists a transaction read after it had appended to them."""
    appended: set[Any] = set()
    amended: set[Any] = set()
    for kind, name, _ in call.value:
        key = canonical(name)
        if kind == "append":
            appended.add(key)
        elif key in appended:
            amended.add(key)
    return amended


def _has_snapshots(calls: Sequence[Call], database: Database, strict: bool) -> bool:
    """Try every order of starts and commits; contents are kept with the number of the transaction that wrote them."""
    required = acknowledged(calls)

    # Transactions that committed, those under way with their snapshots, and what is committed: (value, writer) by key.
    def following(done: frozenset[int], active: frozenset[tuple[int, Any]], committed: Any) -> Iterator[Any]:
        now = dict(committed)
        snapshots = dict(active)
        for number, call in enumerate(calls):
            if number not in done and number not in snapshots:
                seen = {key: value for key, (value, _) in now.items()}
                read = list(database.execute(seen, call.value))
                if call.status == "info" or read == database.answered(call.result):
                    yield done, active | {(number, committed)}, committed
        for number, snapshot in active:
            seen_at_start = dict(snapshot)
            keys = _keys_written(calls[number])
            if all(now.get(key) == seen_at_start.get(key) for key in keys):
                after = {key: value for key, (value, _) in seen_at_start.items()}
                list(database.execute(after, calls[number].value))
                changed = {**now, **{key: (after[key], number) for key in keys}}
                yield done | {number}, active - {(number, snapshot)}, frozenset(changed.items())

    nothing: frozenset[Any] = frozenset()
    return is_reached((nothing, nothing, nothing), lambda done, *_: required <= done, following)


def _has_visible_versions(calls: Sequence[Call], database: Database, strict: bool, *, is_causal: bool) -> bool:
    """Try every order of commits, and for every key that was read every earlier version."""
    required = acknowledged(calls)
    written = [_keys_written(call) for call in calls]
    amended = [_keys_amended(call) if strict else set() for call in calls]
    before = [
        {other for other, one in enumerate(calls) if one.process == call.process and one.returned < call.invoked}
        if is_causal
        else set()
        for call in calls
    ]

    # The committed transactions in their order, each with those that it saw.
    def following(done: frozenset[int], order: tuple[tuple[int, frozenset[int]], ...]) -> Iterator[Any]:
        saw = dict(order)
        numbers = [number for number, _ in order]
        contents: list[Contents] = [{}]
        for number in numbers:
            contents.append(dict(contents[-1]))
            list(database.execute(contents[-1], calls[number].value))
        for number, call in enumerate(calls):
            if number in done or not before[number] <= done:
                continue
            keys = (
                () if call.status == "info" else sorted({canonical(step[1]) for step in call.value if step[0] == "r"})
            )
            places = [[0, *(at + 1 for at, one in enumerate(numbers) if key in written[one])] for key in keys]
            # What a transaction appends to is the latest version.
            places = [held[-1:] if key in amended[number] else held for key, held in zip(keys, places, strict=True)]
            for chosen in product(*places):
                view = {key: contents[at].get(key, database.empty) for key, at in zip(keys, chosen, strict=True)}
                read = list(database.execute(view, call.value))
                if call.status != "info" and read != database.answered(call.result):
                    continue
                sources = {numbers[at - 1] for at in chosen if at} | before[number]
                seen = sources.union(*(saw[source] for source in sources)) if is_causal else sources
                if all(
                    key not in written[other] or numbers.index(other) < at
                    for key, at in zip(keys, chosen, strict=True)
                    for other in seen
                ):
                    yield done | {number}, (*order, (number, frozenset(seen)))

    return is_reached((frozenset[int](), ()), lambda done, _: required <= done, following)


def _has_versions(calls: Sequence[Call], database: Database, strict: bool) -> bool:
    """Try every order of commits, with all versions of every key committed so far."""
    required = acknowledged(calls)

    def following(done: frozenset[int], versions: Any) -> Iterator[Any]:
        versions_of = dict(versions)
        for number, call in enumerate(calls):
            if number not in done and (call.status == "info" or _finds(call, versions_of, database, strict)):
                latest = {key: held[-1] for key, held in versions_of.items()}
                list(database.execute(latest, call.value))
                after = {key: (*versions_of.get(key, (database.empty,)), latest[key]) for key in _keys_written(call)}
                yield done | {number}, frozenset({**versions_of, **after}.items())

    return is_reached((frozenset[int](), frozenset[Any]()), lambda done, _: required <= done, following)


def _finds(call: Call, versions_of: dict[Any, Any], database: Database, strict: bool) -> bool:
    """Whether each read returned a committed version or, after an own write, the latest version with that applied."""
    latest = {key: held[-1] for key, held in versions_of.items()}
    read = iter(list(database.execute(latest, call.value)))
    answered = iter(database.answered(call.result))
    own: set[Any] = set()
    for kind, name, _ in call.value:
        key = canonical(name)
        if kind in ("append", "w"):
            own.add(key)
            continue
        at_its_place, answer = next(read), next(answered)
        if key in own:
            if strict and answer != at_its_place:
                return False
        elif answer not in versions_of.get(key, (database.empty,)):
            return False
    return True


def _has_writes(calls: Sequence[Call], database: Database, strict: bool) -> bool:
    """Try every order of the writes, including uncommitted transactions, against all lists that were read."""
    if database.empty == ("null",) or not strict:
        return True
    reads = [
        (canonical(step[1]), canonical(step[2] or []))
        for call in calls
        if call.status == "ok"
        for step in call.result
        if step[0] not in ("append", "w")
    ]
    required = acknowledged(calls)

    def is_end(done: frozenset[int], contents: Any) -> bool:
        lists = dict(contents)
        return required <= done and all(lists.get(key, ("array",))[: len(seen)] == seen for key, seen in reads)

    def following(done: frozenset[int], contents: Any) -> Iterator[Any]:
        for number, call in enumerate(calls):
            if number not in done:
                after = dict(contents)
                list(database.execute(after, call.value))
                yield done | {number}, frozenset(after.items())

    return is_reached((frozenset[int](), frozenset[Any]()), is_end, following)
