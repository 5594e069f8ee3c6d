"""Where a violation was decided: the curves of `harness explain` as drawings and as sentences.

The input is explain.json, which may be damaged or of another version; invalid parts are left out.
"""

from __future__ import annotations

__all__ = ["deciding_view", "jump_of", "sentences_of"]

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

from markupsafe import Markup

from harness.report.svg import element, percent
from harness.units import MAX_TIME_NS, clip, plural

HEIGHT_PX = 130
TOP_PX, BOTTOM_PX = 8, 20
MAX_POINTS = 400
"""Points drawn; explain.json has them all."""

MAX_RUNS = 10**9
"""Upper bound of the continuations from one moment; no search makes more."""

MAX_LINES = 12
CLOSE_WIDTHS = 12.0
"""Width of the second drawing in multiples of the deciding interval, which is in its middle."""

ALWAYS = 0.9
"""Share of failing runs from which on nearly all count as failing."""

PLANNED, HEALED, NO_LOAD = CURVES = "planned", "healed", "no-load"
"""The curves, as the report's styles name them: with the planned faults, with faults healed at the moment, and with the
load ended at it too."""

_CURVE_OF = {"none": PLANNED, "heal": HEALED, "end-load": NO_LOAD}
"""The curve of each intervention."""


def _is_moment(value: Any) -> TypeGuard[float]:
    """Whether `value` can be a moment (s) of a run."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= MAX_TIME_NS / 1e9


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_RUNS


class _Point(NamedTuple):
    at_s: float
    fails: int
    runs: int

    @property
    def share(self) -> float:
        return self.fails / self.runs if self.runs else 0.0


def _curve_of(one: Mapping[str, Any]) -> str | None:
    """The curve of a point, or of the jump; explanations used to say only whether there were faults."""
    if isinstance(has_faults := one.get("has_faults"), bool):
        return PLANNED if has_faults else HEALED
    return _CURVE_OF.get(str(one.get("intervention")))


def _points(explanation: Mapping[str, Any], curve: str) -> list[_Point]:
    found = []
    points = explanation.get("points")
    for one in points if isinstance(points, list) else ():
        if not isinstance(one, Mapping) or _curve_of(one) != curve:
            continue
        at_s, fails, holds = (one.get(name) for name in ("at_s", "fails", "holds"))
        if _is_moment(at_s) and _is_count(fails) and _is_count(holds) and fails + holds > 0:
            found.append(_Point(at_s, fails, fails + holds))
    return sorted(found)[:MAX_POINTS]


def jump_of(explanation: Mapping[str, Any]) -> tuple[float, float] | None:
    """The interval (s) in which the violation was decided; None if no moment decided it."""
    jump = explanation.get("jump")
    if not isinstance(jump, Mapping):
        return None
    before_s, after_s = jump.get("before_s"), jump.get("after_s")
    if not (_is_moment(before_s) and _is_moment(after_s)):
        return None
    return before_s, after_s


def sentences_of(explanation: Mapping[str, Any]) -> list[str]:
    """What the curves show, in sentences."""
    violation = explanation.get("violation")
    words = clip(violation.get("text") or "", 300) if isinstance(violation, Mapping) else ""
    at_s = violation.get("at_s") if isinstance(violation, Mapping) else None
    seen = f", seen at {_moment(at_s)}" if _is_moment(at_s) else ""
    found = [f"Violation explained{seen}: {words}"] if words else []
    curves = {name: points for name in CURVES if (points := _points(explanation, name))}
    moment, jump = jump_of(explanation), explanation.get("jump")
    if moment is None or not isinstance(jump, Mapping):
        return [*found, _without_moment(explanation, curves)]
    before_s, after_s = moment
    between = f"between {_moment(before_s)} and {_moment(after_s)}"
    name = _curve_of(jump)
    ends = {point.at_s: point for point in curves.get(name or "", ())}
    one, other = ends.get(before_s), ends.get(after_s)
    if name is None or one is None or other is None:
        return [*found, f"Decided {between}."]
    goes_on = {PLANNED: "the same faults", HEALED: "no faults", NO_LOAD: "neither faults nor further operations"}[name]
    return [
        *found,
        *([] if name == PLANNED else _on_faults(curves)),
        *([_on_load(curves)] if name == NO_LOAD and HEALED in curves else []),
        f"Decided {between}: of the runs that repeat this one up to the first moment and continue with a different "
        f"seed and {goes_on}, {_of(one)} fail; from the second moment, {_of(other)}.",
    ]


def _without_moment(explanation: Mapping[str, Any], curves: Mapping[str, Sequence[_Point]]) -> str:
    """Why there is no deciding moment."""
    if not curves:
        return "No continuations were run."
    if explanation.get("is_interrupted") is True:
        return _interrupted(curves)
    is_cut_short = explanation.get("is_cut_short") is True
    # Without the third curve, for which no moments were left, a second one that begins high says nothing yet.
    firsts = [(NO_LOAD, "without faults and load"), *([] if is_cut_short else [(HEALED, "without any faults")])]
    for name, without in firsts if len(curves.get(NO_LOAD, ())) <= 1 else ():
        if name not in curves or curves[name][0].share < ALWAYS:
            continue
        if _fails_mostly(curves[name][0]):
            return f"No moment decides it: {without}, {_of(curves[name][0])} runs fail from the start."
        return f"Too few runs to tell: {without}, {_of(curves[name][0])} runs fail from the start. Raise --runs."
    if is_cut_short:
        return "No deciding moment was found within the limit of moments to examine. Raise --points."
    curve = curves.get(HEALED) or next(iter(curves.values()))
    if len(curve) == 1:
        curve = max(curves.values(), key=len)
    return f"No moment decides it: {_of(curve[0])} runs fail at first, {_of(curve[-1])} at last, without a jump."


def _on_faults(curves: Mapping[str, Sequence[_Point]]) -> list[str]:
    """What the curve with the planned faults shows if it has no deciding moment."""
    planned = curves.get(PLANNED)
    if not planned:
        return []
    if _fails_mostly(planned[0]):
        return [
            f"The faults decide it: with the same faults and a different seed from the start, {_of(planned[0])} runs "
            "fail."
        ]
    load = next((point for point in planned if point.at_s == 0.0), None)
    if load is not None and _fails_mostly(load):
        return [
            f"The faults decide it: with the same faults and a different seed from the beginning of the load, "
            f"{_of(load)} runs fail; from the start, {_of(planned[0])}."
        ]
    return [  # the curve is flat, or has too few runs
        f"With the same faults and a different seed from the start, {_of(planned[0])} runs fail, and no deciding "
        "moment was found."
    ]


def _on_load(curves: Mapping[str, Sequence[_Point]]) -> str:
    """What the curve without faults shows if the one whose load ends has the deciding moment."""
    first = curves[HEALED][0]
    if _fails_mostly(first):
        return f"The load alone decides it: without any faults, {_of(first)} runs fail from the start."
    found = "" if len(curves[HEALED]) == 1 else ", and no deciding moment was found"
    return f"Without any faults, {_of(first)} runs fail from the start{found}."


def _interrupted(curves: Mapping[str, Sequence[_Point]]) -> str:
    """What is known of a search that was interrupted."""
    looked = f"Interrupted after examining {plural(sum(map(len, curves.values())), 'moment')}"
    curve: Sequence[_Point] = next((curves[name] for name in (NO_LOAD, HEALED) if len(curves.get(name, ())) > 1), ())
    curve = curve or curves.get(PLANNED, ())
    rises = [ends for ends in pairwise(curve) if ends[0].share < ends[1].share]
    if not rises:
        return f"{looked}: no deciding moment found so far."
    one, other = max(rises, key=lambda ends: (ends[1].share - ends[0].share, ends[0].at_s - ends[1].at_s))
    return (
        f"{looked}: the steepest rise so far, from {_of(one)} failing runs to {_of(other)}, lies between "
        f"{_moment(one.at_s)} and {_moment(other.at_s)}."
    )


def _fails_mostly(point: _Point) -> bool:
    """Whether nearly all runs fail, and enough were made for that to be significant (Wilson's low end >= 0.5)."""
    from spark_analysis.statistics import wilson  # not needed by a run without a curve

    return point.share >= ALWAYS and wilson(point.fails, point.runs).low >= 0.5


def _of(point: _Point) -> str:
    return f"{point.fails} of {point.runs}"


def _moment(at_s: float, *, decimals: int = 4) -> str:
    return f"{abs(at_s):,.{decimals}f} s{'' if at_s >= 0 else ' before the load'}"


def deciding_view(explanation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The template's variables; None if there is nothing to show."""
    if explanation is None:
        return None
    curves = [(name, points) for name in CURVES if (points := _points(explanation, name))]
    if not curves:
        return None
    every = [point.at_s for _, points in curves for point in points]
    moment = jump_of(explanation)
    drawings = [("Until the violation", _drawing(curves, min(every), max(every), moment))]
    if moment is not None:
        width_s = max(moment[1] - moment[0], 1e-6) * CLOSE_WIDTHS
        middle_s = (moment[0] + moment[1]) / 2
        near = max(min(every), middle_s - width_s / 2), min(max(every), middle_s + width_s / 2)
        drawings.append(("Around the moment", _drawing(curves, near[0], near[1], moment)))
    account = explanation.get("account")
    lines = [
        (_moment(one["at_s"], decimals=6), clip(one.get("text") or "", 160))
        for one in (account if isinstance(account, list) else ())
        if isinstance(one, Mapping) and _is_moment(one.get("at_s"))
    ][:MAX_LINES]
    return {
        "sentences": sentences_of(explanation),
        "drawings": drawings,
        "curves": [name for name, _ in curves],
        "account": lines,
        "repeat": clip(explanation.get("repeat") or "", 600),
        "height_px": HEIGHT_PX,
    }


def _drawing(
    curves: Sequence[tuple[str, Sequence[_Point]]], from_s: float, to_s: float, moment: tuple[float, float] | None
) -> Markup:
    from spark_analysis.statistics import wilson  # not needed by a run without a curve

    span_s = max(to_s - from_s, 1e-9)

    def x(at_s: float) -> str:
        return percent(0.01 + 0.98 * min(1.0, max(0.0, (at_s - from_s) / span_s)))

    def y(share: float) -> float:
        return round(TOP_PX + (1 - share) * (HEIGHT_PX - TOP_PX - BOTTOM_PX), 1)

    parts = [element("line", x1=0, x2="100%", y1=y(at), y2=y(at), class_="grid") for at in (0, 0.5, 1)]
    if moment is not None and moment[1] >= from_s and moment[0] <= to_s:
        width = max((min(moment[1], to_s) - max(moment[0], from_s)) / span_s * 0.98, 0.002)
        parts.append(element("rect", x=x(moment[0]), width=percent(width), y=0, height=y(0), class_="decided"))
    for name, points in curves:
        shown = [point for point in points if from_s <= point.at_s <= to_s]
        for one, other in pairwise(shown):
            ends = {"x1": x(one.at_s), "x2": x(other.at_s)}
            parts.append(element("line", y1=y(one.share), y2=y(other.share), class_=f"curve {name}", **ends))
        for point in shown:
            interval = wilson(point.fails, point.runs)
            title = element("title", f"{_moment(point.at_s)}: {_of(point)} fail")
            parts.append(
                element(
                    "g",
                    title,
                    element(
                        "line", x1=x(point.at_s), x2=x(point.at_s), y1=y(interval.low), y2=y(interval.high),
                        class_=f"spread {name}",
                    ),
                    element("circle", cx=x(point.at_s), cy=y(point.share), r=3.5, class_=f"share {name}"),
                )
            )  # fmt: skip
    parts.append(element("text", _moment(from_s), x=0, y=HEIGHT_PX - 4, class_="tick"))
    parts.append(element("text", _moment(to_s), x="100%", y=HEIGHT_PX - 4, text_anchor="end", class_="tick"))
    label = "Share of failing runs, by the moment from which on they use a different seed"
    return element("svg", *parts, height=HEIGHT_PX, role="img", aria_label=label, class_="chart deciding")
