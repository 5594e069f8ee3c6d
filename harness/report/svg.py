"""Building SVG by hand: elements with escaped text, coordinates in percent, paths of small integers.

Charts stretch with the page and need no script: positions along time are percentages of the drawing's width,
and text and strokes keep their size. Paths cannot use percentages, so they lie in a nested drawing that is
stretched with `preserveAspectRatio="none"`, with strokes that do not scale. Colours are CSS classes, so that
the style sheet handles dark mode and print.
"""

from __future__ import annotations

__all__ = ["element", "percent", "runs_path", "stretched"]

from collections.abc import Iterable

from markupsafe import Markup, escape

Attribute = str | int | float | None


def element(tag: str, *children: str, **attributes: Attribute) -> Markup:
    """One element. Attribute names: `class_` -> class, `view_box` -> viewBox, `_` -> "-". Text is escaped."""
    parts = []
    for name, value in attributes.items():
        if value is None:
            continue
        name = _NAMES.get(name) or name.rstrip("_").replace("_", "-")
        shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
        parts.append(f' {name}="{escape(shown)}"')
    inner = Markup("").join(child if isinstance(child, Markup) else escape(child) for child in children)
    head = f"<{tag}{''.join(parts)}"
    return Markup(f"{head}>{inner}</{tag}>") if children else Markup(f"{head}/>")


_NAMES = {"view_box": "viewBox", "preserve": "preserveAspectRatio"}


def percent(part: float) -> str:
    """A share of the drawing's width: 0.25 -> "25%"."""
    text = f"{100 * part:.2f}".rstrip("0").rstrip(".")
    return f"{text or '0'}%"


def stretched(content: Markup, *, width: float, height: int) -> Markup:
    """A nested drawing whose own `width` x `height` units fill the surrounding one."""
    return element(
        "svg",
        content,
        view_box=f"0 0 {round(width, 4):g} {height}",
        preserve="none",
        width="100%",
        height="100%",
        class_="plot",
    )


def runs_path(points: Iterable[tuple[int, int]]) -> tuple[str, int]:
    """A path of dots at integer points, and its number of strokes; neighbours in a row become one stroke.

    With round caps a stroke of length 0 is a dot, so that a dense row costs as much as one dot.
    """
    parts: list[str] = []
    pen_x = pen_y = start = previous = row = None
    for x, y in [*sorted(points, key=lambda point: (point[1], point[0])), (None, None)]:
        if previous is not None and y == row and x == previous + 1:
            previous = x
            continue
        if start is not None and previous is not None and row is not None:
            if pen_x is None or pen_y is None:
                parts.append(f"M{start} {row}h{previous - start}")
            else:
                dy = row - pen_y
                parts.append(f"m{start - pen_x}{'' if dy < 0 else ' '}{dy}h{previous - start}")
            pen_x, pen_y = previous, row
        start = previous = x
        row = y
    return "".join(parts), len(parts)
