"""The report over many runs: its headline, its labels, its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.commands.report import _recovery_text
from harness.report.fleet import (
    MAX_ROWS,
    FleetData,
    _checks,
    _fault_kinds,
    check_tallies,
    headline,
    labels_of,
    render_fleet,
    report_link,
    share_text,
)


def rate(mode: str, valid: int, invalid: int, unknown: int = 0, high: float = 0.28) -> dict[str, Any]:
    decided = valid + invalid
    return {
        "system": "broker", "configuration": json.dumps({"nodes": "5", "read_mode": mode}), "workload": "register",
        "nemesis": "partition", "cluster": "local", "runs": decided + unknown, "valid": valid, "invalid": invalid,
        "unknown": unknown, "operations": 1000, "rate": invalid / decided if decided else None,
        "rate_low": 0.72 if invalid else 0.0, "rate_high": 1.0 if invalid else high,
        "earliest_witness_ns_p50": 1_500_000_000 if invalid else None,
        "earliest_witness_operations_p50": 321 if invalid else None,
    }  # fmt: skip


def test_the_headline_counts_violations_and_bounds_the_rate() -> None:
    kind, sentence, below = headline([rate("log", 10, 0), rate("unsafe", 0, 10)])
    assert kind == "invalid"
    assert sentence == "10 of 20 runs violated a guarantee; worst: read_mode unsafe, 10 of 10 (72 % to 100 %)."
    assert below == "1 configuration showed none; the rate may still be up to 28 %."


def test_the_headline_without_anomalies_names_the_bound_of_the_rate() -> None:
    kind, sentence, below = headline([rate("log", 10, 0, 1), rate("lease", 10, 0, high=0.3)])
    assert kind == "valid"
    assert sentence == "No anomaly in 20 decided runs; the rate per configuration may still be up to 30 %."
    assert below == "1 unknown run is counted as neither valid nor invalid."
    assert headline([rate("log", 0, 0, 4)])[0] == "unknown"
    assert headline([rate("log", 1, 0, 4)])[0] == "unknown"


def test_violations_found_by_checking_again_are_in_the_headline() -> None:
    rates = [rate("log", 10, 0)]
    found = [
        {"run_id": "a", "check": "register", "verdict": "invalid", "recorded_verdict": "valid"},
        {"run_id": "b", "check": "register", "verdict": "invalid", "recorded_verdict": "invalid"},
        {"run_id": "c", "check": "register", "verdict": "valid", "recorded_verdict": "unknown"},
    ]
    kind, sentence, below = headline(rates, found)
    assert (kind, sentence) == ("invalid", "1 run not recorded as invalid is invalid when checked again.")
    assert below.startswith("No anomaly in 10 decided runs")
    kind, sentence, below = headline([rate("unsafe", 0, 10)], found)
    assert kind == "invalid" and sentence.startswith("10 of 10 runs violated a guarantee")
    assert below == "1 run not recorded as invalid is invalid when checked again."
    assert headline(rates, found[1:]) == headline(rates)


def test_a_configuration_without_decided_runs_is_not_counted_as_clean() -> None:
    """The bound is that of the others; of this one every run may be invalid."""
    kind, sentence, below = headline([rate("log", 100, 0, high=0.037), rate("unsafe", 0, 0, unknown=10, high=1.0)])
    assert kind == "unknown" and sentence.startswith("No anomaly in 100 decided runs")
    assert below == (
        "1 configuration has no decided run, which shows nothing either way. "
        "10 unknown runs are counted as neither valid nor invalid."
    )
    kind, _, below = headline([rate("log", 0, 5), *[rate(mode, 0, 0, unknown=1) for mode in ("unsafe", "lease")]])
    assert kind == "invalid" and below.startswith(
        "2 configurations have no decided run, which shows nothing either way."
    )


def test_the_headline_counts_violations_among_decided_runs_only() -> None:
    assert headline([rate("log", 2, 1, unknown=7)])[1] == "1 of 3 decided runs violated a guarantee."


def test_a_violation_found_by_checking_undecided_runs_again_is_in_the_headline() -> None:
    found = [{"run_id": "r1", "verdict": "invalid", "recorded_verdict": "unknown"}]
    kind, sentence, below = headline([rate("log", 0, 0, unknown=1)], found)
    assert (kind, sentence) == ("invalid", "1 run not recorded as invalid is invalid when checked again.")
    assert below == "None of 1 run was decided. That is what was recorded."
    assert headline([rate("log", 0, 0, unknown=1)])[2] == "This shows nothing either way."


def test_the_headline_counts_runs_that_could_not_be_used() -> None:
    kind, _, below = headline([rate("log", 10, 0)], left_out=1)
    assert (kind, below) == ("valid", "1 run could not be used and is not counted.")
    assert headline([rate("log", 1, 0)], left_out=9)[0] == "unknown"


def test_labels_name_only_the_settings_that_differ() -> None:
    groups = [("broker", json.dumps({"nodes": "5", "mode": m}), "register", "kill", "local") for m in ("a", "b")]
    labels, common = labels_of(groups)
    assert list(labels.values()) == ["mode a", "mode b"]
    assert common == "system broker, nodes 5, workload register, nemesis kill, cluster local"
    assert list(labels_of(groups[:1])[0].values()) == ["all runs"]
    mixed, common_of_ours = labels_of([*groups, ("unknown",) * 5])
    assert list(mixed.values()) == ["mode a", "mode b", "histories of other tools"]
    assert common_of_ours == common
    alone, _ = labels_of([groups[0], ("unknown",) * 5])
    assert list(alone.values()) == ["the harness's runs", "histories of other tools"]


def test_shares_are_never_rounded_to_none_or_all() -> None:
    assert [share_text(value) for value in (0, 1, 0.0004, 0.9996, 0.004, 0.125, 0.994, None)] == [
        "0 %", "100 %", "<0.1 %", ">99.9 %", "0.4 %", "12 %", "99.4 %", "–",
    ]  # fmt: skip


def test_the_page_is_one_file_and_escapes_the_texts_of_runs() -> None:
    rates = [rate("log", 10, 0), rate("<script>alert(1)</script>", 0, 10)]
    group = {name: rates[1][name] for name in ("system", "configuration", "workload", "nemesis", "cluster")}
    data = FleetData(
        place="store", runs=20, operations=2000, first_started_at="2026-01-01T00:00:00+00:00",
        last_started_at="2026-01-02T00:00:00+00:00", unavailable_after_ms=1000, took_s=3.0,
        tables={
            "rates": rates,
            "anomalies": [{**group, "check": "log", "kind": "lost", "count": 3, "per_million_operations": 3000.0}],
            "problems": [{"run": "x/<b>", "problem": "torn & broken", "left_out": True}],
        },
    )  # fmt: skip
    page = render_fleet(data)
    assert "<script" not in page
    assert "http://" not in page and "https://" not in page
    assert "3 lost (3,000 per million)" in page
    assert "1.5 s, 321 operations" in page and "Earliest witness after (median)" in page
    assert "First anomaly" not in page, "a check shows one witness, which need not be its first"
    assert "torn &amp; broken" in page
    assert page.index("violated a guarantee") < page.index("What went wrong")


def test_the_link_of_a_run_escapes_uri_characters_in_its_path(tmp_path: Path) -> None:
    run = tmp_path / "runs #7 50%25 what?" / "20260101T000000Z"
    run.mkdir(parents=True)
    (run / "report.html").write_text("")
    link = report_link(f"file:{run}", str(tmp_path / "report"))
    assert link == "../runs%20%237%2050%2525%20what%3F/20260101T000000Z/report.html"


def test_a_run_has_a_link_only_if_a_browser_can_reach_its_report(tmp_path: Path) -> None:
    run = tmp_path / "store" / "a+b" / "20260101T000000Z"
    run.mkdir(parents=True)
    out = str(tmp_path / "report")
    assert report_link(str(run), out) is None, "the run has no report"
    (run / "report.html").write_text("")
    assert report_link(str(run), out) == "../store/a%2Bb/20260101T000000Z/report.html"
    assert report_link(f"file:{run}", f"file://{out}") == "../store/a%2Bb/20260101T000000Z/report.html"
    assert report_link("hdfs://host/store/a", out) is None
    assert report_link(str(run), "s3a://bucket/report") is None
    assert report_link("compacted:20260101", out) is None


def test_rows_that_the_page_has_no_room_for_are_counted() -> None:
    """Also where configurations have nothing in common."""
    names = ("system", "configuration", "workload", "nemesis", "cluster")
    rates = [{**rate("log", 1, 0, 5), **{name: f"{name} {number}" for name in names}} for number in range(63)]
    groups = [{name: row[name] for name in names} for row in rates]
    outcomes = [{**group, "in_fault": False, "ok": 1, "fail": 0, "info": 0} for group in groups]
    notable = [
        {**groups[0], "run_id": f"r{number}", "test_name": "t", "run_dir": "s3a://b/t", "verdict": "unknown", "seed": 1,
         "reason": ""}
        for number in range(200)
    ]  # fmt: skip
    data = FleetData(
        place="store", runs=63, operations=1, first_started_at=None, last_started_at=None, unavailable_after_ms=1000,
        took_s=3.0, tables={"rates": rates, "outcomes": outcomes, "notable_runs": notable},
    )  # fmt: skip
    page = render_fleet(data)
    assert "3 more configurations in the table <code>rates</code>" in page
    assert "3 more configurations in the table <code>availability</code>" in page
    assert "115 more runs that are not valid" in page


def test_rows_of_folded_tables_and_remarks_that_the_page_has_no_room_for_are_counted() -> None:
    group = {name: rate("log", 1, 0)[name] for name in ("system", "configuration", "workload", "nemesis", "cluster")}
    recoveries = {
        f"recovery_after_{name}_ns_{part}": 0 for name in ("start", "heal") for part in ("p50", "p90", "max", "missing")
    }
    kinds = [
        {**group, **recoveries, "fault_nemesis": "kill", "variant": f"v{number}", "faults": 1, "ok_share": 1.0,
         "ok_per_s": 1.0}
        for number in range(202)
    ]  # fmt: skip
    figures = dict.fromkeys(("p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns"), 5)
    latency = [
        {**group, **figures, "f": "read", "outcome": "ok", "node": node, "phase": phase, "operations": 1,
         "relative_error": 0.0}
        for node, phase in [("all", "during"), *((f"n{number}", "all") for number in range(203))]
    ]  # fmt: skip
    problems = [{"run": f"r{number}", "problem": "odd", "left_out": number < 205} for number in range(205 + 206)]
    data = FleetData(
        place="store", runs=1, operations=1, first_started_at=None, last_started_at=None, unavailable_after_ms=1000,
        took_s=1.0,
        tables={
            "rates": [rate("log", 1, 0)], "outcomes": [{**group, "in_fault": False, "ok": 1, "fail": 0, "info": 0}],
            "fault_kinds": kinds, "latency": latency, "problems": problems,
        },
    )  # fmt: skip
    page = render_fleet(data)
    assert "2 more rows in the table <code>fault_kinds</code>" in page and "v199<" in page and "v200" not in page
    assert "3 more rows in the table <code>latency</code>" in page
    assert "11 more rows in the table <code>problems</code>" in page


def test_recoveries_that_never_came_are_shown_with_every_kind_of_fault() -> None:
    def kind(variant: str, start: tuple[int, int | None], heal: tuple[int, int | None]) -> dict[str, Any]:
        """Of each: how many never came, and how long all others took."""
        found: dict[str, Any] = {
            **{name: rate("log", 1, 0)[name] for name in ("system", "configuration", "workload", "nemesis", "cluster")},
            "fault_nemesis": "kill", "variant": variant, "faults": 9, "ok_share": 0.5, "ok_per_s": 7.0,
        }  # fmt: skip
        for name, (missing, took_ns) in (("start", start), ("heal", heal)):
            found |= {f"recovery_after_{name}_ns_{part}": took_ns for part in ("p50", "p90", "max")}
            found[f"recovery_after_{name}_ns_missing"] = missing
        return found

    rows = [
        kind("all", (9, None), (0, None)), kind("one", (2, 5_000_000), (1, 0)), kind("two", (0, 0), (0, 7_000_000)),
    ]  # fmt: skip
    data = FleetData(
        place="store", runs=1, operations=1, first_started_at=None, last_started_at=None, unavailable_after_ms=1000,
        took_s=1.0, tables={"fault_kinds": rows},
    )  # fmt: skip
    assert [each["back"] for each in _fault_kinds(data, {})] == [
        ["never in 9 faults", "–"],
        ["5 ms · 5 ms · 5 ms; never in 2 faults", "0 · 0 · 0; never in 1 fault"],
        ["0 · 0 · 0", "7 ms · 7 ms · 7 ms"],
    ]


@pytest.mark.parametrize(
    ("n", "missing", "p50", "worst", "words"),
    [
        (3, 0, 0, 0, "recovered at once after heal"),
        (3, 0, 0, 593_000_000, "recovered at once after heal, at most 593 ms"),
        (1, 0, 593_000_000, 593_000_000, "recovered 593 ms after heal"),
        (
            2,
            1,
            2_000_000_000,
            3_000_000_000,
            "recovered 2 s after heal, at most 3 s, never recovered after 1 of 3 heals",
        ),
        (0, 2, None, None, "never recovered after 2 of 2 heals"),
        (0, 0, None, None, ""),
    ],
)
def test_the_summary_says_how_soon_a_system_recovers(
    n: int, missing: int, p50: int | None, worst: int | None, words: str
) -> None:
    assert _recovery_text({"n": n, "missing": missing, "p50": p50, "max": worst}) == words


def test_checks_made_again_are_counted_by_verdict_and_those_without_room_are_counted_too() -> None:
    bad = ["invalid", "unknown"] * MAX_ROWS
    rows = [{"check": "log", "verdict": "valid", "keys": 4}]
    rows += [{"check": "register", "verdict": verdict, "keys": 2} for verdict in bad]
    assert check_tallies(rows) == {
        "log": {"runs": 1, "valid": 1, "invalid": 0, "unknown": 0, "keys": 4},
        "register": {"runs": 2 * MAX_ROWS, "valid": 0, "invalid": MAX_ROWS, "unknown": MAX_ROWS, "keys": 4 * MAX_ROWS},
    }
    data = FleetData(
        place="store", runs=1, operations=1, first_started_at=None, last_started_at=None, unavailable_after_ms=1000,
        took_s=1.0, tables={"checks": rows},
    )  # fmt: skip
    shown = _checks(data)
    assert shown is not None and len(shown["bad"]) == MAX_ROWS and shown["left_out"] == MAX_ROWS
