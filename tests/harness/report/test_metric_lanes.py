"""Lanes of metrics: a line for each host, interrupted where it did not answer, with every peak, in a bounded page."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from harness.metrics.samples import Lane, Line, Samples
from harness.report.metric_lanes import MAX_POINTS, _words, metric_panels, metric_words, thinned
from harness.report.page import MAX_REPORT_BYTES, write_report

NONE = Markup("")
S = 1_000_000_000
POINTS = st.lists(st.tuples(st.integers(0, 1000), st.one_of(st.none(), st.integers(-50, 50).map(float))), max_size=60)


def line_of(points: list[tuple[int, float | None]]) -> Line:
    line = Line()
    for time_ns, value in points:
        line.add(time_ns, value)
    return line


def samples_of(hosts: dict[str, list[tuple[int, float | None]]], *, lanes: int = 1, unit: str = "") -> Samples:
    drawn = [
        Lane(
            f"Lane {number}",
            f"series_{number}",
            unit,
            0,
            "value",
            {host: line_of(each) for host, each in hosts.items()},
        )
        for number in range(lanes)
    ]
    answers = {
        host: line_of([(at, None if value is None else 1.0) for at, value in each]) for host, each in hosts.items()
    }
    return Samples(S, list(hosts), drawn, answers)


@given(POINTS, st.integers(1, 40))
def test_thinning_keeps_the_least_and_the_greatest_and_draws_over_no_gap(
    points: list[tuple[int, float | None]], windows: int
) -> None:
    line = line_of(sorted(points, key=lambda point: point[0]))
    found, whole = list(thinned(line, 1000, windows)), list(line.points())
    assert len(found) <= 5 * windows
    assert [at for at, _ in found] == sorted(at for at, _ in found)
    values = [value for _, value in whole if value is not None]
    kept = [value for _, value in found if value is not None]
    assert set(kept) <= set(values) and bool(kept) == bool(values)
    if values:
        assert (min(kept), max(kept)) == (min(values), max(values))
    gaps = [at for at, value in whole if value is None]
    for (begin, one), (end, other) in itertools.pairwise(found):
        if one is not None and other is not None and begin * windows // 1000 != end * windows // 1000:
            assert not any(begin < gap < end for gap in gaps)


def test_a_line_is_interrupted_where_its_host_did_not_answer() -> None:
    panels = metric_panels(samples_of({"n1": [(0, 1.0), (S, 2.0), (2 * S, None), (4 * S, 2.0)]}), 5 * S, NONE, NONE)
    assert [panel.caption for panel in panels] == ["Metrics, by host", "Lane 0"]
    answered, drawn = (re.findall(r' d="([^"]*)"', panel.svg) for panel in panels)
    assert answered == ["M0 1H4000M8000 1H10000"]  # the last answer counts until the next is due
    assert drawn == ["M0 500h0L2000 0M8000 0h0"]


def test_hosts_and_series_that_said_nothing_have_no_lane() -> None:
    assert metric_panels(samples_of({"n1": [(0, None)], "n2": []}), S, NONE, NONE) == []
    samples = samples_of({"n1": [(0, 1.0)]}, lanes=2)
    samples.lanes[0].lines["n1"] = Line()
    assert [panel.caption for panel in metric_panels(samples, S, NONE, NONE)] == ["Metrics, by host", "Lane 1"]


@pytest.mark.parametrize("values", [[0.0], [-3.0], [-3.0, 4.0], [1e300], [1e-300], [-1e300, 1e300], [5.0, 5.0]])
def test_any_range_of_values_is_within_the_drawing(values: list[float]) -> None:
    samples = samples_of({"n1": [(number * S, value) for number, value in enumerate(values)]})
    panel = metric_panels(samples, len(values) * S, NONE, NONE)[1]
    heights = [int(y) for y in re.findall(r"[ML]\d+ (-?\d+)", panel.svg)]
    assert len(heights) == len(values) and all(0 <= y <= 1000 for y in heights)
    assert all(0 <= at <= 1 for at, _ in panel.labels) and 1 <= len(panel.labels) <= 4


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0"), (0.0012, "s", "1.2 ms"), (0, "", "0"), (3, "", "3"), (0.25, "/s", "0.25"), (12_345, "", "12.3k"),
        (2_500_000, "", "2.5 M"), (16_000_000, "bytes", "16 MB"), (1_500, "bytes/s", "1.5 kB"), (512, "bytes", "512 B"),
        (-2, "", "−2"), (1e300, "", "1e+300"), (9_999, "", "9,999"), (1234.5, "", "1,234"),
    ],
)  # fmt: skip
def test_values_are_written_with_their_unit(value: float, unit: str, text: str) -> None:
    assert _words(value, unit) == text


def test_the_tooltip_says_the_last_value_of_each_host_in_each_window() -> None:
    samples = samples_of({"n1": [(0, 1.0), (S, None), (2 * S, 0.5)], "n2": [(0, 3.0), (2 * S + 1, 4.0)]}, unit="s")
    words = metric_words(samples, 3 * S)
    assert words["window"] == S
    assert words["lines"] == [["Lane 0: n1 1 s, n2 3 s"], ["Lane 0: n1 –"], ["Lane 0: n1 500 ms, n2 4 s"]]


def test_the_points_of_many_hosts_and_lanes_are_bounded() -> None:
    line = [(number * S, math.sin(number)) for number in range(3_600)]
    panels = metric_panels(samples_of({f"n{n}": line for n in range(15)}, lanes=16), 3_600 * S, NONE, NONE)
    points = sum(len(re.findall(r"[LM]\d", panel.svg)) for panel in panels[1:])
    assert 2_000 < points <= MAX_POINTS
    assert sum(len(panel.svg) for panel in panels) < 500_000


def test_the_report_has_the_lanes_of_the_runs_file_and_says_what_is_missing(tmp_path: Path) -> None:
    events = [
        {"index": 0, "time": 0, "process": 0, "type": "invoke", "f": "read", "value": None},
        {"index": 1, "time": 5 * S, "process": 0, "type": "ok", "f": "read", "value": 1},
    ]
    header = {
        "version": 1, "interval_ns": S, "hosts": ["n1"], "pages": ["client/metrics"],
        "metrics": [{"page": 0, "text": "up{a=\"<b>\"}", "title": "Up <&>", "kind": "value", "unit": ""}],
    }  # fmt: skip
    lines = [header, {"time": S, "host": "n1", "page": 0, "values": [1]}, {"broken": 1}]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = {"never_seen": ["rate(gone_total)"], "stopped": "more than 64 MB of samples"}
    results = {"valid": True, "system": {"metrics": said}}
    page = write_report(tmp_path, {}, results, tmp_path / "history.jsonl").read_text()
    assert "Up &lt;&amp;&gt;" in page and "<b>" not in page
    assert "On no page of metrics that any host sent: rate(gone_total)." in page
    assert "Reading metrics stopped before the end: more than 64 MB of samples." in page
    assert "1 line of metrics.jsonl could not be read." in page
    assert 'href="metrics.jsonl"' in page and len(page) < MAX_REPORT_BYTES
    (tmp_path / "metrics.jsonl").unlink()
    page = write_report(tmp_path, {}, results, tmp_path / "history.jsonl").read_text()
    assert "there is no readable metrics.jsonl" in page and "Up &lt;" not in page
