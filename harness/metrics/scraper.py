"""Reads the metrics of every host during a run, beside its load, into metrics.jsonl.

    {"version": 1, "interval_ns": ..., "hosts": ["n1", ...], "metrics": [{"text": ..., "title": ..., ...}, ...]}
    {"time": 1004137518, "host": "n1", "page": 0, "values": [0, 8123, [0.82, 411]]}
    {"time": 2003994020, "host": "n2", "page": 0, "error": "no answer within 1 s"}

The first line says what the values of the others are: those of the page's metrics in their order, null for one that is
not on the page, sum and count for the mean of a histogram. Counters are stored as they are. A host that does not answer
has an `error`: during a fault that is what there is to know. Hosts are reached as clients reach them, each page over a
connection of its own, so that a host that hangs delays neither the run nor another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.metrics.exposition import ExpositionError, sums
from harness.metrics.expression import MEAN, Metric, Page
from harness.sdk.http import JsonHttp
from harness.units import clip

__all__ = [
    "INTERVAL_S",
    "MAX_FILE_BYTES",
    "MAX_PAGE_BYTES",
    "MAX_SAMPLES_OF_A_HOST",
    "TIMEOUT_S",
    "VERSION",
    "Scraper",
    "values_of",
]

logger = logging.getLogger(__name__)

VERSION = 1

INTERVAL_S = 1.0
"""Interval of the samples of a host, as of the leaders: short enough to see an election, and a page of etcd's 150 KB
costs 0.5 ms of processor time to read."""

MAX_SAMPLES_OF_A_HOST = 3_600
"""Samples of a page in the whole run: an hour of one each second. Longer runs have longer intervals, as their report is
no wider."""

TIMEOUT_S = 1.0
"""For a host to send a page. Etcd takes 5 ms; a host that takes longer than the interval has a gap."""

MAX_PAGE_BYTES = 8 << 20
"""Largest page: some hundred times a usual one, and read in 50 ms."""

MAX_FILE_BYTES = 64 << 20
"""Largest metrics.jsonl: 15 hosts with 16 metrics for an hour write 15 MB."""

MODE = "x"
"""Of opening the file, which is new in every run."""

MAX_ERROR = 120
"""Limit of the characters of a gap's reason."""


@dataclass(slots=True)
class Scraper:
    """Reads the metrics of hosts until cancelled. `url(host, port)` returns where clients reach a port, by its name;
    `clock_ns` returns the run's time."""

    metrics: Sequence[Metric]
    hosts: Sequence[str]
    url: Callable[[str, str], str]
    clock_ns: Callable[[], int]
    path: str
    time_limit_s: float
    stopped: str | None = None
    """Why nothing more was written; None if nothing stopped it"""
    _reads: Counter[str] = field(default_factory=Counter)
    _unanswered: Counter[str] = field(default_factory=Counter)
    _last_errors: dict[str, str] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    """Places of metrics that were on a page at least once"""
    _written_bytes: int = 0

    @property
    def interval_s(self) -> float:
        """The time between two samples of a page."""
        return max(INTERVAL_S, self.time_limit_s / MAX_SAMPLES_OF_A_HOST)

    @property
    def pages(self) -> list[Page]:
        """The pages to read."""
        return list(dict.fromkeys(metric.page for metric in self.metrics))

    async def run(self) -> None:
        """Read until cancelled, or until the file is full or cannot be written. Never raises for what a host sends or
        the disk refuses."""
        try:
            with open(self.path, MODE, encoding="ascii", buffering=1) as file:
                self._write(file, self._header())
                async with asyncio.TaskGroup() as group:
                    for host in self.hosts:
                        for number, page in enumerate(self.pages):
                            group.create_task(self._follow(file, host, number, page), name=f"metrics of {host}")
        except* OSError as errors:
            error = _first_of(errors)
            self._stop(f"cannot write {os.path.basename(self.path)}: {error.strerror or error}")

    def summary(self) -> dict[str, Any]:
        """What was read, for results.json."""
        texts = dict.fromkeys(metric.text for metric in self.metrics)
        seen = {self.metrics[place].text for place in self._seen}  # one of several pages has it
        return {
            "interval_s": self.interval_s,
            "metrics": list(texts),
            "reads": dict(self._reads),
            "unanswered": dict(self._unanswered),
            "last_errors": dict(self._last_errors),
            "never_seen": [text for text in texts if text not in seen],
            "stopped": self.stopped,
        }

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        logger.warning("metrics: %s", reason)

    def _header(self) -> Mapping[str, Any]:
        pages = self.pages
        described = [
            {
                "page": pages.index(metric.page), "text": metric.text, "title": metric.title, "kind": metric.kind,
                "unit": metric.unit,
            }
            for metric in self.metrics
        ]  # fmt: skip
        return {
            "version": VERSION,
            "interval_ns": round(self.interval_s * 1e9),
            "hosts": list(self.hosts),
            "pages": list(map(str, pages)),
            "metrics": described,
        }

    def _write(self, file: Any, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n"
        self._written_bytes += len(text)
        file.write(text)

    async def _follow(self, file: Any, host: str, number: int, page: Page) -> None:
        places = [place for place, metric in enumerate(self.metrics) if metric.page == page]
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        async with contextlib.AsyncExitStack() as stack:
            server = JsonHttp(self.url(host, page.port))
            stack.push_async_callback(server.close)
            while self.stopped is None:
                self._write(file, {"host": host, "page": number, **await self._read(server, host, page, places)})
                if self._written_bytes > MAX_FILE_BYTES and self.stopped is None:
                    self._stop(f"more than {MAX_FILE_BYTES >> 20} MB of samples")
                due_s = max(due_s + self.interval_s, loop.time())
                await asyncio.sleep(due_s - loop.time())

    async def _read(self, server: JsonHttp, host: str, page: Page, places: Sequence[int]) -> Mapping[str, Any]:
        """One sample of a page, or why there is none."""
        self._reads[host] += 1
        began_ns = self.clock_ns()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                text = await server.text(page.path, max_bytes=MAX_PAGE_BYTES)
            values = values_of(text, [self.metrics[place] for place in places])
        except Exception as error:  # whatever a broken server sends: it is a gap
            words = f"no answer within {TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else str(error)
            words = clip(words or type(error).__name__, MAX_ERROR)
            self._unanswered[host] += 1
            self._last_errors[host] = words
            return {"time": began_ns, "error": words}
        self._seen |= {place for place, value in zip(places, values, strict=True) if value is not None}
        return {"time": self.clock_ns(), "values": values}


def _first_of(errors: BaseExceptionGroup[OSError]) -> OSError:
    found = errors.exceptions[0]
    return _first_of(found) if isinstance(found, BaseExceptionGroup) else found


def values_of(page: str, metrics: Sequence[Metric]) -> list[float | list[float] | None]:
    """The value of each metric on a page; [sum, count] for a mean. None if it is not there. Raises ExpositionError, for
    a text without lines too."""
    if "\n" not in page:
        raise ExpositionError("not a page of metrics")
    read = iter(sums(page, [series for metric in metrics for series in metric.wanted]))
    found: list[float | list[float] | None] = []
    for metric in metrics:
        if metric.kind != MEAN:
            found.append(next(read))
            continue
        total, number = next(read), next(read)
        found.append(None if total is None or number is None else [total, number])
    return found
