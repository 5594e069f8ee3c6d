"""The parts of the page: paths, time axes, grudges, sections."""

import re
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from harness.report.charts import bands_of
from harness.report.checks import MAX_ROWS, anchor_of, check_sections, terms_of, timed_violations
from harness.report.faults import cut_words, fault_rows, matrix
from harness.report.picture import witness_picture
from harness.report.svg import element, percent, runs_path
from harness.report.timeline import CHARACTER_PX, MARGIN, _Scale
from harness.report.witness import witness_from

MS = 1_000_000


def test_text_is_escaped_and_markup_is_not():
    made = element("g", "<b>", Markup("<i/>"), class_='"x"', view_box="0 0 1 1", stroke_width=1.50, skipped=None)
    assert made == '<g class="&#34;x&#34;" viewBox="0 0 1 1" stroke-width="1.5">&lt;b&gt;<i/></g>'


@given(st.sets(st.tuples(st.integers(0, 12), st.integers(0, 6))))
def test_a_path_of_runs_draws_exactly_its_points(points):
    path, strokes = runs_path(points)
    drawn, x, y = set(), 0, 0
    commands = re.findall(r"([Mm])(-?\d+)[ ]?(-?\d+)h(\d+)", path)
    assert len(commands) == strokes
    for command, a, b, length in commands:
        x, y = (int(a), int(b)) if command == "M" else (x + int(a), y + int(b))
        drawn |= {(x + step, y) for step in range(int(length) + 1)}
        x += int(length)
    assert drawn == points


def test_percentages_have_at_most_two_decimals():
    assert [percent(part) for part in (0, 0.25, 1, 1 / 3, 0.00001)] == ["0%", "25%", "100%", "33.33%", "0%"]


@given(
    st.lists(st.integers(0, 10**11), min_size=1, max_size=20),
    st.lists(st.integers(0, 10**11), max_size=20),
    st.lists(st.integers(-5, 10**11 + 5), max_size=20),
)
def test_the_time_axis_of_a_contradiction_keeps_the_order(own, context, others):
    scale = _Scale(own, context)
    moments = sorted({*own, *others})
    places = [scale(moment) for moment in moments]
    assert places == sorted(places)
    assert all(0 <= place <= 1 for place in places)
    inside = [scale(moment) for moment in sorted(set(own))]
    assert all(earlier < later for earlier, later in pairwise(inside))
    assert inside[0] == MARGIN


def grudge(*cuts):
    found = {}
    for source, destination in cuts:
        found.setdefault(destination, set()).add(source)
    return {destination: frozenset(sources) for destination, sources in found.items()}


HOSTS = ["n1", "n2", "n3", "n4"]
LINKS = list(permutations(HOSTS, 2))


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ([(a, b) for a, b in LINKS if (a in "n1n2") != (b in "n1n2")], "n1 n2  |  n3 n4"),
        ([(a, b) for a, b in LINKS if "n4" in (a, b)], "n1 n2 n3  |  n4"),
        (LINKS, "n1  |  n2  |  n3  |  n4"),
        ([("n1", "n2")], "n2 deaf to n1"),
        ([("n1", "n2"), ("n2", "n1")], "n1 deaf to n2\nn2 deaf to n1"),
        ([], ""),
    ],
)
def test_a_grudge_is_described_in_words(cut, words):
    assert cut_words(grudge(*cut), HOSTS) == words


@given(st.sets(st.sampled_from(LINKS)))
def test_the_words_for_a_grudge_describe_exactly_its_cuts(cut):
    words = cut_words(grudge(*cut), HOSTS)
    said = set()
    if "|" in words:
        groups = [group.split() for group in words.split("|")]
        said = {(a, b) for g in groups for other in groups if g is not other for a in g for b in other}
    elif words:
        for line in words.splitlines():
            destination, sources = line.split(" deaf to ")
            said |= {(source, destination) for source in sources.split()}
    assert said == cut


@given(st.sets(st.sampled_from(LINKS), min_size=1))
def test_the_matrix_fills_a_square_for_each_cut_link(cut):
    drawn = matrix(grudge(*cut), HOSTS)
    filled = re.search(r'd="([^"]*)" class="cut"', drawn)[1]
    squares = {(int(x), int(y)) for x, y in re.findall(r"M(\d+) (\d+)", filled)}
    assert squares == {(18 + 9 * HOSTS.index(b), 9 * HOSTS.index(a)) for a, b in cut}


def test_faults_without_proof_are_kept_before_all_others():
    faults = [{"id": f"f{n}", "proven": n != 90, "healed": n != 95, "start_ns": n} for n in range(100)]
    rows = fault_rows(faults, [], 5)
    assert [row.number for row in rows] == [1, 2, 3, 91, 96]
    assert [row.number for row in fault_rows(faults, [], 1)] == [91]


@pytest.mark.parametrize("process", [7, 123_456, 1_234_567_890])
def test_the_picture_has_room_for_the_names_of_lanes(process):
    operation = {"process": process, "f": "read", "start_ns": 1, "end_ns": 2, "result": 1}
    witness = witness_from({"witness": [operation, {**operation, "process": 8, "start_ns": 3, "end_ns": 4}]})
    found = re.search(rf'<text x="(\d+)"[^>]*>process {process}<', witness_picture(witness, (), title="t"))
    assert int(found[1]) >= len(f"process {process}") * CHARACTER_PX


def test_a_fault_without_an_end_has_a_band_and_one_without_a_start_has_none():
    faults = [
        {"nemesis": "partition", "start_ns": 50, "end_ns": None, "proven": True},
        {"nemesis": "clock", "start_ns": None},
        {"nemesis": "clock", "start_ns": 20, "end_ns": 500},
    ]
    bands, nemeses, left_out = bands_of(faults, 100)
    assert [(band.start, band.end, band.proven, band.number) for band in bands] == [
        (0.5, 1.0, True, 1),
        (0.2, 1.0, False, 3),
    ]
    assert (nemeses, left_out) == (["partition", "clock"], 1)


def test_the_sections_of_checks_are_in_order_of_their_verdicts_failed_first():
    checks = {
        "replicas": {"valid": True, "reason": "same", "committed_bytes": {"n1": 12345, "n2": 12345}},
        "total-queue": {"valid": "unknown", "reason": "out of time", "keys_checked": 3},
        "log": {
            "valid": False,
            "reason": "lost",
            "stats": {
                "counts": {"lost": 2, "stale": 0, "gap": 0, "phantom": 0},
                "examples": {"lost": [{"key": 1, "time_ns": 5 * MS}] * (MAX_ROWS + 3), "stale": []},
                "acknowledged": 77,
                "is_complete": True,
            },
        },
    }
    sections = check_sections(checks, 10)
    assert [(section.name, section.verdict) for section in sections] == [
        ("log", "invalid"),
        ("total-queue", "unknown"),
        ("replicas", "valid"),
    ]
    log, queue, replicas = sections
    assert log.facts == [("acknowledged", "77"), ("is complete", "yes")]
    assert [(t.title, t.columns, len(t.rows), t.left_out) for t in log.tables] == [
        ("counts", ["lost", "stale", "gap", "phantom"], 1, 0),
        ("examples: lost", ["key", "time"], MAX_ROWS, 3),
    ]
    assert log.tables[1].rows[0] == ["1", "0.005 s"]
    assert queue.facts == [("keys checked", "3")]
    assert replicas.tables[0].rows == [["12,345", "12,345"]]
    assert [section.name for section in check_sections(checks, 1)] == ["log"]


def test_the_engines_and_the_search_time_of_a_check_are_shown_in_words():
    stats = {"engines": {"A3 register zones": 8, "general": 1}, "search_s": 0.0221, "terms": [{"start_ns": -40 * MS}]}
    (section,) = check_sections({"linearizable": {"valid": True, "stats": stats}}, 1)
    assert section.facts == [("decided by", "register zones (8 keys), general"), ("search", "22.1 ms")]
    assert section.tables[0].rows == [["0.040 s before the load"]]


def test_only_invalid_checks_have_timed_violations():
    one = {"rule": "votes", "time_s": 1.5, "text": "n1 voted twice"}
    odd = [one, {"rule": "x"}, {"time_s": float("inf")}, {"time_s": "1"}, 7]
    checks = {"invariants": {"valid": False, "violations": odd}, "held": {"valid": True, "violations": [one]}, "x": 3}
    assert timed_violations(checks) == [(1_500_000_000, "invariants", "votes: n1 voted twice")]
    assert timed_violations(None) == timed_violations({"a": {"valid": False, "violations": 4}}) == []


@pytest.mark.parametrize(
    ("name", "anchor"),
    [("leaders", "check-leaders"), ("Total Queue", "check-total-queue"), ('"><b>', "check--b-"), ("", "check-")],
)
def test_the_anchor_of_a_check_has_only_plain_characters(name, anchor):
    assert anchor_of(name) == anchor


def test_tables_are_in_order_of_time_and_show_it_to_the_millisecond():
    terms = [{"term": 2, "start_ns": 5 * MS}, {"term": 1, "start_ns": -MS}]
    check = {"valid": False, "terms": terms, "violations": [{"rule": "votes", "time_s": 1.7108}]}
    (section,) = check_sections({"leaders": check}, 1)
    assert [table.rows for table in section.tables] == [
        [["1", "0.001 s before the load"], ["2", "0.005 s"]],
        [["votes", "1.711 s"]],
    ]
    assert [table.columns for table in section.tables] == [["term", "start"], ["rule", "time"]]


def test_malformed_terms_are_left_out():
    assert terms_of({"leaders": {"terms": [{"term": 1}, 3]}}) == [{"term": 1}]
    assert terms_of({"leaders": None}) == terms_of(None) == terms_of({"leaders": {"terms": 4}}) == []
