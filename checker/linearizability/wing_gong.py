"""The search for a linearization as it is published, on one page.

After Wing & Gong, "Testing and verifying concurrent objects" (J. Parallel Distrib. Comput. 17, 1993), with the cache of
Lowe, "Testing for linearizability" (Concurrency Computat. 29(4), 2017):

    A history is linearizable if it is empty, or if some operation can come first, namely one that was invoked before
    any of the others returned, and the rest is linearizable from the state that it leads to.  The rest is determined by
    the set of operations taken so far and the state: if the same pair is reached again by another order, it need not
    be tried again.

Nothing here is optimised.  It is the specification of the general engine (``general``, ``problem``, ``lookahead``),
which walks the same configurations in another order and prunes them; tests compare the two on histories too long for
the brute force of ``checker.testing``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checker.history import FAIL, INFO, NEVER, History
from checker.models.base import ILLEGAL, Model

__all__ = ["is_linearizable"]


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation that took effect or may have: ``returned`` is :data:`NEVER` for one that may be left out."""

    bit: int
    f: str
    value: Any
    results: Sequence[Any]
    invoked: int
    returned: int


def is_linearizable(history: History, model: Model) -> bool:
    """Whether a history without keys is linearizable with respect to a model.

    Values must be hashable and free of booleans that could be mistaken for numbers.  Exponential in time and memory.
    """
    calls = _calls(history, model)
    completed = sum(call.bit for call in calls if call.returned != NEVER)
    start = (0, model.start())
    seen = {start}
    stack = [start]
    while stack:
        taken, state = stack.pop()
        if taken & completed == completed:
            return True
        for call in _first_ones(calls, taken):
            for result in call.results:
                after = model.step(state, call.f, call.value, result)
                configuration = (taken | call.bit, after)
                if after is not ILLEGAL and configuration not in seen:
                    seen.add(configuration)
                    stack.append(configuration)
    return False


def _first_ones(calls: Sequence[_Call], taken: int) -> Iterator[_Call]:
    """The operations not taken yet that were invoked before any other of these returned, in order of invocation."""
    first_return = NEVER
    for call in calls:
        if call.invoked > first_return:
            return
        if not call.bit & taken:
            yield call
            first_return = min(first_return, call.returned)


def _calls(history: History, model: Model) -> list[_Call]:
    """The operations of a history without those that failed, with every possible result of those that crashed."""
    kinds = [
        (history.f[row], history.value[row], history.result[row])
        for row in range(len(history))
        if history.status[row] != FAIL
    ]
    out = []
    for row, status in enumerate(history.status):
        if status == FAIL:
            continue
        f, value = history.f[row], history.value[row]
        results = model.outcomes(f, value, kinds) if status == INFO else (history.result[row],)
        out.append(_Call(1 << row, f, value, results, history.invoked[row], history.returned[row]))
    return out
