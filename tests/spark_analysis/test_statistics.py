"""The arithmetic against brute force and known values."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_analysis.statistics import (
    difference_interval,
    fisher_exact,
    holm,
    mann_whitney,
    nearest_rank,
    odds_ratio,
    rank_of,
    wilson,
)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_ends_of_a_wilson_interval_are_where_the_score_test_turns(counts: tuple[int, int]) -> None:
    hits, trials = counts
    interval = wilson(hits, trials)
    z = 1.959963984540054
    for end, touched in ((interval.low, hits > 0), (interval.high, hits < trials)):
        if touched:
            assert abs(hits / trials - end) == pytest.approx(z * math.sqrt(end * (1 - end) / trials), rel=1e-9)
    assert 0 <= interval.low <= hits / trials <= interval.high <= 1


def test_a_wilson_interval_of_no_hits_has_a_known_upper_bound(recounting: ModuleType) -> None:
    z_square = 1.959963984540054**2
    assert wilson(0, 30).low == 0
    assert wilson(0, 30).high == pytest.approx(z_square / (30 + z_square))
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0, 1)
    assert recounting.wilson_by_search(3, 10) == pytest.approx((wilson(3, 10).low, wilson(3, 10).high))
    with pytest.raises(ValueError, match="no proportion"):
        wilson(2, 1)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_fisher_agrees_with_counting_the_tables_that_are_no_likelier(of_a: int, of_b: int, data: st.DataObject) -> None:
    a, b = data.draw(st.integers(0, of_a)), data.draw(st.integers(0, of_b))
    hits = a + b
    tables: dict[int, int] = {}
    for chosen in itertools.combinations(range(of_a + of_b), hits):
        first = sum(place < of_a for place in chosen)
        tables[first] = tables.get(first, 0) + 1
    expected = Fraction(sum(ways for ways in tables.values() if ways <= tables[a]), math.comb(of_a + of_b, hits))
    assert fisher_exact(a, of_a, b, of_b) == pytest.approx(float(expected))


def test_fisher_gives_the_known_p_for_the_lady_tasting_tea() -> None:
    assert fisher_exact(3, 4, 1, 4) == pytest.approx(0.4857142857)


@given(st.lists(st.integers(0, 50), unique=True, min_size=2, max_size=9), st.data())
def test_mann_whitney_agrees_with_counting_every_arrangement(values: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(values) - 1))
    first, second = values[:size], values[size:]

    def u_of(ones: tuple[int, ...], others: list[int]) -> int:
        return sum(b > a for a in ones for b in others)

    seen = u_of(tuple(first), second)
    every = [u_of(c, [v for v in values if v not in c]) for c in itertools.combinations(values, size)]
    below, above = sum(u <= seen for u in every), sum(u >= seen for u in every)
    test = mann_whitney(first, second)
    assert test.exact
    assert test.u == seen
    assert test.p == pytest.approx(min(1.0, 2 * min(below, above) / len(every)))
    assert test.effect == pytest.approx(sum((b > a) - (b < a) for a in first for b in second) / (size * len(second)))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=10), st.data())
def test_mann_whitney_with_ties_agrees_with_counting_every_arrangement(values: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(values) - 1))

    def u_of(places: tuple[int, ...]) -> Fraction:
        ones, others = [values[i] for i in places], [values[i] for i in range(len(values)) if i not in places]
        return sum((Fraction((b > a) + (b >= a), 2) for a in ones for b in others), Fraction(0))

    seen = u_of(tuple(range(size)))
    every = [u_of(places) for places in itertools.combinations(range(len(values)), size)]
    below, above = sum(u <= seen for u in every), sum(u >= seen for u in every)
    test = mann_whitney(values[:size], values[size:])
    assert test.exact
    assert test.u == seen
    assert test.p == pytest.approx(min(1.0, 2 * min(below, above) / len(every)))


@pytest.mark.parametrize(("first", "second", "harmed", "runs"), [(100, 30, 2, 130), (20, 4, 2, 24), (900, 40, 3, 940)])
def test_mann_whitney_is_exact_for_few_positive_values_among_many_zeros(
    first: int, second: int, harmed: int, runs: int
) -> None:
    """Its p is twice the share of choices of the positive values that puts all into the second set."""
    test = mann_whitney([0] * first, [0] * (second - harmed) + list(range(1, harmed + 1)))
    assert test.p == pytest.approx(2 * math.comb(second, harmed) / math.comb(runs, harmed))
    other = mann_whitney([0] * (second - harmed) + list(range(1, harmed + 1)), [0] * first)
    assert (other.p, other.effect) == (test.p, -test.effect)


def test_mann_whitney_uses_the_normal_approximation_for_large_samples() -> None:
    # Reference value of SciPy 1.17, mannwhitneyu(..., method="asymptotic").
    large = mann_whitney(list(range(60)), [value + 0.5 for value in range(60)])
    assert not large.exact
    assert large.p == pytest.approx(0.8769515201868247)
    first, second = [value // 2 for value in range(600)], [value // 2 + 10 for value in range(600)]
    tied = mann_whitney(first, second)
    assert not tied.exact
    ties = sum(size**3 - size for size in Counter(first + second).values())
    variance = 600 * 600 / 12 * (1201 - ties / (1200 * 1199))
    assert tied.p == pytest.approx(math.erfc((tied.u - 180_000 - 0.5) / math.sqrt(2 * variance)))
    assert mann_whitney([1, 1], [1, 1]).p == 1
    assert mann_whitney([], [1]).p == 1


def test_mann_whitney_corrects_the_normal_approximation_for_many_ties() -> None:
    """Three values, 400 times each: an eighth of the variance."""
    first, second = [0] * 210 + [1] * 200 + [2] * 190, [0] * 190 + [1] * 200 + [2] * 210
    test = mann_whitney(first, second)
    u = sum(
        Fraction((b > a) + (b >= a), 2) * n * m for a, n in Counter(first).items() for b, m in Counter(second).items()
    )
    ranks = (Fraction(401, 2), Fraction(1201, 2), Fraction(2001, 2))
    middle = Fraction(1201, 2)
    variance = 600 * 600 * sum(400 * (rank - middle) ** 2 for rank in ranks) / (1200 * 1199)
    assert not test.exact and test.u == u
    assert test.p == pytest.approx(
        math.erfc(float(abs(u - 180_000) - Fraction(1, 2)) / math.sqrt(2 * variance)), rel=1e-9
    )


def test_mann_whitney_is_exact_up_to_fifty_runs_against_fifty() -> None:
    assert mann_whitney(range(50), range(50, 100)).exact
    assert not mann_whitney(range(50), range(50, 101)).exact


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_monotone_and_no_smaller(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(b >= a for a, b in zip(p_values, adjusted, strict=True))
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for place, at in enumerate(order):
        expected = max(min(1.0, (len(p_values) - i) * p_values[order[i]]) for i in range(place + 1))
        assert adjusted[at] == pytest.approx(expected)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.sampled_from([1, 500, 900, 990, 999, 1000]))
def test_nearest_rank_is_the_smallest_value_that_covers_the_share(values: list[int], permille: int) -> None:
    ordered = sorted(values)
    value = nearest_rank(ordered, permille)
    assert sum(v <= value for v in values) * 1000 >= permille * len(values)
    smaller = [v for v in values if v < value]
    assert len(smaller) * 1000 < permille * len(values)
    assert 1 <= rank_of(permille, len(values)) <= len(values)


@pytest.mark.parametrize("permille", [1, 500, 900, 990, 999, 1000])
def test_ranks_are_exact_for_samples_of_any_size(permille: int) -> None:
    for size in (*range(1, 1_200), 10**6, 10**6 + 1, 10**12 + 7):
        assert rank_of(permille, size) == max(1, math.ceil(Fraction(permille * size, 1000)))


def test_without_runs_a_difference_may_be_anything() -> None:
    for interval in (difference_interval(0, 0, 1, 4), difference_interval(1, 4, 0, 0)):
        assert (interval.low, interval.high) == (-1, 1)


def test_the_difference_interval_and_the_odds_ratio_have_known_values() -> None:
    # Newcombe (1998), table II, row (a): 56/70 against 48/80, method 10: 0.0524 to 0.3339.
    interval = difference_interval(48, 80, 56, 70)
    assert (interval.low, interval.high) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    assert odds_ratio(1, 10, 9, 10) == pytest.approx((9.5 / 1.5) / (1.5 / 9.5))
    with pytest.raises(ValueError, match="empty"):
        nearest_rank([], 500)
