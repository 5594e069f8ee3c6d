"""Tooltips of the charts over time: a short text for each window, fault, leader and violation.

All texts are made here; the page's script only looks them up. Times are nanoseconds since the test began.
"""

from __future__ import annotations

__all__ = ["MAX_SPANS", "LeaderSpan", "leader_spans", "readout"]

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.report.collect import RunData
from harness.report.grid import latency_of, quantiles_of
from harness.units import clip, duration, per_second

LEAST_COLUMNS = 16
"""Grid columns that the closest zoom shows; zooming in further would only spread the dots."""

MAX_SPANS = 1_000
"""Most faults and terms that get a text; the charts draw fewer."""


class LeaderSpan(NamedTuple):
    """Who led which term; `stop_ns` is the latest possible end."""

    start_ns: int
    stop_ns: int
    leader: str
    term: Any


def leader_spans(terms: Sequence[Mapping[str, Any]], end_ns: int, limit: int) -> tuple[list[LeaderSpan], int]:
    """The first `limit` terms in order, and how many were left out. A term ends at its known end, else when the next
    leader begins."""
    known = [term for term in terms if isinstance(term.get("start_ns"), (int, float)) and term.get("leader")]
    known.sort(key=lambda term: (term["start_ns"], term.get("term", 0)))
    kept = known[:limit]
    spans = []
    for place, term in enumerate(kept):
        following = kept[place + 1]["start_ns"] if place + 1 < len(kept) else end_ns
        stop_ns = term["end_ns"] if isinstance(term.get("end_ns"), (int, float)) else following
        spans.append(LeaderSpan(term["start_ns"], stop_ns, str(term["leader"]), term.get("term")))
    return spans, len(known) - len(kept)


def readout(
    data: RunData,
    bands: Sequence[tuple[float, float, str]],
    terms: Sequence[Mapping[str, Any]],
    moments: Sequence[tuple[int, str]],
    *,
    window_ns: int,
    end_ns: int,
    max_spans: int = MAX_SPANS,
    metrics: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The script's lookup data: `windows` of `window` ns with lines of text, `spans` and `moments` with one text each,
    and `metrics`, with further lines for windows of their own length.

    `bands` are the faults: start and end as shares of the axis, and a text.
    """
    spans: list[tuple[int, int, str]] = [
        (round(start * end_ns), round(end * end_ns), clip(text, 120)) for start, end, text in bands
    ]
    leaders, _ = leader_spans(terms, end_ns, max_spans)
    spans += [
        (int(span.start_ns), int(span.stop_ns), clip(f"leader {span.leader}, term {span.term}", 60)) for span in leaders
    ]
    return {
        "end": end_ns,
        "window": window_ns,
        "least": LEAST_COLUMNS * data.grid.column_ns,
        "windows": _windows(data, window_ns, end_ns),
        "spans": spans[:max_spans],
        "moments": [(at_ns, clip(text, 120)) for at_ns, text in moments],
        "metrics": metrics or {"window": 1, "lines": []},
    }


def _windows(data: RunData, window_ns: int, end_ns: int) -> list[list[str]]:
    lines: list[list[str]] = [[] for _ in range(-(-end_ns // window_ns))]
    for f in data.functions:
        for place, text in _words(data, f, window_ns, end_ns).items():
            if place < len(lines):
                lines[place].append(f"{clip(f, 24)}: {text}")
    return [said or ["no operation completed"] for said in lines]


def _words(data: RunData, f: str, window_ns: int, end_ns: int) -> dict[int, str]:
    """For each window in which operations of `f` ended: their rate or count, and the latency of successful ones."""
    per_window = window_ns // data.grid.column_ns
    found: dict[int, list[str]] = {}
    succeeded = data.grid.windows(data.series([f], ["ok"]), per_window)
    for window, steps in succeeded.items():
        length_s = min(window_ns, max(end_ns - window * window_ns, window_ns // 4)) / 1e9
        median, slowest = (duration(latency_of(step)) for step in quantiles_of(steps, (0.5, 0.99)))
        found[window] = [f"{per_second(steps.total() / length_s)} ok/s, median {median}, p99 {slowest}"]
    for kind in ("fail", "info"):
        counted: dict[int, Counter[int]] = data.grid.windows(data.series([f], [kind]), per_window)
        for window, steps in counted.items():
            found.setdefault(window, []).append(f"{steps.total():,} {kind}")
    return {window: ", ".join(parts) for window, parts in found.items()}
