"""A run as one page to play, pause and step through: replicas in a ring, messages in flight, faults, operations.

Messages come from the network trace, so only a simulated run has them; a page without any says so. Roles and terms
are what the replicas logged, aligned to the history's clock by the elections that the `leaders` check found; for
systems other than the broker, they are what the replicas reported when polled during the run.
"""

from __future__ import annotations

__all__ = ["EVER_NS", "MAX_MESSAGES", "MAX_REPLAY_BYTES", "Replay", "collect_replay", "replay_page"]

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from checker.faults import NEMESIS, faults_of
from harness.history_writer import HistoryError, read_history
from harness.recovery import RECOVERS
from harness.report.checks import terms_of, timed_violations, verdict_word
from harness.report.deciding import jump_of
from harness.report.templating import json_data, report_template, script, style
from harness.report.trace_window import (
    LogState,
    Message,
    NothingSentError,
    TraceError,
    Window,
    choose,
    read_window,
)
from harness.report.witness import witness_from
from harness.roles import read_roles
from harness.store import RunDir
from harness.units import clip, instant, operation_text, plural

MAX_REPLAY_BYTES = 5_000_000
"""Upper bound of a page's size: a minute of five replicas at the default rate takes half of it."""

MAX_MESSAGES = 200_000
"""Most messages on a page. Beyond it the least informative kinds are left out, and the page says how many."""

MAX_OPERATIONS = 60_000
MAX_FAULTS = 400
MAX_VIOLATIONS = 20
MAX_ROLES = 20_000
MAX_LOG_STATES = 100_000
"""Most log changes on a page: twice those of a minute at the default rate. Beyond it every 2nd or 3rd is kept."""

MAX_TEXT = 60
SHUTDOWN_WINDOW_US = 1_000_000
"""Replicas that stop at most this long (µs) before the run's last moment were stopped by the end of the run."""
MAX_VIOLATION_TEXT = 700
EVER_NS = 10**18
"""Longer than any run; from -EVER_NS to EVER_NS is the whole run."""

_T = TypeVar("_T")

ROLE = re.compile(r"^(\S+) .*\brole_change self=(\S+) role=(\w+) term=(\d+)")
LIFE = re.compile(r"^(\S+) .*\bnode (READY|stopped)\b")


@dataclass(slots=True)
class Replay:
    """What a page shows; times are µs on the history's clock."""

    title: str
    verdict: str
    reason: str
    replicas: list[str]
    others: list[str]
    messages: list[Message] = field(default_factory=list)
    logs: list[LogState] = field(default_factory=list)
    operations: list[tuple[int, int, int | None, str, str]] = field(default_factory=list)
    """process, start, end or None, outcome, text"""
    faults: list[dict[str, Any]] = field(default_factory=list)
    roles: list[tuple[int, str, str, int]] = field(default_factory=list)
    """time, host, role, term"""
    violations: list[dict[str, Any]] = field(default_factory=list)
    decided: tuple[int, int] | None = None
    """The interval (µs) in which the violation was decided, if `harness explain` has found it"""
    part: tuple[int | None, int | None] = (None, None)
    """Start and end (µs) of the displayed part; None for the run's own start or end"""
    is_asked: bool = False
    """Whether roles were reported by the replicas when polled, rather than read from their logs"""
    notes: list[str] = field(default_factory=list)


def collect_replay(run_dir: RunDir, *, from_ns: int = -EVER_NS, to_ns: int = EVER_NS) -> Replay:
    """What the page shows of this run between two moments. Raises StoreError or TraceError for damaged files, and
    TraceError for a part in which nothing happened."""
    test = run_dir.read_test()
    results: Mapping[str, Any] = run_dir.read_results() if run_dir.results_path.exists() else {}
    nodes = test.get("nodes")
    replicas = [f"n{number}" for number in range(1, nodes + 1)] if isinstance(nodes, int) and 0 < nodes < 64 else []
    replay = Replay(
        title=run_dir.name,
        verdict=verdict_word(results.get("valid")),
        reason=clip(results.get("reason") or "the run was not judged", 600),
        replicas=replicas,
        others=["clients"],
    )
    silence = _take_messages(replay, run_dir, from_ns, to_ns)
    ended_ns = _take_history(replay, run_dir, from_ns, to_ns)
    _take_roles(replay, run_dir, results, from_ns, to_ns)
    _take_violations(replay, results, is_to_the_end=to_ns >= EVER_NS)
    moment = jump_of(run_dir.read_explanation() or {})
    replay.decided = None if moment is None else (round(moment[0] * 1e6), round(moment[1] * 1e6))
    _restrict_to_window(replay, from_ns, to_ns)
    if from_ns > ended_ns or not (replay.operations or replay.faults):  # outside the run, or an empty page
        if silence is not None:
            raise silence
        if not replay.messages and replay.part != (None, None):
            raise TraceError(f"nothing happened in this part of the run: its history ends at {instant(ended_ns)}")
    replay.faults = _first(replay, replay.faults, MAX_FAULTS, "fault")
    replay.violations = _first(replay, replay.violations, MAX_VIOLATIONS, "violation")
    return replay


def _first(replay: Replay, found: list[_T], most: int, noun: str) -> list[_T]:
    """The first `most` items; a note on the page says how many were left out."""
    if (more := len(found) - most) > 0:
        replay.notes.append(f"the last {plural(more, noun)} left out")
    return found[:most]


def _restrict_to_window(replay: Replay, from_ns: int, to_ns: int) -> None:
    """Drop faults and moments outside the displayed part of the run; nothing else was collected there."""
    begin_us, end_us = from_ns // 1000, to_ns // 1000
    replay.part = (begin_us if from_ns > -EVER_NS else None, end_us if to_ns < EVER_NS else None)
    if replay.part == (None, None):
        return
    words = [
        f"{word} {instant(us * 1000)}" for word, us in zip(("from", "to"), replay.part, strict=True) if us is not None
    ]
    replay.notes.insert(0, f"a part of the run: {' '.join(words)}")
    replay.faults = [
        fault for fault in replay.faults
        if fault["start"] <= end_us and (fault["end"] is None or fault["end"] >= begin_us)
    ]  # fmt: skip
    within = [one for one in replay.violations if begin_us <= one["at"] <= end_us]
    if len(within) < len(replay.violations):
        replay.notes.append(f"{plural(len(replay.violations) - len(within), 'violation')} outside this part")
    replay.violations = within
    if replay.decided is not None and not (replay.decided[0] >= begin_us and replay.decided[1] <= end_us):
        replay.decided = None


def _take_messages(replay: Replay, run_dir: RunDir, from_ns: int, to_ns: int) -> NothingSentError | None:
    """Add messages and log states. Returns the error to raise if no message was in flight in this window."""
    if not run_dir.trace_path.exists():
        replay.notes.append("no messages: the run was made without --cluster sim --trace")
        return None
    silence: NothingSentError | None = None
    try:
        window: Window = choose(read_window(run_dir.trace_path, from_ns=from_ns, to_ns=to_ns), MAX_MESSAGES)
    except NothingSentError as error:
        silence, window = error, error.window
        replay.notes.append("no messages: nothing was sent in this part")
    replay.messages = window.messages
    if window.stopped_ns is not None:
        at = instant(window.stopped_ns)
        replay.notes.append(f"no messages and no logs after {at}: the trace reached its size limit")
    every = -(-len(window.logs) // MAX_LOG_STATES) or 1
    replay.logs = [state for state in window.logs[::every] if state.host in replay.replicas]
    if every > 1:
        replay.notes.append(f"log ends and committed indexes are shown for only one change in {every}")
    replay.others += sorted(window.spoke - {*replay.replicas, *replay.others})
    replay.notes += [f"{plural(number, 'message')} left out: {kind}" for kind, number in window.left_out.items()]
    return silence


def _take_history(replay: Replay, run_dir: RunDir, from_ns: int, to_ns: int) -> int:
    """Add operations and faults; returns the time (ns) of the last event."""
    ended_ns = 0
    nemesis: list[dict[str, Any]] = []
    opened: dict[Any, dict[str, Any]] = {}
    left_out = 0
    with contextlib.suppress(FileNotFoundError):
        history = read_history(run_dir.history_path)
        try:
            for event in history:
                process = event["process"]
                ended_ns = event["time"]
                if process == NEMESIS:
                    nemesis.append(event)
                elif event["type"] == "invoke":
                    opened[process] = event
                elif process in opened:
                    left_out += not _take_operation(replay, opened.pop(process), event, from_ns, to_ns)
        except HistoryError as error:
            replay.notes.append(f"the history is incomplete: {clip(str(error), 200)}")
        if history.truncated:
            replay.notes.append("the history is incomplete: its last line was cut short")
    for invoked in opened.values():
        left_out += not _take_operation(replay, invoked, None, from_ns, to_ns)
    if left_out:
        replay.notes.append(f"{plural(left_out, 'operation')} left out")
    replay.operations.sort(key=lambda operation: operation[1])
    replay.faults = [
        {**_fault(fault), "down": _down_us(fault, nemesis)}
        for fault in faults_of(nemesis)
        if isinstance(fault["start_ns"], int)
    ]
    return ended_ns


def _take_operation(
    replay: Replay, invoked: Mapping[str, Any], completed: Mapping[str, Any] | None, from_ns: int, to_ns: int
) -> bool:
    """Keep an operation that overlaps the window. Returns False if the page has no room for it."""
    end_ns = None if completed is None else completed["time"]
    if invoked["time"] > to_ns or (end_ns is not None and end_ns < from_ns):
        return True
    if len(replay.operations) >= MAX_OPERATIONS:
        return False
    outcome = "info" if completed is None else completed["type"]
    whole = {
        "f": invoked["f"], "value": invoked.get("value"), "type": outcome,
        "result": None if completed is None else completed.get("value"),
    }  # fmt: skip
    key = f"key {clip(invoked['key'], 20)}: " if invoked.get("key") is not None else ""
    node = f" on {clip(completed['node'], 12)}" if completed is not None and completed.get("node") else ""
    text = f"{key}{operation_text(whole, MAX_TEXT)}{node}"
    end_us = None if end_ns is None else end_ns // 1000
    replay.operations.append((invoked["process"], invoked["time"] // 1000, end_us, outcome, text))
    return True


def _fault(fault: Mapping[str, Any]) -> dict[str, Any]:
    grudge = fault.get("grudge")
    cuts = [
        [str(source), str(to)]
        for to, sources in (grudge.items() if isinstance(grudge, Mapping) else ())
        for source in (sources if isinstance(sources, list) else ())
    ]
    hosts = fault.get("hosts")
    end = fault.get("end_ns")
    return {
        "name": clip(f"{fault.get('id', '')} {fault.get('nemesis', 'fault')} {fault.get('variant') or ''}".strip(), 60),
        "kind": clip(fault.get("nemesis") or "fault", 30),
        "start": fault["start_ns"] // 1000,
        "end": end // 1000 if isinstance(end, int) else None,
        "proven": fault.get("proven") is True,
        "hosts": [str(host) for host in hosts] if isinstance(hosts, list) else [],
        "cuts": cuts,
    }


def _down_us(fault: Mapping[str, Any], nemesis: Sequence[Mapping[str, Any]]) -> int | None:
    """When the hosts of a fault went down (µs); None if they did not, or if that is unknown. For a power cut it is the
    time of the cut itself: before it unsynced data is counted for a while, and the replica still answers."""
    if fault.get("nemesis") == "kill":
        return int(fault["start_ns"]) // 1000
    for event in nemesis if fault.get("nemesis") == "power" else ():
        value = event.get("value")
        is_of_it = isinstance(value, Mapping) and value.get("id") == fault["id"]
        if is_of_it and event["f"] == "inject" and event["type"] != "invoke":
            return int(event["time"]) // 1000
    return None


def _take_roles(replay: Replay, run_dir: RunDir, results: Mapping[str, Any], from_ns: int, to_ns: int) -> None:
    asked = [
        (time_ns // 1000, clip(host, 20), clip(role, 20), term) for time_ns, host, role, term in read_roles(results)
    ]
    if asked:
        replay.is_asked = True
        _place_roles(replay, asked, to_ns)
        replay.notes.append("roles are those that the replicas reported when polled once a second")
        return
    lines = [change for host in replay.replicas for change in _role_lines(run_dir.nodes_path / host)]
    zero_us = _zero_us(lines, terms_of(results.get("checks")))
    if zero_us is None:
        replay.notes.append("no roles: no log shows when a leader was elected")
        return
    _place_roles(replay, [(time_us - zero_us, host, role, term) for time_us, host, role, term in lines], to_ns)
    if any(fault["kind"] == "clock" for fault in replay.faults):
        replay.notes.append("role changes are timed by the replicas' own clocks, which faults have shifted")


def _place_roles(replay: Replay, changes: Sequence[tuple[int, str, str, int]], to_ns: int) -> None:
    placed = sorted(change for change in changes if change[0] * 1000 <= to_ns)
    replay.roles = _first(replay, placed, MAX_ROLES, "role change")


def _role_lines(directory: Path) -> Iterator[tuple[int, str, str, int]]:
    """(wall time in µs, host, role, term) of every change of a role that a replica logged."""
    for path in sorted(directory.glob("*.log")) if directory.is_dir() else ():
        if not path.is_file():  # a replica's pipe: opening it would block until somebody writes
            continue
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                match = ROLE.match(line)
                life = None if match else LIFE.match(line)
                if match and (time_us := _wall_us(match[1])) is not None:
                    yield time_us, directory.name, clip(match[3].lower(), 20), int(match[4])
                elif life and (time_us := _wall_us(life[1])) is not None:
                    # A killed replica logs no stop: its previous role ends when it starts again.
                    yield time_us, directory.name, "stopped" if life[2] == "stopped" else "started", 0


def _wall_us(text: str) -> int | None:
    try:
        return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1_000_000)
    except ValueError:
        return None


def _zero_us(lines: Sequence[tuple[int, str, str, int]], terms: Sequence[Mapping[str, Any]]) -> int | None:
    """The wall time at which the history's clock was 0, from an election that both the logs and the check contain."""
    logged = {(host, term): time_us for time_us, host, role, term in reversed(lines) if role == "leader"}
    for term in terms:
        key = (term.get("leader"), term.get("term"))
        start_ns = term.get("start_ns")
        if key in logged and isinstance(start_ns, int):
            return logged[key] - start_ns // 1000
    return None


def _take_violations(replay: Replay, results: Mapping[str, Any], *, is_to_the_end: bool) -> None:
    """Add the moment of each violation: the last answer of its witness, or the time that the check gives. A failure to
    recover is placed at the end of the run, when the run had waited for the recovery."""
    checks = results.get("checks")
    found: list[dict[str, Any]] = [
        {"at": time_ns // 1000, "text": clip(f"{name}: {text}", MAX_VIOLATION_TEXT), "operations": []}
        for time_ns, name, text in timed_violations(checks)
    ]
    for name, check in checks.items() if isinstance(checks, Mapping) else ():
        if not isinstance(check, Mapping) or check.get("valid") is not False:
            continue
        witness = witness_from(check)
        if witness is None:
            continue
        moment_ns = max(op["start_ns"] if op["end_ns"] is None else op["end_ns"] for op in witness.operations)
        found.append(
            {
                "at": moment_ns // 1000,
                "text": clip(f"{name}: {witness.text or check.get('reason') or ''}", MAX_VIOLATION_TEXT),
                "operations": [[op["process"], op["start_ns"] // 1000] for op in witness.operations],
            }
        )
    recovery = checks.get(RECOVERS) if isinstance(checks, Mapping) else None
    if is_to_the_end and isinstance(recovery, Mapping) and recovery.get("valid") is False:
        text = clip(f"{RECOVERS}: {recovery.get('reason') or ''}", MAX_VIOLATION_TEXT)
        found.append({"at": _end_us(replay), "text": text, "operations": []})
    replay.violations = sorted(found, key=lambda one: one["at"])


def _end_us(replay: Replay) -> int:
    """The last moment before the replicas are stopped at the end of the run, else the last known moment."""
    messages = [one.sent_ns if one.arrived_ns is None else one.arrived_ns for one in replay.messages]
    operations = [started if ended is None else ended for _, started, ended, _, _ in replay.operations]
    faults: list[int] = [one["start"] if one["end"] is None else one["end"] for one in replay.faults]
    end_us = max([max(messages, default=0) // 1000, *operations, *faults, *(at_us for at_us, *_ in replay.roles)])
    stops = [at_us for at_us, _, role, _ in replay.roles if role == "stopped" and end_us - at_us <= SHUTDOWN_WINDOW_US]
    return min(stops, default=end_us + 1) - 1


class _TextTable:
    """Numbers texts in order of first use; each is stored once."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))


def _packed(replay: Replay, messages: Sequence[Message]) -> dict[str, Any]:
    """The page's data: columns of integers, times as differences, texts by their numbers in a table."""
    hosts = [*replay.replicas, *replay.others]
    number = {host: place for place, host in enumerate(hosts)}
    kinds, details, texts = _TextTable(), _TextTable(), _TextTable()
    columns: dict[str, list[int]] = {name: [] for name in ("sent", "flight", "pair", "kind", "detail", "losses")}
    before_us = 0
    for place, message in enumerate(messages):
        sent_us = message.sent_ns // 1000
        flight_us = -1 if message.arrived_ns is None else max(1, message.arrived_ns // 1000 - sent_us)
        rpc: Mapping[str, Any] = message.rpcs[0] if message.rpcs else {}
        is_reply = bool(rpc.get("reply"))
        columns["sent"].append(sent_us - before_us)
        columns["flight"].append(flight_us)
        columns["pair"].append(number[message.source] * len(hosts) + number[message.destination])
        columns["kind"].append(2 * kinds(clip(rpc.get("rpc") or "part", 30)) + is_reply)
        more = f" +{len(message.rpcs) - 1}" if len(message.rpcs) > 1 else ""
        columns["detail"].append(details(clip(rpc.get("detail") or "", 40) + more))
        if message.losses:
            columns["losses"] += [place, message.losses]
        before_us = sent_us
    before_us = 0
    operations: dict[str, list[int]] = {name: [] for name in ("process", "start", "length", "outcome", "text")}
    for process, start_us, end_us, outcome, text in replay.operations:
        operations["process"].append(process)
        operations["start"].append(start_us - before_us)
        operations["length"].append(-1 if end_us is None else end_us - start_us)
        operations["outcome"].append(("ok", "fail", "info").index(outcome))
        operations["text"].append(texts(text))
        before_us = start_us
    logs: dict[str, list[int]] = {name: [] for name in ("at", "host", "committed", "ahead")}
    before_us = 0
    for state in replay.logs:
        logs["at"].append(state.time_ns // 1000 - before_us)
        logs["host"].append(number[state.host])
        logs["committed"].append(state.committed)
        logs["ahead"].append(state.end - state.committed)
        before_us = state.time_ns // 1000
    return {
        "title": replay.title, "hosts": hosts, "replicas": len(replay.replicas), "messages": columns, "logs": logs,
        "kinds": list(kinds.texts), "details": list(details.texts), "operations": operations,
        "texts": list(texts.texts), "roles": replay.roles, "faults": replay.faults, "violations": replay.violations,
        "decided": replay.decided, "part": replay.part,
    }  # fmt: skip


def replay_page(replay: Replay) -> str:
    """The page as self-contained HTML of at most `MAX_REPLAY_BYTES`. Raises TraceError if it would be larger even
    without messages."""
    messages: Sequence[Message] = replay.messages
    notes = list(replay.notes)
    while True:
        html = _render(replay, messages, notes)
        if len(html.encode()) <= MAX_REPLAY_BYTES:
            return html
        if not messages:
            raise TraceError("the run is too long for one page: choose a part of it with --from and --to")
        window = Window(0, 0, messages=list(messages))
        messages = choose(window, len(messages) // 2).messages if len(messages) > 1000 else []
        left_out = plural(len(replay.messages) - len(messages), "message")
        notes = [
            *replay.notes,
            f"{left_out} left out, of the least informative kinds: choose a part with --from and --to",
        ]


def _render(replay: Replay, messages: Sequence[Message], notes: Sequence[str]) -> str:
    return report_template("replay.html").render(
        css=style("report.css", "replay.css"),
        **script("replay.js"),
        data=json_data(_packed(replay, messages)),
        title=replay.title,
        verdict=replay.verdict,
        reason=replay.reason,
        notes=[clip(note, 300) for note in notes],
        violations=replay.violations,
        has_logs=bool(replay.logs),
        has_logged_roles=bool(replay.roles) and not replay.is_asked,
        has_messages=bool(messages),
        is_decided=replay.decided is not None,
    )
