"""Reads metrics.jsonl back: for each metric and host a line of points over time, with gaps.

The rate of a counter between two samples is its growth per second. A counter that is smaller than before was set back
to 0 meanwhile, by a restart, and has grown from there. The mean of a histogram is that of what it observed between two
samples; if that was nothing, there is no point. Over a gap, in which a host did not answer, no line is drawn, and no
rate or mean is taken: nobody knows when in it anything happened.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from harness.metrics.expression import MAX_METRICS, MEAN, RATE
from harness.metrics.scraper import MAX_FILE_BYTES, VERSION
from harness.units import clip

__all__ = ["Lane", "Line", "Samples", "read_samples"]

MAX_HOSTS = 100
"""Hosts of a file; more are none of ours."""

MAX_TIME_NS = 1 << 62
"""A hundred years, and what fits the arrays of points."""

MAX_LINE_BYTES = 1 << 16
"""A line has at most MAX_METRICS values."""


@dataclass(slots=True)
class Line:
    """Points of one metric of one host, in order of time; a value of NaN interrupts the line."""

    times_ns: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, time_ns: int, value: float | None) -> None:
        """Add a point, or a gap; one gap after another is the same gap."""
        if value is None and (not self.values or math.isnan(self.values[-1])):
            return
        self.times_ns.append(time_ns)
        self.values.append(math.nan if value is None else value)

    def points(self) -> Iterator[tuple[int, float | None]]:
        """Time (ns) and value, None where the line is interrupted."""
        for time_ns, value in zip(self.times_ns, self.values, strict=True):
            yield time_ns, None if math.isnan(value) else value


@dataclass(slots=True)
class Lane:
    """One metric: its title, its expression, its unit ("s", "bytes", "", or one of these per second), and a line for
    each host."""

    title: str
    text: str
    unit: str
    page: int
    kind: str
    lines: dict[str, Line]

    @property
    def is_empty(self) -> bool:
        """Whether no host ever had a value."""
        return not any(line.values for line in self.lines.values())


@dataclass(slots=True)
class Samples:
    """All that a run read. Times are nanoseconds since its load began."""

    interval_ns: int
    hosts: list[str]
    lanes: list[Lane]
    answers: dict[str, Line]
    """Host -> 1 where it answered, a gap where one of its pages did not"""
    damaged: int = 0
    """Lines that could not be read"""


def read_samples(path: str | os.PathLike[str]) -> Samples | None:
    """The samples of a run; None if there is no such file or its first line is none of ours. Damaged lines are skipped
    and counted. Raises OSError."""
    if not os.path.isfile(path) or os.path.getsize(path) > 2 * MAX_FILE_BYTES:
        return None
    with open(path, "rb") as file:
        samples = _header(_parsed(file.readline(MAX_LINE_BYTES)))
        if samples is None:
            return None
        reader = _Reader(samples)
        while line := file.readline(MAX_LINE_BYTES):
            if not reader.add(_parsed(line)):
                samples.damaged += 1
    return samples


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None


def _header(data: Any) -> Samples | None:
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
        return None
    hosts, metrics, interval_ns = data.get("hosts"), data.get("metrics"), data.get("interval_ns")
    if not isinstance(hosts, list) or not isinstance(metrics, list) or not _is_time(interval_ns):
        return None
    if (
        interval_ns <= 0
        or len(hosts) > MAX_HOSTS
        or len(metrics) > MAX_METRICS
        or not all(isinstance(host, str) for host in hosts)
    ):
        return None
    lanes = []
    for metric in metrics:
        if not isinstance(metric, Mapping) or type(metric.get("page")) is not int:
            return None
        title, text, unit, kind = (clip(metric.get(name) or "") for name in ("title", "text", "unit", "kind"))
        lanes.append(Lane(title or text, text, unit, metric["page"], kind, {host: Line() for host in hosts}))
    return Samples(interval_ns, hosts, lanes, {host: Line() for host in hosts})


def _is_time(value: Any) -> TypeGuard[int]:
    return type(value) is int and -MAX_TIME_NS < value < MAX_TIME_NS


class _Reader:
    """Adds the lines of a file to samples; remembers each host's last counters."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._before: dict[tuple[str, int], tuple[int, Sequence[float]]] = {}
        """(host, place of a metric) -> time and raw values of its last sample, unless there is a gap since."""
        self._silent: dict[str, set[int]] = {host: set() for host in samples.hosts}
        """Host -> its pages that did not answer when last read."""

    def add(self, data: Any) -> bool:
        """Add a line; returns whether it is one of ours."""
        samples = self._samples
        if not isinstance(data, Mapping):
            return False
        host, time_ns, page = data.get("host"), data.get("time"), data.get("page")
        if not isinstance(host, str) or host not in samples.answers or not _is_time(time_ns):
            return False
        if type(page) is not int:
            return False
        places = [place for place, lane in enumerate(samples.lanes) if lane.page == page]
        values = data.get("values", [None] * len(places))
        if not isinstance(values, list) or len(values) != len(places) or not all(map(_is_value, values)):
            return False
        silent = self._silent[host]
        silent.discard(page) if "values" in data else silent.add(page)
        samples.answers[host].add(time_ns, None if silent else 1.0)
        for place, value in zip(places, values, strict=True):
            samples.lanes[place].lines[host].add(time_ns, self._point(host, place, time_ns, value))
        return True

    def _point(self, host: str, place: int, time_ns: int, value: Any) -> float | None:
        kind = self._samples.lanes[place].kind
        if value is None or isinstance(value, list) != (kind == MEAN):
            self._before.pop((host, place), None)
            return None
        if kind not in (RATE, MEAN):
            return float(value)
        raw = [float(each) for each in (value if isinstance(value, list) else [value])]
        before = self._before.get((host, place))
        self._before[host, place] = time_ns, raw
        if before is None or time_ns <= before[0]:
            return None
        is_reset = raw[-1] < before[1][-1]  # of a mean the count: what was observed may be negative
        grown = raw if is_reset else [now - then for now, then in zip(raw, before[1], strict=True)]
        if kind == RATE:
            return _finite(grown[0] / ((time_ns - before[0]) / 1e9))
        return _finite(grown[0] / grown[1]) if grown[1] > 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_value(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) == 2 and all(map(_is_number, value))
    return value is None or _is_number(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300
