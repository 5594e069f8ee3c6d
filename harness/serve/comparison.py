"""Compares two runs side by side: options, results, and latencies."""

from __future__ import annotations

__all__ = ["MAX_HISTORY_BYTES", "Comparison", "Row", "compare_runs"]

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.checks import verdict_word
from harness.report.collect import OUTCOMES, RunData, collect
from harness.report.grid import marks_of
from harness.report.store_page import fault_words, operation_words
from harness.run_index import RunSummary
from harness.serve.files import NoFile, NotThere, open_beneath
from harness.store import Store
from harness.units import clip, count, duration, per_second

MAX_HISTORY_BYTES = 48 * 1024 * 1024
"""The largest history whose latencies are computed for a page: 400,000 events, some seconds."""

MAX_ROWS = 60
MAX_TEXT = 240
"""Characters of a value that are shown; whole values are compared."""
MAX_COMMIT = 12
NONE = "–"
_MARKS = {"median": 0.5, "95 %": 0.95, "99 %": 0.99}


@dataclass(frozen=True, slots=True)
class Row:
    """One property of both runs, as text that may be cut; `is_different` compares the whole values."""

    name: str
    first: str
    second: str
    is_different: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, property by property."""

    asked: Sequence[Row]
    outcome: Sequence[Row]
    checks: Sequence[Row]
    latency: Sequence[Row]
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs, with the content of its files."""

    summary: RunSummary
    test: Mapping[str, Any]
    results: Mapping[str, Any]


def compare_runs(store: Store, first: Side, second: Side) -> Comparison:
    """Compare two runs. Reads both histories: call it outside an event loop."""
    notes = [
        f"results.json of {side.summary.name} cannot be read or is too large: its checks are not shown"
        for side in (first, second)
        if not side.results and side.summary.verdict not in ("running", "unfinished")
    ]
    histories = [_history(store, side, notes) for side in (first, second)]
    asked = _rows(_asked(first.test), _asked(second.test))
    outcome = _rows(_outcome(first), _outcome(second))
    checks = _rows(_checks(first.results), _checks(second.results))
    latency = _rows(_latency(histories[0]), _latency(histories[1]))
    return Comparison(asked, outcome, checks, latency, notes)


def _rows(first: Mapping[str, str], second: Mapping[str, str]) -> list[Row]:
    names = list(dict.fromkeys([*first, *second]))[:MAX_ROWS]
    return [_row(name, first.get(name, NONE), second.get(name, NONE)) for name in names]


def _row(name: str, first: str, second: str) -> Row:
    is_different = first != second
    first, second = clip(first, MAX_TEXT), clip(second, MAX_TEXT)
    if is_different and first == second:
        first, second = f"{first} (differs further on)", f"{second} (differs further on)"
    return Row(name, first, second, is_different)


def _asked(test: Mapping[str, Any]) -> dict[str, str]:
    """The options in test.json; each setting of the system is a separate one."""
    found: dict[str, str] = {}
    for name, value in test.items():
        if name in ("settings", "cluster_options") and isinstance(value, Mapping):
            found.update({clip(f"{name} {key}", 60): _text(inner) for key, inner in value.items()})
        elif isinstance(value, list):
            found[clip(name, 60)] = ", ".join(map(_text, value)) or "none"
        else:
            found[clip(name, 60)] = NONE if value is None else _text(value)
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _outcome(side: Side) -> dict[str, str]:
    run, results = side.summary, side.results
    found = {
        "verdict": run.verdict,
        "reason": _text(results.get("reason") or run.reason or NONE),
        "operations": operation_words(run),
        "faults": fault_words(run),
        "took": NONE if run.duration_s is None else duration(run.duration_s * 1e9),
    }
    by_function = results.get("ops_by_f")
    for f, numbers in by_function.items() if isinstance(by_function, Mapping) else ():
        if isinstance(numbers, Mapping):
            words = (f"{count(n)} {clip(kind, 10)}" for kind, n in numbers.items() if isinstance(n, int))
            found[clip(f, 40)] = ", ".join(words)
    if isinstance(results.get("version"), str):
        found["version"] = results["version"]
    if isinstance(results.get("git_commit"), str):
        changed = " with local changes" if results.get("git_dirty") else ""
        found["git commit"] = results["git_commit"][:MAX_COMMIT] + changed
    return found


def _checks(results: Mapping[str, Any]) -> dict[str, str]:
    checks = results.get("checks")
    if not isinstance(checks, Mapping):
        return {}
    return {
        clip(name, 40): f"{verdict_word(check.get('valid'))}: {_text(check.get('reason') or 'no reason given')}"
        for name, check in checks.items()
        if isinstance(check, Mapping)
    }


def _history(store: Store, side: Side, notes: list[str]) -> RunData | None:
    """A summary of a run's history; None if it is missing, unreadable or too large, which is added to `notes`."""
    run = side.summary
    parts = [run.test, run.time, "history.jsonl"]
    try:
        fd = open_beneath(store.root, parts)
    except NoFile as error:
        notes.append(f"the history of {run.name} cannot be read ({error}): its latencies are unknown")
        return None
    except NotThere:
        notes.append(f"{run.name} has no history.jsonl: its latencies are unknown")
        return None
    with open(fd, "rb") as file:
        size_bytes = file.seek(0, 2)
        if size_bytes > MAX_HISTORY_BYTES:
            notes.append(f"the history of {run.name} is too large to compute its latencies here; see its report")
            return None
        file.seek(0)
        data = collect(f"/proc/self/fd/{file.fileno()}", final_reads_from=side.results.get("final_reads_from"))
    if data.damage is not None:
        notes.append(f"the history of {run.name} is damaged; its latencies are those up to the damage")
    return data


def _latency(data: RunData | None) -> dict[str, str]:
    """Latency of successful operations by function and quantile, and the longest time without a success."""
    if data is None:
        return {}
    found = {}
    for f in data.functions:
        _, marks_ns = marks_of(data.grid, data.series([f], ["ok"]), list(_MARKS.values()))
        for name, mark_ns in zip((*_MARKS, "longest"), marks_ns, strict=bool(marks_ns)):
            found[f"{clip(f, 40)}, {name}"] = duration(mark_ns)
    found["longest silence"] = duration(data.silence_ns[1] - data.silence_ns[0])
    completed = sum(data.total(kind) for kind in OUTCOMES)
    if data.end_ns:
        found["operations per second"] = per_second(completed / (data.end_ns / 1e9))
    return found
