"""Large random valid histories for benchmarks, written straight into columns."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from checker.history import INFO, NEVER, OK, History

__all__ = ["LARGE", "large_history"]

#: Performs the operation of one row on the object and fills in the row's columns.
Perform = Callable[[random.Random, dict[str, Any], History, int], None]


def _cas(rng: random.Random, state: dict[str, Any], history: History, row: int) -> None:
    kind, held = rng.random(), state.get("value")
    if kind < 0.34:
        history.f[row], history.result[row] = "read", held
    elif kind < 0.67:
        value = rng.randrange(5)
        history.f[row] = "write"
        history.value[row] = history.result[row] = state["value"] = value
    else:
        old, new = rng.randrange(5), rng.randrange(5)
        history.f[row], history.value[row] = "cas", (old, new)
        if held == old:
            state["value"], history.result[row] = new, (old, new)
        else:
            history.result[row] = False


def _register(rng: random.Random, state: dict[str, Any], history: History, row: int) -> None:
    if rng.random() < 0.5:
        history.f[row], history.result[row] = "read", state.get("value")
    else:
        history.f[row] = "write"
        history.value[row] = history.result[row] = state["value"] = row


def _log(rng: random.Random, state: dict[str, Any], history: History, row: int) -> None:
    log = state.setdefault("log", [])
    if rng.random() < 0.5:
        history.f[row], history.value[row], history.result[row] = "append", row, [len(log), row]
        log.append(row)
    else:
        offset = max(0, len(log) - rng.randrange(8))
        history.f[row], history.value[row] = "read", {"offset": offset, "max": 32}
        history.result[row] = {"offset": offset, "messages": log[offset : offset + 32], "tail": len(log)}


def _queue(rng: random.Random, state: dict[str, Any], history: History, row: int) -> None:
    queue = state.setdefault("queue", deque())
    if rng.random() < 0.5:
        history.f[row] = "enqueue"
        history.value[row] = history.result[row] = row
        queue.append(row)
    else:
        history.f[row], history.result[row] = "dequeue", queue.popleft() if queue else None


def _stack(rng: random.Random, state: dict[str, Any], history: History, row: int) -> None:
    stack = state.setdefault("stack", [])
    if rng.random() < 0.5:
        history.f[row] = "push"
        history.value[row] = history.result[row] = row
        stack.append(row)
    else:
        history.f[row], history.result[row] = "pop", stack.pop() if stack else None


def _priority(rng: random.Random, state: dict[str, Any], history: History, row: int) -> None:
    heap = state.setdefault("heap", [])
    if rng.random() < 0.5:
        history.f[row] = "insert"
        # A fixed shuffle of the numbers below a prime, so that priorities differ and follow no order.
        history.value[row] = history.result[row] = row * 7919 % 15_485_863
        heapq.heappush(heap, history.value[row])
    else:
        history.f[row], history.result[row] = "extract", heapq.heappop(heap) if heap else None


def _list_append(rng: random.Random, state: dict[str, Any], history: History, row: int) -> None:
    """Transactions of one to four steps on 30 keys at a time; keys are retired, so that reads stay short."""
    asked, answered = [], []
    for _ in range(rng.randrange(1, 5)):
        key = row // 300 * 30 + rng.randrange(30)
        held = state.setdefault(f"list {key}", [])
        if rng.random() < 0.5:
            asked.append(["r", key, None])
            answered.append(["r", key, list(held)])
        else:
            held.append(state.setdefault("next", 0))
            state["next"] += 1
            asked.append(["append", key, held[-1]])
            answered.append(asked[-1])
    history.f[row], history.value[row], history.result[row] = "txn", asked, answered


LARGE: dict[str, Perform] = {
    "cas-register": _cas,
    "register": _register,
    "log": _log,
    "fifo-queue": _queue,
    "stack": _stack,
    "priority-queue": _priority,
    "list-append": _list_append,
}


def large_history(kind: str, operations: int, clients: int, *, seed: int = 1, crash: float = 0.0) -> History:
    """A linearizable history of that kind (a name in ``LARGE``) by ``clients`` clients, the same for the same seed.

    ``crash`` is the share of operations whose outcome stays unknown; all of them did happen.  Booleans occur only as
    answers of a compare-and-set.
    """
    perform = LARGE[kind]
    rng = random.Random(seed)
    history = History(booleans=False)
    state: dict[str, Any] = {}
    idle, next_process = list(range(clients)), clients
    running: list[tuple[int, int, bool]] = []
    position = issued = 0
    while issued < operations or running:
        if idle and issued < operations and (not running or rng.random() < 0.5):
            process = idle.pop(int(rng.random() * len(idle)))
            history.process.append(process)
            history.f.append("")
            history.value.append(None)
            history.result.append(None)
            history.status.append(OK)
            history.invoked.append(position)
            history.returned.append(NEVER)
            running.append((issued, process, False))
            issued += 1
            position += 1
            continue
        chosen = int(rng.random() * len(running))
        row, process, done = running[chosen]
        if not done:
            perform(rng, state, history, row)
            running[chosen] = (row, process, True)
            if rng.random() < 0.7:
                continue
        running[chosen] = running[-1]
        running.pop()
        if crash and rng.random() < crash:
            history.status[row] = INFO
            idle.append(next_process)
            next_process += 1
        else:
            history.returned[row] = position
            position += 1
            idle.append(process)
    rows = len(history.f)
    history.key = [None] * rows
    history.invoked_ns = [1000 * position for position in history.invoked]
    history.returned_ns = [None if position == NEVER else 1000 * position for position in history.returned]
    history.node = [None] * rows
    return history
