"""One pass and bounded memory give the same numbers as counting everything."""

import importlib.util
import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.live_stats import quantile
from harness.report import collect as module
from harness.report.collect import collect, error_kind
from harness.report.grid import (
    BINS,
    BINS_PER_DECADE,
    FIRST_COLUMN_NS,
    MAX_COLUMNS,
    LatencyGrid,
    bin_of,
    latency_of,
    marks_of,
    quantiles_of,
)
from harness.report.witness import MAX_NEIGHBOURS, Neighbours, Witness, real_time_edges, witness_from

spec = importlib.util.spec_from_file_location("collect_runs", Path(__file__).parent / "conftest.py")
runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runs)

POINTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 50 * FIRST_COLUMN_NS * MAX_COLUMNS), st.integers(0, 10**14)),
    max_size=60,
)


@given(POINTS)
def test_the_grid_counts_every_point_in_its_cell(points):
    grid = LatencyGrid(3)
    for point in points:
        grid.add(*point)
    expected = Counter((time // grid.column_ns, series, bin_of(latency)) for series, time, latency in points)
    assert {cell[:3]: cell.operations for cell in grid.cells()} == expected
    assert all(cell.column < MAX_COLUMNS for cell in grid.cells())
    longest = max((time for _, time, _ in points), default=0)
    assert grid.column_ns == FIRST_COLUMN_NS or longest >= grid.column_ns * MAX_COLUMNS // 2


@given(st.integers(1_000, 10**13 - 1))
def test_a_bin_of_latencies_is_six_percent_wide(latency_ns):
    step = bin_of(latency_ns)
    assert latency_of(step) <= latency_ns * 1.000001
    assert latency_ns <= latency_of(step + 1) * 1.000001
    assert latency_of(step + 1) / latency_of(step) == pytest.approx(10 ** (1 / BINS_PER_DECADE))


def test_latencies_off_the_scale_are_counted_in_the_outer_bins():
    assert bin_of(0) == bin_of(-5) == 0
    assert bin_of(10**18) == BINS - 1


@given(st.lists(st.integers(1_000, 10**12), min_size=1), st.floats(0.01, 1))
def test_quantiles_are_within_three_percent(latencies, q):
    found = latency_of(quantiles_of(Counter(map(bin_of, latencies)), [q])[0])
    exact = quantile(sorted(latencies), q)
    assert abs(math.log(found / exact)) <= math.log(10) / BINS_PER_DECADE / 2 * 1.001


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=200))
def test_the_longest_latency_is_exact_and_no_quantile_is_above_it(latencies):
    grid = LatencyGrid(2)
    for place, latency_ns in enumerate(latencies):
        grid.add(place % 2, place * 10**7, latency_ns)
    number, marks_ns = marks_of(grid, [0, 1], [0.5, 0.99])
    assert (number, marks_ns[-1]) == (len(latencies), max(latencies))
    assert marks_ns == sorted(marks_ns)
    assert marks_of(grid, [0], [])[1] == [max(latencies[::2])]
    assert marks_of(LatencyGrid(1), [0], [0.5]) == (0, [])


def test_an_empty_count_has_no_quantiles():
    assert quantiles_of(Counter(), [0.5]) == []


@pytest.fixture
def history(tmp_path):
    path = tmp_path / "history.jsonl"
    runs.write_run(path, operations=3000, faults=runs.make_faults(60))
    return path


def events_of(path):
    return [event for event in map(json.loads, path.read_text().splitlines()) if event["process"] != "nemesis"]


def operations_of(path):
    """Every operation as (invocation, completion or None), the plain way."""
    started, found = {}, []
    for event in events_of(path):
        if event["type"] == "invoke":
            started[event["process"]] = event
        else:
            found.append((started.pop(event["process"]), event))
    return found + [(event, None) for event in started.values()]


def longest_silence(events, end_ns):
    """The longest time with an operation invoked and none ending ok, event by event."""
    longest = asked = 0
    since = None
    for event in [*events, {"type": "end", "time": end_ns}]:
        asked += {"invoke": 1, "end": 0}.get(event["type"], -1)
        if event["type"] in ("ok", "end") and since is not None:
            longest = max(longest, event["time"] - since)
            since = event["time"] if asked else None
        elif event["type"] == "invoke" and since is None:
            since = event["time"]
    return longest


def test_collect_agrees_with_counting(history):
    data = collect(history)
    events = events_of(history)
    counted = Counter((event["f"], event["type"]) for event in events)
    assert {(f, kind): n for f, kinds in data.outcomes.items() for kind, n in kinds.items() if n} == counted
    counts = {key: error.events for key, error in data.errors.items()}
    assert counts == Counter((e["f"], e["type"], error_kind(e["error"])) for e in events if "error" in e)
    assert data.end_ns == max(json.loads(line)["time"] for line in history.read_text().splitlines())
    assert data.silence_ns[1] - data.silence_ns[0] == longest_silence(events, data.end_ns)
    cells = Counter()
    for invocation, done in operations_of(history):
        column = done["time"] // data.grid.column_ns
        cells[done["f"], done["type"], column, bin_of(done["time"] - invocation["time"])] += 1
    found = {
        (data.functions[cell.series // 3], module.OUTCOMES[cell.series % 3], cell.column, cell.step): cell.operations
        for cell in data.grid.cells()
    }
    assert found == cells


def write(path, events):
    with open(path, "w") as file:
        for index, (time_ns, process, kind, f, fields) in enumerate(events):
            event = {"index": index, "time": time_ns, "process": process, "type": kind, "f": f, **fields}
            file.write(json.dumps(event) + "\n")
    return path


def operation(process, invoked_s, completed_s, kind):
    yield {"time": int(invoked_s * 1e9), "process": process, "type": "invoke", "f": "read", "value": None}
    yield {"time": int(completed_s * 1e9), "process": process, "type": kind, "f": "read", "value": None}


@pytest.mark.parametrize(
    ("operations", "silence_s"),
    [
        # No operation was open between the load and the final reads.
        ([(0, 0, 1, "ok"), (1, 9, 9.5, "ok")], (0, 1)),
        # One was, and failed; then none was open for a while, but none had succeeded either.
        ([(0, 0, 1, "ok"), (1, 2, 3, "fail"), (1, 8, 9, "ok")], (2, 9)),
        # One was still open when another succeeded.
        ([(0, 0, 7, "ok"), (1, 0.5, 1, "ok")], (1, 7)),
    ],
)
def test_silence_lasts_from_an_invocation_to_the_next_success(tmp_path, operations, silence_s):
    events = sorted((e for one in operations for e in operation(*one)), key=lambda event: event["time"])
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps({"index": index, **event}) + "\n" for index, event in enumerate(events)))
    data = collect(path)
    assert tuple(at / 1e9 for at in data.silence_ns) == silence_s


@pytest.mark.parametrize(("final_reads_from", "silence_s"), [(None, (2, 9)), (4, (2, 4)), (3, (2, 9))])
def test_silence_ends_with_the_load_if_no_operation_is_open_then(tmp_path, final_reads_from, silence_s):
    """By event 4 the failed operation has ended; at event 3 it is still open."""
    operations = [(0, 0, 1, "ok"), (1, 2, 4, "fail"), (1, 8, 9, "ok")]
    events = [event for one in operations for event in operation(*one)]
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps({"index": index, **event}) + "\n" for index, event in enumerate(events)))
    data = collect(path, final_reads_from=final_reads_from)
    assert tuple(at / 1e9 for at in data.silence_ns) == silence_s


def test_the_numbers_of_functions_and_errors_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_ERRORS", 10)
    events = []
    for number in range(50):
        events.append((2 * number, 1, "invoke", f"f{number % 20}", {}))
        events.append((2 * number + 1, 1, "fail", f"f{number % 20}", {"error": "no " + "x" * number}))
    data = collect(write(tmp_path / "h", events))
    assert data.functions == ["f0", "f1", "f2", "f3", "f4", "other"]
    assert (data.total("invoke"), data.total("fail")) == (50, 50)
    assert len(data.errors) == 10
    assert sum(error.events for error in data.errors.values()) + data.errors_not_told_apart == 50


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("entry 488 of term 1", "entry # of term #"),
        ("10.77.0.2:10911: code 1: no, after 1.5 s", "#: code 1: no, after # s"),
        ("Errno 111, status=404, -3", "Errno 111, status=404, -#"),
        ("this node follows n3, not S0; utf8", "this node follows n3, not S0; utf8"),
        ("lease 694d7bb1f8a2 of 0f1e2d3c-4b5a", "lease # of #"),
        ("deadbeef and defaced added", "deadbeef and defaced added"),
        ("took 1,234.", "took #."),
        ("", ""),
    ],
)
def test_errors_that_differ_only_in_numbers_are_of_one_kind(text, kind):
    assert error_kind(text) == kind


def test_the_first_error_of_a_kind_is_kept(tmp_path):
    events = [(n, n, "info", "write", {"error": f"entry {n} is not known"}) for n in range(7, 107)]
    data = collect(write(tmp_path / "h", events))
    ((key, error),) = data.errors.items()
    assert key == ("write", "info", "entry # is not known")
    assert (error.events, error.first) == (100, "entry 7 is not known")


def test_operations_without_an_answer_are_counted(tmp_path):
    data = collect(write(tmp_path / "h", [(1, 1, "invoke", "read", {}), (2, 2, "invoke", "read", {})]))
    assert (data.still_open, data.end_ns) == (2, 2)


def test_a_completion_without_its_invocation_does_not_stop_the_report(tmp_path):
    data = collect(write(tmp_path / "h", [(1, 1, "ok", "read", {}), (-5, 2, "ok", "read", {})]))
    assert data.outcomes["read"]["ok"] == 2
    assert list(data.grid.cells()) == []


def test_neighbours_are_the_nearest_operations_on_the_key(history):
    operations = operations_of(history)
    inside = [item for item in operations if item[0]["key"] == 3 and item[1] and item[1]["type"] == "ok"]
    chosen = [inside[20], inside[26], inside[40]]
    witness = witness_from(
        {
            "witness": [
                {
                    "process": done["process"],
                    "f": done["f"],
                    "key": 3,
                    "type": "ok",
                    "invoked_ns": invocation["time"],
                    "returned_ns": done["time"],
                }
                for invocation, done in chosen
            ]
        }
    )
    found = collect(history, [witness]).neighbours[0]
    spans = [(invocation["time"], done["time"]) for invocation, done in chosen]
    low, high = min(a for a, _ in spans), max(b for _, b in spans)

    def distance(invocation, done):
        end = done["time"] if done else invocation["time"]
        return min(max(a - end, invocation["time"] - b, 0) for a, b in spans)

    candidates = [
        item
        for item in operations
        if item[0]["key"] == 3
        and item not in chosen
        and item[0]["time"] <= high
        and (item[1] or item[0])["time"] >= low
    ]
    nearest = sorted(distance(*item) for item in candidates)[:MAX_NEIGHBOURS]
    by_start = {(item[0]["process"], item[0]["time"]): item for item in candidates}
    assert sorted(distance(*by_start[op["process"], op["start_ns"]]) for op in found) == nearest
    assert len(found) == MAX_NEIGHBOURS


def test_an_unanswered_operation_can_be_a_neighbour():
    witness = Witness([{"process": 1, "start_ns": 10, "end_ns": 20}])
    neighbours = Neighbours(witness)
    neighbours.consider({"process": 2, "time": 15, "f": "write", "value": 3}, None)
    assert [(op["type"], op["end_ns"]) for op in neighbours.chosen()] == [("info", None)]


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.sampled_from(["ok", "info"])), max_size=8)


@given(SPANS)
def test_real_time_edges_are_the_transitive_reduction_of_the_order(spans):
    operations = [{"start_ns": a, "end_ns": a + length, "type": kind} for a, length, kind in spans]
    edges = {(edge.source, edge.target) for edge in real_time_edges(operations)}
    everyone = range(len(operations))

    def before(i, j):
        return operations[i]["type"] == "ok" and operations[i]["end_ns"] < operations[j]["start_ns"]

    def reaches(edges, i, j):
        return (i, j) in edges or any((i, k) in edges and reaches(edges, k, j) for k in everyone)

    for i in everyone:
        for j in everyone:
            assert reaches(edges, i, j) == before(i, j)
    for edge in edges:
        assert not reaches(edges - {edge}, *edge)


def test_edges_follow_their_operations_when_these_are_sorted_and_cut():
    operations = [
        {"process": n, "f": "read", "type": "ok", "invoked_ns": 100 - n, "returned_ns": 200} for n in range(40)
    ]
    edges = [{"source": 39, "target": 38, "kind": "wr", "reason": "r"}, {"source": 0, "target": 39, "kind": "wr"}]
    edges += [{"source": 7, "target": "x"}, "nonsense"]
    witness = witness_from({"witness": {"operations": operations, "edges": edges, "text": "t"}})
    assert [op["process"] for op in witness.operations[:2]] == [39, 38]
    assert [(edge.source, edge.target) for edge in witness.edges] == [(0, 1)]
    assert witness.left_out == 16


def test_times_are_preferred_to_positions():
    operation = {"process": 1, "f": "write", "status": "info", "invoked": 3, "returned": None, "invoked_ns": 50}
    witness = witness_from({"witness": {"operations": [operation], "key": 0}})
    assert (witness.operations[0]["start_ns"], witness.operations[0]["end_ns"]) == (50, None)
    assert witness.has_key and witness.operations[0]["type"] == "info"


@pytest.mark.parametrize("check", [{}, {"witness": None}, {"witness": []}, {"witness": {"operations": None}}])
def test_a_check_without_operations_in_its_witness_has_none(check):
    assert witness_from(check) is None
