"""The run over time: faults, latency, rates and leaders on one time axis.

Each panel is a separate drawing with the same axis; the page stacks them. Shaded bands through all panels are
the faults, from injection to heal. A latency dot is a cell of the grid (see `grid`): one column of time by one
step of latency; cells with more operations are drawn stronger.
"""

from __future__ import annotations

__all__ = ["MAX_BANDS", "Band", "Panel", "Panels", "bands_of", "over_time"]

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from harness.metrics.samples import Samples
from harness.report.collect import OUTCOMES, RunData
from harness.report.grid import BINS_PER_DECADE, latency_of, quantiles_of
from harness.report.metric_lanes import metric_panels, metric_words
from harness.report.panel import Panel, drawing
from harness.report.readout import MAX_SPANS, leader_spans, readout
from harness.report.svg import element, percent, runs_path, stretched
from harness.units import clip, count, duration, instant, linear_ticks, time_ticks

MAX_BANDS = 250
"""Most fault bands drawn; more would be a uniform grey at any width. The text says how many are missing."""

TINTS = 5
"""Colours of bands; with more nemeses some share a colour, as the legend shows."""

MAX_TRACKS = 4
"""Rows of the fault track, for overlapping faults; a fifth fault at the same time shares the last row."""

WINDOWS = 150
"""Most windows of the rate and quantile lines: each is several pixels wide, so that a short dip stays visible."""

LATENCY_HEIGHT_PX = 170
RATE_HEIGHT_PX = 96
TRACK_HEIGHT_PX = 22
LEADER_HEIGHT_PX = 16
CLIENT_HEIGHT_PX = 7
"""Height of a client's row: forty rows fit on a screen."""

DRAWN_WIDTH_PX = 980
NAME_CHARACTER_PX = 6.6
TERM_CHARACTER_PX = 5.6
"""Estimated widths, by which a name must fit beside its bar, and a term into its bar, on a wide page. Without script,
narrow pages show only the number."""

MAX_TERMS = 400
"""Most leader bars drawn; the checks section counts all terms."""

MAX_LEADERS = 15
"""Most rows of leaders; the caption says if more nodes led."""

_LINES = ((0.5, "median"), (0.99, "p99"))


@dataclass(frozen=True, slots=True)
class Band:
    """One fault on the time axis; `start` and `end` are shares of it."""

    number: int
    name: str
    start: float
    end: float
    proven: bool
    words: str
    title: str
    """`words` with the start and end times"""
    tint: int


@dataclass(slots=True)
class Panels:
    """The stack of drawings and what a reader needs to know about them."""

    panels: list[Panel]
    axis: Markup
    bands_left_out: int = 0
    tints: list[list[str]] = field(default_factory=list)
    """The nemeses drawn in each tint, by the tint's number"""
    window_ns: int = 0
    column_ns: int = 0
    dots: int = 0
    readout: Mapping[str, Any] = field(default_factory=dict)
    """The texts that the page's script shows for each moment"""


def bands_of(
    faults: Sequence[Mapping[str, Any]], end_ns: int, most: int = MAX_BANDS
) -> tuple[list[Band], list[str], int]:
    """The faults as bands, the names of their nemeses in order of appearance, and how many were left out."""
    bands: list[Band] = []
    nemeses: dict[str, int] = {}
    skipped = 0
    for number, fault in enumerate(faults, 1):
        start_ns, stop_ns = fault.get("start_ns"), fault.get("end_ns")
        if not isinstance(start_ns, (int, float)) or end_ns <= 0:
            skipped += 1
            continue
        if len(bands) >= most:
            skipped += 1
            continue
        nemesis, variant = clip(fault.get("nemesis", "fault"), 40), clip(fault.get("variant") or "", 40)
        tint = nemeses.setdefault(nemesis, len(nemeses))
        stop_ns = stop_ns if isinstance(stop_ns, (int, float)) else end_ns
        proven, is_unmet = fault.get("proven") is True, fault.get("exercised") is False
        what = clip(f"fault {number}: {nemesis} {variant}", 100)
        notes = ("" if proven else ", NOT PROVEN") + (", not exercised" if is_unmet else "")
        bands.append(
            Band(
                number=number,
                name=variant or nemesis,
                start=min(1.0, max(0.0, start_ns / end_ns)),
                end=min(1.0, max(0.0, stop_ns / end_ns)),
                proven=proven,
                words=what + notes,
                title=f"{what}, {instant(start_ns)} to {instant(stop_ns)}{notes}",
                tint=tint % TINTS,
            )
        )
    return bands, list(nemeses), skipped


def over_time(
    data: RunData,
    faults: Sequence[Mapping[str, Any]],
    terms: Sequence[Mapping[str, Any]],
    *,
    moments: Sequence[tuple[int, str]] = (),
    samples: Samples | None = None,
    max_strokes: int,
    max_spans: int = MAX_SPANS,
) -> Panels | None:
    """All panels of a run; None if nothing happened. `moments` (ns, text) of violations are marked in each panel.
    `samples` are the metrics of the system under test.

    Pairs of time columns are merged until the latency dots take at most `max_strokes` strokes. At most `max_spans`
    faults and as many terms are drawn.
    """
    ends = [data.end_ns, *(int(f["end_ns"]) for f in faults if isinstance(f.get("end_ns"), (int, float)))]
    end_ns = max(ends)
    if end_ns <= 0:
        return None
    bands, nemeses, skipped = bands_of(faults, end_ns, min(MAX_BANDS, max_spans))
    ticks = time_ticks(end_ns)
    marks = [
        element("line", x1=percent(at), x2=percent(at), y1=0, y2="100%", class_="moment")
        for at in (min(1.0, max(0.0, at_ns / end_ns)) for at_ns, _ in moments)
    ]
    back = Markup("").join([*(_band(band) for band in bands), *_verticals(ticks)])
    front = Markup("").join(marks)
    panels = []
    if bands:
        panels.append(_track(bands))
    columns = max(1, math.ceil(end_ns / data.grid.column_ns))
    panels += _client_panels(data, end_ns, back, front, max_strokes // 3)
    latency, dots, column_ns = _latency_panels(data, columns, end_ns, back, front, max_strokes)
    panels += latency
    per_window = max(1, math.ceil(columns / WINDOWS))
    panels += _rate_panels(data, columns, per_window, end_ns, back, front)
    leaders = _leader_panel(terms, end_ns, back, front, min(MAX_TERMS, max_spans))
    if leaders is not None:
        panels.append(leaders)
    if samples is not None:
        panels += metric_panels(samples, end_ns, back, front)
    window_ns = per_window * data.grid.column_ns
    return Panels(
        panels=panels,
        axis=_axis(ticks),
        bands_left_out=skipped,
        tints=[nemeses[tint::TINTS] for tint in range(min(TINTS, len(nemeses)))],
        window_ns=window_ns,
        column_ns=column_ns,
        dots=dots,
        readout=readout(
            data,
            [(band.start, band.end, band.words) for band in bands],
            terms,
            moments,
            window_ns=window_ns,
            end_ns=end_ns,
            max_spans=max_spans,
            metrics=None if samples is None else metric_words(samples, end_ns),
        ),
    )


def _band(band: Band) -> Markup:
    css = f"band tint{band.tint}" + ("" if band.proven else " unproven")
    width = max(band.end - band.start, 0.001)
    return element("rect", x=percent(band.start), width=percent(width), y=0, height="100%", class_=css)


def _verticals(ticks: Iterable[tuple[float, str]]) -> list[Markup]:
    return [element("line", x1=percent(at), x2=percent(at), y1=0, y2="100%", class_="grid vertical") for at, _ in ticks]


def _axis(ticks: Sequence[tuple[float, str]]) -> Markup:
    labels = []
    for place, (at, label) in enumerate(ticks):
        anchor = "start" if at < 0.02 else "end" if at > 0.97 else "middle"
        css = "tick" + (" odd" if place % 2 else "")
        labels.append(element("text", label, x=percent(at), y=13, text_anchor=anchor, class_=css))
    return element("svg", *labels, height=18, class_="axis", aria_hidden="true")


def _track(bands: Sequence[Band]) -> Panel:
    """The faults as labelled bars; overlapping ones are in different rows."""
    rows = _rows(bands)
    bars = []
    for place, (band, row) in enumerate(zip(bands, rows, strict=True)):
        following = next((bands[n].start for n in range(place + 1, len(bands)) if rows[n] == row), 1.0)
        width = max(band.end - band.start, 0.002)
        css = f"fault tint{band.tint}" + ("" if band.proven else " unproven")
        inside = [
            element("title", band.title),
            element("rect", x=0, y=0, width="100%", height=TRACK_HEIGHT_PX - 4, rx=3, class_=css),
        ]
        if width > 0.012:
            size = "wide" if width > 0.05 else "narrow"
            inside.append(element("text", str(band.number), x=5, y=13, class_=f"number {size}"))
        name_px = 11 + 7 * len(str(band.number))
        room = max(width, following - band.start)
        inside.append(_label(band.name, name_px, room, NAME_CHARACTER_PX, y=13, class_="name"))
        bars.append(
            element(
                "svg",
                *inside,
                x=percent(band.start),
                y=row * TRACK_HEIGHT_PX + 2,
                width=percent(width),
                height=TRACK_HEIGHT_PX - 4,
            )
        )
    height_px = (max(rows) + 1) * TRACK_HEIGHT_PX
    label = f"{len(bands)} faults: " + "; ".join(band.title for band in bands[:20])
    return Panel("Faults, from injection to heal", drawing(height_px, label, *bars), height_px, kind="track")


def _rows(bands: Sequence[Band]) -> list[int]:
    """The row of each fault: the first free one, or the last if more faults overlap than there are rows."""
    free_from: list[float] = []
    rows = []
    for band in bands:
        row = next((r for r, free in enumerate(free_from) if free <= band.start), len(free_from))
        row = min(row, MAX_TRACKS - 1)
        if row == len(free_from):
            free_from.append(0.0)
        free_from[row] = max(free_from[row], band.end)
        rows.append(row)
    return rows


def _client_panels(data: RunData, end_ns: int, back: Markup, front: Markup, max_strokes: int) -> list[Panel]:
    """What every client did: a row for each client, with its operations in the colour of their outcome."""
    lanes = data.lanes
    column_ns, runs = lanes.runs(max_strokes)
    if not runs:
        return []
    paths = []
    for outcome in OUTCOMES:
        drawn = "".join(f"M{first} {2 * row + 1}h{length}" for kind, row, first, length in runs if kind == outcome)
        if drawn:
            paths.append(element("path", d=drawn, class_=f"lane-run {outcome}"))
    height_px = lanes.rows * CLIENT_HEIGHT_PX
    # Units are columns across and half rows down; strokes run along the middle of each row.
    layer = element(
        "svg", *paths, view_box=f"0 0 {end_ns / column_ns:.4f} {2 * lanes.rows}", preserve="none", width="100%",
        height="100%", class_="plot",
    )  # fmt: skip
    shared = -(-lanes.slots // lanes.rows)
    caption = "What each client did" + (f" ({shared} share a row)" if shared > 1 else "")
    every = max(1, lanes.rows // 5)
    labels = [((row + 0.5) / lanes.rows, str(row * lanes.slots // lanes.rows)) for row in range(0, lanes.rows, every)]
    label = f"{caption}: {lanes.slots} clients, coloured by how their operations ended"
    return [Panel(caption, drawing(height_px, label, back, layer, front), height_px, labels, kind="clients")]


def _label(text: str, x: int, room: float, character_px: float, **attributes: Any) -> Markup:
    """A text with `room` for it (a share of the drawing's width), hidden if it would be cut off.

    This assumes a wide page; the page's script decides again at every width and zoom.
    """
    needed_px = round(x + character_px * len(text))
    hidden = None if needed_px <= room * DRAWN_WIDTH_PX else "none"
    return element("text", text, x=x, display=hidden, data_room=f"{room:.4f}", data_needs=needed_px, **attributes)


def _latency_panels(
    data: RunData, columns: int, end_ns: int, back: Markup, front: Markup, max_strokes: int
) -> tuple[list[Panel], int, int]:
    """A panel for each function, all with the same scale; the number of strokes; a column's width (ns)."""
    steps = [cell.step for cell in data.grid.cells()]
    if not steps:
        return [], 0, data.grid.column_ns
    low, high = min(steps) - 4, max(steps) + 6
    merge = 1
    while True:
        drawn = {f: _dots(data, f, merge, high) for f in data.functions}
        strokes = sum(number for found in drawn.values() for _, number in found)
        if strokes <= max_strokes or columns // merge <= 16:
            break
        merge *= 2
    per_window = max(1, math.ceil(columns / WINDOWS))
    # The axis ends with the run, usually within the last column, so its length in columns is fractional.
    length = end_ns / data.grid.column_ns
    labels = _latency_labels(low, high)
    lines = [element("line", x1=0, x2="100%", y1=percent(at), y2=percent(at), class_="grid") for at, _ in labels]
    panels = []
    for f in data.functions:
        outcomes = data.outcomes[f]
        if not any(outcomes[kind] for kind in OUTCOMES):
            continue
        dots = Markup("").join(path for path, _ in drawn[f])
        height = high - low
        layer = stretched(dots, width=length / merge, height=height)
        curves = stretched(_quantile_lines(data, f, per_window, length, high), width=length, height=height)
        label = f"Latency of {f} over time: " + ", ".join(f"{count(outcomes[kind])} {kind}" for kind in OUTCOMES)
        svg = drawing(LATENCY_HEIGHT_PX, clip(label), back, *lines, layer, curves, front)
        panels.append(Panel(f"Latency of {clip(f, 40)}", svg, LATENCY_HEIGHT_PX, labels, kind="latency"))
    return panels, strokes, merge * data.grid.column_ns


def _dots(data: RunData, f: str, merge: int, high: int) -> list[tuple[Markup, int]]:
    """The dots of one function as paths and their strokes: ok in three strengths, then fail, then info on top."""
    found = []
    for outcome in OUTCOMES:
        wanted = frozenset(data.series([f], [outcome]))
        cells: Counter[tuple[int, int]] = Counter()
        for cell in data.grid.cells():
            if cell.series in wanted:
                cells[cell.column // merge, high - 1 - cell.step] += cell.operations
        if not cells:
            continue
        if outcome != "ok":
            path, number = runs_path(cells)
            css = f"dots {outcome}"
            found.append((element("path", d=path, class_=css), number))
            if outcome == "info":
                found.append((element("path", d=path, class_="dots hole"), number))
            continue
        strong = max(3, 4 * sorted(cells.values())[len(cells) // 2])
        levels = (("faint", 1, 1), ("", 2, strong - 1), ("strong", strong, math.inf))
        for name, least, most in levels:
            path, number = runs_path(point for point, operations in cells.items() if least <= operations <= most)
            if number:
                found.append((element("path", d=path, class_=f"dots ok {name}".strip()), number))
    return found


def _latency_labels(low: int, high: int) -> list[tuple[float, str]]:
    """Ticks of the logarithmic axis: decades, subdivided if there are few."""
    decades = (high - low) / BINS_PER_DECADE
    multiples = (1,) if decades > 2.2 else (1, 3) if decades > 0.8 else (1, 2, 3, 5)
    offsets = [math.log10(multiple) * BINS_PER_DECADE for multiple in multiples]
    labels = []
    for decade in range(low // BINS_PER_DECADE, high // BINS_PER_DECADE + 1):
        for offset in offsets:
            step = decade * BINS_PER_DECADE + offset
            if low + 1 <= step <= high - 1:
                labels.append(((high - step) / (high - low), duration(latency_of(step))))
    return labels


def _quantile_lines(data: RunData, f: str, per_window: int, length: float, high: int) -> Markup:
    """Median and 99th percentile of ok operations by window, interrupted at windows without any. The run is `length`
    columns long."""
    windows = data.grid.windows(data.series([f], ["ok"]), per_window)
    lines = []
    for place, (q, name) in enumerate(_LINES):
        parts: list[str] = []
        previous = None
        for window in sorted(windows):
            y = high - quantiles_of(windows[window], [q])[0]
            x = (window * per_window + min((window + 1) * per_window, length)) / 2
            parts.append(f"L{x:g} {y:g}" if previous == window - 1 else f"M{x:g} {y:g}h0")
            previous = window
        if parts:
            lines.append(element("path", d="".join(parts), class_=f"line q{place} {name}"))
    return Markup("").join(lines)


def _rate_panels(data: RunData, columns: int, per_window: int, end_ns: int, back: Markup, front: Markup) -> list[Panel]:
    """Completions per second: successes, and below them, on their own scale, failures and unknown outcomes."""
    panels = []
    for caption, kinds in (("Succeeded per second", ("ok",)), ("Failed or unknown per second", ("fail", "info"))):
        rates = {kind: _rates(data, kind, columns, per_window, end_ns) for kind in kinds}
        highest = max((max(values, default=0.0) for values in rates.values()), default=0.0)
        if highest <= 0 and kinds != ("ok",):
            continue
        ticks = linear_ticks(highest)
        top = ticks[-1]
        labels = [(1 - tick / top, f"{tick:,.0f}" if top >= 5 else f"{tick:g}") for tick in ticks]
        lines = [element("line", x1=0, x2="100%", y1=percent(at), y2=percent(at), class_="grid") for at, _ in labels]
        paths = []
        for kind, values in rates.items():
            outline = "".join(f"V{round(1000 * (1 - value / top))}H{number + 1}" for number, value in enumerate(values))
            if kind == "ok":
                paths.append(element("path", d=f"M0 1000{outline}V1000Z", class_="area ok"))
            paths.append(element("path", d=f"M0 1000{outline}", class_=f"line rate {kind}"))
        # The last window may extend beyond the run; the axis ends with the run.
        layer = stretched(Markup("").join(paths), width=end_ns / (per_window * data.grid.column_ns), height=1000)
        height_px = RATE_HEIGHT_PX if kinds == ("ok",) else RATE_HEIGHT_PX * 2 // 3
        peaks = ", ".join(f"{kind} at most {max(values, default=0):,.0f}" for kind, values in rates.items())
        svg = drawing(height_px, f"{caption}: {peaks}", back, *lines, layer, front)
        panels.append(Panel(caption, svg, height_px, labels, kind="rate"))
    return panels


def _rates(data: RunData, kind: str, columns: int, per_window: int, end_ns: int) -> list[float]:
    """Operations per second by window. The last one is as long as the rest of the run, but at least a quarter."""
    windows = data.grid.windows(data.series(data.functions, [kind]), per_window)
    number = math.ceil(columns / per_window)
    window_ns = per_window * data.grid.column_ns
    rates = []
    for window in range(number):
        length_ns = min(window_ns, max(end_ns - window * window_ns, window_ns // 4))
        rates.append(windows.get(window, Counter()).total() / (length_ns / 1e9))
    return rates


def _leader_panel(
    terms: Sequence[Mapping[str, Any]], end_ns: int, back: Markup, front: Markup, most: int
) -> Panel | None:
    """A row for each node, a bar for each term it led: until the term's end if that is known, else until the next
    leader begins."""
    spans, left_out = leader_spans(terms, end_ns, most)
    if not spans:
        return None
    every = sorted({span.leader for span in spans}, key=lambda name: (len(name), name))
    nodes = every[:MAX_LEADERS]
    rows = {node: row for row, node in enumerate(nodes)}
    bars = []
    for place, span in enumerate(spans):
        start, stop = (min(1.0, max(0.0, at / end_ns)) for at in (span.start_ns, span.stop_ns))
        row = rows.get(span.leader)
        if row is None or (stop <= 0 and place + 1 < len(spans)):
            continue
        width = max(stop - start, 0.003)
        inside = [
            element("title", clip(f"{span.leader} leads term {span.term} from {instant(span.start_ns)}")),
            element("rect", x=0, y=0, width="100%", height=LEADER_HEIGHT_PX - 4, rx=2, class_="leader"),
        ]
        text = clip(f"term {span.term}", 20)
        inside.append(_label(text, 4, width, TERM_CHARACTER_PX, y=9.5, class_="term"))
        bars.append(
            element(
                "svg",
                *inside,
                x=percent(start),
                y=row * LEADER_HEIGHT_PX + 2,
                width=percent(width),
                height=LEADER_HEIGHT_PX - 4,
            )
        )
    height_px = len(nodes) * LEADER_HEIGHT_PX
    labels = [((row + 0.5) / len(nodes), clip(node, 12)) for node, row in rows.items()]
    caption = "Leader by node and term" + (f" (first {most} of {most + left_out})" if left_out else "")
    caption += f", {len(nodes)} of {len(every)} nodes that led" if len(nodes) < len(every) else ""
    svg = drawing(height_px, f"{caption}: {len(spans)} terms on {len(nodes)} nodes", back, *bars, front)
    return Panel(caption, svg, height_px, labels, kind="leaders")
