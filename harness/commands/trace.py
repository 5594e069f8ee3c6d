"""`harness trace RUN`: draws a window of a simulated run's network messages as a sequence diagram.

With --replay: writes the run, or a part of it, as a page to play and step through.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checker.faults import faults_of
from harness.atomic_files import write_output
from harness.errors import OperatorError
from harness.history_writer import read_history
from harness.report import OutputConsole
from harness.report.replay import EVER_NS, collect_replay, replay_page
from harness.report.sequence import MAX_ARROWS, leaders_of, sequence_page, sequence_svg
from harness.report.trace_window import Window, choose, read_window
from harness.store import RunDir, store_of
from harness.units import plural

__all__ = ["MAX_HOSTS_DRAWN", "trace_command"]

MAX_HOSTS_DRAWN = 17
"""Limit of lifelines: the maximum of replicas, the clients and the name server."""


def trace_command(arguments: argparse.Namespace) -> int:
    """Draw the window and print the file's path. Returns 0; raises OperatorError for what cannot be drawn."""
    if arguments.replay:
        return _replay(arguments)
    if arguments.from_s is None or arguments.to_s is None:
        raise OperatorError("give --from and --to for what to draw, or --replay for a page of the whole run")
    if not (_is_time(arguments.from_s) and _is_time(arguments.to_s) and arguments.from_s < arguments.to_s):
        raise OperatorError(
            f"--from {arguments.from_s:g} must be less than --to {arguments.to_s:g}, both within the run"
        )
    run_dir = store_of(arguments).find(arguments.run)
    path = _path(arguments, run_dir.path / "trace.html")
    if path.suffix not in (".html", ".svg"):
        raise OperatorError(f"--out {path}: must end in .html or .svg")
    wanted = list(dict.fromkeys(word.strip() for word in arguments.hosts.split(",") if word.strip()))
    if len(wanted) == 1:
        raise OperatorError("--hosts: name at least two hosts")
    window = read_window(
        run_dir.trace_path, from_ns=round(arguments.from_s * 1e9), to_ns=round(arguments.to_s * 1e9), hosts=wanted
    )
    drawn = choose(window, MAX_ARROWS)
    hosts = wanted or _in_order(_speakers(drawn) | {name for name in drawn.spoke if _is_replica(name)})
    if len(hosts) > MAX_HOSTS_DRAWN:
        raise OperatorError(
            f"{len(hosts)} hosts sent messages, but only {MAX_HOSTS_DRAWN} fit side by side: choose some with --hosts"
        )
    leaders = leaders_of(run_dir.read_results()) if run_dir.results_path.exists() else []
    draw = sequence_svg if path.suffix == ".svg" else sequence_page
    text = draw(drawn, title=run_dir.name, hosts=hosts, faults=_faults(run_dir), leaders=leaders)
    try:
        write_output(path, text)
    except OSError as error:
        raise OperatorError(f"--out {path}: {error.strerror}") from None
    console = OutputConsole(stderr=True)
    left_out = f", {drawn.left_out.total():,} left out" if drawn.left_out else ""
    console.print_line(f"{len(drawn.messages)} messages between {len(hosts)} hosts{left_out}")
    print(path)
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from_ns, to_ns = (
        default if given is None else round(given * 1e9) if _is_time(given) else None
        for given, default in ((arguments.from_s, -EVER_NS), (arguments.to_s, EVER_NS))
    )
    if from_ns is None or to_ns is None or from_ns >= to_ns:
        raise OperatorError("--from must be less than --to")
    if arguments.hosts:
        raise OperatorError("--hosts: a replay always shows all hosts; omit it")
    run_dir = store_of(arguments).find(arguments.run)
    path = _path(arguments, run_dir.path / "replay.html")
    if path.suffix != ".html":
        raise OperatorError(f"--out {path}: must end in .html")
    replay = collect_replay(run_dir, from_ns=from_ns, to_ns=to_ns)
    try:
        write_output(path, replay_page(replay))
    except OSError as error:
        raise OperatorError(f"--out {path}: {error.strerror}") from None
    console = OutputConsole(stderr=True)
    counts = ((replay.messages, "message"), (replay.operations, "operation"), (replay.faults, "fault"))
    words = ", ".join(plural(len(each), noun) for each, noun in counts)
    console.print_line("; ".join([words, *replay.notes]))
    print(path)
    return 0


def _path(arguments: argparse.Namespace, default: Path) -> Path:
    """The output path. Raises OperatorError if the default path exists and is not a file: opening a pipe for writing
    would block until somebody reads."""
    if arguments.out:
        return Path(arguments.out)
    if default.exists() and not default.is_file():
        raise OperatorError(f"{default} is not a regular file: move it away, or choose another path with --out")
    return default


def _is_time(seconds: float) -> bool:
    """Whether a time is finite, also in nanoseconds."""
    return math.isfinite(seconds * 1e9)


def _speakers(window: Window) -> set[str]:
    return {name for message in window.messages for name in (message.source, message.destination)}


def _is_replica(name: str) -> bool:
    """Whether a host is a replica. Replicas always get a lifeline: a silent one is the most telling."""
    return name.startswith("n") and name[1:].isdigit()


def _in_order(names: Iterable[str]) -> list[str]:
    """The clients, the replicas by number, then the others."""

    def place(name: str) -> tuple[int, int, str]:
        if _is_replica(name):
            return 1, int(name[1:]), name
        return (0 if name == "clients" else 2), 0, name

    return sorted(names, key=place)


def _faults(run_dir: RunDir) -> Sequence[Mapping[str, Any]]:
    return faults_of(read_history(run_dir.history_path)) if run_dir.history_path.exists() else []
