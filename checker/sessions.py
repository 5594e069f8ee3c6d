"""Weaker than linearizable: sequential consistency, and what one session may expect of its own reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from checker.history import FAIL, INFO, OK, History, freeze
from checker.linearizability.budget import Budget
from checker.models.base import FAILED, ILLEGAL, UNKNOWN, Model
from checker.tally import Events, Tally
from checker.verdict import Result, Verdict
from checker.words import named_row

__all__ = ["check_sequential", "check_sessions"]

#: Configurations between two looks at the budget.
STEPS_BETWEEN_CHECKS = 4096


def check_sequential(
    events: Events, model: Model, *, timeout_s: float | None = None, memory_mb: float | None = None
) -> Result:
    """Whether one order of all operations, keeping each process's own, is legal for the model (Lamport 1979).

    Not local, so keys are not split: ``model`` sees all operations.  Deciding is NP-complete; depth first over how far
    each process has come, remembering configurations, within the budget.  An operation of unknown outcome may be left
    out (it was its process's last).
    """
    budget = Budget(timeout_s=timeout_s, memory_mb=memory_mb)
    history = History.of(events)
    programs: dict[Any, list[tuple[Any, ...]]] = {}
    asserts = model.failures_that_assert()
    for row, status in enumerate(history.status):
        f = history.f[row]
        if status == OK:
            result = history.result[row]
        elif status == INFO:
            if f in model.pure:
                continue
            result = UNKNOWN
        elif status == FAIL and f in asserts and row not in history.errors:
            result = FAILED
        else:
            continue
        programs.setdefault(history.process[row], []).append((f, history.value[row], result, row))
    lanes = list(programs.values())
    ends = tuple(len([op for op in lane if op[2] is not UNKNOWN]) for lane in lanes)
    stats: dict[str, Any] = {"model": model.name, "operations": len(history), "engines": {"sequential search": 1}}
    start = ((0,) * len(lanes), model.start())
    stack, seen = [start], {start}
    best: tuple[int, ...] = start[0]
    steps = 0
    while stack:
        places, state = stack.pop()
        if all(place >= end for place, end in zip(places, ends, strict=True)):
            stats["steps"] = steps
            return Result(
                verdict=Verdict.VALID, stats=stats, reason=f"sequentially consistent: {len(history)} operations"
            )
        if sum(places) > sum(best):
            best = places
        steps += 1
        if steps % STEPS_BETWEEN_CHECKS == 0:
            stopped = budget.exhausted()
            if stopped:
                stats["steps"] = steps
                return Result(verdict=Verdict.UNKNOWN, stats=stats, reason=f"{stopped} after {steps} steps")
        for lane, place in enumerate(places):
            if place == len(lanes[lane]):
                continue
            f, value, result, _ = lanes[lane][place]
            after = model.step(state, f, value, result)
            if after is ILLEGAL:
                continue
            moved = ((*places[:lane], place + 1, *places[lane + 1 :]), after)
            if moved not in seen:
                seen.add(moved)
                stack.append(moved)
    stats["steps"] = steps
    stuck = [lanes[lane][place][3] for lane, place in enumerate(best) if place < ends[lane]]
    tally = Tally(model.name, history, wrong=("not-sequential",))
    named = "; ".join(named_row(history, row, model) for row in stuck[:6])
    tally.add("not-sequential", stuck[:12], f"no order that keeps each process's own gets past all of: {named}")
    result = tally.result(fine="")
    stats = {**result.stats, **stats}
    return Result(verdict=Verdict.INVALID, witness=result.witness, stats=stats, reason=result.reason)


def version_of(result: Any) -> Any:
    """How new a result is: a map's ``tail``, a pair's first part, or the value itself; ``None`` says nothing."""
    if isinstance(result, Mapping):
        return result.get("tail", result.get("version"))
    if isinstance(result, (list, tuple)):
        return result[0] if result else None
    return result


def check_sessions(
    events: Events,
    *,
    reads: tuple[str, ...] = ("read", "tail", "get"),
    writes: tuple[str, ...] = ("write", "append", "put"),
    version: Callable[[Any], Any] = version_of,
) -> Result:
    """Session guarantees (Terry et al. 1994) per process and key, from the versions that results carry.

    Results must say how new they are: a versioned register's ``[version, value]``, a log's offset and tail.  Counts
    ``monotonic-reads`` (a read older than an earlier read), ``read-your-writes`` (older than an earlier own write),
    ``monotonic-writes`` (a write placed before an earlier own write), ``writes-follow-reads`` (placed before what was
    read).  A log's append at offset n is version n + 1.
    """
    history = History.of(events)
    kinds = ("monotonic-reads", "read-your-writes", "monotonic-writes", "writes-follow-reads")
    tally = Tally("sessions", history, wrong=kinds)
    read_by: dict[Any, tuple[Any, int]] = {}
    wrote_by: dict[Any, tuple[Any, int]] = {}
    for row, f in enumerate(history.f):
        if history.status[row] != OK or (f not in reads and f not in writes):
            continue
        number = version(history.result[row])
        if number is None:
            continue
        if f == "append":
            number += 1
        session = (history.process[row], freeze(history.key[row]))
        read, wrote = read_by.get(session), wrote_by.get(session)
        is_read = f in reads
        for before, kind, strict in (
            (read, "monotonic-reads" if is_read else "writes-follow-reads", not is_read),
            (wrote, "read-your-writes" if is_read else "monotonic-writes", not is_read),
        ):
            if before is not None and (number <= before[0] if strict else number < before[0]):
                text = f"{named_row(history, row)} is at version {number}, after {named_row(history, before[1])}"
                tally.add(kind, (before[1], row), text)
        target = read_by if is_read else wrote_by
        known = target.get(session)
        if known is None or number > known[0]:
            target[session] = (number, row)
    return tally.result(fine="every session kept its guarantees")
