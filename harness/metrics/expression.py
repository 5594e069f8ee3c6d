"""What is drawn of a page of metrics: a series, the rate of a counter, or the mean of a histogram.

The words are those of PromQL, as far as they make sense for one sample of one host after the other:

    etcd_server_proposals_pending                    the value itself
    http_requests{code="500"}                        the sum of the samples that have these labels
    rate(etcd_server_proposals_committed_total)      growth per second, also over a restart, which sets it back to 0
    mean(etcd_disk_wal_fsync_duration_seconds)       the mean of what a histogram or summary has observed meanwhile
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.errors import OperatorError
from harness.metrics.exposition import NAME, ExpositionError, Series, labels_of

__all__ = [
    "MAX_METRICS",
    "MEAN",
    "METRICS",
    "NO_METRICS",
    "RATE",
    "VALUE",
    "Metric",
    "Page",
    "chosen",
    "declared_metrics",
    "declared_pages",
    "declared_problems",
    "metric_of",
]

VALUE, RATE, MEAN = "value", "rate", "mean"

METRICS = "metrics"
"""Key of what was read, as a summary, among a run's facts about the system."""

NO_METRICS = "none"
"""For `--metrics`: nothing is read."""

MAX_METRICS = 16
"""Limit of a run's metrics. Each is a lane of the report, and more than a screen of lanes nobody compares."""

MAX_TEXT = 200
"""Limit of the characters of an expression or a title, which are headings."""

_EXPRESSION = re.compile(
    rf'(?:(rate|mean)\()?\s*({NAME})\s*(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})?\s*(\))?', re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of metrics: the name of the port that serves it, and its path."""

    port: str
    path: str

    def __str__(self) -> str:
        return f"{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class Metric:
    """One lane: which page, what of it, and its title."""

    page: Page
    text: str
    """The expression, as given"""
    kind: str
    """VALUE, RATE or MEAN"""
    series: Series
    title: str

    @property
    def wanted(self) -> Sequence[Series]:
        """The series to read: one, or those of sum and count."""
        if self.kind != MEAN:
            return (self.series,)
        return tuple(replace(self.series, name=f"{self.series.name}_{part}") for part in ("sum", "count"))

    @property
    def unit(self) -> str:
        """ "s", "bytes" or "", by Prometheus' convention that names end with the base unit."""
        name = self.series.name.removesuffix("_total").removesuffix("_sum")
        unit = "s" if name.endswith("_seconds") else "bytes" if name.endswith("_bytes") else ""
        return f"{unit}/s" if self.kind == RATE else unit


def metric_of(text: str, page: Page, title: str = "") -> Metric:
    """The metric that an expression describes. Raises ValueError."""
    match = _EXPRESSION.fullmatch(text.strip())
    if match is None or (match[1] is None) != (match[4] is None) or len(text) > MAX_TEXT:
        said = f'{text[:60]!r} is not a series such as up, http_requests{{code="500"}}, rate(requests_total) or '
        raise ValueError(f"{said}mean(request_seconds)")
    try:
        labels = frozenset(labels_of(match[3] or "").items())
    except ExpositionError as error:
        raise ValueError(f"{text[:60]!r}: {error}") from None
    return Metric(page, text.strip(), match[1] or VALUE, Series(match[2], labels), title or text.strip())


def declared_pages(declared: Mapping[str, Mapping[str, str]]) -> tuple[Page, ...]:
    """The pages of a plug-in's metrics: "port/path" -> expression -> title."""
    parts = (where.partition("/") for where in declared)
    return tuple(Page(port, f"/{path}") for port, _, path in parts)


def declared_metrics(declared: Mapping[str, Mapping[str, str]]) -> tuple[Metric, ...]:
    """The metrics of a plug-in. Raises ValueError."""
    pages = zip(declared_pages(declared), declared.values(), strict=True)
    return tuple(metric_of(text, page, title) for page, titles in pages for text, title in titles.items())


def declared_problems(declared: Mapping[Any, Any], ports: Iterable[object]) -> list[str]:
    """What is wrong with a plug-in's metrics, one line each."""
    problems = []
    number = 0
    for where, titles in declared.items():
        if not isinstance(where, str) or "/" not in where or where.partition("/")[0] not in ports:
            problems.append(
                f'metrics has {where!r:.60}, not "PORT/PATH" with the name of a port, such as "client/metrics"'
            )
            continue
        if re.search(r"[^!-~]", where):
            problems.append(f"metrics has {where!r:.60}, a path with a blank or a character that must be escaped")
            continue
        if not isinstance(titles, Mapping):
            problems.append(f"metrics[{where!r}] is {titles!r:.60}, not a mapping of series to titles")
            continue
        number += len(titles)
        for text, title in titles.items():
            if not isinstance(text, str) or not isinstance(title, str) or not 0 < len(title) <= MAX_TEXT:
                problems.append(f"metrics[{where!r}] has {text!r:.60}: {title!r:.60}, not a series and its title")
                continue
            try:
                metric_of(text, Page("", ""))
            except ValueError as error:
                problems.append(f"metrics[{where!r}]: {error}")
    if number > MAX_METRICS:
        problems.append(f"metrics has {number} series, more than {MAX_METRICS}")
    return problems


def chosen(
    declared: Sequence[Metric], asked: Sequence[str], *, pages: Sequence[Page], system: str
) -> tuple[Metric, ...]:
    """The metrics of a run: those that the system declares and, on each of its pages, those of `--metrics`; nothing for
    `none`. Raises OperatorError."""
    if NO_METRICS in asked:
        if len(asked) > 1:
            raise OperatorError(f"--metrics {NO_METRICS} cannot be combined with other values of --metrics")
        return ()
    if asked and not pages:
        raise OperatorError(
            f"--metrics: system {system} declares no page of metrics: add metrics to its file, or omit the option"
        )
    known = {(metric.page, metric.text) for metric in declared}
    found = list(declared)
    for text in asked:
        for page in pages:
            try:
                metric = metric_of(text, page)
            except ValueError as error:
                raise OperatorError(f"--metrics: {error}") from None
            if (page, metric.text) not in known:
                known.add((page, metric.text))
                found.append(metric)
    if len(found) > MAX_METRICS:
        raise OperatorError(
            f"--metrics: {len(found)} series, of which {len(declared)} are the system's own; at most "
            f"{MAX_METRICS} are drawn"
        )
    return tuple(found)
