"""A message sequence (Lamport) diagram: hosts are vertical lines, time runs down, messages are slanted arrows.

As in the witness's drawing, the axis keeps the exact order of all moments and shortens the gaps between them:
messages take fractions of a millisecond and are tens of milliseconds apart, so that a drawing to scale would be
horizontal lines and empty space. A gap that was shortened a lot is labelled with its length.
"""

from __future__ import annotations

__all__ = ["MAX_ARROWS", "Leadership", "sequence_page", "sequence_svg"]

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from harness.report.faults import cut_words
from harness.report.svg import element
from harness.report.templating import style
from harness.report.trace_window import RANKS, Message, Window
from harness.units import clip, count, duration, instant, plural

MAX_ARROWS = 300
"""Most messages in one drawing, which is then a dozen screens long; nobody reads a longer one."""

TIME_PX = 104
"""The column of times on the left."""

COLUMN_PX = 168
NOTES_PX = 236
"""The column of faults on the right."""

HEAD_PX = 46
FOOT_PX = 28
ROW_PX = 18
"""Distance of two moments that follow each other closely: the height of a label."""

MAX_GAP_PX = 54
SHORTEST_GAP_NS = 100_000
"""Longer gaps get more than ROW_PX, by their logarithm."""

LABELLED_GAP_NS = 5_000_000
TIME_LABEL_PX = 26
NOTE_LINE_PX = 15
NOTE_CHARACTERS = 36
LABEL_CHARACTERS = 34
BAR_PX = 9
SHORT_OF_PX = 22

_CLASSES = {
    "vote": "vote", "heartbeat": "beat", "append": "push", "commit": "push", "compare": "repair", "truncate": "repair",
    "send": "client", "send batch": "client", "pull": "client", "max offset": "client", "min offset": "client",
}  # fmt: skip
_LEGEND = (
    ("vote", "vote"), ("beat", "heartbeat"), ("push", "append, commit"), ("repair", "compare, truncate"),
    ("client", "clients"), ("other", "other"), ("lost", "lost or retransmitted"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Leadership:
    """A host that became a term's leader, at `start_ns` of the history's clock."""

    host: str
    term: int
    start_ns: int


def leaders_of(results: Mapping[str, Any]) -> list[Leadership]:
    """Who became leader when, from a run's results; empty if they do not say."""
    checks = results.get("checks")
    leaders = checks.get("leaders") if isinstance(checks, Mapping) else None
    terms = leaders.get("terms") if isinstance(leaders, Mapping) else None
    return [
        Leadership(str(term["leader"]), term["term"], term["start_ns"])
        for term in (terms if isinstance(terms, list) else [])
        if isinstance(term, Mapping) and isinstance(term.get("start_ns"), int) and isinstance(term.get("term"), int)
    ]


class _Scale:
    """Maps moments to heights: keeps their order, draws gaps by their logarithm."""

    def __init__(self, moments_ns: Sequence[int]) -> None:
        self.moments = sorted(set(moments_ns))
        self.heights = [float(HEAD_PX + ROW_PX)]
        for earlier, later in zip(self.moments, self.moments[1:], strict=False):
            extra = 7 * math.log2(max(1.0, (later - earlier) / SHORTEST_GAP_NS))
            self.heights.append(self.heights[-1] + min(MAX_GAP_PX, ROW_PX + extra))

    def __call__(self, moment_ns: int) -> float:
        """Interpolate linearly between known moments; a moment outside them is placed at the nearer end."""
        after = bisect.bisect_right(self.moments, moment_ns)
        if after == 0:
            return self.heights[0]
        if after == len(self.moments):
            return self.heights[-1]
        begin, end = self.moments[after - 1], self.moments[after]
        part = (moment_ns - begin) / (end - begin)
        return self.heights[after - 1] + part * (self.heights[after] - self.heights[after - 1])

    @property
    def bottom(self) -> float:
        """The height of the last moment."""
        return self.heights[-1]


class _Drawing:
    """Draws one window as SVG."""

    def __init__(
        self, window: Window, faults: Sequence[Mapping[str, Any]], leaders: Sequence[Leadership], hosts: Sequence[str]
    ) -> None:
        self.window = window
        self.hosts = hosts
        self.faults = [fault for fault in faults if self._overlaps(fault)]
        # Includes leaders without a line: they end the leadership of the one before.
        self.leaders = sorted(
            (one for one in leaders if one.start_ns <= window.to_ns), key=lambda one: (one.start_ns, one.term)
        )
        self.scale = _Scale(self._moments())
        self.places = {host: TIME_PX + COLUMN_PX * (0.5 + number) for number, host in enumerate(hosts)}
        self.right = TIME_PX + COLUMN_PX * len(hosts)
        self.width = self.right + (NOTES_PX if self.faults else 24)
        self.height = self.scale.bottom + ROW_PX + FOOT_PX

    def _overlaps(self, fault: Mapping[str, Any]) -> bool:
        start, end = fault.get("start_ns"), fault.get("end_ns")
        return isinstance(start, int) and start <= self.window.to_ns and (end is None or end >= self.window.from_ns)

    def _within(self, moment_ns: Any) -> bool:
        return isinstance(moment_ns, int) and self.window.from_ns <= moment_ns <= self.window.to_ns

    def _moments(self) -> list[int]:
        moments = [self.window.from_ns, self.window.to_ns]
        for message in self.window.messages:
            moments += [max(message.sent_ns, self.window.from_ns)]
            moments += [message.arrived_ns] if message.arrived_ns is not None else []
        moments += [f[name] for f in self.faults for name in ("start_ns", "end_ns") if self._within(f.get(name))]
        return moments + [one.start_ns for one in self._leaders_drawn() if self._within(one.start_ns)]

    def _leaders_drawn(self) -> list[Leadership]:
        return [one for one in self.leaders if one.host in self.hosts]

    def parts(self) -> list[Markup]:
        """All elements, from back to front."""
        arrows = [self._arrow(message) for message in self.window.messages]
        return [
            *self._bands(),
            *self._time_axis(),
            *self._lifelines(),
            *self._leaderships(),
            *(line for line, _ in arrows),
            *(label for _, label in arrows if label is not None),
            *self._flags(),
            *self._notes(),
        ]

    def _bands(self) -> list[Markup]:
        parts = []
        for number, fault in enumerate(self.faults):
            top, height = self._span(fault)
            tint = f"band tint{number % 5}"
            parts.append(element("rect", x=0, y=top, width=float(self.width), height=height, class_=tint))
            parts += [
                element("rect", x=self.places[host] - 26, y=top, width=52, height=height, class_=f"{tint} struck")
                for host in fault.get("hosts") or ()
                if host in self.places
            ]
            for name in ("start_ns", "end_ns"):
                if self._within(fault.get(name)):
                    y = self.scale(fault[name])
                    parts.append(
                        element(
                            "line", x1=TIME_PX - 8, x2=float(self.width), y1=y, y2=y, class_=f"edge ink{number % 5}"
                        )
                    )
        return parts

    def _span(self, fault: Mapping[str, Any]) -> tuple[float, float]:
        top = self.scale(fault["start_ns"]) if self._within(fault["start_ns"]) else float(HEAD_PX)
        end = fault.get("end_ns")
        bottom = self.scale(end) if isinstance(end, int) and self._within(end) else self.scale.bottom + ROW_PX
        return top, max(2.0, bottom - top)

    def _notes(self) -> list[Markup]:
        parts: list[Markup] = []
        free = 0.0
        for number, fault in enumerate(self.faults):
            y = max(self._span(fault)[0] + NOTE_LINE_PX, free)
            name = f"{fault.get('id', '')} {fault.get('nemesis', 'fault')} {fault.get('variant') or ''}".strip()
            lines = [(name, "fault"), *((line, "words") for line in _fault_words(fault, self.hosts))]
            for text, class_ in lines:
                shown = clip(text, NOTE_CHARACTERS)
                parts.append(element("text", shown, x=float(self.right + 10), y=y, class_=f"{class_} ink{number % 5}"))
                y += NOTE_LINE_PX
            free = y + 4
        return parts

    def _time_axis(self) -> list[Markup]:
        parts: list[Markup] = []
        last = -math.inf
        scale = self.scale
        for place, (moment, y) in enumerate(zip(scale.moments, scale.heights, strict=True)):
            if place and (gap_ns := moment - scale.moments[place - 1]) >= LABELLED_GAP_NS:
                middle = (y + scale.heights[place - 1]) / 2 + 4
                parts.append(element("text", f"⋮ {duration(gap_ns)}", x=TIME_PX - 14, y=middle, class_="gap"))
            if y - last >= TIME_LABEL_PX:
                parts.append(element("text", _moment_text(moment), x=TIME_PX - 14, y=y + 4, class_="time"))
                parts.append(element("line", x1=TIME_PX - 8, x2=float(self.right), y1=y, y2=y, class_="tick"))
                last = y
        return parts

    def _lifelines(self) -> list[Markup]:
        parts = []
        bottom = self.scale.bottom + ROW_PX
        for x in self.places.values():
            parts.append(element("line", x1=x, x2=x, y1=HEAD_PX - 12, y2=bottom, class_="life"))
        return parts

    def heads(self) -> list[Markup]:
        """The hosts' names at the top of their lines."""
        parts = []
        for host, x in self.places.items():
            name = clip(host, 16)
            parts.append(element("rect", x=x - 42, y=8, width=84, height=26, rx=13, class_="host"))
            parts.append(element("text", name, x=x, y=25.5, class_="name"))
        return parts

    def _leaderships(self) -> list[Markup]:
        parts = []
        for number, one in enumerate(self.leaders):
            following = self.leaders[number + 1].start_ns if number + 1 < len(self.leaders) else None
            if one.host not in self.places or (following is not None and following < self.window.from_ns):
                continue
            x, begins = self.places[one.host], self._within(one.start_ns)
            top = self.scale(one.start_ns) if begins else float(HEAD_PX - 6)
            bottom = self.scale.bottom + ROW_PX if following is None else self.scale(following)
            bar = {"x": x - BAR_PX / 2, "y": top, "width": BAR_PX, "height": max(2.0, bottom - top), "rx": 3}
            parts.append(element("rect", element("title", f"{one.host} leads term {one.term}"), class_="leads", **bar))
        return parts

    def _flags(self) -> list[Markup]:
        """A flag to the left of the host's line for each leader elected in this window."""
        parts = []
        for one in self._leaders_drawn():
            if self._within(one.start_ns):
                x, y, text = self.places[one.host] - BAR_PX / 2, self.scale(one.start_ns), f"leads term {one.term}"
                width = 6.2 * len(text) + 10
                parts.append(element("path", d=f"M{x:.1f} {y:.1f}l-7 -9h-{width:.1f}v18h{width:.1f}z", class_="flag"))
                parts.append(element("text", text, x=x - 12, y=y + 4, class_="flagtext"))
        return parts

    def _arrow(self, message: Message) -> tuple[Markup, Markup | None]:
        """The arrow and its label."""
        x1, x2 = self.places[message.source], self.places[message.destination]
        y1 = self.scale(max(message.sent_ns, self.window.from_ns))
        has_arrived = message.arrived_ns is not None
        y2 = self.scale(message.arrived_ns) if message.arrived_ns is not None else y1 + ROW_PX
        is_lost = message.losses > 0 and not has_arrived
        sign = math.copysign(1.0, x2 - x1)
        # An arrow that did not arrive (lost, or the window ends before) stops short of the receiver's line.
        x1, x2 = x1 + sign * BAR_PX / 2, x2 - sign * (BAR_PX / 2 if has_arrived else SHORT_OF_PX)
        angle = math.atan2(y2 - y1, x2 - x1)
        colour = "lost" if message.losses else _CLASSES.get(message.kind, "other")
        reply = " reply" if message.rpcs and all(rpc.get("reply") for rpc in message.rpcs) else ""
        line = element(
            "g",
            element("title", self._title(message)),
            element("path", d=f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", class_="line"),
            element("path", d=_cross(x2, y2) if is_lost else _tip(x2, y2, angle), class_="cross" if is_lost else "tip"),
            class_=f"arrow {colour}{reply}",
        )
        if not message.rpcs:
            return line, None
        # Text along the arrow near its head, never upside down: for an arrow to the left it begins at the head.
        turn = math.degrees(angle if sign > 0 else angle - math.pi)
        back = 13 + (5 if is_lost else 0)
        at_x, at_y = x2 - math.cos(angle) * back, y2 - math.sin(angle) * back - 3.5
        label = element(
            "text",
            clip(message.label, LABEL_CHARACTERS),
            x=round(at_x, 1),
            y=round(at_y, 1),
            transform=f"rotate({turn:.1f} {at_x:.1f} {at_y:.1f})",
            class_=f"label {colour} {'ends' if sign > 0 else 'begins'}",
        )
        return line, label

    def _title(self, message: Message) -> str:
        if message.arrived_ns is not None:
            fate = f"arrived after {duration(message.arrived_ns - message.sent_ns)}"
        else:
            fate = "lost, being retransmitted" if message.losses else "in flight at the end of the window"
        again = f", {plural(message.losses, 'time')} lost or held up behind a lost message" if message.losses else ""
        words = (
            "; ".join(f"{r.get('rpc')} {r.get('detail', '')}".strip() for r in message.rpcs[:8]) or "part of a message"
        )
        return clip(
            f"{message.source} → {message.destination}: {words}; sent at {_moment_text(message.sent_ns)}, "
            f"{fate}{again}; {message.size_bytes} bytes, connection {message.connection}"
        )


def _fault_words(fault: Mapping[str, Any], hosts: Sequence[str]) -> list[str]:
    grudge = fault.get("grudge")
    if isinstance(grudge, Mapping) and grudge:
        cut = {str(to): frozenset(map(str, sources)) for to, sources in grudge.items() if sources}
        names = sorted({*cut, *(one for sources in cut.values() for one in sources)})
        return cut_words(cut, names).split("\n")
    victims = [str(host) for host in fault.get("hosts") or ()]
    return [" ".join(victims)] if victims else []


def _moment_text(moment_ns: int) -> str:
    return f"{moment_ns / 1e9:.5f} s".replace("-", "−")


def _tip(x: float, y: float, angle: float) -> str:
    wings = [(x - 8 * math.cos(angle + turn), y - 8 * math.sin(angle + turn)) for turn in (0.38, -0.38)]
    return f"M{x:.1f} {y:.1f}" + "".join(f"L{wing_x:.1f} {wing_y:.1f}" for wing_x, wing_y in wings) + "Z"


def _cross(x: float, y: float) -> str:
    return f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"


LEGEND_PX = 1040.0
"""Width of the legend; a drawing of few hosts is narrower."""


def _legend(y: float) -> list[Markup]:
    parts: list[Markup] = []
    x = 24.0
    for class_, words in _LEGEND:
        line = element("path", d=f"M{x:.1f} {y:.1f}h26", class_="line")
        tip = element("path", d=_tip(x + 30, y, 0.0), class_="tip")
        parts += [element("g", line, tip, class_=f"arrow {class_}")]
        parts += [element("text", words, x=x + 36, y=y + 4, class_="words")]
        x += 56 + 6.9 * len(words)
    parts += [element("rect", x=x, y=y - 7, width=BAR_PX, height=14, rx=3, class_="leads")]
    parts += [element("text", "newest leader", x=x + 15, y=y + 4, class_="words")]
    return parts


def sequence_svg(
    window: Window,
    *,
    title: str,
    hosts: Sequence[str],
    faults: Sequence[Mapping[str, Any]] = (),
    leaders: Sequence[Leadership] = (),
) -> Markup:
    """The diagram as a standalone SVG. `window` is a result of `choose`; `hosts` are in the order of their lines."""
    drawing = _Drawing(window, faults, leaders, hosts)
    top = 62
    return element(
        "svg",
        element("style", style("sequence.css")),
        element("rect", x=0, y=0, width="100%", height="100%", class_="surface"),
        element("text", clip(title, 120), x=24, y=30, class_="title"),
        element("text", _summary(window), x=24, y=50, class_="words"),
        element("g", *drawing.parts(), *drawing.heads(), transform=f"translate(0 {top})"),
        *_legend(top + drawing.height),
        xmlns="http://www.w3.org/2000/svg",
        width=max(float(drawing.width), LEGEND_PX),
        height=top + drawing.height + 24,
        role="img",
        aria_label=clip(f"Message sequence diagram. {title}"),
    )


def sequence_page(
    window: Window,
    *,
    title: str,
    hosts: Sequence[str],
    faults: Sequence[Mapping[str, Any]] = (),
    leaders: Sequence[Leadership] = (),
) -> str:
    """The diagram as one HTML page without scripts; the hosts' names stay visible while it scrolls."""
    drawing = _Drawing(window, faults, leaders, hosts)
    width = float(drawing.width)
    heads = element("svg", *drawing.heads(), width=width, height=42, aria_hidden="true")
    body = element(
        "svg", *drawing.parts(), width=width, height=drawing.height, role="img", aria_label=clip(title), class_="body"
    )
    legend = element("svg", *_legend(12.0), width=max(width, LEGEND_PX), height=24, role="img", aria_label="legend")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(clip(title, 120))}</title>\n<style>\n{style('sequence.css')}</style>\n</head>\n<body>\n"
        f"<h1>{escape(clip(title, 120))}</h1>\n<p>{escape(_summary(window))}</p>\n{legend}\n"
        f'<div class="heads">{heads}</div>\n{body}\n</body>\n</html>\n'
    )


def _summary(window: Window) -> str:
    """What is drawn, and by which rule messages were left out."""
    shown = f"{instant(window.from_ns)} to {instant(window.to_ns)}, {plural(len(window.messages), 'message')}"
    ends = ""
    if window.stopped_ns is not None:
        ends = f" The trace reached its size limit at {instant(window.stopped_ns)}; later messages are unknown."
    left_out = window.left_out.total()
    if not left_out:
        return f"{shown}. Time runs downwards; the order of events is exact, but gaps are shortened.{ends}"
    names = [f"{name} ({count(window.left_out[name])})" for name, _ in RANKS if window.left_out[name]]
    return (
        f"{shown} of {count(left_out + len(window.messages))}: the most informative kinds are drawn, up to "
        f"{MAX_ARROWS} messages; of the last kind, the earliest. Left out: {', '.join(names)}.{ends}"
    )
