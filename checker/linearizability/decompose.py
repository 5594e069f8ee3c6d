"""Splitting one object into independent parts: sets by element, topics by queue.

Linearizability is local: a history over several independent objects is linearizable iff each object's part is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from checker.history import INFO, OK, History, freeze
from checker.linearizability.outcome import NotApplicable
from checker.models.base import Model
from checker.models.collections import Set
from checker.models.logs import Log, Topic

__all__ = ["Groups", "decompose"]

Groups = dict[Any, Sequence[int]]


def decompose(history: History, groups: Groups, model: Model) -> tuple[History, Groups, Model]:
    """The same question about smaller independent objects, where the model allows it.

    The history returned has the same rows; operations of a topic are renamed to those of a log.
    """
    if type(model) is Set and "read" not in history.f:
        return history, _by_element(history, groups), model
    if type(model) is Topic:
        try:
            return _by_queue(history, groups, model)
        except NotApplicable:
            return history, groups, model
    return history, groups, model


def _by_element(history: History, groups: Groups) -> Groups:
    out: dict[Any, list[int]] = {}
    values = history.value
    for key, rows in groups.items():
        for row in rows:
            element = freeze(values[row])
            out.setdefault(element if key is None else (key, element), []).append(row)
    return dict(out)


def _by_queue(history: History, groups: Groups, model: Topic) -> tuple[History, Groups, Model]:
    """Sends, reads and tails of each queue; a send of unknown outcome goes where its value was seen."""
    values, results = list(history.value), list(history.result)
    names = {"send": "append", "read": "read", "tail": "tail"}
    out: dict[Any, list[int]] = {}
    for key, rows in groups.items():
        sent = [freeze(values[row]) for row in rows if history.f[row] == "send"]
        if len(set(sent)) < len(sent):
            raise NotApplicable("two sends send the same value")
        seen: dict[Any, int] = {}
        placed: list[tuple[int, Any]] = []
        for row in rows:
            if history.f[row] == "read" and history.status[row] == OK:
                for value in results[row]["messages"]:
                    seen[freeze(value)] = results[row]["queue"]
        for row in rows:
            f, status, result = history.f[row], history.status[row], results[row]
            if status == OK:
                queue = result["queue"] if f == "read" else result[0]
                if not 0 <= queue < model.queues:
                    raise NotApplicable(f"queue {queue!r} does not exist")
                if f == "send":
                    results[row] = [result[1], values[row]]
                elif f == "tail":
                    results[row] = result[1]
                placed.append((row, queue))
            elif f == "send" and status == INFO and freeze(values[row]) in seen:
                placed.append((row, seen[freeze(values[row])]))
            elif f == "send":
                placed.append((row, None))
        for row, queue in placed:
            if queue is not None:
                out.setdefault(queue if key is None else (key, queue), []).append(row)
        lost = [row for row, queue in placed if queue is None]
        for queue in range(model.queues):
            rows_of_queue = out.get(queue if key is None else (key, queue))
            if rows_of_queue is not None and lost:
                rows_of_queue.extend(lost)
                rows_of_queue.sort()
    renamed = replace(history, f=[names.get(f, f) for f in history.f], value=values, result=results)
    return renamed, dict(out), Log()
