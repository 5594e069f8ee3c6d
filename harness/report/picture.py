"""A witness as a standalone SVG file, for pages other than the harness's reports."""

from __future__ import annotations

__all__ = ["witness_picture"]

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from harness.report.svg import element
from harness.report.timeline import CHARACTER_PX, DRAWN_WIDTH_PX, arrowhead, timeline
from harness.report.witness import Witness
from harness.units import clip

NAMES_PX = 92
"""Least width of the lane names: room for a process number of four digits."""

EDGE_PX = 12
TITLE_PX = 34


def witness_picture(witness: Witness, faults: Sequence[Mapping[str, Any]], *, title: str) -> Markup:
    """The conflicting operations as one SVG, with a lane for each process and the faults of that time."""
    drawing = timeline(witness, (), faults)
    longest = max(len(f"process {name}") for _, name in drawing.lanes)
    names_px = max(NAMES_PX, round(longest * CHARACTER_PX) + 2 * EDGE_PX)
    names = [
        element("text", f"process {name}", x=names_px - 10, y=TITLE_PX + share * drawing.height_px + 4, class_="name")
        for share, name in drawing.lanes
    ]
    chart = element("svg", drawing.svg, x=names_px, y=TITLE_PX, width=DRAWN_WIDTH_PX, height=drawing.height_px)
    width, height = names_px + DRAWN_WIDTH_PX + EDGE_PX, TITLE_PX + drawing.height_px + EDGE_PX
    return element(
        "svg",
        element("style", _style()),
        arrowhead(),
        element("rect", x=0, y=0, width=width, height=height, rx=8, class_="page"),
        element("text", clip(title, 110), x=EDGE_PX, y=22, class_="title"),
        *names,
        chart,
        xmlns="http://www.w3.org/2000/svg",
        view_box=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=clip(title, 110),
    )


@cache
def _style() -> Markup:
    return Markup((Path(__file__).parent / "static" / "picture.css").read_text(encoding="utf-8"))
