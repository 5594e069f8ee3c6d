"""`harness export RUN`: writes a run in the files of other tools."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from checker.faults import faults_of
from harness.atomic_files import write_lines, write_output
from harness.errors import OperatorError
from harness.export.jepsen import events_as_edn, results_as_edn, time_name
from harness.export.otlp import otlp_lines
from harness.export.perfetto import MAX_MESSAGES, trace_events
from harness.history_writer import HistoryReader, read_history
from harness.metrics.samples import read_samples
from harness.registry import short_name
from harness.report import OutputConsole
from harness.report.checks import verdict_word
from harness.report.replay import EVER_NS
from harness.report.sequence import leaders_of
from harness.report.trace_window import Message, NothingSentError, choose, read_window
from harness.store import RunDir, store_of
from harness.units import plural

__all__ = ["export_command"]


def export_command(arguments: argparse.Namespace) -> int:
    """Write the files and print their path. Returns 0; raises OperatorError for what cannot be read or written."""
    run_dir = store_of(arguments).find(arguments.run)
    if not run_dir.history_path.exists():
        raise OperatorError(f"{run_dir.path} has no history: the run never began")
    try:
        path = _FORMATS[arguments.format](run_dir, arguments.out, OutputConsole(stderr=True))
    except OSError as error:
        raise OperatorError(f"--out: cannot write {error.filename}: {error.strerror}") from None
    print(path)
    return 0


def _export_jepsen(run_dir: RunDir, out: str | None, console: OutputConsole) -> Path:
    results = run_dir.read_results() if run_dir.results_path.exists() else {}
    started_at = results.get("started_at")
    name = time_name(started_at) if isinstance(started_at, str) else run_dir.path.name
    place = Path(out or "jepsen-store") / run_dir.path.parent.name / name
    place.mkdir(parents=True, exist_ok=True)
    history = read_history(run_dir.history_path)
    write_lines(place / "history.edn", events_as_edn(history))
    write_output(place / "results.edn", results_as_edn(results) + "\n")
    _say_if_cut(history, console)
    return place


def _file_of(run_dir: RunDir, out: str | None, name: str) -> Path:
    """The file to write. Raises OperatorError."""
    path = Path(out) if out else run_dir.path / name
    if not out and path.exists() and not path.is_file():
        raise OperatorError(f"{path} is not a regular file: move it away, or choose another path with --out")
    return path


def _export_perfetto(run_dir: RunDir, out: str | None, console: OutputConsole) -> Path:
    path = _file_of(run_dir, out, "perfetto.json")
    messages, left_out = _messages(run_dir)
    results = run_dir.read_results() if run_dir.results_path.exists() else {}
    hosts = [host for host in results.get("hosts") or () if isinstance(host, str)]
    history = read_history(run_dir.history_path)
    samples = read_samples(run_dir.metrics_path)
    events = trace_events(history, hosts=hosts, leaders=leaders_of(results), messages=messages, samples=samples)
    write_lines(path, _as_json(events))
    _say_if_cut(history, console)
    if messages:
        more = f"; {left_out:,} more were left out" if left_out else ""
        console.print_line(f"{plural(len(messages), 'message')} of the trace{more}")
    return path


def _export_otlp(run_dir: RunDir, out: str | None, console: OutputConsole) -> Path:
    path = _file_of(run_dir, out, "otlp.jsonl")
    test: Mapping[str, Any] = run_dir.read_test() if run_dir.test_path.exists() else {}
    results = run_dir.read_results() if run_dir.results_path.exists() else {}
    run_id = next((found["run_id"] for found in (results, test) if isinstance(found.get("run_id"), str)), run_dir.name)
    began_ms = results.get("load_began_wall_ms")
    if type(began_ms) is not int:
        began_ms = _started_ms(run_dir, results)
        console.print_line("when the load began was not stored: the spans are as if it had begun when the run did")
    system = short_name(str(test.get("system", "unknown")))
    resource = {
        "splitbrain.run": run_id,
        "splitbrain.test": run_dir.path.parent.name,
        "splitbrain.workload": test.get("workload"),
        "splitbrain.seed": test.get("seed"),
        "splitbrain.verdict": verdict_word(results.get("valid")) if results else None,
    }
    history = read_history(run_dir.history_path)
    faults = faults_of(read_history(run_dir.history_path))
    lines = otlp_lines(
        history, faults=faults, run_id=run_id, zero_ns=began_ms * 1_000_000, resource=resource, system=system
    )
    write_lines(path, lines)
    _say_if_cut(history, console)
    return path


def _started_ms(run_dir: RunDir, results: Mapping[str, Any]) -> int:
    """When a run started, by its results or by its directory's name; 0 if neither says."""
    for text in (results.get("started_at"), run_dir.path.name.partition("-")[0]):
        with contextlib.suppress(ValueError):
            return round(datetime.fromisoformat(str(text)).timestamp() * 1000)
    return 0


def _say_if_cut(history: HistoryReader, console: OutputConsole) -> None:
    if history.truncated:
        console.print_line(f"the last line of the history was cut short and is left out; events: {history.events:,}")


def _messages(run_dir: RunDir) -> tuple[list[Message], int]:
    """The messages of a traced run, and how many were left out."""
    if not run_dir.trace_path.exists():
        return [], 0
    try:
        window = choose(read_window(run_dir.trace_path, from_ns=-EVER_NS, to_ns=EVER_NS), MAX_MESSAGES)
    except NothingSentError:
        return [], 0
    return window.messages, window.left_out.total()


_FORMATS = {"jepsen": _export_jepsen, "perfetto": _export_perfetto, "otlp": _export_otlp}


def _as_json(events: Iterator[str]) -> Iterator[str]:
    """One object with an array of events, an event on each line."""
    yield '{"displayTimeUnit":"ms","traceEvents":['
    before = next(events)
    for event in events:
        yield f"{before},"
        before = event
    yield before
    yield "]}"
