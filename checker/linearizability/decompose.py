"""Splitting one object into independent parts: sets by element, topics by queue.

Linearizability is local: a history over several independent objects is linearizable iff each object's part is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from operator import lt
from typing import Any

from checker.history import INFO, NEVER, OK, History, freeze
from checker.linearizability.outcome import NotApplicable
from checker.models.base import Model
from checker.models.collections import Set
from checker.models.logs import Log, Topic

__all__ = ["Groups", "decompose"]

Groups = dict[Any, Sequence[int]]


def decompose(history: History, groups: Groups, model: Model) -> tuple[History, Groups, Model]:
    """The same question about smaller independent objects, if the model allows it.

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
    """Sends, reads and tails of each queue; a send of unknown outcome is of the queue in which its value was seen, or
    an unseen offset must have been filled.  Raises :class:`NotApplicable` if it matters which of several that is.
    """
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
                if f == "send" and (result is None or None in (result[0], result[1])):
                    raise NotApplicable("a send got no queue, or its offset there")
                queue = result["queue"] if f == "read" else result[0]
                if queue not in range(model.queues):
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
        if not lost:
            continue
        names_of = [queue if key is None else (key, queue) for queue in range(model.queues)]
        of_queues = [out[name] for name in names_of if name in out]
        fillers = [row for row in lost if history.status[row] == INFO]
        filled = _fill_holes(history, of_queues, results, fillers)
        for rows_of_queue, own in zip(of_queues, filled, strict=True):
            elsewhere = set().union(*filled) - own
            rows_of_queue.extend(row for row in lost if row not in elsewhere)
            rows_of_queue.sort()
    renamed = replace(history, f=[names.get(f, f) for f in history.f], value=values, result=results)
    return renamed, dict(out), Log()


def _fill_holes(
    history: History, of_queues: Sequence[Sequence[int]], results: Sequence[Any], fillers: Sequence[int]
) -> list[set[int]]:
    """For each queue, which of the ``fillers``, sends that nobody saw, fill its holes, if several queues have holes.

    A send that filled a hole in one queue has filled none in another.  The earliest send fills the hole with the
    earliest deadline, and so on: if that fails, every assignment does, and :class:`NotApplicable` is raised.  If a
    single queue alone needs more of them than there are, no assignment is made.
    """
    filled: list[set[int]] = [set() for _ in of_queues]
    holes = [_deadlines(history, rows, results, len(fillers)) for rows in of_queues]
    begun = [history.invoked[row] for row in fillers]
    if sum(map(bool, holes)) < 2 or not all(
        len(deadlines) <= len(begun) and all(map(lt, begun, sorted(deadlines))) for deadlines in holes
    ):
        return filled
    due = sorted((deadline, queue) for queue, deadlines in enumerate(holes) for deadline in deadlines)
    for (deadline, queue), row in zip_longest(due, fillers[: len(due)]):
        if row is None or history.invoked[row] >= deadline:
            raise NotApplicable("sends of unknown outcome would have to fill places in several queues")
        filled[queue].add(row)
    return filled


def _deadlines(history: History, rows: Sequence[int], results: Sequence[Any], most: int) -> list[int]:
    """Deadlines for filling the holes of a queue: offsets below a length that was returned which nobody saw.  At most
    ``most + 1`` of them, since that is already too many."""
    known: set[int] = set()
    lengths: list[tuple[int, int]] = []
    for row in rows:
        if history.status[row] != OK:
            continue
        f, result = history.f[row], results[row]
        if f == "read":
            known.update(range(result["offset"], result["offset"] + len(result["messages"])))
            length = result.get("tail")
            if length is None:  # at least what the read has shown
                length = result["offset"] + len(result["messages"]) if result["messages"] else 0
        else:
            length = result if f == "tail" else result[0]
            if f == "send":
                known.add(length)
        lengths.append((length, history.returned[row]))
    lengths.sort(reverse=True)
    longest = lengths[0][0] if lengths else 0
    holes = list(islice((place for place in range(longest) if place not in known), most + 1))
    deadlines: list[int] = []
    at, soonest = 0, NEVER
    for place in reversed(holes):
        while at < len(lengths) and lengths[at][0] > place:
            soonest = min(soonest, lengths[at][1])
            at += 1
        deadlines.append(soonest)
    return deadlines
