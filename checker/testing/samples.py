"""Random concurrent histories: a real object used by simulated clients, with crashes and occasional lies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from checker.history import History
from checker.models.base import ILLEGAL, Model
from checker.models.collections import FIFOQueue, GrowOnlySet, PriorityQueue, Set, Stack, UnorderedQueue
from checker.models.counters import Counter, FetchAndAdd
from checker.models.keyvalue import KeyValue
from checker.models.logs import Log, Topic
from checker.models.registers import CASRegister, MultiRegister, Mutex, Register, VersionedRegister

__all__ = ["SAMPLED_MODELS", "random_history"]

Request = tuple[str, Any]
#: Chooses the next request: the random source, a number never used before, how many values to choose from (0: fresh).
Choose = Callable[[random.Random, int, int], Request]


def _value(rng: random.Random, fresh: int, spread: int) -> int:
    return rng.randrange(1, spread + 1) if spread else fresh


def _register(rng: random.Random, fresh: int, spread: int) -> Request:
    return ("read", None) if rng.random() < 0.5 else ("write", _value(rng, fresh, spread))


def _cas(rng: random.Random, fresh: int, spread: int) -> Request:
    if rng.random() < 0.35:
        old = rng.choice([None, *range(1, (spread or fresh) + 1)])
        return "cas", (old, _value(rng, fresh, spread))
    return _register(rng, fresh, spread)


def _multi(rng: random.Random, fresh: int, spread: int) -> Request:
    steps = []
    for name in rng.sample("xyz", rng.randrange(1, 3)):
        steps.append(("read", name, None) if rng.random() < 0.5 else ("write", name, _value(rng, fresh, spread)))
    return "txn", steps


def _mutex(rng: random.Random, fresh: int, spread: int) -> Request:
    return rng.choice(["acquire", "release"]), None


def _puts(put: str, take: str) -> Choose:
    def choose(rng: random.Random, fresh: int, spread: int) -> Request:
        return (take, None) if rng.random() < 0.5 else (put, _value(rng, fresh, spread))

    return choose


def _set(rng: random.Random, fresh: int, spread: int) -> Request:
    f = rng.choice(["add", "remove", "contains"] + (["read"] if fresh % 2 else []))
    return f, None if f == "read" else rng.randrange(1, 4)


def _grow(rng: random.Random, fresh: int, spread: int) -> Request:
    return ("read", None) if rng.random() < 0.5 else ("add", _value(rng, fresh, spread))


def _counter(rng: random.Random, fresh: int, spread: int) -> Request:
    return ("read", None) if rng.random() < 0.5 else ("add", rng.choice([1, 2, 3, -1] if spread else [1, 2]))


def _log(rng: random.Random, fresh: int, spread: int) -> Request:
    f = rng.choice(["append", "read", "tail"])
    return (f, _value(rng, fresh, spread)) if f == "append" else (f, {"offset": rng.randrange(3), "max": 3})


def _topic(rng: random.Random, fresh: int, spread: int) -> Request:
    f = rng.choice(["send", "read", "tail"])
    if f == "send":
        return f, _value(rng, fresh, spread)
    return f, {"queue": rng.randrange(2), "offset": rng.randrange(2), "max": 3}


def _strings(rng: random.Random, fresh: int, spread: int) -> Request:
    f = rng.choice(["get", "get", "append", "put"])
    return f, None if f == "get" else f"{_value(rng, fresh, spread)};"


#: Models with a way to use each.
SAMPLED_MODELS: dict[str, tuple[Model, Choose]] = {
    "register": (Register(), _register),
    "cas-register": (CASRegister(), _cas),
    "multi-register": (MultiRegister(), _multi),
    "versioned-register": (VersionedRegister(), _register),
    "mutex": (Mutex(), _mutex),
    "set": (Set(), _set),
    "grow-only-set": (GrowOnlySet(), _grow),
    "counter": (Counter(), _counter),
    "fetch-and-add": (FetchAndAdd(), _counter),
    "fifo-queue": (FIFOQueue(), _puts("enqueue", "dequeue")),
    "stack": (Stack(), _puts("push", "pop")),
    "priority-queue": (PriorityQueue(), _puts("insert", "extract")),
    "unordered-queue": (UnorderedQueue(), _puts("enqueue", "dequeue")),
    "log": (Log(), _log),
    "topic": (Topic(queues=2), _topic),
    "key-value": (KeyValue(), _strings),
}


def random_history(
    name: str,
    rng: random.Random,
    *,
    operations: int = 6,
    processes: int = 3,
    spread: int = 0,
    crash: float = 0.1,
    lie: float = 0.15,
) -> History:
    """A history of ``operations`` operations on the model called ``name``.

    ``spread`` is how many values writes choose from (0: every write its own).  ``crash`` is the share of operations
    that end with unknown outcome, half of them without an effect; ``lie`` is the share of answers replaced by those of
    others, which may or may not break the history.
    """
    model, choose = SAMPLED_MODELS[name]
    state: Any = model.start()
    events: list[dict[str, Any]] = []
    open_requests: dict[int, dict[str, Any]] = {}
    issued, next_process = 0, processes
    idle = list(range(processes))
    answers: dict[str, list[Any]] = {}
    while issued < operations or open_requests:
        if idle and issued < operations and (not open_requests or rng.random() < 0.5):
            process = idle.pop(rng.randrange(len(idle)))
            issued += 1
            f, value = choose(rng, issued, spread)
            open_requests[process] = {"f": f, "value": value, "done": False}
            events.append({"process": process, "type": "invoke", "f": f, "value": value})
            continue
        process = rng.choice(sorted(open_requests))
        request = open_requests[process]
        f, value = request["f"], request["value"]
        if not request["done"]:
            if rng.random() >= crash / 2:
                state, request["type"], request["result"] = _perform(model, state, f, value, rng)
                request["done"] = True
                continue
            kind, result = "info", None
        elif rng.random() < crash / 2:
            kind, result = "info", None
        else:
            kind, result = request["type"], request["result"]
            if kind == "fail" and rng.random() < lie:
                kind, result = "ok", value
            elif kind == "ok":
                if rng.random() < lie and answers.get(f):
                    result = rng.choice(answers[f])
                answers.setdefault(f, []).append(result)
        del open_requests[process]
        events.append({"process": process, "type": kind, "f": f, "value": result})
        idle.append(next_process if kind == "info" else process)
        next_process += kind == "info"
    return History.from_events(events)


def _perform(model: Model, state: Any, f: str, value: Any, rng: random.Random) -> tuple[Any, str, Any]:
    """Perform the operation on the object: state after, outcome, result."""
    result = _answer(model, state, f, value, rng)
    after = model.step(state, f, value, result)
    if after is ILLEGAL:
        return state, "fail", None
    return after, "ok", result


def _answer(model: Model, state: Any, f: str, value: Any, rng: random.Random) -> Any:
    if isinstance(model, MultiRegister):
        return _transact(dict(state), value)
    if isinstance(model, (FIFOQueue, Stack, PriorityQueue, UnorderedQueue)):
        if f in model.puts:
            return value
        if not state:
            return None
        if isinstance(model, UnorderedQueue):
            return rng.choice(state)
        return state[-1] if isinstance(model, Stack) else state[0]
    if isinstance(model, VersionedRegister):
        return list(state) if f == "read" else state[0] + 1
    if isinstance(model, (Set, GrowOnlySet)):
        if f == "read":
            return sorted(state)
        return (value in state) if f in ("contains", "remove") else value not in state
    if isinstance(model, CASRegister) and f == "cas" and state != value[0]:
        return False
    if isinstance(model, FetchAndAdd):
        return state
    if isinstance(model, Log):
        return _look(state, f, value, [len(state), value])
    if isinstance(model, Topic):
        queue = rng.randrange(model.queues) if f == "send" else value["queue"]
        result = _look(state[queue], f, value, [queue, len(state[queue])])
        if f == "tail":
            return [queue, result]
        return {"queue": queue, **result} if f == "read" else result
    return state if f in model.pure else value


def _transact(registers: dict[str, Any], steps: list[Any]) -> list[Any]:
    out = []
    for kind, name, value in steps:
        if kind == "write":
            registers[name] = value
        out.append((kind, name, registers.get(name)))
    return out


def _look(log: tuple[Any, ...], f: str, value: Any, appended: list[Any]) -> Any:
    if f == "tail":
        return len(log)
    if f != "read":
        return appended
    offset = value["offset"]
    return {"offset": offset, "messages": list(log[offset : offset + value["max"]]), "tail": len(log)}
