"""Turns values into HTML. Templates escape, so that content of a run, a node or a URL appears as text."""

from __future__ import annotations

__all__ = ["PAGE_ROWS", "SORTS", "Query", "environment", "list_view", "run_view"]

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2

from harness.report.checks import check_sections
from harness.report.faults import fault_rows, hosts_of
from harness.report.store_page import fault_words, operation_words, started_words
from harness.report.templating import template_environment
from harness.run_index import STATES, RunIndex, RunSummary, select, unreadable_words
from harness.serve.files import FileEntry, media_type
from harness.units import clip, duration

PAGE_ROWS = 50
"""Runs per page of the list."""

MAX_CHOICES = 100
"""Limit of names in a drop-down list; a store has a handful of each kind."""

MAX_FAULT_ROWS = 60
MAX_CHECKS = 40

SORTS: Mapping[str, str] = {
    "time": "newest", "duration_s": "longest", "ok": "most operations", "faults": "most faults", "verdict": "verdict",
}  # fmt: skip
"""Sort key of the list -> its label."""

_WORST_FIRST = ("invalid", "unknown", "unfinished", "running", "valid")


@dataclass(frozen=True, slots=True)
class Query:
    """Filter, order and page of the list; unknown values are ignored."""

    words: str = ""
    verdict: str = ""
    test: str = ""
    system: str = ""
    workload: str = ""
    nemesis: str = ""
    cluster: str = ""
    sort: str = "time"
    page: int = 1

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Query:
        """From the query parameters of a URL."""
        texts = {name: given.get(name, "")[:200] for name in ("words", "verdict", *_FILTERS)}
        sort, page = given.get("sort", "time"), given.get("page", "1")
        number = int(page) if page.isascii() and page.isdigit() and len(page) < 8 else 1
        return cls(**texts, sort=sort if sort in SORTS else "time", page=max(1, number))

    def address(self, page: int) -> str:
        """The URL of another page of the same list."""
        given = {name: getattr(self, name) for name in ("words", "verdict", *_FILTERS, "sort")}
        return "/?" + urlencode({**{name: text for name, text in given.items() if text}, "page": page})


_FILTERS = ("test", "system", "workload", "nemesis", "cluster")


def run_address(name: str, *more: str) -> str:
    """The URL of a run's page, or of something below it."""
    return "/runs/" + "/".join(quote(part, safe="") for part in (*name.split("/"), *more))


def file_address(name: str, way: str, path: str) -> str:
    """The URL of a file of a run, to view (`files`) or to download (`download`)."""
    return f"{run_address(name, way)}/{quote(path)}"


def size_words(size_bytes: int) -> str:
    """A human-readable size: "71 KB"."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"


@cache
def environment() -> jinja2.Environment:
    """The template environment with its filters and globals."""
    found = template_environment(
        "harness.serve",
        operation_words=operation_words,
        fault_words=fault_words,
        started=started_words,
        size=size_words,
    )
    found.globals.update(run_address=run_address, file_address=file_address)
    return found


@cache
def report_policy() -> str:
    """The content security policy for a page in a run's directory, which anybody may have written: a separate origin
    (sandbox), and no scripts but ours."""
    scripts = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()}'"
        for path in sorted((Path(__file__).parent.parent / "report" / "static").glob("*.js"))
    )
    return (
        "sandbox allow-scripts allow-downloads allow-top-navigation-by-user-activation; default-src 'none'; "
        f"style-src 'unsafe-inline'; img-src data:; script-src {scripts}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def list_view(index: RunIndex, query: Query) -> dict[str, Any]:
    """The template values of the list page."""
    found = select(
        index.runs,
        verdicts=[query.verdict] if query.verdict else (),
        words=query.words,
        **{name: getattr(query, name) for name in _FILTERS},
    )
    found = _sorted(found, query.sort)
    pages = max(1, -(-len(found) // PAGE_ROWS))
    page = min(query.page, pages)
    begin = (page - 1) * PAGE_ROWS
    return {
        "runs": found[begin : begin + PAGE_ROWS],
        "query": query,
        "page": page,
        "pages": pages,
        "found": len(found),
        "total": len(index.runs) + index.left_out,
        "left_out": index.left_out,
        "unreadable": unreadable_words(index),
        "tally": [(state, number) for state in STATES if (number := sum(run.verdict == state for run in found))],
        "states": STATES,
        "sorts": SORTS,
        "choices": {name: _choices(index.runs, name) for name in _FILTERS},
    }


def _sorted(runs: list[RunSummary], sort: str) -> list[RunSummary]:
    if sort == "time":
        return runs
    if sort == "verdict":
        return sorted(runs, key=lambda run: _WORST_FIRST.index(run.verdict))
    return sorted(runs, key=lambda run: -(getattr(run, sort) or 0))


def _choices(runs: Sequence[RunSummary], name: str) -> list[str]:
    if name == "nemesis":
        found = {one.partition("=")[0] for given in {run.nemesis for run in runs} for one in given.split(",")}
    else:
        found = {getattr(run, name) for run in runs}
    return sorted(found - {""})[:MAX_CHOICES]


def run_view(
    run: RunSummary,
    test: Mapping[str, Any],
    results: Mapping[str, Any],
    files: tuple[Sequence[FileEntry], int],
) -> dict[str, Any]:
    """The template values of a run's page."""
    faults = results.get("faults")
    faults = [fault for fault in faults if isinstance(fault, Mapping)] if isinstance(faults, list) else []
    doubts = results.get("doubts")
    return {
        "run": run,
        "reason": clip(results.get("reason") or run.reason, 1200),
        "facts": _facts(run, test),
        "checks": check_sections(results.get("checks"), MAX_CHECKS),
        "faults": fault_rows(faults, hosts_of(results, test), MAX_FAULT_ROWS),
        "more_faults": max(0, len(faults) - MAX_FAULT_ROWS),
        "doubts": [clip(line) for line in doubts[:12]] if isinstance(doubts, list) else [],
        "replay": clip(results.get("replay") or "", 2000),
        "files": [(file, media_type(file.path.split("/")) is not None) for file in files[0]],
        "more_files": files[1],
        # A judged run has all its checks and faults in results.json.
        "is_partial": not results and any(file.path == "results.json" for file in files[0]),
        "has_report": any(file.path == "report.html" for file in files[0]),
        "pages": [file.path for file in files[0] if media_type(file.path.split("/")) == "text/html"],
        "now": datetime.now(UTC),
    }


def _plain(number: Any) -> Any:
    """60.0 -> "60", 2.5 -> "2.5"; anything but a float, from a damaged file, unchanged."""
    return f"{number:g}" if isinstance(number, float) else number


def _facts(run: RunSummary, test: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("System", run.system), ("Workload", run.workload), ("Nemesis", run.nemesis), ("Cluster", run.cluster),
        ("Settings", run.settings), ("Nodes", run.nodes), ("Clients", test.get("concurrency")),
        ("Rate per second", "no limit" if test.get("rate") == 0 else _plain(test.get("rate"))),
        ("Load, in seconds", _plain(test.get("time_limit_s"))), ("Seed", run.seed),
        ("Started (UTC)", started_words(run.started_at)),
        ("Took", None if run.duration_s is None else duration(run.duration_s * 1e9)),
        ("Operations", operation_words(run)), ("Faults", fault_words(run)),
    ]  # fmt: skip
    return [(name, clip(value, 200)) for name, value in facts if value not in (None, "", "–")]
