"""A witness as a picture: one lane per process, one bar per operation, arrows for the reasons.  Self-contained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from checker.history import INFO, OK, Operation
from checker.verdict import Edge, Result, Witness
from checker.words import seconds, short

__all__ = ["html", "svg"]

#: Maximum number of operations drawn: a larger picture explains nothing, and reports stay small.
MAX_DRAWN = 60
#: Geometry in pixels.
_LEFT, _LANE, _BAR, _STEP, _TOP = 110, 52, 16, 64, 36
#: Width of a character of a label, and the room between two labels of a lane.
_CHARACTER, _APART = 7, 12
#: How far beside the middle of a bar an arrow begins or ends: two opposite arrows do not coincide.
_ASIDE = 8
#: Reasons in real time and in a process's order, whose arrows go from an end to a start.
_IN_TIME = ("realtime", "process")
_COLOURS = (
    ".ok{fill:#85ade8}.info{fill:#e6c06a}.fail{fill:#e39b9b}.other{fill:#bbbbbb}text{fill:#191b1f}"
    ".label{paint-order:stroke;stroke:#ffffff;stroke-width:3px}.lane{stroke:#dedfda}.bar{stroke:#556677}"
    ".edge{stroke:#bd2218}.tip{fill:#bd2218}"
)
_DARK = (
    ".ok{fill:#35568c}.info{fill:#7d6524}.fail{fill:#7d3a3a}.other{fill:#555555}text{fill:#e9eaec}"
    ".label{stroke:#111317}.lane{stroke:#32373f}.edge{stroke:#ff8075}.tip{fill:#ff8075}"
)


def _label(operation: Operation) -> str:
    steps = operation.result if operation.status == OK and operation.result else operation.value or ()
    if operation.f == "txn" and isinstance(steps, (list, tuple)) and all(_is_step(step) for step in steps):
        return ", ".join(f"{step[0]} {short(step[1], 12)} {short(step[2], 18)}" for step in steps[:3])
    if operation.value is not None and operation.f not in ("read", "get", "tail"):
        return f"{operation.f} {short(operation.value, 24)}"
    return f"{operation.f} = {short(operation.result, 30)}" if operation.status == OK else operation.f


def _is_step(step: object) -> bool:
    return isinstance(step, (list, tuple)) and len(step) == 3


class _Bar(NamedTuple):
    """An operation's place in the drawing."""

    start: int
    end: int
    top: int

    @property
    def middle(self) -> int:
        return (self.start + self.end) // 2


def _ends(operation: Operation) -> bool:
    return operation.returned is not None and operation.status != INFO


def _columns(operations: Sequence[Operation], labels: Sequence[str]) -> dict[float, int]:
    """Where each event lies: in their order, far enough apart that no label reaches the next one of its lane."""
    returns = {o.returned for o in operations if o.returned is not None and _ends(o)}
    events = sorted({o.invoked for o in operations} | returns)
    begins = {operation.invoked: index for index, operation in enumerate(operations)}
    free: dict[object, int] = {}
    columns: dict[float, int] = {}
    x = _LEFT
    for event in events:
        index = begins.get(event)
        if index is not None:
            process = operations[index].process
            x = max(x, free.get(process, 0))
            free[process] = x + len(labels[index]) * _CHARACTER + _APART
        columns[event] = x
        x += _STEP
    return columns


def svg(witness: Witness) -> str:
    """The witness as one SVG element: time runs to the right by order of events, not to scale.

    Operations are numbered in the witness's order, from 1.  A solid arrow is an order in real time or of a process, a
    dashed one follows from a value.
    """
    operations = witness.operations[:MAX_DRAWN]
    labels = [f"#{number} {_label(operation)}" for number, operation in enumerate(operations, 1)]
    columns = _columns(operations, labels)
    lanes: dict[object, int] = {}
    for operation in sorted(operations, key=lambda o: o.invoked):
        lanes.setdefault(operation.process, len(lanes))
    reach = (columns[o.invoked] + len(label) * _CHARACTER for o, label in zip(operations, labels, strict=True))
    width = max([_LEFT, *columns.values(), *reach]) + _STEP
    height = _TOP + len(lanes) * _LANE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(witness.text[:300])}">',
        f"<style>{_COLOURS}@media(prefers-color-scheme:dark){{{_DARK}}}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>',
    ]
    for process, lane in lanes.items():
        y = _TOP + lane * _LANE + _BAR // 2
        parts.append(f'<text x="4" y="{y + 4}">process {escape(str(process))}</text>')
        parts.append(f'<line x1="{_LEFT}" x2="{width}" y1="{y}" y2="{y}" class="lane"/>')
    bars = []
    for operation in operations:
        start = columns[operation.invoked]
        end = columns[operation.returned] if _ends(operation) and operation.returned is not None else width - 6
        bars.append(_Bar(start, max(start + 8, end), _TOP + lanes[operation.process] * _LANE))
    parts += [_drawn(*each) for each in zip(operations, labels, bars, strict=True)]
    parts += [
        _arrow(edge, bars[edge.source], bars[edge.target])
        for edge in witness.edges
        if edge.source < len(bars) and edge.target < len(bars)
    ]
    parts += [
        f'<text x="{bar.start}" y="{bar.top - 5}" class="label">{escape(label)}</text>'
        for label, bar in zip(labels, bars, strict=True)
    ]
    return "".join([*parts, "</svg>"])


def _drawn(operation: Operation, label: str, bar: _Bar) -> str:
    times = f"{seconds(operation.invoked_ns) or operation.invoked} to {seconds(operation.returned_ns) or '?'}"
    status = operation.status if operation.status in ("ok", "info", "fail") else "other"
    dash = "" if _ends(operation) else ' stroke-dasharray="4 3"'
    return (
        f"<g><title>{escape(label)} ({escape(times)})</title>"
        f'<rect x="{bar.start}" y="{bar.top}" width="{bar.end - bar.start}" height="{_BAR}" rx="3" '
        f'class="bar {status}"{dash}/></g>'
    )


def _arrow(edge: Edge, source: _Bar, target: _Bar) -> str:
    """An arrow in time goes from an end to a start, any other between the middles."""
    if edge.kind in _IN_TIME:
        x1, x2, dash = source.end, target.start, ""
        y1, y2 = source.top + _BAR // 2, target.top + _BAR // 2
    else:
        x1, x2, dash = source.middle + _ASIDE, target.middle - _ASIDE, ' stroke-dasharray="5 3"'
        y1 = source.top + (_BAR if target.top >= source.top else 0)
        y2 = target.top + (_BAR if source.top >= target.top else 0)
    bend = f"Q{(x1 + x2) // 2} {max(y1, y2) + 22} " if source.top == target.top else "L"
    return (
        f'<g><title>{escape(edge.reason[:400])}</title><path d="M{x1} {y1}{bend}{x2} {y2}" fill="none" class="edge" '
        f'stroke-width="1.4"{dash} marker-end="url(#tip)"/></g>'
    )


def _fact(value: Any) -> str:
    """A figure of a result, as text without Python's quotes and braces."""
    if isinstance(value, str):
        return short(value, 300)[1:-1] if len(value) > 300 else value
    if isinstance(value, Mapping):
        return ", ".join(f"{_fact(name)}: {short(one, 80)}" for name, one in [*value.items()][:20])
    if isinstance(value, (list, tuple)):
        return ", ".join(one if isinstance(one, str) and len(one) <= 80 else short(one, 80) for one in value[:20])
    return short(value, 300)


def _facts(stats: Mapping[str, Any]) -> str:
    rows = []
    for name, value in stats.items():
        if (
            name == "examples"
            or value is None
            or value == ""
            or (isinstance(value, (Mapping, list, tuple)) and not value)
        ):
            continue
        is_time = name.endswith("_s") and isinstance(value, (int, float))
        said = f"{value * 1000:.3g} ms" if is_time else _fact(value)
        words = (name[:-2] if is_time else name).replace("_", " ")
        rows.append(f"<tr><td>{escape(words)}</td><td>{escape(said)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def html(result: Result, *, title: str = "History check") -> str:
    """A small self-contained page: title, verdict, the sentence, the picture, the reasons, the figures."""
    witness = result.witness
    verdict = str(result.verdict)
    body = [
        f'<p class="soft">{escape(title)}</p><h1 class="{escape(verdict)}">{escape(verdict)}</h1>',
        f"<p>{escape(result.reason[:4000])}</p>",
    ]
    if witness is not None:
        if witness.operations:
            body.append(f'<div style="overflow-x:auto">{svg(witness)}</div>')
        reasons = "".join(
            f"<li>#{edge.source + 1} before #{edge.target + 1} ({escape(edge.kind)}): {escape(edge.reason[:400])}</li>"
            for edge in witness.edges[:MAX_DRAWN]
        )
        if reasons:
            body.append(
                '<p class="soft">Time runs to the right, in the order of events. An arrow points from an operation to '
                f"one that must come after it: solid in real time, dashed because of a value.</p><ul>{reasons}</ul>"
            )
        if witness.note:
            body.append(f"<p>{escape(witness.note)}</p>")
    body.append(_facts(result.stats))
    style = (
        ":root{color-scheme:light dark}body{font:15px/1.5 sans-serif;max-width:72em;margin:2em auto;padding:0 1em;"
        "color:#191b1f;background:#fff;overflow-wrap:anywhere}td{padding:0 1em 0 0;vertical-align:top}"
        ".soft{color:#5c6068}.valid{color:#0b7450}.invalid{color:#bd2218}.unknown{color:#64429f}"
        "@media(prefers-color-scheme:dark){body{color:#e9eaec;background:#111317}.soft{color:#a0a5ae}"
        ".valid{color:#4fd09c}.invalid{color:#ff8075}.unknown{color:#bfa2f7}}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{style}</style></head><body>{''.join(body)}</body></html>"
    )
