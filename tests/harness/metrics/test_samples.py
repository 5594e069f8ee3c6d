"""Samples as lines over time: rates survive restarts, gaps stay gaps, and a damaged file is read as far as it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics.samples import Samples, read_samples

HEADER = {
    "version": 1, "interval_ns": 1_000_000_000, "hosts": ["n1", "n2"], "pages": ["client/metrics"],
    "metrics": [
        {"page": 0, "text": "up", "title": "Up", "kind": "value", "unit": ""},
        {"page": 0, "text": "rate(writes_total)", "title": "Writes", "kind": "rate", "unit": "/s"},
        {"page": 0, "text": "mean(fsync_seconds)", "title": "Fsync", "kind": "mean", "unit": "s"},
    ],
}  # fmt: skip


def sample(second: float, *values: Any, host: str = "n1") -> dict[str, Any]:
    """A line of a host: its values, or an error if there are none."""
    said = {"values": list(values)} if values else {"error": "no answer within 1 s"}
    return {"time": round(second * 1e9), "host": host, "page": 0, **said}


def read_of(path: Path, *lines: Any, header: Any = HEADER) -> Samples:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in (header, *lines)]
    path.write_text("".join(f"{text}\n" for text in texts))
    samples = read_samples(path)
    assert samples is not None
    return samples


def points(samples: Samples, lane: int, host: str = "n1") -> list[tuple[float, float | None]]:
    return [(time_ns / 1e9, value) for time_ns, value in samples.lanes[lane].lines[host].points()]


def test_values_rates_and_means_are_lines_with_gaps(tmp_path: Path) -> None:
    samples = read_of(
        tmp_path / "m.jsonl",
        sample(0, 1, 100, [1.0, 10]),
        sample(1, 0, 150, [3.0, 14]),
        sample(3, 1, 150, [3.0, 14]),  # two seconds later, without a write
        sample(4),
        sample(5),
        sample(6, 1, 7, [0.5, 1]),
        sample(7, 1, 9, [1.5, 3]),
        sample(1.5, 1, 4, [1.0, 1], host="n2"),
    )
    assert points(samples, 0) == [(0, 1), (1, 0), (3, 1), (4, None), (6, 1), (7, 1)]
    assert points(samples, 1) == [(1, 50), (3, 0), (4, None), (7, 2)]
    assert points(samples, 2) == [(1, 0.5), (3, None), (7, 0.5)]
    assert points(samples, 1, "n2") == []
    answers = [(at // 10**9, value is not None) for at, value in samples.answers["n1"].points()]
    assert answers == [(0, True), (1, True), (3, True), (4, False), (6, True), (7, True)]


def test_a_host_answers_if_all_its_pages_do(tmp_path: Path) -> None:
    header = HEADER | {"metrics": [HEADER["metrics"][0], HEADER["metrics"][0] | {"page": 1}]}  # type: ignore[index]
    lines = [sample(0, 1), sample(0, 1) | {"page": 1}, sample(1), sample(1, 1) | {"page": 1}, sample(2, 1)]
    samples = read_of(tmp_path / "m.jsonl", *lines, sample(2) | {"page": 1}, header=header)
    answers = [(at // 10**9, value is not None) for at, value in samples.answers["n1"].points()]
    assert answers == [(0, True), (0, True), (1, False), (2, True), (2, False)]
    assert points(samples, 0) == [(0, 1), (1, None), (2, 1)]
    assert points(samples, 1) == [(0, 1), (1, 1), (2, None)]


def test_a_counter_that_was_set_back_has_grown_from_0(tmp_path: Path) -> None:
    samples = read_of(
        tmp_path / "m.jsonl",
        sample(0, 1, 1_000, [9.0, 90]),
        sample(2, 1, 30, [1.0, 4]),
        sample(3, 1, 31, [1.0, 4]),
        sample(4, 1, None, None),
        sample(5, 1, 40, [2.0, 5]),
        sample(6, 1, 42, [4.0, 6]),
    )
    assert points(samples, 1) == [(2, 15), (3, 1), (4, None), (6, 2)]
    assert points(samples, 2) == [(2, 0.25), (3, None), (6, 2)]


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.booleans()), max_size=30))
def test_a_rate_is_never_negative_and_adds_up_to_what_was_counted(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool, bool]]
) -> None:
    """Without gaps the rates, each times its second, add up to all growth that a reader could see: a restart hides what
    was counted between the last sample and the restart."""
    counter, seen, lines = 0, 0, [sample(0, 1, 0, None)]
    for second, (grown, restarts, is_lost) in enumerate(steps, 1):
        before = counter
        counter = grown if restarts else counter + grown
        seen += counter - before if counter >= before else counter
        lines.append(sample(second, 1, counter, None))
        if is_lost:
            lines.append(sample(second, host="n2"))
    samples = read_of(tmp_path_factory.mktemp("s") / "m.jsonl", *lines)
    rates = [value for _, value in points(samples, 1)]
    assert all(value is not None and value >= 0 for value in rates)
    assert sum(value or 0 for value in rates) == pytest.approx(seen)


@pytest.mark.parametrize(
    "line",
    [
        "garbage", "[" * 5_000, "[]", sample(1, 1, 2), sample(1, "x", 2, None), sample(1, 1, 2, [1]), {"time": 1},
        sample(1, 1, 2, None) | {"time": "1"}, sample(1, 1, 2, None) | {"time": 1 << 70}, sample(1, True, 2, None),
        sample(1, 1, 2, None) | {"host": "n9"}, sample(1, 1, 2, None) | {"host": ["n1"]}, '{"time": NaN}',
        '{"host": "n1", "page": 0, "time": 1, "values": [Infinity, 1, null]}', "1" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_line_is_counted_and_the_others_are_read(tmp_path: Path, line: Any) -> None:
    samples = read_of(tmp_path / "m.jsonl", sample(0, 1, 2, None), line, sample(2, 3, 4, None))
    assert samples.damaged >= 1
    assert points(samples, 0) == [(0, 1), (2, 3)]


def test_a_line_that_was_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    read_of(tmp_path / "m.jsonl", sample(0, 1, 2, None))
    with open(tmp_path / "m.jsonl", "a") as file:
        file.write('{"time": 1, "host": "n1", "page": 0, "values": [1, 2')
    samples = read_samples(tmp_path / "m.jsonl")
    assert samples is not None and samples.damaged == 1 and points(samples, 0) == [(0, 1)]


@pytest.mark.parametrize(
    "header",
    [
        "", "7", {}, HEADER | {"version": 2}, HEADER | {"hosts": "n1"}, HEADER | {"hosts": [1]},
        HEADER | {"metrics": 1}, HEADER | {"metrics": [1]}, HEADER | {"metrics": [{}] * 99},
        HEADER | {"interval_ns": 0}, "x" * 100_000,
    ],
)  # fmt: skip
def test_a_file_with_another_first_line_is_none_of_ours(tmp_path: Path, header: Any) -> None:
    text = header if isinstance(header, str) else json.dumps(header)
    (tmp_path / "m.jsonl").write_text(f"{text}\n")
    assert read_samples(tmp_path / "m.jsonl") is None
    assert read_samples(tmp_path / "absent.jsonl") is None
    assert read_samples(tmp_path) is None
