"""What a plug-in and an operator write to name a series, and what is wrong with it, in a line that helps."""

from __future__ import annotations

import pytest

from harness.errors import OperatorError
from harness.metrics.exposition import Series
from harness.metrics.expression import (
    MAX_METRICS,
    MEAN,
    RATE,
    VALUE,
    Metric,
    Page,
    chosen,
    declared_metrics,
    declared_pages,
    declared_problems,
    metric_of,
)

PAGE = Page("client", "/metrics")
DECLARED = {"client/metrics": {"up": "Is up", "rate(requests_total)": "Requests"}, "peer/": {"db_bytes": "Size"}}


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("up", VALUE, [Series("up")]),
        (' http{code="5 00", x="}"} ', VALUE, [Series("http", frozenset({("code", "5 00"), ("x", "}")}))]),
        ("rate( a_total )", RATE, [Series("a_total")]),
        ("rate", VALUE, [Series("rate")]),
        (
            'mean(a_seconds{op="get"})',
            MEAN,
            [Series(f"a_seconds_{part}", frozenset({("op", "get")})) for part in ("sum", "count")],
        ),
    ],
)
def test_a_series_is_a_name_with_labels_or_its_rate_or_mean(text: str, kind: str, wanted: list[Series]) -> None:
    metric = metric_of(text, PAGE)
    assert (metric.kind, metric.wanted, metric.title) == (kind, (*wanted,), text.strip())


@pytest.mark.parametrize("text", ["", "5xx", "rate(up", "up)", "sum(up)", "up{a=1}", 'up{a!="1"}', "a b", "x" * 201])
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"rate\(requests_total\)|labels"):
        metric_of(text, PAGE)


@pytest.mark.parametrize(
    ("text", "unit"),
    [("db_size_bytes", "bytes"), ("rate(sent_bytes_total)", "bytes/s"), ("mean(fsync_seconds)", "s"), ("up", ""),
     ("rate(up_total)", "/s"), ("mean(size_bytes)", "bytes")],
)  # fmt: skip
def test_the_unit_is_the_one_that_the_name_ends_with(text: str, unit: str) -> None:
    assert metric_of(text, PAGE).unit == unit


def test_declared_metrics_have_their_page_and_title() -> None:
    found = declared_metrics(DECLARED)
    assert [(str(metric.page), metric.text, metric.title) for metric in found] == [
        ("client/metrics", "up", "Is up"),
        ("client/metrics", "rate(requests_total)", "Requests"),
        ("peer/", "db_bytes", "Size"),
    ]
    assert declared_pages({"client/a/b?x=1": {}}) == (Page("client", "/a/b?x=1"),)


def test_mistakes_of_a_plug_in_are_all_named() -> None:
    wrong = {
        "nowhere/metrics": {}, "client": {}, 7: {}, "client/a b": {}, "client/1": "up",
        "client/2": {"up": ""}, "client/3": {"rate(up": "x"}, "client/4": {f"a{n}": "x" for n in range(MAX_METRICS)},
    }  # fmt: skip
    problems = declared_problems(wrong, ["client"])
    assert len(problems) == 8, problems
    assert 'not "PORT/PATH" with the name of a port' in problems[0]
    assert problems[-1] == f"metrics has {MAX_METRICS + 2} series, more than {MAX_METRICS}"
    assert declared_problems(DECLARED, ["client", "peer"]) == []


def chosen_of(*asked: str, declared: dict[str, dict[str, str]] = DECLARED) -> tuple[Metric, ...]:
    return chosen(declared_metrics(declared), asked, pages=declared_pages(declared), system="mine")


def test_the_operator_adds_series_on_each_page_and_turns_all_off() -> None:
    assert [metric.text for metric in chosen_of()] == ["up", "rate(requests_total)", "db_bytes"]
    added = chosen_of("up", "go_goroutines")[3:]
    assert [(str(metric.page), metric.text) for metric in added] == [
        ("peer/", "up"), ("client/metrics", "go_goroutines"), ("peer/", "go_goroutines"),
    ]  # fmt: skip
    assert chosen_of("none") == ()
    assert chosen_of("none", declared={}) == ()


@pytest.mark.parametrize(
    ("asked", "declared", "said"),
    [
        (("none", "up"), DECLARED, "--metrics none cannot be combined"),
        (("up",), {}, "system mine declares no page of metrics"),
        (("rate(",), DECLARED, "--metrics: 'rate\\(' is not a series"),
        (tuple(f"a{n}" for n in range(20)), DECLARED, "43 series, of which 3 are the system's own; at most 16"),
    ],
)
def test_an_operators_mistake_is_one_line(
    asked: tuple[str, ...], declared: dict[str, dict[str, str]], said: str
) -> None:
    with pytest.raises(OperatorError, match=said):
        chosen_of(*asked, declared=declared)
