"""Random histories for the checkers other than linearizability: clients of a correct object, and lies."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from checker.testing.definitions.samples import ERRORS, PROCESSES, Sample, draw_sample
from checker.testing.definitions.values import canonical

__all__ = ["PROPERTY_OPTIONS", "draw_property"]

Options = dict[str, Any]

PROPERTY_OPTIONS: dict[str, tuple[Options, ...]] = {
    "unique-ids": ({},),
    "counter-bounds": ({}, {"initial": 3}),
    "exclusion": ({},),
    "bank": ({}, {"total": 10}, {"allow_negative": True}),
    "long-fork": ({},),
    "simple-set": ({},),
    "set-full": ({}, {"linearizable": True}),
    "total-queue": ({}, {"allow_duplicates": False}),
    "consumer-progress": ({},),
    "transaction-visibility": ({},),
    "delay": ({}, {"tolerance_ms": 20.0, "resolution_ms": 1.0}),
    "sessions": ({},),
    "log-losses": ({},),
    "write-skew": ({},),
}
"""The checkers, each with the options that it is sampled with."""

KEYS: tuple[tuple[Any, ...], ...] = (
    ("a", "b"), (1, True), (0, False, None), (1, "1"), ([1], [True]), ({"a": 1}, [["a", 1]]), ("x", None)
)  # fmt: skip
"""Sets of keys for one history, all distinct although some look alike."""

VALUES = (1, 2, 3, True, "1", 1.5, False, 0)


@dataclass
class _Place:
    """What the clients use: one memory for all of them, and what each is in the middle of."""

    rng: random.Random
    lie_rate: float
    used: int = 0
    memory: list[Any] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    time_ms: float = 0.0

    def lies(self) -> bool:
        """Whether to make up this answer."""
        return self.rng.random() < self.lie_rate

    def value(self) -> Any:
        """A value of one of several types, sometimes one that was used already."""
        self.used += 1
        if self.rng.random() < 0.15:
            return self.rng.choice(VALUES)
        return VALUES[self.used % len(VALUES)] if self.rng.random() < 0.5 else self.used + 10


Ask = Callable[[_Place, Any], tuple[str, Any]]
Answer = Callable[[_Place, str, Any, Any], Any]


def _ask_id(place: _Place, process: Any) -> tuple[str, Any]:
    return "generate", None


def _answer_id(place: _Place, f: str, value: Any, process: Any) -> Any:
    shown = place.rng.choice(place.memory) if place.lies() and place.memory else place.value()
    place.memory.append(shown)
    return shown


def _ask_counter(place: _Place, process: Any) -> tuple[str, Any]:
    f = place.rng.choice(("read", "read", "add", "increment", "decrement"))
    return f, place.rng.choice((1, 2, -1, 5)) if f == "add" else None


def _answer_counter(place: _Place, f: str, value: Any, process: Any) -> Any:
    if f != "read":
        place.memory.append(-1 if f == "decrement" else 1 if value is None else value)
        return value
    shown = sum(place.memory) + place.values.get("initial", 0)
    return shown + place.rng.choice((-2, -1, 1, 3)) if place.lies() else shown


def _ask_lock(place: _Place, process: Any) -> tuple[str, Any]:
    wants_release = process in place.memory
    return ("release" if wants_release != (place.rng.random() < 0.1) else "acquire"), None


def _answer_lock(place: _Place, f: str, value: Any, process: Any) -> Any:
    if f == "acquire":
        if any(holder != process for holder in place.memory) and not place.lies():
            return FAILED
        place.memory.append(process)
    else:
        place.memory = [holder for holder in place.memory if holder != process]
    return None


def _ask_bank(place: _Place, process: Any) -> tuple[str, Any]:
    if place.rng.random() < 0.6:
        return "read", None
    return "transfer", {"from": "a", "to": "b", "amount": place.rng.choice((1, 5, 20))}


def _answer_bank(place: _Place, f: str, value: Any, process: Any) -> Any:
    if not place.memory:
        place.memory = [6, 4]
    if f == "transfer":
        if place.memory[0] < value["amount"] and not place.lies():
            return FAILED
        place.memory = [place.memory[0] - value["amount"], place.memory[1] + value["amount"]]
        return value
    shown = list(place.memory)
    if place.lies():
        shown[place.rng.randrange(2)] += place.rng.choice((-20, -1, 1))
    return dict(zip("ab", shown, strict=True)) if place.rng.random() < 0.5 else [["a", shown[0]], ["b", shown[1]]]


def _ask_fork(place: _Place, process: Any) -> tuple[str, Any]:
    unwritten = [key for key in ("x", "y", "z") if key not in place.values]
    if unwritten and place.rng.random() < 0.4:
        key = place.rng.choice(unwritten)
        place.values[key] = None
        return "write", [["w", key, 1]]
    keys = ["x", "y", "z"]
    place.rng.shuffle(keys)
    return "read", [["r", key, None] for key in keys]


def _answer_fork(place: _Place, f: str, value: Any, process: Any) -> Any:
    if f == "write":
        place.values[value[0][1]] = 1
        return value
    shown = [["r", key, place.values.get(key)] for _, key, _ in value]
    if place.lies():
        step = place.rng.choice(shown)
        step[2] = None if step[2] else 1
    return shown


def _ask_row(place: _Place, process: Any) -> tuple[str, Any]:
    if place.rng.random() < 0.3:
        return "read", None
    place.used += 1
    row = f"row {place.used}"
    return "insert", [row, None] if place.rng.random() < 0.5 else [None, row]


def _answer_row(place: _Place, f: str, value: Any, process: Any) -> Any:
    if f == "insert":
        if place.memory and not place.lies():
            return FAILED
        place.memory.append(value[0] or value[1])
        return value
    shown = list(place.memory)
    if place.lies():
        return place.rng.choice(([], [*shown, *shown], [*shown, f"row {place.rng.randint(1, 4)}"]))
    return shown


def _ask_set(place: _Place, process: Any) -> tuple[str, Any]:
    return ("read", None) if place.rng.random() < 0.4 else ("add", place.value())


def _answer_set(place: _Place, f: str, value: Any, process: Any) -> Any:
    if f == "add":
        if canonical(value) not in map(canonical, place.memory):
            place.memory.append(value)
        return value
    shown = list(place.memory)
    if shown and place.lies():
        at = place.rng.randrange(len(shown))
        shown[at : at + 1] = place.rng.choice(([], [shown[at], shown[at]], [], [place.value()]))
    return shown


def _ask_queue(place: _Place, process: Any) -> tuple[str, Any]:
    if place.rng.random() < 0.5:
        return place.rng.choice(("enqueue", "send")), place.value()
    return place.rng.choice(("dequeue", "dequeue", "drain")), None


def _answer_queue(place: _Place, f: str, value: Any, process: Any) -> Any:
    if f in ("enqueue", "send"):
        if not place.lies():
            place.memory.append(value)
        return value
    if f == "drain":
        shown, place.memory = place.memory, []
        return [*shown, place.value()] if place.lies() else shown
    if not place.memory:
        return place.value() if place.lies() else None
    return place.memory[0] if place.lies() else place.memory.pop(0)


def _ask_progress(place: _Place, process: Any) -> tuple[str, Any]:
    where = {"group": place.rng.choice(("g", "h")), "queue": place.rng.choice((0, 0, 1))}
    if place.rng.random() < 0.5:
        return "fetch", where
    place.used += place.rng.choice((0, 1, 3))
    offset = place.rng.randrange(place.used + 1) if place.lies() else place.used
    return "commit", {**where, "offset": offset}


def _answer_progress(place: _Place, f: str, value: Any, process: Any) -> Any:
    where = (value["group"], value["queue"])
    if f == "commit":
        place.values[str(where)] = value["offset"]
        return value
    offset = place.values.get(str(where), 0)
    return {**value, "offset": place.rng.randrange(place.used + 2) if place.lies() else offset}


def _ask_visibility(place: _Place, process: Any) -> tuple[str, Any]:
    own = place.values.setdefault(repr(process), [])
    if own:
        # A client that does not know how the end of a transaction went may ask for the same again.
        f, message = own[-1] if place.rng.random() < 0.5 else own.pop()
        return f, message
    if place.rng.random() < 0.5:
        return "receive", None
    place.used += 1
    own.append((place.rng.choice(("commit", "commit", "rollback")), place.used))
    return "prepare", place.used


def _answer_visibility(place: _Place, f: str, value: Any, process: Any) -> Any:
    if f in ("commit", "rollback") and (f == "commit") != place.lies() and value not in place.memory:
        place.memory.append(value)
    if f != "receive":
        return value
    if place.lies():
        return [*place.memory[1:], place.rng.randrange(place.used + 1)] if place.used else []
    return list(place.memory) if len(place.memory) != 1 or place.rng.random() < 0.5 else place.memory[0]


def _ask_delay(place: _Place, process: Any) -> tuple[str, Any]:
    if place.rng.random() < 0.5:
        return "receive", None
    place.used += 1
    return "send", {"message": place.used, "delay_ms": place.rng.choice((0, 10, 30))}


def _answer_delay(place: _Place, f: str, value: Any, process: Any) -> Any:
    if f == "send":
        due_ms = place.time_ms + value["delay_ms"]
        place.memory.append((due_ms + place.rng.choice((-40, -3, 2000)) if place.lies() else due_ms, value["message"]))
        return value
    shown = [message for due_ms, message in place.memory if due_ms <= place.time_ms]
    place.memory = [(due_ms, message) for due_ms, message in place.memory if due_ms > place.time_ms]
    return shown if len(shown) != 1 or place.rng.random() < 0.5 else shown[0]


def _ask_session(place: _Place, process: Any) -> tuple[str, Any]:
    return ("read", None) if place.rng.random() < 0.6 else ("write", place.value())


def _answer_session(place: _Place, f: str, value: Any, process: Any) -> Any:
    if f == "write":
        place.memory.append(value)
        version = len(place.memory)
        return version - place.rng.randrange(1, 3) if place.lies() and version > 2 else version
    version = len(place.memory)
    if place.lies() and version:
        version -= 1
    return [version, place.memory[version - 1] if version else None]


FAILED = object()
"""The answer of an operation that was refused."""

CLIENTS: dict[str, tuple[Ask, Answer]] = {
    "unique-ids": (_ask_id, _answer_id),
    "counter-bounds": (_ask_counter, _answer_counter),
    "exclusion": (_ask_lock, _answer_lock),
    "bank": (_ask_bank, _answer_bank),
    "long-fork": (_ask_fork, _answer_fork),
    "write-skew": (_ask_row, _answer_row),
    "simple-set": (_ask_set, _answer_set),
    "set-full": (_ask_set, _answer_set),
    "total-queue": (_ask_queue, _answer_queue),
    "consumer-progress": (_ask_progress, _answer_progress),
    "transaction-visibility": (_ask_visibility, _answer_visibility),
    "delay": (_ask_delay, _answer_delay),
    "sessions": (_ask_session, _answer_session),
}
TIMED = frozenset({"delay"})


def draw_property(name: str, rng: random.Random, *, options: Options | None = None, most_operations: int = 9) -> Sample:
    """A history of up to that many operations for the checker ``name``."""
    chosen = dict(rng.choice(PROPERTY_OPTIONS[name]) if options is None else options)
    if name == "log-losses":
        return Sample(name, chosen, draw_sample("log", rng).events)
    keys = rng.choice(KEYS) if rng.random() < 0.4 else (None,)
    lie_rate = rng.choice((0.0, 0.15, 0.4))
    values = {"initial": chosen["initial"]} if "initial" in chosen else {}
    places = [_Place(rng, lie_rate, values=dict(values)) for _ in keys]
    ask, answer = CLIENTS[name]
    crash_rate, fail_rate = rng.choice((0.0, 0.1, 0.3)), rng.choice((0.0, 0.1))
    idle = list(rng.choice(PROCESSES)[: rng.randint(1, 4)])
    running: list[tuple[Any, str, Any, int]] = []
    events: list[dict[str, Any]] = []
    asked, operations = 0, rng.randint(2, most_operations)

    def add(process: Any, kind: str, f: str, value: Any, at: int) -> None:
        passed_ms = rng.choice((0.5, 3.0, 15.0))
        for place in places:
            place.time_ms += passed_ms
        event = {"process": process, "type": kind, "f": f, "value": value}
        if keys[at] is not None:
            event["key"] = keys[at]
        if kind in ("fail", "info") and rng.random() < 0.5:
            event["error"] = rng.choice(ERRORS)
        if name in TIMED:
            event["time"] = int(places[0].time_ms * 1e6)
        events.append(event)

    while running or (asked < operations and idle):
        if asked < operations and idle and (not running or rng.random() < 0.5):
            asked += 1
            process = idle.pop(rng.randrange(len(idle)))
            at = rng.randrange(len(keys)) if len(keys) > 1 else 0
            f, value = ask(places[at], process)
            running.append((process, f, value, at))
            add(process, "invoke", f, value, at)
            continue
        process, f, value, at = running.pop(rng.randrange(len(running)))
        draw = rng.random()
        if draw < crash_rate:
            if rng.random() < 0.5:
                answer(places[at], f, value, process)
            if rng.random() < 0.3:
                continue
            add(process, "info", f, value, at)
        else:
            shown = FAILED if draw < crash_rate + fail_rate else answer(places[at], f, value, process)
            add(process, "fail" if shown is FAILED else "ok", f, value if shown is FAILED else shown, at)
        idle.append(process)
    return Sample(name, chosen, events)
