"""The witness of a violation in real time: a lane for each process, a bar for each operation.

A linear scale would not do: operations last milliseconds and lie seconds apart, so that bars to scale would be
hairlines. The axis keeps the exact order of all starts and ends and shortens the gaps between them to their
logarithm; a gap that was shortened a lot is labelled with its length.
"""

from __future__ import annotations

__all__ = ["Timeline", "arrowhead", "timeline"]

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from harness.report.svg import element, percent
from harness.report.witness import Witness
from harness.units import clip, duration, instant, operation_text

LANE_PX = 46
CONTEXT_LANE_PX = 32
"""Height of a lane that holds only neighbours, which are context."""

BAR_PX = 14
TOP_PX = 22
BOTTOM_PX = 26

DRAWN_WIDTH_PX = 760
"""Width for which labels are placed; on narrower pages the drawing scrolls sideways."""

CHARACTER_PX = 6.7
"""Width of a label's character, to estimate whether two labels would touch."""

ARROW_ID = "arrow"

MARGIN = 0.02
CONTEXT_WEIGHT = 0.45
"""Factor for the width of a gap that a neighbour bounds."""

LABELLED_GAP_SHARE = 0.1
"""Share of the whole time from which on a gap is labelled with its length."""

Operation = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The drawing and the names of its lanes (share from the top, process)."""

    svg: Markup
    height_px: int
    lanes: Sequence[tuple[float, str]]


class _Scale:
    """Maps moments to shares of the axis: keeps their order, draws gaps by their logarithm.

    The axis spans the moments of the witness; moments of neighbours within that span count as well.
    """

    def __init__(self, moments_ns: Sequence[int], context_ns: Sequence[int] = ()) -> None:
        own = set(moments_ns)
        first, last = min(own), max(own)
        self.moments = sorted(own | {moment for moment in context_ns if first <= moment <= last})
        pairs = list(zip(self.moments, self.moments[1:], strict=False))
        self.gaps = [later - earlier for earlier, later in pairs]
        shortest = min(self.gaps, default=1)
        weights = [
            (1 + math.log2(gap / shortest) * 0.35) * (1.0 if earlier in own and later in own else CONTEXT_WEIGHT)
            for gap, (earlier, later) in zip(self.gaps, pairs, strict=True)
        ]
        total = sum(weights) or 1.0
        self.places = [MARGIN]
        for weight in weights:
            self.places.append(self.places[-1] + weight / total * (1 - 2 * MARGIN))

    def __call__(self, moment_ns: float) -> float:
        """Interpolate linearly between known moments; 0.0 before the first, 1.0 after the last."""
        if moment_ns < self.moments[0]:
            return 0.0
        if moment_ns > self.moments[-1]:
            return 1.0
        after = bisect.bisect_right(self.moments, moment_ns)
        if after >= len(self.moments):
            return self.places[-1]
        share = (moment_ns - self.moments[after - 1]) / self.gaps[after - 1]
        return self.places[after - 1] + share * (self.places[after] - self.places[after - 1])


def timeline(witness: Witness, neighbours: Sequence[Operation], faults: Sequence[Mapping[str, Any]]) -> Timeline:
    """Draw a witness with its neighbours and the faults behind them."""
    operations: list[tuple[int | None, Operation]] = [(place, op) for place, op in enumerate(witness.operations)]
    operations += [(None, op) for op in neighbours]
    scale = _Scale(_moments(witness.operations), _moments(neighbours))
    lanes = _Lanes(operations)
    height_px = TOP_PX + lanes.height_px + BOTTOM_PX
    parts = _bands(faults, scale)
    parts += [element("line", x1=0, x2="100%", y1=y, y2=y, class_="lane") for y in lanes.middles.values()]
    parts += _gap_labels(scale, height_px)
    labels: list[Markup] = []
    taken: dict[tuple[int, int], list[tuple[float, float]]] = {}
    # The witness's operations come first: their labels always appear, a neighbour's only if there is room.
    for place, op in sorted(operations, key=lambda item: (item[0] is None, item[1]["start_ns"])):
        y = lanes.middles[op["process"]]
        parts.append(_bar(place, op, scale, y))
        label = _label(place, op, scale, y, taken)
        if label is not None:
            labels.append(label)
    parts += [
        _arrow(edge.kind, witness.operations[edge.source], witness.operations[edge.target], scale, lanes)
        for edge in witness.edges
    ]
    names = ", ".join(operation_text(op) for op in witness.operations[:12])
    svg = element(
        "svg",
        *parts,
        *labels,
        height=height_px,
        role="img",
        class_="chart timeline",
        aria_label=clip(f"Timeline of the operations in conflict: {names}"),
    )
    names_of_lanes = [(y / height_px, clip(str(process), 10)) for process, y in lanes.middles.items()]
    return Timeline(svg, height_px, names_of_lanes)


def arrowhead() -> Markup:
    """The definition that the arrows of every timeline of a page refer to."""
    tip = element("path", d="M0 0L7 3.5L0 7Z", class_="tip")
    size = {"markerWidth": 7, "markerHeight": 7, "refX": 6.5, "refY": 3.5}
    marker = element("marker", tip, id=ARROW_ID, orient="auto", markerUnits="userSpaceOnUse", **size)
    return element("defs", marker)


def _moments(operations: Sequence[Operation]) -> list[int]:
    ends = [op["end_ns"] for op in operations if op["end_ns"] is not None]
    return [*(op["start_ns"] for op in operations), *ends]


class _Lanes:
    """A lane for each process: those of the witness on top in order of appearance, then the neighbours'."""

    def __init__(self, operations: Sequence[tuple[int | None, Operation]]) -> None:
        self.middles: dict[Any, int] = {}
        self.height_px = 0
        for place, op in operations:
            if op["process"] not in self.middles:
                lane_px = CONTEXT_LANE_PX if place is None else LANE_PX
                # A low lane has room for labels only above its bars, so the bars lie below its middle.
                self.middles[op["process"]] = TOP_PX + self.height_px + lane_px // 2 + (5 if place is None else 0)
                self.height_px += lane_px


def _bands(faults: Sequence[Mapping[str, Any]], scale: _Scale) -> list[Markup]:
    found = []
    for number, fault in enumerate(faults, 1):
        start_ns, end_ns = fault.get("start_ns"), fault.get("end_ns")
        if not isinstance(start_ns, (int, float)):
            continue
        stop_ns = end_ns if isinstance(end_ns, (int, float)) else math.inf
        if stop_ns < scale.moments[0] or start_ns > scale.moments[-1]:
            continue
        start, stop = scale(start_ns), scale(stop_ns)
        name = clip(f"{number} {fault.get('variant') or fault.get('nemesis') or 'fault'}", 30)
        found.append(
            element(
                "svg",
                element("rect", x=0, y=0, width="100%", height="100%", class_="band tint0"),
                element("text", name, x=5, y=13, class_="bandname"),
                x=percent(start),
                y=0,
                width=percent(max(stop - start, 0.004)),
                height="100%",
            )
        )
    return found


def _gap_labels(scale: _Scale, height_px: int) -> list[Markup]:
    """The first and last moment, and the length of each gap that was shortened a lot."""
    total_ns = scale.moments[-1] - scale.moments[0]
    found = [
        element("text", instant(scale.moments[0]), x=percent(MARGIN), y=height_px - 8, class_="tick"),
    ]
    if total_ns > 0:
        found.append(
            element(
                "text",
                instant(scale.moments[-1]),
                x=percent(1 - MARGIN),
                y=height_px - 8,
                class_="tick",
                text_anchor="end",
            )
        )
    free_from = 0.14
    for place, gap_ns in enumerate(scale.gaps):
        left, right = scale.places[place], scale.places[place + 1]
        if gap_ns / total_ns < LABELLED_GAP_SHARE:
            continue
        middle = (left + right) / 2
        text = f"⋯ {duration(gap_ns)} ⋯"
        half = len(text) * CHARACTER_PX / DRAWN_WIDTH_PX / 2
        if middle - half > free_from and middle + half < 0.86:
            free_from = middle + half + 0.01
            found.append(element("text", text, x=percent(middle), y=height_px - 8, class_="tick", text_anchor="middle"))
    return found


def _span(op: Operation, scale: _Scale) -> tuple[float, float]:
    start = scale(op["start_ns"])
    return start, 1.0 if op["end_ns"] is None else max(scale(op["end_ns"]), start + 0.004)


def _bar(place: int | None, op: Operation, scale: _Scale, y: int) -> Markup:
    start, stop = _span(op, scale)
    top = y - BAR_PX // 2
    role = "context" if place is None else "culprit"
    title = f"process {op['process']}: {operation_text(op)}, {instant(op['start_ns'])} to "
    title += "the end, never completed" if op["end_ns"] is None else instant(op["end_ns"])
    inside = [element("title", clip(title, 160))]
    if op["type"] == "info" and stop < 1.0:
        # It may have taken effect at any time after its start, or never.
        inside.append(
            element("rect", x=percent(stop), y=top + 4, width=percent(1 - stop), height=BAR_PX - 8, class_="afterwards")
        )
    kind = op["type"] if op["type"] in ("ok", "fail", "info") else "info"
    inside.append(
        element(
            "rect",
            x=percent(start),
            y=top,
            width=percent(stop - start),
            height=BAR_PX,
            rx=3,
            class_=f"bar {kind} {role}",
        )
    )
    return element("g", *inside)


def _label(
    place: int | None, op: Operation, scale: _Scale, y: int, taken: dict[tuple[int, int], list[tuple[float, float]]]
) -> Markup | None:
    """What an operation did, above or below its bar, whichever is free; None for a neighbour without room."""
    start, stop = _span(op, scale)
    stop = min(stop, 1.0)
    text = operation_text(op, 34)
    width = (len(text) + (3 if place is not None else 0)) * CHARACTER_PX / DRAWN_WIDTH_PX
    at_right = start + width > 0.99
    left = max(0.0, stop - width) if at_right else start
    rows = (-BAR_PX // 2 - 5, BAR_PX // 2 + 13)[: 1 if place is None else 2]
    free = [
        row
        for row in range(len(rows))
        if all(left + width <= begin or left >= end for begin, end in taken.get((y, row), ()))
    ]
    if not free and place is None:
        return None
    row = free[0] if free else 0
    taken.setdefault((y, row), []).append((left, left + width + 0.008))
    number = [] if place is None else [element("tspan", f"{place + 1} ", class_="badge")]
    return element(
        "text",
        *number,
        element("tspan", text),
        x=percent(stop if at_right else start),
        y=y + rows[row],
        text_anchor="end" if at_right else "start",
        class_="what" if place is not None else "what context",
    )


def _arrow(kind: str, source: Operation, target: Operation, scale: _Scale, lanes: _Lanes) -> Markup:
    """An arrow to an operation that must come later; from end to start if real time or process order requires it."""
    source_span, target_span = _span(source, scale), _span(target, scale)
    one, other = lanes.middles[source["process"]], lanes.middles[target["process"]]
    in_time = kind in ("realtime", "process")
    x1 = source_span[1] if in_time else sum(source_span) / 2
    x2 = target_span[0] if in_time else sum(target_span) / 2
    reach = 0 if one == other else (BAR_PX // 2 + 1) * (1 if other > one else -1)
    css = "order" + ("" if in_time else " value")
    return element(
        "line",
        x1=percent(x1),
        y1=one + (reach if not in_time else 0),
        x2=percent(x2),
        y2=other - reach,
        class_=css,
        marker_end=f"url(#{ARROW_ID})",
    )
