"""The report over many runs: one file that first says which configuration misbehaves, and how certain that is.

It takes the tables of an analysis as plain rows (it does not import Spark) and uses the same style sheet and
hand-built SVG as the report of a single run, without a script.
"""

from __future__ import annotations

__all__ = ["FleetData", "check_tallies", "headline", "labels_of", "render_fleet", "report_link", "share_text"]

import json
import math
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from harness.report.svg import element, percent
from harness.report.templating import report_template, style
from harness.units import count, duration, plural

Row = Mapping[str, Any]

GROUP = ("system", "configuration", "workload", "nemesis", "cluster")
MAX_GROUPS = 60
"""Most groups drawn; a larger matrix is better read as a table, from the Parquet files."""

MAX_ROWS = 200
"""Most rows of any other table on the page."""

ROW_HEIGHT_PX = 30

REPORT = "report.html"
"""File name of the report in a run's folder."""

UNKNOWN = "unknown"
"""Value of a group's column that a run does not state."""

_RECOVERIES = ("recovery_after_start_ns", "recovery_after_heal_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetData:
    """The tables' rows by table name, and facts about the analysis itself."""

    place: str
    runs: int
    operations: int
    first_started_at: str | None
    last_started_at: str | None
    unavailable_after_ms: int
    took_s: float
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    out: str = ""
    """The folder of the page; links to runs are relative to it. If empty, there are no links."""
    missing: Sequence[str] = ()
    """What could not be computed, and why."""

    def rows(self, name: str) -> Sequence[Row]:
        """A table's rows; empty if the table was not computed."""
        return self.tables.get(name, ())


def share_text(share: float | None, *, low: bool = False) -> str:
    """A share as a percentage with its significant digits: 0 %, 0.4 %, 12 %, 100 %."""
    if share is None:
        return "–"
    value = 100 * share
    if value in (0, 100):
        return f"{value:.0f} %"
    if value < 0.1:
        return "<0.1 %" if not low else f"{value:.2g} %"
    if value > 99.9:
        return ">99.9 %"
    return f"{value:.1f} %" if value < 10 or value > 99 else f"{value:.0f} %"


def _group(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in GROUP)


def _traits(group: Sequence[str]) -> dict[str, str]:
    """A group as name: value, with one entry for each setting of its configuration."""
    traits: dict[str, str] = {}
    for name, value in zip(GROUP, group, strict=True):
        if name != "configuration":
            traits[name] = value
            continue
        try:
            settings = json.loads(value)
        except ValueError:
            settings = None
        if isinstance(settings, dict):
            traits |= {str(key): str(item) for key, item in settings.items()}
        else:
            traits[name] = value
    return traits


def labels_of(groups: Iterable[Sequence[str]]) -> tuple[dict[tuple[str, ...], str], str]:
    """A label for each group of what distinguishes it, and a text of what all groups have in common.

    Histories of other tools state no traits, and are ignored when the common traits are determined.
    """
    every = [tuple(group) for group in groups]
    traits = {group: _traits(group) for group in every if set(group) != {UNKNOWN}}
    names = list(dict.fromkeys(name for found in traits.values() for name in found))
    differing = [name for name in names if len({found.get(name) for found in traits.values()}) > 1]
    own = "all runs" if len(traits) == len(every) else "the harness's runs"
    labels = {
        group: ", ".join(f"{name} {traits[group][name]}" for name in differing if name in traits[group]) or own
        if group in traits
        else "histories of other tools"
        for group in every
    }
    shared = next(iter(traits.values()), {})
    common = ", ".join(f"{name} {shared[name]}" for name in names if name not in differing)
    return labels, common


NOTHING_SHOWN = "This shows nothing either way."


def headline(rates: Sequence[Row], checks: Sequence[Row] = (), *, left_out: int = 0) -> tuple[str, str, str]:
    """(verdict, sentence on top, sentence below it) from the table of rates, the checks made again, and the number of
    runs that could not be used."""
    verdict, sentence, below = _headline_of_rates(rates, left_out)
    if left_out:
        below += f" {plural(left_out, 'run')} could not be used and {_are(left_out)} not counted."
    found = {row["run_id"] for row in checks if row["verdict"] == "invalid" and row["recorded_verdict"] != "invalid"}
    if found:
        new = f"{plural(len(found), 'run')} not recorded as invalid {_are(len(found))} invalid when checked again"
        if verdict == "invalid":
            below = f"{new}. {below}"
        else:  # the recorded verdicts show no violation, the new check does
            sentence, below = new + ".", f"{sentence} {below.replace(NOTHING_SHOWN, 'That is what was recorded.')}"
        verdict = "invalid"
    return verdict, sentence, below.strip()


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _headline_of_rates(rates: Sequence[Row], left_out: int) -> tuple[str, str, str]:
    labels, _ = labels_of(map(_group, rates))
    runs = sum(row["runs"] for row in rates)
    invalid = sum(row["invalid"] for row in rates)
    unknown = sum(row["unknown"] for row in rates)
    doubt = (
        f" {plural(unknown, 'unknown run')} {_are(unknown)} counted as neither valid nor invalid." if unknown else ""
    )
    undecided = sum(row["invalid"] == 0 == row["valid"] for row in rates)
    if undecided and len(rates) > 1:
        has = "has" if undecided == 1 else "have"
        doubt = f" {plural(undecided, 'configuration')} {has} no decided run, which shows nothing either way.{doubt}"
    clean = [row for row in rates if row["invalid"] == 0 and row["valid"] > 0]
    bad = sorted((row for row in rates if row["invalid"]), key=lambda row: -row["rate_low"])
    if bad:
        worst = bad[0]
        of = plural(runs - unknown, "decided run") if unknown else plural(runs, "run")
        sentence = f"{count(invalid)} of {of} violated a guarantee"
        if len(rates) > 1:
            sentence += (
                f"; worst: {labels[_group(worst)]}, {worst['invalid']} of {worst['valid'] + worst['invalid']} "
                f"({share_text(worst['rate_low'])} to {share_text(worst['rate_high'])})"
            )
        below = ""
        if clean:
            bound = max(row["rate_high"] for row in clean)
            below = (
                f"{plural(len(clean), 'configuration')} showed none; the rate may still be up to {share_text(bound)}."
            )
        return "invalid", sentence + ".", (below + doubt).strip()
    if clean:
        bound = max(row["rate_high"] for row in clean)
        sentence = (
            f"No anomaly in {plural(runs - unknown, 'decided run')}; the rate per configuration may still be up to "
        )
        is_doubtful = undecided > 0 or unknown + left_out > (runs + left_out) / 2
        return "unknown" if is_doubtful else "valid", f"{sentence}{share_text(bound)}.", doubt.strip()
    return "unknown", f"None of {plural(runs, 'run')} was decided.", NOTHING_SHOWN


def _axis_end(rates: Sequence[Row]) -> float:
    """The end of the axis of rates: a round share that includes every interval."""
    highest = max((row["rate_high"] for row in rates if row["valid"] + row["invalid"]), default=1.0)
    return next((end for end in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if highest <= end), 1.0)


def _forest(row: Row, end: float) -> Markup:
    """One interval: a line from low to high, a dot at the rate."""
    marks = [
        element("line", x1=percent(at), x2=percent(at), y1=0, y2="100%", class_="grid")
        for at in (0, 0.25, 0.5, 0.75, 1)
    ]
    if row["rate"] is not None:
        low, high, rate = (min(1.0, row[name] / end) for name in ("rate_low", "rate_high", "rate"))
        kind = "bad" if row["invalid"] else "good"
        middle = ROW_HEIGHT_PX // 2
        marks += [
            element("line", x1=percent(low), x2=percent(high), y1=middle, y2=middle, class_=f"interval {kind}"),
            *[
                element("line", x1=percent(at), x2=percent(at), y1=middle - 5, y2=middle + 5, class_=f"cap {kind}")
                for at in (low, high)
            ],
            element("circle", cx=percent(rate), cy=middle, r=5, class_=f"point {kind}"),
        ]
    words = f"{share_text(row['rate'])}, {share_text(row['rate_low'])} to {share_text(row['rate_high'])}"
    return element("svg", *marks, height=ROW_HEIGHT_PX, role="img", aria_label=words, class_="forest")


def _rates(data: FleetData, labels: Mapping[tuple[str, ...], str]) -> dict[str, Any]:
    rates = sorted(data.rows("rates"), key=lambda row: (-row["rate_low"], -row["invalid"], labels[_group(row)]))
    end = _axis_end(rates)
    kinds: dict[tuple[str, ...], list[str]] = {}
    for row in data.rows("anomalies"):
        per_million = row["per_million_operations"]
        rate = "" if per_million is None else f" ({_figure(per_million)} per million)"
        kinds.setdefault(_group(row), []).append(f"{count(row['count'])} {row['kind']}{rate}")
    rows = [
        {
            "label": labels[_group(row)],
            "runs": count(row["runs"]),
            "invalid": count(row["invalid"]),
            "decided": count(row["valid"] + row["invalid"]),
            "unknown": count(row["unknown"]) if row["unknown"] else "",
            "rate": share_text(row["rate"]),
            "interval": f"{share_text(row['rate_low'])} – {share_text(row['rate_high'])}",
            "svg": _forest(row, end),
            "operations": count(row["operations"]),
            "kinds": "; ".join(kinds.get(_group(row), [])) or "none",
            "witness": _witness(row),
            "bad": bool(row["invalid"]),
        }
        for row in rates[:MAX_GROUPS]
    ]
    ticks = [share_text(end * part) for part in (0, 0.25, 0.5, 0.75, 1)]
    return {"rows": rows, "left_out": max(0, len(rates) - MAX_GROUPS), "ticks": ticks}


def _figure(number: float) -> str:
    """A number to two or three significant digits."""
    if number < 100:
        return f"{number:.2g}"
    unit = 10 ** max(0, math.floor(math.log10(number)) - 2)
    return count(round(number / unit) * unit)


def _length(time_ns: float) -> str:
    """A duration as text, with "0" for zero."""
    return duration(time_ns) if time_ns else "0"


def _witness(row: Row) -> str:
    """When the earliest witness of a run was complete, and after how many operations: medians."""
    if row["earliest_witness_ns_p50"] is None:
        return "–"
    operations = count(row["earliest_witness_operations_p50"])
    return f"{duration(row['earliest_witness_ns_p50'])}, {operations} operations"


def _availability(data: FleetData, labels: Mapping[tuple[str, ...], str]) -> list[dict[str, Any]]:
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in data.rows("outcomes"):
        sums = found.setdefault(_group(row), {"in": [0, 0], "out": [0, 0]})["in" if row["in_fault"] else "out"]
        sums[0] += row["ok"]
        sums[1] += row["ok"] + row["fail"] + row["info"]
    for row in data.rows("availability"):
        if _group(row) in found:
            found[_group(row)][row["measure"]] = row
    longest = max((row["max"] or 0 for row in data.rows("availability") if row["measure"] in _RECOVERIES), default=0)
    rows = []
    for group, measures in sorted(found.items(), key=lambda item: labels.get(item[0], "")):
        rows.append(
            {
                "label": labels.get(group, " ".join(group)),
                "out": _ratio_text(measures["out"]),
                "in": _ratio_text(measures["in"]),
                "away": _spread(measures.get("unavailable_ns")),
                "recoveries": [_recovery(measures.get(name), longest) for name in _RECOVERIES],
                "lost": _loss(measures.get("lost")),
                "duplicated": _loss(measures.get("duplicated")),
            }
        )
    return rows


def _fault_kinds(data: FleetData, labels: Mapping[tuple[str, ...], str]) -> list[dict[str, Any]]:
    """The effect of each kind of fault; [] if each group has one kind only, which the availability table covers."""
    rows = data.rows("fault_kinds")
    if len(rows) <= len({_group(row) for row in rows}):
        return []
    return [
        {
            "label": labels.get(_group(row), ""),
            "fault": f"{row['fault_nemesis']} {row['variant'] or ''}".strip(),
            "faults": count(row["faults"]),
            "ok": share_text(row["ok_share"]),
            "per_s": "–" if row["ok_per_s"] is None else _figure(row["ok_per_s"]),
            "back": [_recovery_words(row, name) for name in _RECOVERIES],
        }
        for row in rows
    ]


def _recovery_words(row: Row, name: str) -> str:
    """The recoveries from one kind of fault: median, p90 and worst, and how many never came."""
    never = f"never in {plural(row[f'{name}_missing'], 'fault')}" if row[f"{name}_missing"] else ""
    if row[f"{name}_max"] is None:
        return never or "–"
    words = " · ".join(_length(row[f"{name}_{part}"]) for part in ("p50", "p90", "max"))
    return f"{words}; {never}" if never else words


def _ratio_text(sums: Sequence[int]) -> str:
    return share_text(sums[0] / sums[1]) if sums[1] else "–"


def _spread(row: Row | None) -> str:
    if row is None or not row["n"]:
        return "–"
    return "never" if row["max"] == 0 else f"median {_length(row['p50'])}, at most {duration(row['max'])}"


def _recovery(row: Row | None, longest_ns: int) -> dict[str, Any] | None:
    """A text and a drawing of the distribution of recovery times: median, p90 and worst."""
    if row is None or not row["n"] + row["missing"]:
        return None
    if not row["n"]:
        return {"words": f"never in {plural(row['missing'], 'fault')}", "svg": None}
    words = "at once" if row["max"] == 0 else f"{_length(row['p50'])} · {_length(row['p90'])} · {duration(row['max'])}"
    if row["missing"]:
        words += f"; never in {row['missing']} of {row['n'] + row['missing']}"
    if not longest_ns:
        return {"words": words, "svg": None}
    low, middle, high = (row[name] / longest_ns for name in ("p50", "p90", "max"))
    svg = element(
        "svg",
        element("line", x1="0%", x2=percent(high), y1=7, y2=7, class_="whisker"),
        element("line", x1="0%", x2=percent(middle), y1=7, y2=7, class_="body"),
        element("circle", cx=percent(low), cy=7, r=4, class_="point middle"),
        height=14, role="img", aria_label=words, class_="spread",
    )  # fmt: skip
    return {"words": words, "svg": svg}


def _loss(row: Row | None) -> str:
    if row is None or not row["n"]:
        return "–"
    if row["max"] == 0:
        return f"none in {plural(row['n'], 'run')}"
    return f"{count(round(row['mean'] * row['n']))} in {plural(row['n'], 'run')}, at most {count(row['max'])}"


def _latency(data: FleetData, labels: Mapping[tuple[str, ...], str]) -> dict[str, Any]:
    """Latency of successful operations: by phase over all nodes, and by node for the details."""
    good = [row for row in data.rows("latency") if row["outcome"] == "ok"]
    together = [row for row in good if row["node"] == "all" and row["phase"] != "all"]
    marks = [row[name] for row in together for name in ("p50_ns", "p999_ns")]
    low, high = (math.log(max(1, min(marks))), math.log(max(2, *marks))) if marks else (0.0, 1.0)
    order = {"before": 0, "during": 1, "after": 2}
    together.sort(key=lambda row: (labels.get(_group(row), ""), row["f"], order.get(row["phase"], 3)))
    by_node = [row for row in good if row["node"] not in ("all", None) and row["phase"] == "all"]
    by_node.sort(key=lambda row: (labels.get(_group(row), ""), row["f"], row["node"]))
    return {
        "rows": [_latency_row(row, labels, low, high) for row in together[:MAX_ROWS]],
        "nodes": [_latency_row(row, labels, low, high) for row in by_node[:MAX_ROWS]],
        "left_out": max(0, len(together) - MAX_ROWS),
        "nodes_left_out": max(0, len(by_node) - MAX_ROWS),
        "error": max((row["relative_error"] for row in good), default=0.0),
    }


def _latency_row(row: Row, labels: Mapping[tuple[str, ...], str], low: float, high: float) -> dict[str, Any]:
    def at(time_ns: int) -> float:
        return min(1.0, max(0.0, (math.log(max(1, time_ns)) - low) / (high - low or 1.0)))

    p50, p90, p99, p999 = (row[f"{name}_ns"] for name in ("p50", "p90", "p99", "p999"))
    svg = element(
        "svg",
        element("line", x1=percent(at(p50)), x2=percent(at(p999)), y1=7, y2=7, class_="whisker"),
        element("line", x1=percent(at(p50)), x2=percent(at(p99)), y1=7, y2=7, class_="body"),
        element("circle", cx=percent(at(p50)), cy=7, r=4, class_="point middle"),
        height=14, role="img", aria_label=f"median {duration(p50)}, p99 {duration(p99)}", class_="spread",
    )  # fmt: skip
    return {
        "label": labels.get(_group(row), ""), "f": row["f"], "phase": row["phase"], "node": row["node"],
        "operations": count(row["operations"]), "svg": svg,
        "marks": [duration(time_ns) for time_ns in (p50, p90, p99, p999, row["max_ns"])],
    }  # fmt: skip


def check_tallies(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """For each check: how many runs and keys it examined, and how many runs it found valid, invalid or unknown."""
    tally: dict[str, dict[str, int]] = {}
    for row in rows:
        kinds = tally.setdefault(row["check"], {"runs": 0, "valid": 0, "invalid": 0, "unknown": 0, "keys": 0})
        kinds["runs"] += 1
        kinds[row["verdict"]] += 1
        kinds["keys"] += row["keys"]
    return tally


def _checks(data: FleetData) -> dict[str, Any] | None:
    rows = data.rows("checks")
    if not rows:
        return None
    bad = [row for row in rows if row["verdict"] != "valid"]
    return {"tally": check_tallies(rows), "bad": bad[:MAX_ROWS], "left_out": max(0, len(bad) - MAX_ROWS)}


def _local(place: str) -> Path | None:
    """A URI or path as a path on this machine; None if it is neither local nor absolute. Hadoop and Spark do not
    escape paths in URIs, so `#`, `?` and `%41` in them are literal parts of the name."""
    if place.startswith("file:"):
        return Path("/" + re.sub("^file:(//[^/]*)?", "", place).lstrip("/"))
    return Path(place) if place.startswith("/") else None


def report_link(run_dir: str, out: str) -> str | None:
    """The relative URL of a run's report from the page in `out`; None if a browser cannot reach it."""
    run, page = _local(run_dir), _local(out)
    if run is None or page is None or not (run / REPORT).is_file():
        return None
    return urllib.parse.quote(os.path.relpath(run / REPORT, page))


def _unbroken(text: str) -> str:
    """Put a non-breaking space into percentages."""
    return text.replace(" %", "\u00a0%")


def render_fleet(data: FleetData) -> str:
    """The page as self-contained HTML."""
    rates = data.rows("rates")
    labels, common = labels_of(map(_group, rates))
    problems = list(data.rows("problems"))
    left_out = sum(bool(row["left_out"]) for row in problems)
    verdict, sentence, below = headline(rates, data.rows("checks"), left_out=left_out)
    kept = [row for row in data.rows("notable_runs")]
    availability, fault_kinds = _availability(data, labels), _fault_kinds(data, labels)
    return report_template("fleet.html").render(
        css=style("report.css", "fleet.css"),
        data=data,
        verdict=verdict,
        sentence=_unbroken(sentence),
        below=_unbroken(below),
        common=common,
        rates=_rates(data, labels),
        availability=availability[:MAX_GROUPS],
        availability_left_out=max(0, len(availability) - MAX_GROUPS),
        fault_kinds=fault_kinds[:MAX_ROWS],
        fault_kinds_left_out=max(0, len(fault_kinds) - MAX_ROWS),
        latency=_latency(data, labels),
        checks=_checks(data),
        notable=kept[:MAX_ROWS],
        # The table holds only the first ones, so the total comes from the rates.
        notable_left_out=max(0, sum(row["invalid"] + row["unknown"] for row in rates) - min(len(kept), MAX_ROWS)),
        labels={row["run_id"]: labels.get(_group(row), "") for row in kept},
        links={row["run_id"]: report_link(row["run_dir"], data.out) for row in kept[:MAX_ROWS]},
        left_out_runs=[row for row in problems if row["left_out"]][:MAX_ROWS],
        left_out_count=left_out,
        remarks=[row for row in problems if not row["left_out"]][:MAX_ROWS],
        problem_count=len(problems),
        problems_left_out=max(0, left_out - MAX_ROWS) + max(0, len(problems) - left_out - MAX_ROWS),
    )
