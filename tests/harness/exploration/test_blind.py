"""Searches without a hint: how those that found nothing count, and what a measurement leaves behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import _blind
from benchmarks._blind import (
    FULL,
    SEARCHED,
    SMALL,
    blind_table,
    guide_table,
    measure_blind,
    quantile,
    read_conditions,
    read_results,
)

ENDS = st.lists(st.tuples(st.integers(1, 30).map(float), st.booleans()), min_size=1, max_size=20)


def share_found(ends: list[tuple[float, bool]], by: float) -> float:
    """The Kaplan-Meier estimate of the share that has found something by a moment, straight from its formula."""
    left = 1.0
    for moment in sorted({value for value, is_found in ends if is_found and value <= by}):
        at_risk = sum(value >= moment for value, _ in ends)
        left *= 1 - sum(is_found and value == moment for value, is_found in ends) / at_risk
    return 1 - left


@given(ends=ENDS, ratio=st.sampled_from((0.1, 0.5, 0.9)))
def test_a_quantile_is_the_first_moment_at_which_the_estimate_reaches_its_ratio(
    ends: list[tuple[float, bool]], ratio: float
) -> None:
    at = quantile(ends, ratio)
    moments = sorted({value for value, is_found in ends if is_found})
    reached = [moment for moment in moments if share_found(ends, moment) >= ratio - 1e-9]
    assert at == (reached[0] if reached else None)


@given(values=st.lists(st.integers(1, 100).map(float), min_size=1, max_size=20))
def test_if_every_search_succeeds_it_is_an_ordinary_quantile(values: list[float]) -> None:
    assert quantile([(value, True) for value in values], 0.5) == sorted(values)[math.ceil(len(values) / 2) - 1]
    assert quantile([(value, False) for value in values], 0.1) is None


def result(mutant: str, ground: str, number: int, *, seeds: int, is_found: bool) -> dict[str, Any]:
    found = {"checks": ["invariants"]} if is_found else {}
    return {
        "mutant": mutant, "ground": ground, "number": number, "first_seed": 0, "budget_s": 60.0, "found": is_found,
        "seeds": seeds, "core_s": float(seeds), "unclean": [], **found,
    }  # fmt: skip


def test_the_table_names_the_mutants_that_were_not_found() -> None:
    results = [
        *(result("accept-gap", "log", number, seeds=3, is_found=True) for number in range(4)),
        result("accept-gap", "log", 4, seeds=9, is_found=False),
        result("late-truncate", "log", 0, seeds=11, is_found=False),
    ]
    text = "\n".join(blind_table(results))
    assert "1 of 2 mutants were found" in text and "Found in none: late-truncate." in text
    assert "| accept-gap | log | 4 of 5 | 3 (> 9) | 3 (> 9) | invariants |" in text
    assert "| late-truncate | log | 0 of 1 | > 11 | > 11 |  |" in text
    assert blind_table([]) == []


def test_a_measurement_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blind, "blind_search", fake_search)
    path = tmp_path / "blind.jsonl"
    known = {**result("accept-gap", "log", 0, seeds=99, is_found=False), "load": SEARCHED}
    said = [
        {"conditions": "a busy machine", "load": SEARCHED},
        {"conditions": "of before"},
        {"conditions": "a quiet one", "load": SMALL},
        known,
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in said))
    measure_blind(["accept-gap"], searches=2, budget_s=1.0, jobs=1, path=path)
    seen = [(each["ground"], each["number"], each["seeds"]) for each in read_results(path)]
    grounds = ["log", "register", "queue", "transactions"]
    assert seen == [("log", 0, 99), *((ground, 0, 1) for ground in grounds[1:]), *((each, 1, 1) for each in grounds)]
    assert read_conditions(path) == {SEARCHED: ["a busy machine"], FULL: ["of before"], SMALL: ["a quiet one"]}
    lines = blind_table(read_results(path), read_conditions(path))
    assert "a busy machine" in lines
    assert not {"a quiet one", "of before"} & set(lines), "nothing was searched both ways, nor with that load"
    before = {**known, "load": FULL}
    both = "\n".join(blind_table([*read_results(path), before], read_conditions(path)))
    assert both.index("| accept-gap | log | 1 of 2 |") < both.index("of before") and "| log | 0 of 1 |" in both


def test_a_measurement_with_and_without_a_guide_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blind, "blind_search", fake_search)
    path = tmp_path / "blind.jsonl"
    for ways in ((False,), (False, True)):
        measure_blind(
            ["accept-gap"], searches=2, budget_s=1.0, jobs=1, path=path, ways=ways, load=SMALL, grounds=["log"]
        )
    seen = [(each["number"], each["guided"], each["load"]) for each in read_results(path)]
    assert seen == [(0, False, SMALL), (1, False, SMALL), (0, True, SMALL), (1, True, SMALL)]
    measure_blind(["accept-gap"], searches=3, budget_s=1.0, jobs=1, path=path, until_s=0.0)
    assert len(read_results(path)) == 4, "no search starts when the time is over"


def test_searches_of_two_commits_are_not_compared_but_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blind, "blind_search", fake_search)
    path = tmp_path / "blind.jsonl"
    random_one = {**result("accept-gap", "log", 0, seeds=9, is_found=False), "load": SMALL, "guided": False}
    guided = {**random_one, "guided": True, "commit": "another"}
    path.write_text(json.dumps(random_one) + "\n" + json.dumps(guided) + "\n")
    assert guide_table(read_results(path)) == []
    measure_blind(
        ["accept-gap"], searches=1, budget_s=1.0, jobs=1, path=path, ways=(False, True), load=SMALL, grounds=["log"]
    )
    assert [each["seeds"] for each in read_results(path)] == [9, 9, 1, 1]
    assert any("| accept-gap | log | 1 of 1 |" in line for line in guide_table(read_results(path)))


def test_a_guide_is_compared_by_searches_that_were_made_with_and_without_it() -> None:
    def search(number: int, core_s: int, *, is_guided: bool) -> dict[str, Any]:
        found = result("accept-gap", "log", number, seeds=core_s, is_found=core_s < 60)
        return {**found, "guided": is_guided, "load": SMALL}

    random_ones = [search(number, core_s, is_guided=False) for number, core_s in enumerate((20, 40, 60, 60, 10, 10))]
    guided = [search(number, core_s, is_guided=True) for number, core_s in enumerate((10, 20, 30, 30, 5))]
    text = "\n".join(guide_table([*random_ones, *guided], {SMALL: ["on a quiet machine"]}))
    assert "| accept-gap | log | 3 of 5 | 40 | 38 | 5 of 5 | 20 | 19 | 2.00 (" in text
    assert "found by 3 of 5 random and 5 of 5 guided searches" in text and "by the medians: 2.00 (" in text
    assert "on a quiet machine" in text and "from the same seeds, of 60 core s:" in text
    assert guide_table(random_ones) == []
    few = [each for each in [*random_ones, *guided] if each["number"] < 4]
    assert "| 20 | 22 |  |" in "\n".join(guide_table(few)), "fewer than five give no interval"
    assert "| accept-gap | log | 5 of 5 |" not in "\n".join(blind_table([*random_ones, *guided])).split("### With")[0]


def fake_search(
    mutant: str, ground: str, *, number: int, budget_s: float, is_guided: bool, load: str
) -> dict[str, Any]:
    return {**result(mutant, ground, number, seeds=1, is_found=True), "guided": is_guided, "load": load}
