"""index.html of a store: the newest runs in one self-contained file that opens in a browser without a server."""

from __future__ import annotations

__all__ = ["MAX_ROWS", "fault_words", "operation_words", "render_store", "started_words", "update_store_page"]

import logging
import os
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from urllib.parse import quote

import jinja2

from harness.atomic_files import replace_file
from harness.report.templating import script, style, template_environment
from harness.run_index import STATES, RunIndex, RunSummary, index_lock, read_index, unreadable_words
from harness.store import Store, StoreError
from harness.units import clip, count

logger = logging.getLogger(__name__)

MAX_ROWS = 500
"""Runs on the page: about 300 KB, which opens instantly. `harness runs` and `harness serve` list all of them."""


def operation_words(run: RunSummary) -> str:
    """Operations of a run by outcome: "3,639 ok, 6 info"; "–" if unknown."""
    if run.ok is None:
        return "–"
    others = (("fail", run.fail), ("info", run.info))
    return ", ".join([f"{count(run.ok)} ok", *(f"{count(number)} {kind}" for kind, number in others if number)])


def fault_words(run: RunSummary) -> str:
    """Faults of a run and how many are proven: "2 proven", "1 of 2 proven", "none"; "–" if unknown."""
    if run.faults is None or run.proven is None:
        return "–"
    if not run.faults:
        return "none"
    proven = f"{run.faults} proven" if run.proven == run.faults else f"{run.proven} of {run.faults} proven"
    return f"{proven}, {run.unmet} not exercised" if run.unmet else proven


@cache
def _environment() -> jinja2.Environment:
    return template_environment(
        quote=quote, operation_words=operation_words, fault_words=fault_words, started=started_words
    )


def render_store(root: Path, index: RunIndex) -> str:
    """The page of the store at `root`, newest runs first; each run links to its report, or else to its directory."""
    shown = index.runs[:MAX_ROWS]
    total = len(index.runs) + index.left_out
    return (
        _environment()
        .get_template("store.html")
        .render(
            css=style("report.css", "store.css"),
            **script("store.js"),
            title=clip(root.name, 80),
            runs=[(run, os.path.isfile(root / run.name / "report.html")) for run in shown],
            tally=[(state, number) for state in STATES if (number := sum(run.verdict == state for run in index.runs))],
            states=STATES,
            total=total,
            not_shown=total - len(shown),
            unreadable=unreadable_words(index),
            running=sum(run.verdict == "running" for run in index.runs),
            written_at=datetime.now(UTC),
        )
    )


def update_store_page(store: Store) -> None:
    """Rewrite index.html of a store. If that fails, the old file stays and a warning is logged: a run must not fail
    because of it."""
    try:
        with index_lock(store):
            html = render_store(store.root, read_index(store))
            replace_file(store.root / "index.html", html.encode("utf-8", "backslashreplace"))
    except (OSError, StoreError) as error:
        logger.warning("cannot update index.html of the store: %s", error)


def started_words(started_at: datetime | None) -> str:
    """A start time as text, in UTC: "2026-01-31 12:00:00"; "–" if unknown."""
    return "–" if started_at is None else started_at.strftime("%Y-%m-%d %H:%M:%S")
