"""Random histories that make trouble.

First a correct object is simulated: every operation takes effect at one moment between its invocation and its return.
Operations fail with and without an error, crash before or after their effect, or take effect long after they crashed,
and processes go on after a crash.  Then, in three of four histories, one or two events are falsified: an answer is
replaced, a success reported as a failure, or a failure as a success.  Finally the history may be cut off at any event.

Values come in families, because what makes trouble for one engine keeps another from being chosen: values that all
differ, few values that repeat, and values that a careless comparison confuses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checker.testing.definitions.objects import PUTS, Object, make_object
from checker.testing.definitions.values import canonical

__all__ = ["OPTIONS", "Sample", "draw_options", "draw_sample"]

Event = dict[str, Any]
Options = dict[str, Any]

MIXED = (None, True, False, 0, 1, 1.5, "1", "", "true", [1], [True], ["1"], {"a": 1}, {"a": True}, [None])
"""No two of these are equal, but each resembles another."""

PROCESSES: tuple[tuple[Any, ...], ...] = ((0, 1, 2, 3), ("a", "b", "c", "d"), ("client-1", 0, "0", 1), (7, 3, 5, 11))
KEYS: tuple[tuple[Any, ...], ...] = ((None,), (None,), (None,), ("x", "y"), (1, "1"), (0, 1, 2))
AWAY = (-1, -1, 1, 1, 1 << 50)
"""How far a false number is from the true one: one away, or too far to be reached by counting up to it."""
ERRORS = ("connection refused", "not the leader", ["timeout", 5])

OPTIONS: dict[str, tuple[Options, ...]] = {
    "register": ({}, {"initial": 0}, {"initial": 1, "none_is_any": False}, {"none_is_any": True}),
    "cas-register": ({}, {"initial": 0}, {"initial": 1, "none_is_any": False}, {"none_is_any": True}),
    "multi-register": ({}, {"initial": {"x": 0, "y": 1}}, {"initial": {"x": True}}),
    "versioned-register": ({}, {"initial": 0, "initial_version": 3}, {"initial": 1}),
    "mutex": ({}, {"held": True}),
    "counter": ({}, {"initial": 5}, {"initial": -1}),
    "fetch-and-add": ({}, {"initial": 3}),
    "priority-queue": ({}, {"largest_first": True}),
    "topic": ({"queues": 2}, {"queues": 1}, {}),
    "key-value": ({}, {"initial": "ab"}),
}
"""The options that each model is sampled with; models not listed here have none."""


@dataclass
class Sample:
    """A history, the object it is a history of, and that object's options."""

    name: str
    options: Options
    events: list[Event]
    is_distinct: bool = True

    def specification(self) -> Object:
        """The object to judge the history by."""
        return make_object(self.name, self.options)


@dataclass
class _Values:
    """Where the values of one history come from."""

    rng: random.Random
    family: str
    used: int = 0
    pool: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = list(MIXED)
        self.rng.shuffle(self.pool)

    def new(self) -> Any:
        """A value to put: unused so far in the families whose values differ."""
        self.used += 1
        if self.family == "few":
            return self.rng.randrange(3)
        if self.family == "mixed few":
            return self.rng.choice((None, True, 1, 1.0, "1", False, 0))
        if self.family == "mixed":
            return self.pool[self.used % len(self.pool)]
        if self.family == "strings":
            return f"v{self.used}"
        return self.used

    def any(self) -> Any:
        """A value that may or may not have been put."""
        if self.family.startswith("mixed"):
            return self.rng.choice((*MIXED, 1.0, 0.0))
        if self.family == "few":
            return self.rng.choice((0, 1, 2, 1.0, None))
        drawn = self.rng.randrange(self.used + 2)
        return f"v{drawn}" if self.family == "strings" else self.rng.choice((drawn, drawn, drawn, float(drawn), None))


FAMILIES = ("distinct", "distinct", "strings", "mixed", "mixed few", "few")


def draw_options(name: str, rng: random.Random) -> Options:
    """One of that model's combinations of options."""
    return dict(rng.choice(OPTIONS.get(name, ({},))))


def _ask_register(values: _Values, rng: random.Random) -> tuple[str, Any]:
    return ("read", None) if rng.random() < 0.5 else ("write", values.new())


def _ask_cas_register(values: _Values, rng: random.Random) -> tuple[str, Any]:
    return ("cas", [values.any(), values.new()]) if rng.random() < 0.35 else _ask_register(values, rng)


def _ask_multi_register(values: _Values, rng: random.Random) -> tuple[str, Any]:
    steps = []
    for _ in range(rng.randint(1, 3)):
        register = rng.choice(("x", "y", "z"))
        steps.append(["read", register, None] if rng.random() < 0.6 else ["write", register, values.new()])
    return "txn", steps


def _ask_mutex(values: _Values, rng: random.Random) -> tuple[str, Any]:
    return rng.choice(("acquire", "release")), None


def _ask_set(values: _Values, rng: random.Random) -> tuple[str, Any]:
    f = rng.choice(("add", "add", "remove", "contains", "read"))
    return f, None if f == "read" else values.new() if f == "add" and rng.random() < 0.7 else values.any()


def _ask_grow_only_set(values: _Values, rng: random.Random) -> tuple[str, Any]:
    return ("read", None) if rng.random() < 0.5 else ("add", values.new())


def _ask_counter(values: _Values, rng: random.Random) -> tuple[str, Any]:
    f = rng.choice(("read", "read", "add", "increment", "decrement"))
    if f == "read" or (f != "add" and rng.random() < 0.7):
        return f, None
    return f, rng.choice((1, 2, 5, 0, -1, 2.0))


def _ask_fetch_and_add(values: _Values, rng: random.Random) -> tuple[str, Any]:
    if rng.random() < 0.3:
        return "read", None
    amounts = (1,) if values.family in ("distinct", "strings") else (1, 2) if values.family == "few" else (0, 1, 2, -1)
    return rng.choice(("add", "add", "fetch-and-add")), rng.choice(amounts)


def _asker_of_container(put: str, take: str) -> Callable[[_Values, random.Random], tuple[str, Any]]:
    def ask(values: _Values, rng: random.Random) -> tuple[str, Any]:
        if rng.random() < 0.5:
            return take, None
        value = values.new()
        return put, "null" if value is None else value

    return ask


def _ask_priority_queue(values: _Values, rng: random.Random) -> tuple[str, Any]:
    if rng.random() < 0.5:
        return "extract", None
    if values.family == "strings":
        return "insert", rng.choice(("a", "b", "c", "d", "e", "f", "g", "h", "i")) + str(values.new())
    values.used += 1
    number = rng.randrange(3) if values.family in ("few", "mixed few") else rng.randrange(9) * 9 + values.used
    return "insert", rng.choice((number, number, float(number)))


def _range_asked(rng: random.Random) -> dict[str, Any]:
    asked: dict[str, Any] = {"offset": rng.choice((0, 0, 0, 1, 2, 3))}
    if rng.random() < 0.7:
        asked["max"] = rng.choice((1, 2, 10, 10))
    return asked


def _ask_log(values: _Values, rng: random.Random) -> tuple[str, Any]:
    f = rng.choice(("append", "append", "read", "read", "tail"))
    if f == "append":
        return f, values.new()
    return f, _range_asked(rng) if f == "read" else None


def _ask_topic(values: _Values, rng: random.Random) -> tuple[str, Any]:
    f, value = _ask_log(values, rng)
    if f == "append":
        return "send", value
    return f, {**(value or {}), "queue": rng.choice((0, 0, 0, 1))}


def _ask_key_value(values: _Values, rng: random.Random) -> tuple[str, Any]:
    f = rng.choice(("get", "get", "put", "append", "append"))
    if f == "get":
        return f, None
    values.used += 1
    return f, rng.choice(("a", "b", "", "ab")) if values.family.endswith("few") else f"<{values.used}>"


ASK: dict[str, Callable[[_Values, random.Random], tuple[str, Any]]] = {
    "register": _ask_register,
    "cas-register": _ask_cas_register,
    "multi-register": _ask_multi_register,
    "versioned-register": _ask_register,
    "mutex": _ask_mutex,
    "set": _ask_set,
    "grow-only-set": _ask_grow_only_set,
    "counter": _ask_counter,
    "fetch-and-add": _ask_fetch_and_add,
    "fifo-queue": _asker_of_container("enqueue", "dequeue"),
    "stack": _asker_of_container("push", "pop"),
    "priority-queue": _ask_priority_queue,
    "unordered-queue": _asker_of_container("send", "receive"),
    "log": _ask_log,
    "topic": _ask_topic,
    "key-value": _ask_key_value,
}


def _plain(canonical_value: Any) -> Any:
    """The JSON value that a canonical one stands for."""
    kind, *parts = canonical_value
    if kind == "null":
        return None
    if kind == "array":
        return [_plain(part) for part in parts]
    if kind == "object":
        return {_plain(name): _plain(value) for name, value in sorted(parts[0], key=repr)}
    return parts[0]


def _recorded(name: str, f: str, value: Any, answer: Any, rng: random.Random) -> Any:
    """What a truthful system records for an answer of the specification; it may leave out parts that are optional."""
    if name in ("register", "cas-register"):
        return _plain(answer) if f == "read" else answer if f == "cas" else value
    if name == "multi-register":
        return [[step[0], step[1], _plain(recorded)] for step, recorded in zip(value, answer, strict=True)]
    if name == "versioned-register":
        if f == "read":
            return [answer[0], _plain(answer[1])]
        return answer if rng.random() < 0.9 else None
    if name in ("set", "grow-only-set"):
        if f == "read":
            elements = sorted(map(_plain, answer), key=repr)
            rng.shuffle(elements)
            return elements
        return answer if name == "set" and (f == "contains" or rng.random() < 0.8) else None
    if name in ("fifo-queue", "stack", "priority-queue", "unordered-queue"):
        return value if f in PUTS else _plain(answer)
    if name in ("log", "topic") and f in ("read", "tail"):
        return _recorded_read(answer[value["queue"]] if name == "topic" else answer, f, value, rng)
    if name == "log" and f == "append":
        return [answer if rng.random() < 0.9 else None, value]
    if name == "topic":
        return rng.choice((*[list(answer)] * 9, None, [None, answer[1]], [answer[0], None]))
    return answer


def _recorded_read(log: tuple[Any, ...], f: str, asked: dict[str, Any] | None, rng: random.Random) -> Any:
    """A truthful read of a log, occasionally with fewer messages than were asked for."""
    queue = {"queue": asked["queue"]} if asked and "queue" in asked else {}
    if asked is None or f == "tail":
        return [*queue.values(), len(log)] if queue else len(log)
    end = asked["offset"] + asked.get("max", len(log))
    messages = list(map(_plain, log[asked["offset"] : end]))
    if messages and rng.random() < 0.1:
        messages.pop()
    return {**queue, "offset": asked["offset"], "messages": messages, "tail": len(log)}


def _as_answered(value: Any, rng: random.Random) -> Any:
    """The same JSON value, with some whole numbers written as floats."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int) and rng.random() < 0.1:
        return float(value)
    if isinstance(value, list):
        return [_as_answered(item, rng) for item in value]
    return value


@dataclass
class _Running:
    """An operation under way in the simulation."""

    process: Any
    f: str
    value: Any
    key: Any
    has_happened: bool = False
    answer: Any = None


class _Simulation:
    """Clients of correct objects, one per key; events come out in real-time order."""

    def __init__(self, name: str, options: Options, values: _Values, rng: random.Random) -> None:
        self.name, self.values, self.rng = name, values, rng
        self.specification = make_object(name, options)
        self.queues = min(2, options.get("queues", 2))
        self.states: dict[Any, Any] = {}
        self.keys = rng.choice(KEYS)
        self.idle = list(rng.choice(PROCESSES)[: rng.randint(1, 4)])
        self.open: list[_Running] = []
        self.crashed: list[_Running] = []
        self.crash_rate = rng.choice((0.0, 0.1, 0.35))
        self.fail_rate = rng.choice((0.0, 0.1, 0.3))
        self.events: list[Event] = []

    def run(self, operations: int) -> list[Event]:
        """The events of up to that many operations, all completed except crashed ones."""
        asked = 0
        while asked < operations or self.open:
            if self.crashed and self.rng.random() < 0.2:
                self._happen(self.crashed.pop(self.rng.randrange(len(self.crashed))))
            if asked < operations and self.idle and (not self.open or self.rng.random() < 0.5):
                asked += 1
                self._invoke()
            elif self.open:
                self._advance(self.rng.choice(self.open))
            else:
                break
        return self.events

    def _event(self, call: _Running, kind: str, value: Any, **more: Any) -> None:
        event = {"process": call.process, "type": kind, "f": call.f, "value": value, **more}
        if call.key is not None:
            event["key"] = call.key
        self.events.append(event)

    def _invoke(self) -> None:
        process = self.idle.pop(self.rng.randrange(len(self.idle)))
        f, value = ASK[self.name](self.values, self.rng)
        if isinstance(value, dict) and "queue" in value:
            value["queue"] %= self.queues
        call = _Running(process, f, value, self.rng.choice(self.keys))
        self.open.append(call)
        self._event(call, "invoke", value)

    def _happen(self, call: _Running) -> None:
        """Let the operation take effect now, unless the object forbids it."""
        state = self.states.get(canonical(call.key), self.specification.start())
        outcomes = self.specification.outcomes(state, call.f, call.value)
        if outcomes:
            call.answer, after = self.rng.choice(outcomes)
            self.states[canonical(call.key)] = after
            call.has_happened = True

    def _advance(self, call: _Running) -> None:
        draw = self.rng.random()
        if draw < self.crash_rate:
            self._crash(call)
        elif not call.has_happened and draw < self.crash_rate + self.fail_rate:
            self._complete(call, "fail", call.value, **self._error())
        elif not call.has_happened:
            self._happen(call)
            if not call.has_happened:
                self._complete(call, "fail", call.value)
        else:
            recorded = _recorded(self.name, call.f, call.value, call.answer, self.rng)
            self._complete(call, "ok", _as_answered(recorded, self.rng))

    def _crash(self, call: _Running) -> None:
        self.open.remove(call)
        if not call.has_happened:
            self.crashed.append(call)
        if self.rng.random() < 0.7:
            self._event(call, "info", call.value if self.rng.random() < 0.5 else None, **self._error())
            self.idle += [call.process] if self.rng.random() < 0.7 else []

    def _error(self) -> dict[str, Any]:
        return {"error": self.rng.choice(ERRORS)} if self.rng.random() < 0.5 else {}

    def _complete(self, call: _Running, kind: str, value: Any, **more: Any) -> None:
        self.open.remove(call)
        self.idle.append(call.process)
        self._event(call, kind, value, **more)


def _other_answer(name: str, event: Event, events: list[Event], values: _Values, rng: random.Random) -> Any:
    """A well-formed answer that need not be true."""
    same_kind = [other["value"] for other in events if other["type"] == "ok" and other["f"] == event["f"]]
    answer = event["value"]
    if rng.random() < 0.4 and name != "multi-register":
        other = rng.choice(same_kind)
        if name in ("log", "topic") and event["f"] == "read":
            return {**answer, "messages": other["messages"], "tail": other["tail"]}
        return [answer[0], other[1]] if name == "topic" and event["f"] == "tail" else other
    if isinstance(answer, bool):
        return not answer
    if name == "cas-register" and event["f"] == "cas":
        return False
    if name in ("register", "cas-register", "fifo-queue", "unordered-queue"):
        return values.any()
    if name in ("stack", "priority-queue"):
        return rng.choice([None, *(other["value"] for other in events if other["f"] in ("insert", "push"))])
    if isinstance(answer, int | float):
        return answer + rng.choice(AWAY)
    if isinstance(answer, str):
        return rng.choice((answer + "a", answer[:-1], ""))
    if name in ("log", "topic") and event["f"] == "read":
        return _other_range(answer, values, rng)
    if name in ("set", "grow-only-set") and event["f"] == "read":
        return _other_elements(answer, values, rng)
    if isinstance(answer, list) and answer:
        return _other_list(name, event["f"], answer, values, rng)
    return answer


def _other_range(answer: dict[str, Any], values: _Values, rng: random.Random) -> dict[str, Any]:
    """A read of a log with a message added or changed, two messages swapped, or another tail."""
    messages, tail = list(answer["messages"]), answer["tail"]
    kind = rng.randrange(4)
    if kind == 0:
        tail = max(0, tail + rng.choice(AWAY))
    elif kind == 1 and messages:
        messages[rng.randrange(len(messages))] = values.any()
    elif kind == 2 and len(messages) > 1:
        messages[:2] = [messages[1], messages[0]]
    else:
        messages.append(values.any())
        tail += 1
    return {**answer, "messages": messages, "tail": tail}


def _other_elements(answer: list[Any], values: _Values, rng: random.Random) -> list[Any]:
    """A read of a whole set with an element removed or added."""
    changed = list(answer)
    if changed and rng.random() < 0.5:
        del changed[rng.randrange(len(changed))]
        return changed
    more = values.any()
    return changed if canonical(more) in map(canonical, changed) else [*changed, more]


def _other_list(name: str, f: str, answer: list[Any], values: _Values, rng: random.Random) -> list[Any]:
    """A pair or the steps of a transaction with one part changed."""
    changed = list(answer)
    place = rng.randrange(len(changed))
    if name == "multi-register":
        kind, register, value = changed[place]
        changed[place] = [kind, register, values.any() if kind == "read" else value]
    elif name == "versioned-register" and place == 1:
        changed[1] = values.any()
    elif name == "topic" and f == "send" and place == 0:
        changed[0] = 0 if changed[0] else 1
    elif name == "topic":
        changed[1] = max(0, (changed[1] or 0) + rng.choice(AWAY))
    elif isinstance(changed[0], int | float):
        changed[0] = max(0, changed[0] + rng.choice(AWAY))
    return changed


def _lie(name: str, events: list[Event], values: _Values, rng: random.Random) -> None:
    """Change one or two completions so that they differ from what happened."""
    for _ in range(rng.randint(1, 2)):
        recorded = [event for event in events if event["type"] == "ok"]
        if not recorded:
            return
        event = rng.choice(recorded)
        draw = rng.random()
        failed = [event for event in events if event["type"] == "fail"]
        if name == "grow-only-set" and event["f"] == "add":
            reads = [other for other in recorded if other["f"] == "read"]
            event = rng.choice(reads) if reads else event
        if name == "mutex" and failed and draw < 0.6:
            event = rng.choice(failed)
            event["type"] = "ok"
            event.pop("error", None)
        elif draw < 0.75:
            event["value"] = _other_answer(name, event, events, values, rng)
        elif draw < 0.9:
            event["type"] = "fail"
            event.update({"error": rng.choice(ERRORS)} if rng.random() < 0.5 else {})
        else:
            event["type"] = "info"


def _has_equal_puts(events: list[Event]) -> bool:
    """Whether two operations put the same value under the same key."""
    put = [
        (canonical(event.get("key")), canonical(event["value"]))
        for event in events
        if event["type"] == "invoke" and event["f"] in PUTS | {"write", "append", "put"}
    ]
    return len(put) != len(set(put))


def draw_sample(
    name: str, rng: random.Random, *, options: Mapping[str, Any] | None = None, most_operations: int = 7
) -> Sample:
    """A history of two to ``most_operations`` operations of the object ``name``; the same for the same ``rng``."""
    chosen = dict(options) if options is not None else draw_options(name, rng)
    values = _Values(rng, rng.choice(FAMILIES))
    events = _Simulation(name, chosen, values, rng).run(rng.randint(2, most_operations))
    if rng.random() < 0.75:
        _lie(name, events, values, rng)
    if rng.random() < 0.3:
        events = events[: rng.randint(1, len(events))]
    return Sample(name, chosen, events, not _has_equal_puts(events))
