"""The metrics of the system under test on the time axis of the report: when each host answered, and a lane a metric.

A lane has a line for each host, in the colour of the host's row above the lanes. Where the host did not answer, it is
interrupted. Where a window of time has several samples, it goes through the least and the greatest, in their order, so
that neither a short peak nor a short dip is lost.
"""

from __future__ import annotations

__all__ = ["HOST_COLOURS", "MAX_POINTS", "metric_panels", "metric_words"]

import math
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from harness.metrics.samples import Lane, Line, Samples
from harness.report.panel import Panel, drawing
from harness.report.svg import element, percent, stretched
from harness.units import clip, count, duration, linear_ticks

HOST_COLOURS = 8
"""Colours of hosts; from the ninth on they repeat."""

MAX_POINTS = 24_000
"""Most points of all lines together: some 250 kB of the page."""

WINDOWS = 300
"""Most windows of a line; each is three pixels of a wide page."""

LANE_HEIGHT_PX = 64
ROW_HEIGHT_PX = 13
UNITS = 1000
"""Height of a lane's own coordinates."""

MAX_WORDS_HOSTS = 5
MAX_WORDS_LANES = 8
"""Hosts and lanes whose values the tooltips say; more would not fit beside the pointer."""


def metric_panels(samples: Samples, end_ns: int, back: Markup, front: Markup) -> list[Panel]:
    """A panel that shows when each host answered, then one for each metric that any host had."""
    lanes = [lane for lane in samples.lanes if not lane.is_empty]
    if not samples.hosts or not any(line.values for line in samples.answers.values()):
        return []
    windows = max(20, min(WINDOWS, MAX_POINTS // (2 * max(1, len(lanes) * len(samples.hosts)))))
    return [
        _answers(samples, end_ns, back, front),
        *(_lane(lane, samples.hosts, end_ns, windows, back, front) for lane in lanes),
    ]


def _colour(number: int) -> str:
    return f"host{number % HOST_COLOURS}"


def _answers(samples: Samples, end_ns: int, back: Markup, front: Markup) -> Panel:
    """A row for each host, drawn where it answered."""
    hosts = samples.hosts
    rows = []
    for row, host in enumerate(hosts):
        drawn = "".join(
            f"M{start} {2 * row + 1}H{stop}" for start, stop in _stretches(samples.answers[host], samples, end_ns)
        )
        if drawn:
            rows.append(element("path", d=drawn, class_=f"answered {_colour(row)}"))
    height_px = max(1, len(hosts)) * ROW_HEIGHT_PX
    layer = element(
        "svg", *rows, view_box=f"0 0 {10 * UNITS} {2 * len(hosts)}", preserve="none", width="100%", height="100%",
        class_="plot",
    )  # fmt: skip
    every = max(1, math.ceil(len(hosts) / 8))
    labels = [((row + 0.5) / len(hosts), clip(hosts[row], 12)) for row in range(0, len(hosts), every)]
    label = f"When each of {len(hosts)} hosts answered with its metrics"
    return Panel(
        "Metrics, by host", drawing(height_px, label, back, layer, front), height_px, labels, kind="answers",
        detail="a gap: no answer",
    )  # fmt: skip


def _stretches(line: Line, samples: Samples, end_ns: int) -> Iterator[tuple[int, int]]:
    """Where a host answered: begin and end, in ten thousandths of the axis. An answer counts until the next sample is
    due."""
    begin_ns: int | None = None
    last_ns = 0
    for time_ns, value in line.points():
        if value is None:
            if begin_ns is not None:
                yield _at(begin_ns, end_ns), _at(min(time_ns, last_ns + samples.interval_ns), end_ns)
            begin_ns = None
            continue
        begin_ns = time_ns if begin_ns is None else begin_ns
        last_ns = time_ns
    if begin_ns is not None:
        yield _at(begin_ns, end_ns), _at(min(end_ns, last_ns + samples.interval_ns), end_ns)


def _at(time_ns: int, end_ns: int) -> int:
    return round(10 * UNITS * min(1.0, max(0.0, time_ns / end_ns)))


def _lane(lane: Lane, hosts: Sequence[str], end_ns: int, windows: int, back: Markup, front: Markup) -> Panel:
    lines = {host: list(thinned(lane.lines[host], end_ns, windows)) for host in hosts}
    values = [value for points in lines.values() for _, value in points if value is not None]
    low, high = min(0.0, *values), max(0.0, *values)
    ticks = linear_ticks(high) if high > 0 or low == 0 else [0.0]
    top = ticks[-1] if ticks[-1] > low else low + 1.0
    if low < 0:
        ticks = [low, *ticks]
    labels = [((top - tick) / (top - low), _words(tick, lane.unit)) for tick in ticks]
    grid = [element("line", x1=0, x2="100%", y1=percent(at), y2=percent(at), class_="grid") for at, _ in labels]
    paths = []
    for number, host in enumerate(hosts):
        drawn = _path(lines[host], end_ns, low, top)
        if drawn:
            paths.append(element("path", d=drawn, class_=f"line metric {_colour(number)}"))
    layer = stretched(Markup("").join(paths), width=10 * UNITS, height=UNITS)
    label = (
        f"{lane.title}, {len(hosts)} hosts: from {_words(min(values), lane.unit)} to {_words(max(values), lane.unit)}"
    )
    svg = drawing(LANE_HEIGHT_PX, clip(label), back, *grid, layer, front)
    detail = clip(lane.text, 90) if lane.text != lane.title else ""
    return Panel(clip(lane.title, 90), svg, LANE_HEIGHT_PX, _apart(labels), kind="metric", detail=detail)


def _apart(labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Labels that do not cover one another: of more than three the first, the last and, if there is one, the middle."""
    if len(labels) <= 3:
        return list(labels)
    return [labels[0], *([labels[len(labels) // 2]] if len(labels) % 2 else []), labels[-1]]


def thinned(line: Line, end_ns: int, windows: int) -> Iterator[tuple[int, float | None]]:
    """The points of a line, but at most the least and the greatest value of each window before its first gap (None),
    that gap, and the same after it."""
    window, gap_ns = -1, None
    before: list[tuple[int, float]] = []
    after: list[tuple[int, float]] = []
    for time_ns, value in line.points():
        at = min(windows - 1, max(0, time_ns * windows // max(1, end_ns)))
        if at != window:
            yield from _kept(before, gap_ns, after)
            window, gap_ns, before, after = at, None, [], []
        if value is None:
            gap_ns = time_ns if gap_ns is None else gap_ns
        else:
            (before if gap_ns is None else after).append((time_ns, value))
    yield from _kept(before, gap_ns, after)


def _kept(
    before: Sequence[tuple[int, float]], gap_ns: int | None, after: Sequence[tuple[int, float]]
) -> Iterator[tuple[int, float | None]]:
    yield from _extremes(before)
    if gap_ns is not None:
        yield gap_ns, None
    yield from _extremes(after)


def _extremes(found: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    if len(found) < 3:
        return list(found)
    least, greatest = min(found, key=lambda point: point[1]), max(found, key=lambda point: point[1])
    return sorted({least, greatest})


def _path(points: Sequence[tuple[int, float | None]], end_ns: int, low: float, top: float) -> str:
    parts: list[str] = []
    is_begun = False
    for time_ns, value in points:
        if value is None:
            is_begun = False
            continue
        x, y = _at(time_ns, end_ns), round(UNITS * (top - value) / (top - low))
        parts.append(f"L{x} {y}" if is_begun else f"M{x} {y}h0")
        is_begun = True
    return "".join(parts)


def _words(value: float, unit: str) -> str:
    """A value with about three digits: "1.2 ms", "16 MB", "0.5"."""
    if unit == "s":
        return "0" if value == 0 else duration(value * 1e9)
    sign, size = ("−" if value < 0 else ""), abs(value)
    suffix = " B" if unit.startswith("bytes") and size else ""
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4 if not suffix else 1e3, "k")):
        if 1e15 > size >= power:
            divisor = 1e3 if letter == "k" else power
            return f"{sign}{size / divisor:.3g} {letter}{suffix.strip()}".replace(" k", " k" if suffix else "k")
    text = count(round(size)) if (size == round(size) or size >= 100) and size < 1e15 else f"{size:.3g}"
    return f"{sign}{text}{suffix}"


def metric_words(samples: Samples, end_ns: int) -> dict[str, Any]:
    """For the tooltips: the length of a window (ns), and for each window a line of text for each metric, with the last
    value of each host in it."""
    window_ns = max(samples.interval_ns, end_ns // WINDOWS, 1)
    windows = -(-end_ns // window_ns)
    hosts = samples.hosts[:MAX_WORDS_HOSTS]
    lines: list[list[str]] = [[] for _ in range(windows)]
    for lane in [lane for lane in samples.lanes if not lane.is_empty][:MAX_WORDS_LANES]:
        known: list[dict[str, str]] = [{} for _ in range(windows)]
        for host in hosts:
            for time_ns, value in lane.lines[host].points():
                place = max(0, time_ns) // window_ns
                if place < windows:
                    known[place][host] = "–" if value is None else _words(value, lane.unit)
        for place, said in enumerate(known):
            if said:
                values = ", ".join(f"{clip(host, 12)} {said[host]}" for host in hosts if host in said)
                lines[place].append(f"{clip(lane.title, 40)}: {values}")
    return {"window": window_ns, "lines": lines}
