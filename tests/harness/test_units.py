"""Numbers, times and operations as text for people."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.units import (
    clip,
    duration,
    exact_instant,
    instant,
    linear_ticks,
    operation_text,
    per_second,
    plural,
    share,
    time_ticks,
)

MS = 1_000_000


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1 µs"),
        (830_400, "830 µs"),
        (1_305_000, "1.3 ms"),
        (99_960_000, "100 ms"),
        (999_600_000, "1 s"),
        (1_350_000_000, "1.35 s"),
        (119_000_000_000, "119 s"),
        (125_000_000_000, "2 min 5 s"),
        (3_600_000_000_000, "60 min"),
        (7_260_000_000_000, "2 h 1 min"),
        (-5_000_000, "−5 ms"),
    ],
)
def test_a_duration_is_formatted_in_fitting_units(time_ns, text):
    assert duration(time_ns) == text


@given(st.integers(1, 10**15))
def test_a_duration_is_accurate_to_half_a_percent(time_ns):
    factors = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9, "h": 3600e9}
    parts = re.findall(r"([\d.]+) (ns|µs|ms|s|min|h)", duration(time_ns))
    assert sum(float(number) * factors[unit] for number, unit in parts) == pytest.approx(time_ns, rel=0.0051)


def test_instants_are_in_milliseconds_and_exact_instants_in_microseconds():
    assert (instant(12_345_678_900), instant(-40 * MS)) == ("12.346 s", "0.040 s before the load")
    assert exact_instant(1_012_345_678_900) == "1,012.345679 s"


def test_small_rates_are_not_rounded_to_0():
    rates = [0, 0.0042, 0.33, 1.0, 8.54, 9.96, 185.4, 12345.6]
    assert list(map(per_second, rates)) == ["0", "0.0042", "0.33", "1", "8.5", "10", "185", "12,346"]


def test_shares_are_not_rounded_to_0_or_100_percent():
    assert [share(*pair) for pair in ((0, 0), (0, 9), (9, 9), (1, 10**6), (10**6 - 1, 10**6), (1, 3))] == [
        "–",
        "0 %",
        "100 %",
        "<0.1 %",
        ">99.9 %",
        "33.3 %",
    ]
    assert [plural(1, "fault"), plural(12345, "fault")] == ["1 fault", "12,345 faults"]


@given(st.integers(1, 10**16))
def test_time_ticks_are_few_even_and_within_the_axis(end_ns):
    ticks = time_ticks(end_ns)
    places = [at for at, _ in ticks]
    assert places[0] == 0 and places[-1] <= 1.0000001
    assert 2 <= len(ticks) <= 9
    steps = [later - earlier for earlier, later in pairwise(places)]
    assert max(steps) == pytest.approx(min(steps))
    assert len({label for _, label in ticks}) == len(ticks)


@given(st.floats(1e-3, 1e9))
def test_linear_ticks_cover_the_highest_value(highest):
    ticks = linear_ticks(highest)
    assert ticks[0] == 0
    assert ticks[-1] >= highest * 0.999
    assert ticks[-2] < highest
    assert len(ticks) <= 5


@given(st.text(), st.integers(2, 50))
def test_clipped_text_is_short_and_printable(text, limit):
    clipped = clip(text, limit)
    assert len(clipped) <= limit
    assert clipped.isprintable()
    if text.isprintable() and len(text) <= limit:
        assert clipped == text


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        ({"f": "write", "value": 17, "result": 17, "type": "ok"}, "write 17"),
        ({"f": "write", "value": 17, "type": "info"}, "write 17 → ?"),
        ({"f": "write", "value": 17, "type": "fail"}, "write 17 → failed"),
        ({"f": "read", "value": None, "result": 17, "type": "ok"}, "read → 17"),
        ({"f": "read", "value": None, "result": None, "type": "ok"}, "read → nothing"),
        ({"f": "append", "value": 9, "result": [3, 9], "type": "ok"}, "append 9 → offset 3"),
        (
            {
                "f": "read",
                "value": {"offset": 4, "max": 32},
                "result": {"offset": 4, "messages": [7, 8], "tail": 6},
                "type": "ok",
            },
            "read from 4 → [7, 8], tail 6",
        ),
        (
            {"f": "read", "value": {"offset": 0}, "result": {"messages": list(range(99)), "tail": 99}, "type": "ok"},
            "read from 0 → [0, 1, …, 98], tail 99",
        ),
        ({"f": "tail", "value": None, "result": 4, "type": "ok"}, "tail → 4"),
        ({"f": "cas", "value": [1, 2], "result": [1, 2], "type": "ok"}, "cas [1, 2]"),
    ],
)
def test_an_operation_is_formatted_as_text(operation, text):
    assert operation_text(operation) == text
