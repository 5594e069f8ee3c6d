"""`harness export RUN`: writes a run in the files of other tools."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from harness.atomic_files import write_lines, write_output
from harness.errors import OperatorError
from harness.export.jepsen import events_as_edn, results_as_edn, time_name
from harness.export.perfetto import MAX_MESSAGES, trace_events
from harness.history_writer import HistoryReader, read_history
from harness.report import OutputConsole
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
    export = _export_jepsen if arguments.format == "jepsen" else _export_perfetto
    try:
        path = export(run_dir, arguments.out, OutputConsole(stderr=True))
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


def _export_perfetto(run_dir: RunDir, out: str | None, console: OutputConsole) -> Path:
    path = Path(out) if out else run_dir.path / "perfetto.json"
    if not out and path.exists() and not path.is_file():
        raise OperatorError(f"{path} is not a regular file: move it away, or choose another path with --out")
    messages, left_out = _messages(run_dir)
    results = run_dir.read_results() if run_dir.results_path.exists() else {}
    hosts = [host for host in results.get("hosts") or () if isinstance(host, str)]
    history = read_history(run_dir.history_path)
    events = trace_events(history, hosts=hosts, leaders=leaders_of(results), messages=messages)
    write_lines(path, _as_json(events))
    _say_if_cut(history, console)
    if messages:
        more = f"; {left_out:,} more were left out" if left_out else ""
        console.print_line(f"{plural(len(messages), 'message')} of the trace{more}")
    return path


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


def _as_json(events: Iterator[str]) -> Iterator[str]:
    """One object with an array of events, an event on each line."""
    yield '{"displayTimeUnit":"ms","traceEvents":['
    before = next(events)
    for event in events:
        yield f"{before},"
        before = event
    yield before
    yield "]}"
