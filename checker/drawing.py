"""A witness as a picture: one lane per process, one bar per operation, arrows for the reasons.  Self-contained."""

from __future__ import annotations

from html import escape

from checker.history import INFO, OK, Operation
from checker.verdict import Result, Witness
from checker.words import seconds, short

__all__ = ["html", "svg"]

#: Maximum number of operations drawn: a larger picture explains nothing, and reports stay small.
MAX_DRAWN = 60
#: Geometry in pixels.
_LEFT, _LANE, _BAR, _STEP, _TOP = 110, 46, 22, 64, 30
_COLOURS = {"ok": "#cfe3f7", "info": "#f6e7c1", "fail": "#f3d0d0"}
_EDGE_COLOURS = {"realtime": "#777777", "process": "#8a5a00", "ww": "#b02a37", "wr": "#1a7f4b", "rw": "#6f42c1"}


def _label(operation: Operation) -> str:
    steps = operation.result if operation.status == OK and operation.result else operation.value or ()
    if operation.f == "txn" and isinstance(steps, (list, tuple)) and all(_is_step(step) for step in steps):
        return ", ".join(f"{step[0]} {short(step[1], 12)} {short(step[2], 18)}" for step in steps[:3])
    if operation.value is not None and operation.f not in ("read", "get", "tail"):
        return f"{operation.f} {short(operation.value, 24)}"
    return f"{operation.f} = {short(operation.result, 30)}" if operation.status == OK else operation.f


def _is_step(step: object) -> bool:
    return isinstance(step, (list, tuple)) and len(step) == 3


def svg(witness: Witness) -> str:
    """The witness as one SVG element: time runs to the right by order of events, not to scale."""
    operations = witness.operations[:MAX_DRAWN]
    events = sorted(
        {o.invoked for o in operations}
        | {o.returned for o in operations if o.returned is not None and o.status != INFO}
    )
    column = {event: index for index, event in enumerate(events)}
    lanes: dict[object, int] = {}
    for operation in sorted(operations, key=lambda o: o.invoked):
        lanes.setdefault(operation.process, len(lanes))
    width = _LEFT + (len(events) + 1) * _STEP
    height = _TOP + len(lanes) * _LANE + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{escape(witness.text[:300])}">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="context-stroke"/></marker></defs>',
    ]
    for process, lane in lanes.items():
        y = _TOP + lane * _LANE
        parts.append(f'<text x="4" y="{y + 15}">process {escape(str(process))}</text>')
        parts.append(f'<line x1="{_LEFT}" x2="{width}" y1="{y + _LANE - 8}" y2="{y + _LANE - 8}" stroke="#eeeeee"/>')
    boxes: list[tuple[int, int, int]] = []
    for operation in operations:
        x = _LEFT + column[operation.invoked] * _STEP
        ended = operation.returned is not None and operation.status != INFO
        end = _LEFT + column[operation.returned] * _STEP if ended and operation.returned is not None else width - 6
        y = _TOP + lanes[operation.process] * _LANE
        boxes.append((x, end, y))
        dash = "" if ended else ' stroke-dasharray="4 3"'
        times = f"{seconds(operation.invoked_ns) or operation.invoked} to {seconds(operation.returned_ns) or '?'}"
        label = escape(_label(operation))
        parts.append(
            f"<g><title>{label} ({escape(times)})</title>"
            f'<rect x="{x}" y="{y}" width="{max(8, end - x)}" height="{_BAR}" '
            f'rx="3" fill="{_COLOURS.get(operation.status, "#dddddd")}" stroke="#556677"{dash}/>'
            f'<text x="{x + 4}" y="{y + 15}">{label}</text></g>'
        )
    for edge in witness.edges:
        if edge.source >= len(boxes) or edge.target >= len(boxes):
            continue
        x1, y1 = boxes[edge.source][1], boxes[edge.source][2] + _BAR // 2
        x2, y2 = boxes[edge.target][0], boxes[edge.target][2] + _BAR // 2
        colour = _EDGE_COLOURS.get(edge.kind, "#333333")
        bend = min(y1, y2) - 18
        parts.append(
            f'<g><title>{escape(edge.reason[:400])}</title><path d="M{x1} {y1}Q{(x1 + x2) // 2} {bend} {x2} {y2}" '
            f'fill="none" stroke="{colour}" stroke-width="1.4" marker-end="url(#tip)"/>'
            f'<text x="{(x1 + x2) // 2}" y="{bend + 12}" fill="{colour}" text-anchor="middle">{escape(edge.kind)}'
            "</text></g>"
        )
    return "".join([*parts, "</svg>"])


def html(result: Result, *, title: str = "History check") -> str:
    """A small self-contained page: the verdict, the sentence, the picture, the reasons, the engine."""
    witness = result.witness
    colour = {"valid": "#1a7f4b", "invalid": "#b02a37"}.get(str(result.verdict), "#8a5a00")
    body = [f'<h1 style="color:{colour}">{escape(str(result.verdict))}</h1>', f"<p>{escape(result.reason[:4000])}</p>"]
    if witness is not None:
        if witness.operations:
            body.append(f'<div style="overflow-x:auto">{svg(witness)}</div>')
        edges = witness.edges[:MAX_DRAWN]
        reasons = "".join(f"<li><b>{escape(e.kind)}</b>: {escape(e.reason[:400])}</li>" for e in edges)
        if reasons:
            body.append(f"<ul>{reasons}</ul>")
        if witness.note:
            body.append(f"<p>{escape(witness.note)}</p>")
    facts = {name: value for name, value in result.stats.items() if name not in ("examples",)}
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(short(v, 300))}</td></tr>" for k, v in facts.items())
    body.append(f"<table>{rows}</table>")
    style = "body{font:15px/1.5 sans-serif;max-width:72em;margin:2em auto;padding:0 1em}td{padding:0 1em 0 0}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{style}</style></head><body>{''.join(body)}</body></html>"
    )
