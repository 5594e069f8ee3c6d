"""One drawing of the report's stack of charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from harness.report.svg import element

__all__ = ["Panel", "drawing"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing with its caption, height and the labels of its value axis (share from the top, text)."""

    caption: str
    svg: Markup
    height_px: int
    labels: Sequence[tuple[float, str]] = ()
    kind: str = ""
    detail: str = ""
    """Follows the caption, less prominently"""


def drawing(height_px: int, label: str, *content: Markup) -> Markup:
    """An element that fills the width; `label` says what it shows to those who do not see it."""
    return element("svg", *content, height=height_px, role="img", aria_label=label, class_="chart")
