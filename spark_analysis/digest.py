"""What one run contributes to the tables: counts, faults, unavailability, recovery, latencies.

Runs inside executors, once per run, over NumPy columns. The definitions (all times in ns since the test began):

phase           of an operation, by its invocation: `during` while any fault is in force (from the call that
                injects it to the end of the call that heals it), `before` the first fault, `after` otherwise
latency         from invocation to completion, by outcome
unavailability  a maximal interval in which clients tried and none succeeded, if it lasts at least the
                threshold. It begins with the last success before it (or, if nothing was open then, with the next
                invocation) and ends with the next success, or with the last event before a lull. A lull is a
                time without open operations that lasts at least the threshold.
recovery        after a fault's start: the end of the first unavailability that ends after the start and begins
                before the heal, minus the start. After its heal: the end of the unavailability that the heal
                falls into, minus the heal. 0 if there is no such unavailability; null if it ends without a
                success (not recovered).
"""

from __future__ import annotations

__all__ = ["PHASES", "RUN_TYPE", "digest", "phases_of", "spans_of"]

import itertools
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from spark_analysis.operations import FAIL, INFO, OK, STATUS_NAMES, Fault, Ints, RunData

PHASES = ("before", "during", "after")

_COUNT = pa.struct(
    [("f", pa.string()), ("phase", pa.string()), ("ok", pa.int64()), ("fail", pa.int64()), ("info", pa.int64())]
)
_SPAN = pa.struct([("start_ns", pa.int64()), ("end_ns", pa.int64()), ("recovered", pa.bool_())])
_FAULT = pa.struct(
    [
        ("fault_id", pa.string()),
        ("nemesis", pa.string()),
        ("variant", pa.string()),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("proven", pa.bool_()),
        ("exercised", pa.bool_()),
        ("healed", pa.bool_()),
        ("in_force_ns", pa.int64()),
        ("ok", pa.int64()),
        ("fail", pa.int64()),
        ("info", pa.int64()),
        ("away_after_start", pa.bool_()),
        ("recovery_after_start_ns", pa.int64()),
        ("away_after_heal", pa.bool_()),
        ("recovery_after_heal_ns", pa.int64()),
    ]
)
_LATENCY = pa.struct(
    [
        ("f", pa.string()),
        ("node", pa.string()),
        ("phase", pa.string()),
        ("outcome", pa.string()),
        ("operations", pa.int64()),
        ("latencies_ns", pa.binary()),  # int64, little-endian: 8 bytes per operation are the cheapest exact form
    ]
)

RUN_TYPE = pa.struct(
    [
        ("operations", pa.int64()),
        ("events", pa.int64()),  # of clients
        ("end_ns", pa.int64()),
        ("during_ns", pa.int64()),
        ("timed", pa.bool_()),
        ("counts", pa.list_(_COUNT)),
        ("spans", pa.list_(_SPAN)),
        ("faults", pa.list_(_FAULT)),
        ("latencies", pa.list_(_LATENCY)),
    ]
)
"""Arrow type of one run's digest; `spans` and `latencies` are empty if the history has no times."""


class Span(NamedTuple):
    """An interval in which clients tried and none succeeded; `recovered` tells whether it ended with a success."""

    start_ns: int
    end_ns: int
    recovered: bool


def digest(run: RunData, *, unavailable_after_ns: int) -> dict[str, Any]:
    """A run as one value of `RUN_TYPE`."""
    edges = _fault_edges(run)
    phase = phases_of(run.invoked_ns, edges)
    spans = spans_of(run, unavailable_after_ns) if run.timed else []
    return {
        "operations": len(run),
        "events": len(run) + int((run.completed >= 0).sum()),
        "end_ns": run.end_ns,
        "during_ns": int((np.minimum(edges[1], run.end_ns) - np.minimum(edges[0], run.end_ns)).sum()),
        "timed": run.timed,
        "counts": _counts(run, phase),
        "spans": [span._asdict() for span in spans],
        "faults": _fault_rows(run, spans),
        "latencies": _latencies(run, phase) if run.timed else [],
    }


def _fault_edges(run: RunData) -> tuple[Ints, Ints]:
    """Starts and ends of the intervals in which at least one fault was in force, which may be after the run's end."""
    merged: list[list[int]] = []
    for start, end in sorted((f.start_ns, _end_ns(f)) for f in run.faults):
        end = max(start, end)
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array([m[0] for m in merged], np.int64), np.array([m[1] for m in merged], np.int64)


def _end_ns(fault: Fault) -> int:
    """The end of a fault, beyond that of any run if it was never healed: the last event of a killed run may be an
    invocation, which such a fault affects as well."""
    return np.iinfo(np.int64).max if fault.end_ns is None else fault.end_ns


def phases_of(invoked_ns: Ints, edges: tuple[Ints, Ints]) -> Any:
    """The phase of every operation as an index into `PHASES`; a fault includes its start and excludes its end."""
    starts, ends = edges
    begun = np.searchsorted(starts, invoked_ns, side="right")
    over = np.searchsorted(ends, invoked_ns, side="right")
    return np.where(begun > over, 1, np.where(begun == 0, 0, 2)).astype(np.int64)


def _counts(run: RunData, phase: Any) -> list[dict[str, Any]]:
    width = len(PHASES) * len(STATUS_NAMES)
    code = run.f.codes.astype(np.int64) * width + phase * len(STATUS_NAMES) + run.status
    shape = (len(run.f.names), len(PHASES), len(STATUS_NAMES))
    tally = np.bincount(code, minlength=len(run.f.names) * width).reshape(shape)
    return [
        {"f": name, "phase": PHASES[p], "ok": int(row[OK]), "fail": int(row[FAIL]), "info": int(row[INFO])}
        for name, by_phase in zip(run.f.names, tally, strict=True)
        for p, row in enumerate(by_phase)
        if row.any()
    ]


def spans_of(run: RunData, threshold_ns: int) -> list[Span]:
    """The run's unavailabilities, in order."""
    if not len(run):
        return []
    ended = run.completed_ns >= 0
    times = np.concatenate((run.invoked_ns, run.completed_ns[ended]))
    positions = np.concatenate((run.invoked, _completion_positions(run, ended)))
    steps = np.concatenate((np.ones(len(run), np.int64), np.full(int(ended.sum()), -1)))
    success = np.concatenate((np.zeros(len(run), bool), run.status[ended] == OK))
    order = np.lexsort((positions, times))
    times, steps, success = times[order], steps[order], success[order]
    still_open = np.cumsum(steps)
    pause = np.diff(times, append=times[-1])
    lull = (still_open == 0) & (pause >= threshold_ns)
    lull[-1] = True
    cuts = np.flatnonzero(success | lull)
    ends = cuts
    begins = np.concatenate(([-1], cuts[:-1]))
    # An interval begins at the success that closed the one before, or at the next invocation if nothing was open then.
    fresh = (begins < 0) | (still_open[begins] == 0)
    start_ns = times[np.where(fresh, begins + 1, begins)]
    end_ns = times[ends]
    long = (end_ns - start_ns >= threshold_ns) & (ends > begins)
    return [
        Span(int(start), int(end), bool(good))
        for start, end, good in zip(start_ns[long], end_ns[long], success[ends][long], strict=True)
    ]


def _completion_positions(run: RunData, ended: Any) -> Any:
    """Positions of completions; if only the time is known (foreign `info`), they sort after all others of that time."""
    known = run.completed[ended]
    return np.where(known >= 0, known, np.iinfo(np.int64).max)


def _fault_rows(run: RunData, spans: list[Span]) -> list[dict[str, Any]]:
    """Every fault, with the outcomes of the operations invoked while it was in force."""
    order = np.argsort(run.invoked_ns, kind="stable")
    times, status = run.invoked_ns[order], run.status[order]
    rows = []
    for fault in run.faults:
        until_ns = max(fault.start_ns, _end_ns(fault))
        first, last = (int(np.searchsorted(times, at_ns)) for at_ns in (fault.start_ns, until_ns))
        ok, fail, info = np.bincount(status[first:last], minlength=len(STATUS_NAMES)).tolist()
        in_force_ns = max(0, min(until_ns, run.end_ns) - fault.start_ns)
        rows.append(_fault_row(fault, spans) | {"in_force_ns": in_force_ns, "ok": ok, "fail": fail, "info": info})
    return rows


def _fault_row(fault: Fault, spans: list[Span]) -> dict[str, Any]:
    end_ns = fault.end_ns
    first = next((s for s in spans if s.end_ns > fault.start_ns and (end_ns is None or s.start_ns < end_ns)), None)
    at_heal = None
    if end_ns is not None:
        at_heal = next((s for s in spans if s.start_ns <= end_ns < s.end_ns), None)
    return {
        "fault_id": fault.fault_id,
        "nemesis": fault.nemesis,
        "variant": fault.variant,
        "start_ns": fault.start_ns,
        "end_ns": end_ns,
        "proven": fault.proven,
        "exercised": fault.exercised,
        "healed": fault.healed,
        "away_after_start": first is not None,
        "recovery_after_start_ns": _recovery(first, fault.start_ns),
        "away_after_heal": None if end_ns is None else at_heal is not None,
        "recovery_after_heal_ns": None if end_ns is None else _recovery(at_heal, end_ns),
    }


def _recovery(span: Span | None, since_ns: int) -> int | None:
    if span is None:
        return 0
    return span.end_ns - since_ns if span.recovered else None


def _latencies(run: RunData, phase: Any) -> list[dict[str, Any]]:
    rows = np.flatnonzero(run.completed_ns >= 0)
    if not len(rows):
        return []
    nodes = len(run.node.names) + 1
    code = run.f.codes[rows].astype(np.int64) * nodes + run.node.codes[rows] + 1
    code = (code * len(PHASES) + phase[rows]) * len(STATUS_NAMES) + run.status[rows]
    order = np.argsort(code, kind="stable")
    code = code[order]
    latency_ns = (run.completed_ns[rows] - run.invoked_ns[rows])[order].astype("<i8")
    edges = [0, *(np.flatnonzero(code[1:] != code[:-1]) + 1).tolist(), len(code)]
    found = []
    for start, end in itertools.pairwise(edges):
        rest, status = divmod(int(code[start]), len(STATUS_NAMES))
        rest, p = divmod(rest, len(PHASES))
        f, node = divmod(rest, nodes)
        found.append(
            {
                "f": run.f.names[f],
                "node": run.node.names[node - 1] if node else None,
                "phase": PHASES[p],
                "outcome": STATUS_NAMES[status],
                "operations": end - start,
                "latencies_ns": latency_ns[start:end].tobytes(),
            }
        )
    return found
