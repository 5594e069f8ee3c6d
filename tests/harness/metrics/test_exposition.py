"""Pages of metrics: every sample of a chosen series counts once, whatever its labels hold, and garbage is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.metrics.exposition import MAX_SAMPLES, ExpositionError, Series, labels_of, sums

NAMES = ("up", "up_total", "http_requests_total", "job:rate", "_x")
LABELS = ("code", "method", "le")
VALUES = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12).map(lambda x: round(x, 3))
TEXTS = st.text(st.sampled_from('ab{}",\\=#\n é 1\u2028\x85'), max_size=6)
SAMPLES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(LABELS), TEXTS), VALUES), max_size=12
)

Sample = tuple[str, Mapping[str, str], float]


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def as_line(sample: Sample, shape: int) -> str:
    """A sample as one writer or another writes it: with blanks, a time, a trailing comma, an exemplar."""
    name, labels, value = sample
    blank = " " * (shape % 3)
    pairs = f"{blank},{blank}".join(f'{key}{blank}={blank}"{escaped(text)}"' for key, text in labels.items())
    comma = "," if labels and shape % 2 else ""
    braces = f"{blank}{{{blank}{pairs}{comma}{blank}}}" if labels or shape % 5 == 0 else ""
    tail = ("", " 1395066363000", ' # {trace_id="a}b"} 0.67', " 123.5 # {} 1 2", "\t", "\r")[shape % 6]
    return f"{blank}{name}{braces} {value!r}{tail}\n"


def page_of(samples: Sequence[Sample], shapes: Sequence[int]) -> str:
    lines = [f'# HELP up up {{ # \n# TYPE up gauge\n\nother{{up="up 1"}} 5\nup{"x" * 3} 7\n']
    lines += [as_line(sample, shape) for sample, shape in zip(samples, shapes, strict=False)]
    return "".join(lines) + "# EOF\n"


@given(SAMPLES, st.lists(st.integers(0, 29), min_size=12, max_size=12), st.sampled_from(NAMES),
       st.dictionaries(st.sampled_from(LABELS), TEXTS, max_size=2))  # fmt: skip
@example([("up", {"code": "}"}, 1.0), ("up", {"code": "}", "le": '"'}, 2.0)], [2] * 12, "up", {"code": "}"})
def test_the_sum_is_that_of_the_samples_with_the_name_and_the_labels(
    samples: list[Sample], shapes: list[int], name: str, labels: dict[str, str]
) -> None:
    having = [value for each, its, value in samples if each == name and labels.items() <= its.items()]
    (found,) = sums(page_of(samples, shapes), [Series(name, frozenset(labels.items()))])
    assert found == (pytest.approx(sum(having), abs=1e-3) if having else None)


@given(SAMPLES)
def test_the_parser_of_prometheus_finds_the_same(samples: list[Sample]) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    page = "".join(
        as_line(sample, 1 + 6 * number) for number, sample in enumerate(samples) if "\x85" not in str(sample)
    )
    theirs = [each for family in parser.text_string_to_metric_families(page) for each in family.samples]
    for name in NAMES:
        for label in ({}, *({"code": each.labels["code"]} for each in theirs if "code" in each.labels)):
            having = [each.value for each in theirs if each.name == name and label.items() <= each.labels.items()]
            (found,) = sums(page, [Series(name, frozenset(label.items()))])
            assert found == (pytest.approx(sum(having), abs=1e-3) if having else None)


@given(st.text())
@example("up{")
@example('up{a="b" 1\n')
@example("up 1 2 3 4\n")
def test_garbage_has_no_value_or_is_refused(garbage: str) -> None:
    try:
        found = sums(garbage, [Series("up"), Series("u")])
    except ExpositionError:
        return
    assert all(each is None or math.isfinite(each) for each in found)


@pytest.mark.parametrize(
    "line", ["up", "up 1 x", "up{a=b} 1", 'up{a="b} 1', "up 0x1p3", "up 1_000", "up one", 'up{a="b"', "up{} ", "up # 1"]
)
def test_a_broken_line_of_a_chosen_series_is_refused(line: str) -> None:
    with pytest.raises(ExpositionError):
        sums(f"{line}\n", [Series("up")])
    assert sums(f"{line}\n", [Series("down")]) == [None]  # a page's other series are nobody's business


def test_values_that_are_no_numbers_to_draw_are_left_out() -> None:
    page = 'up{a="1"} NaN\nup{a="2"} +Inf\nup{a="3"} 2\nonly NaN\nbig{a="1"} 1e308\nbig{a="2"} 1e308\n'
    assert sums(page, [Series("up"), Series("only"), Series("big")]) == [2.0, None, None]


def test_a_last_line_without_its_end_is_skipped_because_it_may_be_cut() -> None:
    assert sums("up 1\nup 234", [Series("up")]) == [1.0]


def test_a_series_with_too_many_samples_is_refused() -> None:
    page = "".join(f'up{{client="{number}"}} 1\n' for number in range(MAX_SAMPLES + 1))
    with pytest.raises(ExpositionError, match="more than 10,000 samples"):
        sums(page, [Series("up")])
    assert sums(page.replace("up{", "upper{"), [Series("up")]) == [None]


def test_one_endless_line_is_read_in_one_pass() -> None:
    for piece in ("up{" + 'a="' * 300_000, "up{" + '"' * 300_000, "up" * 300_000, "up " + "1" * 300_000 + " x"):
        with pytest.raises(ExpositionError):
            sums(f"up 1\n{piece}\nup x\n", [Series("up")])


def test_a_sample_with_endless_labels_is_refused() -> None:
    with pytest.raises(ExpositionError):
        sums("up{" + 'a="1",' * 300_000 + "} 1\n", [Series("up")])


def test_labels_are_unescaped() -> None:
    assert labels_of(r'a="x\\y\"z\n", "b.c"="1",') == {"a": 'x\\y"z\n', "b.c": "1"}
