"""Human-readable numbers: durations, counts, shares, axis ticks; and short texts for operations."""

from __future__ import annotations

__all__ = [
    "MAX_TIME_NS",
    "clip",
    "count",
    "duration",
    "exact_instant",
    "instant",
    "linear_ticks",
    "operation_text",
    "per_second",
    "plural",
    "share",
    "time_ticks",
]

import json
import math
from collections.abc import Mapping
from typing import Any

from checker.history import plain
from nemesis.words import plural

MAX_TEXT = 400
"""Limit of each string of a run in the report, as nodes determine the length of their errors."""

MAX_TIME_NS = 10**21
"""Longer than any run (30,000 years). Larger values and NaN, from a damaged file or a third-party checker, are shown as
NO_TIME."""

NO_TIME = "?"

_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800)


def clip(value: Any, limit: int = MAX_TEXT) -> str:
    """`value` as text of at most `limit` characters, on one line and without control characters."""
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    text = text[: limit + 1]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else "\ufffd" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def count(number: int) -> str:
    """12345 -> "12,345"."""
    return f"{number:,}"


def per_second(rate: float) -> str:
    """A rate per second that does not round small values to 0: "12,345", "8.5", "0.33", "0"."""
    return f"{rate:,.0f}" if rate == 0 or rate >= 9.95 else f"{rate:.2g}"


def share(part: int, whole: int) -> str:
    """A percentage that rounds to 0 % or 100 % only if that is exact."""
    if whole <= 0:
        return "–"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "<0.1 %"
    if 99.9 < percent < 100:
        return ">99.9 %"
    return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.1f} %"


def duration(time_ns: float) -> str:
    """A duration with about three digits: "830 µs", "4.21 ms", "12.0 s", "2 min 5 s"; "?" if it is invalid."""
    if not -MAX_TIME_NS <= time_ns <= MAX_TIME_NS:
        return NO_TIME
    if time_ns < 0:
        return "−" + duration(-time_ns)
    for unit_ns, unit in ((1, "ns"), (1e3, "µs"), (1e6, "ms"), (1e9, "s")):
        scaled = time_ns / unit_ns
        if scaled < 999.5 and (unit != "s" or scaled < 120):
            digits = 0 if scaled >= 99.5 or unit == "ns" else 1 if scaled >= 9.95 else 2
            text = f"{scaled:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"
    minutes, seconds = divmod(round(time_ns / 1e9), 60)
    if minutes < 120:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    hours, minutes = divmod(round(time_ns / 60e9), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def instant(time_ns: float) -> str:
    """A time of the run to the millisecond: "12.345 s"; "0.040 s before the load"; "?" if it is invalid."""
    if not -MAX_TIME_NS <= time_ns <= MAX_TIME_NS:
        return NO_TIME
    return f"{time_ns / 1e9:,.3f} s" if time_ns >= 0 else f"{-time_ns / 1e9:,.3f} s before the load"


def exact_instant(time_ns: float) -> str:
    """A time to the microsecond, for ordering the operations of a contradiction: "12.345678 s"; "?" if it is
    invalid."""
    if not -MAX_TIME_NS <= time_ns <= MAX_TIME_NS:
        return NO_TIME
    return f"{time_ns / 1e9:,.6f} s"


def time_ticks(end_ns: int, *, wanted: int = 7) -> list[tuple[float, str]]:
    """Ticks of a time axis from 0 to `end_ns`: (share of the axis, label); at most about `wanted`."""
    if end_ns <= 0:
        return [(0.0, "0 s")]
    end_s = end_ns / 1e9
    if end_s < _STEPS_S[0] * 2:
        step_s = max(1e-9, 10.0 ** math.floor(math.log10(end_s / 2)))
        while end_s / step_s > wanted:
            step_s *= 2
    else:
        whole_days_s = math.ceil(end_s / wanted / 86400) * 86400
        step_s = float(next((step for step in _STEPS_S if end_s / step <= wanted), whole_days_s))
    ticks = []
    for number in range(int(end_s / step_s + 1e-9) + 1):
        at_s = number * step_s
        ticks.append((at_s / end_s, "0" if number == 0 else duration(at_s * 1e9)))
    return ticks


def linear_ticks(highest: float, *, wanted: int = 3) -> list[float]:
    """Round values from 0 that cover `highest`, the last at or above it."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / wanted
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    return [number * step for number in range(math.ceil(highest / step - 1e-9) + 1)]


def operation_text(operation: Mapping[str, Any], limit: int = 60) -> str:
    """An operation as a short text: "write 17", "read → 17", "append 3 → offset 12", "write 9 → ?"."""
    f, value, result, kind = (operation.get(name) for name in ("f", "value", "result", "type"))
    asked = "" if value is None else _short(value)
    if kind == "ok":
        answer = _answer(str(f), value, result)
    else:
        answer = {"fail": "failed", "info": "?"}.get(str(kind), "")
    words = [str(f), asked, f"→ {answer}" if answer else ""]
    return clip(" ".join(word for word in words if word), limit)


def _answer(f: str, value: Any, result: Any) -> str:
    if isinstance(result, Mapping) and "messages" in result:
        messages = result["messages"]
        tail = result.get("tail")
        return f"{_short(messages)}" + (f", tail {tail}" if tail is not None else "")
    if f == "append" and isinstance(result, (list, tuple)) and len(result) == 2:
        return f"offset {result[0]}"
    if result is None:
        return "nothing" if f == "read" else ""
    return "" if result == value else _short(result)


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "offset" in value:
        return f"from {value['offset']}"
    if isinstance(value, (list, tuple)) and len(value) > 4:
        return clip([*value[:2], "…", *value[-1:]], 32).replace('"…"', "…")
    return clip(value, 32)
