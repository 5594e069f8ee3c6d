"""report.html: one self-contained file that gives the verdict first and the explanation after it.

The only script is ours, which zooms the charts and copies the replay line; nothing is loaded from elsewhere. What
the nodes or the operator wrote appears only as text: the templates escape it, and the page's Content-Security-Policy
refuses any other script. Without script the charts show the whole run.
"""

from __future__ import annotations

__all__ = ["MAX_REPORT_BYTES", "write_report"]

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from checker.faults import count_unmet
from harness.atomic_files import replace_file
from harness.metrics.expression import MAX_METRICS, METRICS
from harness.metrics.samples import Samples, read_samples
from harness.report.charts import over_time
from harness.report.checks import anchor_of, check_sections, terms_of, timed_violations, verdict_word, with_times
from harness.report.collect import OUTCOMES, RunData, collect
from harness.report.deciding import deciding_view
from harness.report.faults import fault_rows, hosts_of
from harness.report.grid import marks_of
from harness.report.lanes import MAX_ROWS
from harness.report.readout import MAX_SPANS
from harness.report.templating import json_data, report_template, script, style
from harness.report.timeline import arrowhead, timeline
from harness.report.witness import Witness, fault_after, witness_from
from harness.store import RunDir, StoreError
from harness.test import MAX_CONCURRENCY
from harness.units import clip, count, duration, per_second, plural, share

MAX_REPORT_BYTES = 1_000_000
"""Upper bound of every report's size, so that it can be mailed and opens instantly."""

MAX_WITNESSES = 4
"""Most contradictions drawn."""

MAX_TIMED_VIOLATIONS = 8
"""Most violations with a time given by a check that are marked in the charts, the first ones."""

MAX_ERROR_ROWS = 15
MAX_DOUBTS = 12
MAX_LOG_LINKS = 60
MAX_LOG_NAME = 80
MAX_SETTINGS = 30


class _Detail(NamedTuple):
    """How much of a run is drawn; the report uses the first of `_DETAILS` that fits into `MAX_REPORT_BYTES`."""

    strokes: int
    spans: int
    """Faults, and terms of leaders, in the charts"""
    fault_rows: int
    witnesses: int
    checks: int
    has_tables: bool
    has_metrics: bool


_DETAILS = (
    _Detail(24_000, MAX_SPANS, 120, MAX_WITNESSES, 40, True, True),
    _Detail(8_000, 300, 40, 2, 20, True, True),
    # At this level the page is bounded by the lengths of single texts, with room to spare.
    _Detail(1_500, 60, 10, 1, 10, False, False),
)


def write_report(
    run_dir: str | os.PathLike[str],
    test: Mapping[str, Any],
    results: Mapping[str, Any],
    history_path: str | os.PathLike[str],
) -> Path:
    """Write `run_dir`/report.html from the contents of test.json and results.json and from the history.

    Invalid or missing parts of the results and a damaged or missing history are shown as such. The file is at most
    `MAX_REPORT_BYTES` long and is replaced atomically. Returns its path. Raises StoreError if it cannot be written.
    """
    directory = Path(run_dir)
    witnesses = _witnesses(results)
    data = collect(
        history_path,
        [witness for _, witness in witnesses],
        clients=_clients(test),
        final_reads_from=results.get("final_reads_from"),
    )
    samples = _samples(directory)
    html = b""
    for detail in _DETAILS:
        html = _render(directory, test, results, data, samples, witnesses, detail).encode("utf-8", "backslashreplace")
        if len(html) <= MAX_REPORT_BYTES:
            break
    path = directory / "report.html"
    try:
        replace_file(path, html)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    return path


def _samples(directory: Path) -> Samples | None:
    """The metrics of the system under test; None if none were read, or they cannot be."""
    with contextlib.suppress(OSError):
        return read_samples(RunDir(directory).metrics_path)
    return None


def _witnesses(results: Mapping[str, Any]) -> list[tuple[str, Witness]]:
    checks = results.get("checks")
    if not isinstance(checks, Mapping):
        return []
    found = []
    for name, check in checks.items():
        if isinstance(check, Mapping) and check.get("valid") is False:
            witness = witness_from(check)
            if witness is not None:
                found.append((clip(name, 40), witness))
    return found[:MAX_WITNESSES]


def _render(
    directory: Path,
    test: Mapping[str, Any],
    results: Mapping[str, Any],
    data: RunData,
    samples: Samples | None,
    witnesses: Sequence[tuple[str, Witness]],
    detail: _Detail,
) -> str:
    faults = _faults(results)
    checks = results.get("checks")
    rows = fault_rows(faults, hosts_of(results, test), detail.fault_rows)
    moments = _moments(checks, witnesses)
    over = over_time(
        data, faults, terms_of(checks), moments=moments, samples=samples if detail.has_metrics else None,
        max_strokes=detail.strokes, max_spans=detail.spans,
    )  # fmt: skip
    views = [
        _witness_view(name, witness, near, faults)
        for (name, witness), near in zip(witnesses, data.neighbours, strict=True)
    ][: detail.witnesses]
    sections = check_sections(checks, detail.checks)
    if not detail.has_tables:
        sections = [dataclasses.replace(section, tables=[]) for section in sections]
    sentence, reason = _sentence(results, data, faults, witnesses), clip(results.get("reason") or "", 1200)
    template = report_template("report.html")
    return template.render(
        # The page's style sheet and script are files of this package.
        css=style("report.css"),
        **script("report.js"),
        arrowhead=arrowhead(),
        title=clip(f"{directory.parent.name}/{directory.name}", 120),
        verdict=verdict_word(results.get("valid")),
        sentence=sentence,
        # Do not repeat the sentence.
        reason="" if reason.lower() in sentence.lower() or sentence.lower() in reason.lower() else reason,
        has_moments=bool(moments),
        doubts=_doubts(results),
        tiles=_tiles(data, faults),
        facts=_facts(test, results),
        replay=clip(results.get("replay") or "", 2000),
        decided=deciding_view(_explanation(directory)),
        witnesses=views,
        over=over,
        metrics=_metrics_note(results, samples, has_lanes=detail.has_metrics),
        readout=json_data(over.readout if over else {}),
        latencies=_latency_rows(data),
        fault_rows=rows,
        faults_left_out=len(faults) - len(rows),
        fault_count=len(faults),
        sections=sections,
        sections_left_out=len(_items(checks)) - len(sections),
        outcomes=_outcome_rows(data),
        errors=_error_rows(data),
        unexpected=[(clip(text), clip(number, 20)) for text, number in _items(results.get("unexpected_errors"))][:10],
        timeouts=[(clip(line), clip(number, 20)) for line, number in _items(results.get("timeouts"))][:10],
        files=_files(directory),
        history=data,
    )


def _doubts(results: Mapping[str, Any]) -> list[str]:
    """The first doubts, and how many more there are."""
    doubts = _list(results.get("doubts"))
    more = len(doubts) - MAX_DOUBTS
    left_out = [f"and {more} more: results.json has all"] if more > 0 else []
    return [clip(line) for line in doubts[:MAX_DOUBTS]] + left_out


def _clients(test: Mapping[str, Any]) -> int:
    clients = test.get("concurrency")
    return clients if isinstance(clients, int) and 0 < clients <= MAX_CONCURRENCY else MAX_ROWS


def _explanation(directory: Path) -> Mapping[str, Any] | None:
    """The result of `harness explain`; None if there is none or it cannot be read."""
    with contextlib.suppress(StoreError):
        return RunDir(directory).read_explanation()
    return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _maps(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in _list(value) if isinstance(item, Mapping)]


def _faults(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The faults without impossible times, since the charts are drawn to scale."""
    return [with_times(fault) for fault in _maps(results.get("faults"))]


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def _moment(witness: Witness) -> int:
    """When a violation became visible: the last answer among its operations."""
    return max(int(op["start_ns"] if op["end_ns"] is None else op["end_ns"]) for op in witness.operations)


def _moments(checks: Any, witnesses: Sequence[tuple[str, Witness]]) -> list[tuple[int, str]]:
    """Time and text of violations: at the last answer of each contradiction, and those that checks give a time."""
    found = [(_moment(witness), f"violation: {name}") for name, witness in witnesses]
    timed = sorted(timed_violations(checks))[:MAX_TIMED_VIOLATIONS]
    found += [(time_ns, clip(f"violation: {name}: {text}", 120)) for time_ns, name, text in timed]
    return found


def _sentence(
    results: Mapping[str, Any],
    data: RunData,
    faults: Sequence[Mapping[str, Any]],
    witnesses: Sequence[tuple[str, Witness]],
) -> str:
    """The verdict in one sentence, without the verdict word itself."""
    verdict = verdict_word(results.get("valid"))
    reason = clip(results.get("reason") or "", 600)
    if verdict == "invalid":
        text = clip(witnesses[0][1].text or reason) if witnesses else reason
        return _capital(_arrows(_without_times(text))) or "A check failed"
    if verdict == "unknown":
        return _capital(reason) or "No reason was recorded"
    completed = sum(data.total(kind) for kind in OUTCOMES)
    parts = [plural(completed, "operation")]
    if not faults:
        parts.append("no faults")
    elif all(fault.get("proven") is True for fault in faults):
        parts.append(f"{plural(len(faults), 'fault')}, " + ("proven" if len(faults) == 1 else "all proven"))
    else:
        proven = sum(fault.get("proven") is True for fault in faults)
        parts.append(f"{plural(len(faults), 'fault')}, only {proven} proven")
    if unmet := count_unmet(faults):
        parts.append(f"{unmet} not exercised")
    return ", ".join(parts)


_SPAN = re.compile(r" \((?:from )?\d[\d.]* s[^()]*\)")


def _without_times(text: str) -> str:
    """A checker's sentence as a headline, without times in parentheses; the paragraph below it has them."""
    return _SPAN.sub("", text)


def _arrows(text: str) -> str:
    """`->` as one character, as in the tables: a browser breaks lines behind its hyphen."""
    return text.replace("->", "→")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _tiles(data: RunData, faults: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The figures at the top of the page: name, value, remark."""
    totals = {kind: data.total(kind) for kind in OUTCOMES}
    completed = sum(totals.values())
    tiles = [
        (
            "Operations",
            count(completed),
            f"{per_second(completed / (data.end_ns / 1e9))} per second" if data.end_ns else "",
        ),
        ("Succeeded", share(totals["ok"], completed), f"{count(totals['ok'])} ok"),
        ("Definitely failed", count(totals["fail"]), share(totals["fail"], completed)),
        ("Outcome unknown", count(totals["info"]), share(totals["info"], completed)),
    ]
    if faults:
        proven = sum(fault.get("proven") is True for fault in faults)
        unmet = count_unmet(faults)
        remarks = [_span_of(faults), f"{unmet} not exercised" if unmet else ""]
        tiles.append(("Faults proven", f"{proven} of {len(faults)}", ", ".join(filter(None, remarks))))
    else:
        tiles.append(("Faults", "none", ""))
    begin_ns, end_ns = data.silence_ns
    if end_ns > begin_ns:
        tiles.append(
            ("Longest silence", duration(end_ns - begin_ns), f"from {begin_ns / 1e9:.1f} s to {end_ns / 1e9:.1f} s")
        )
    else:
        tiles.append(("Longest silence", "–", ""))
    return tiles


def _span_of(faults: Sequence[Mapping[str, Any]]) -> str:
    spans = [
        fault["end_ns"] - fault["start_ns"]
        for fault in faults
        if isinstance(fault.get("start_ns"), int) and isinstance(fault.get("end_ns"), int)
    ]
    return f"{duration(sum(spans))} in total" if spans else ""


def _facts(test: Mapping[str, Any], results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What determined the run: name, value; unknown ones are left out."""
    commit = results.get("git_commit")
    if commit:
        commit = str(commit)[:12] + (" with local changes" if results.get("git_dirty") else "")
    settings = ", ".join(f"{key}={value}" for key, value in _items(test.get("settings"))[:MAX_SETTINGS])
    nemesis = ", ".join(map(str, _list(test.get("nemesis")))) or "none"
    if isinstance(test.get("nemesis_schedule"), str):
        nemesis = f"schedule {test['nemesis_schedule']}"
    duration_s, limit_s = results.get("duration_s"), test.get("time_limit_s")
    rate = test.get("rate")
    seed = results.get("seed", test.get("seed"))
    facts = [
        ("System", test.get("system")),
        ("Workload", test.get("workload")),
        ("Nemesis", nemesis),
        ("Cluster", " – ".join(str(x) for x in (test.get("cluster"), results.get("cluster_detail")) if x)),
        ("Nodes", test.get("nodes")),
        ("Clients", test.get("concurrency")),
        ("Rate", f"{rate:g} per second" if isinstance(rate, (int, float)) and 0 < rate <= sys.float_info.max else None),
        ("Load", duration(limit_s * 10**9) if isinstance(limit_s, (int, float)) else None),
        ("Settings", settings or None),
        ("Seed", seed),
        ("Started", _date(results.get("started_at"))),
        ("Whole run", duration(duration_s * 10**9) if isinstance(duration_s, (int, float)) else None),
        ("Stopped by", results.get("interrupted")),
        ("Stopped at", results.get("stopped_at_first_violation")),
        ("Commit", commit),
        ("Version", results.get("version")),
        ("Run", results.get("run_id")),
    ]
    return [(name, clip(value, 300)) for name, value in facts if value not in (None, "")]


def _date(text: Any) -> str | None:
    try:
        return datetime.fromisoformat(str(text)).strftime("%Y-%m-%d %H:%M:%S %Z").strip() if text else None
    except ValueError:
        return clip(text, 60)


def _witness_view(
    name: str, witness: Witness, neighbours: Sequence[Mapping[str, Any]], faults: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "name": name,
        "anchor": anchor_of(name).replace("check-", "contradiction-", 1),
        "witness": witness,
        "text": _capital(_arrows(clip(witness.text, 1200))),
        "drawing": timeline(witness, neighbours, faults),
        "neighbours": len(neighbours),
        "reasons": [edge for edge in witness.edges if edge.reason][:16],
        "fault_after": fault_after(witness, faults),
    }


def _latency_rows(data: RunData) -> list[tuple[str, str, list[str]]]:
    """Function, number of ok operations, and their median, p95, p99 and maximum latency."""
    rows = []
    for f in data.functions:
        number, marks_ns = marks_of(data.grid, data.series([f], ["ok"]), (0.5, 0.95, 0.99))
        if number:
            rows.append((f, count(number), [duration(mark_ns) for mark_ns in marks_ns]))
    return rows


def _outcome_rows(data: RunData) -> list[tuple[str, list[str]]]:
    kinds = ("invoke", *OUTCOMES)
    rows = [(f, [count(data.outcomes[f][kind]) for kind in kinds]) for f in data.functions]
    if len(rows) > 1:
        rows.append(("all", [count(data.total(kind)) for kind in kinds]))
    return rows


def _metrics_note(results: Mapping[str, Any], samples: Samples | None, *, has_lanes: bool) -> list[str]:
    """What a reader must know of the metrics that are, or are not, among the charts."""
    system = results.get("system")
    said = system.get(METRICS) if isinstance(system, Mapping) else None
    if not isinstance(said, Mapping):
        return []
    notes = []
    if never := [clip(text, 90) for text in _list(said.get("never_seen"))[:MAX_METRICS]]:
        notes.append(f"On no page of metrics that any host sent: {', '.join(never)}.")
    if isinstance(said.get("stopped"), str):
        notes.append(f"Reading metrics stopped before the end: {clip(said['stopped'], 200)}.")
    if samples is None:
        notes.append("The metrics that were read are missing: there is no readable metrics.jsonl.")
    elif not has_lanes:
        notes.append("The metrics are not drawn, as this page would be too large; metrics.jsonl has them.")
    elif samples.damaged:
        notes.append(f"{plural(samples.damaged, 'line')} of metrics.jsonl could not be read.")
    return notes


def _error_rows(data: RunData) -> dict[str, Any]:
    ranked = sorted(data.errors.items(), key=lambda item: (-item[1].events, item[0]))
    shown = []
    for (f, kind, pattern), error in ranked[:MAX_ERROR_ROWS]:
        example = clip(error.first, 300) if error.first != pattern and error.events > 1 else ""
        # An error that occurred once is shown verbatim.
        shown.append((f, kind, clip(pattern if example else error.first, 300), example, count(error.events)))
    left_out = sum(error.events for _, error in ranked[MAX_ERROR_ROWS:]) + data.errors_not_told_apart
    return {"rows": shown, "left_out": left_out}


def _files(directory: Path) -> list[tuple[str, str, str]]:
    """Links to the run's files: relative URL, name, description."""
    known = (
        ("results.json", "verdict and checks as JSON"),
        ("history.jsonl", "every event of the history, in order"),
        ("history.parquet", "the same as Parquet, for harness report"),
        ("test.json", "options of the test"),
        ("schedule.json", "schedule of the faults, for harness replay"),
        ("harness.log", "log of the harness"),
        ("trace.jsonl", "every network message"),
        ("metrics.jsonl", "metrics of the system under test, as its hosts reported them"),
        ("explain.json", "where the violation was decided, from harness explain"),
    )
    files = [(name, name, what) for name, what in known if (directory / name).exists()]
    logs: list[str] = []
    for folder, folders, names in os.walk(directory):
        depth = len(Path(folder).relative_to(directory).parts)
        folders[:] = sorted(folders) if depth < 3 else []
        logs += [
            os.path.relpath(os.path.join(folder, name), directory)
            for name in sorted(names)
            if name.endswith((".log", ".out", ".txt")) and depth > 0 and len(name) <= MAX_LOG_NAME
        ]
        if len(logs) >= MAX_LOG_LINKS:
            break
    return files + [(quote(name, errors="replace"), clip(name, 120), "") for name in logs[:MAX_LOG_LINKS]]
