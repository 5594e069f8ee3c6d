"""The arithmetic behind every figure: intervals, quantiles, tests, effect sizes.

Uses only the standard library, and is exact where possible, so that executors need nothing else and tests can
compute every number in another way.
"""

from __future__ import annotations

__all__ = [
    "CONFIDENCE",
    "QUANTILES",
    "Interval",
    "RankTest",
    "Z",
    "difference_interval",
    "fisher_exact",
    "holm",
    "mann_whitney",
    "nearest_rank",
    "odds_ratio",
    "rank_of",
    "wilson",
]

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95
"""Confidence level of every interval; `Z` is its normal quantile."""

QUANTILES = {"p50": 500, "p90": 900, "p99": 990, "p999": 999}
"""Quantiles of every distribution, in thousandths."""

Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)

MAX_EXACT_PAIRS = 2_500
"""Largest product of sample sizes for which the rank test, without ties, counts every arrangement: 50 runs against 50,
some milliseconds. Above that the normal approximation is right to three digits."""

MAX_EXACT_WORK = 1_000_000_000
"""Most bytes that the exact count may add up if there are ties: 50 runs against 50 with a few ties (some tenths of a
second), or any number of runs of which all but a hundred have the same value, such as no loss. For the latter the
normal approximation is wrong: it gives 0.01 if none of 100 runs and 2 of 30 lost something, although chance does as
much in a tenth of all cases."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTest:
    """Result of a Mann-Whitney test. `effect` is Cliff's delta: +1 if every value of the second sample is larger."""

    u: float
    p: float
    effect: float
    exact: bool


def wilson(successes: int, trials: int, *, z: float = Z) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927, no continuity correction).

    For 0 of n the high end is z^2/(n + z^2), the rate that "never seen" cannot exclude. Without trials it is 0 to 1.
    Raises ValueError for impossible counts.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} is no proportion")
    if trials == 0:
        return Interval(0.0, 1.0)
    share = successes / trials
    square = z * z
    centre = (share + square / (2 * trials)) / (1 + square / trials)
    half = z / (1 + square / trials) * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return Interval(low, high)


def difference_interval(a: int, of_a: int, b: int, of_b: int) -> Interval:
    """An interval for the proportion of the second sample minus that of the first (Newcombe 1998, method 10)."""
    if of_a == 0 or of_b == 0:
        return Interval(-1.0, 1.0)
    first, second = wilson(a, of_a), wilson(b, of_b)
    share_a, share_b = a / of_a, b / of_b
    difference = share_b - share_a
    below = math.hypot(share_b - second.low, first.high - share_a)
    above = math.hypot(second.high - share_b, share_a - first.low)
    return Interval(max(-1.0, difference - below), min(1.0, difference + above))


def odds_ratio(a: int, of_a: int, b: int, of_b: int) -> float:
    """Odds of the second sample over those of the first, with half a count added everywhere (Haldane)."""
    return ((b + 0.5) / (of_b - b + 0.5)) / ((a + 0.5) / (of_a - a + 0.5))


def fisher_exact(a: int, of_a: int, b: int, of_b: int) -> float:
    """Two-sided p of Fisher's exact test that `a` of `of_a` and `b` of `of_b` have one proportion.

    Sums, in integers, the tables with the same margins that are no likelier than the observed one. Raises
    ValueError for impossible counts.
    """
    if not (0 <= a <= of_a and 0 <= b <= of_b):
        raise ValueError(f"{a} of {of_a} and {b} of {of_b} are no proportions")
    hits, total = a + b, of_a + of_b
    seen = math.comb(of_a, a) * math.comb(of_b, b)
    ways = 0
    for first in range(max(0, hits - of_b), min(of_a, hits) + 1):
        arrangement = math.comb(of_a, first) * math.comb(of_b, hits - first)
        if arrangement <= seen:
            ways += arrangement
    return _ratio(ways, math.comb(total, hits))


def _ratio(part: int, whole: int) -> float:
    """The quotient of two integers of any size as a float, at most 1 (true division allows operands beyond 1e308)."""
    return min(1.0, part / whole)


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> RankTest:
    """Two-sided test that neither sample tends to larger values.

    Exact (all arrangements counted) up to `MAX_EXACT_PAIRS`, or with ties up to `MAX_EXACT_WORK`; otherwise the normal
    approximation with corrections for ties and continuity. Empty samples, or all values equal, give p = 1.
    """
    m, n = len(first), len(second)
    if m == 0 or n == 0:
        return RankTest(u=0.0, p=1.0, effect=0.0, exact=True)
    ordered = sorted([*((value, 0) for value in first), *((value, 1) for value in second)])
    sizes = Counter(value for value, _ in ordered)
    tied = len(sizes) < m + n
    rank_sum, position = 0.0, 0
    tie_groups = []
    while position < m + n:
        value = ordered[position][0]
        size = sizes[value]
        middle = position + (size + 1) / 2
        rank_sum += middle * sum(1 for at in range(position, position + size) if ordered[at][1] == 1)
        tie_groups.append((size, 2 * position + size + 1))
        position += size
    u = rank_sum - n * (n + 1) / 2
    effect = 2 * u / (m * n) - 1
    if not tied and m * n <= MAX_EXACT_PAIRS:
        return RankTest(u=u, p=_exact_p(round(u), m, n), effect=effect, exact=True)
    total = m + n
    if tied and _tied_work(tie_groups, min(m, n)) <= MAX_EXACT_WORK:
        seen = round(2 * rank_sum)
        p = _exact_tied_p(tie_groups, n, seen) if n <= m else _exact_tied_p(tie_groups, m, total * (total + 1) - seen)
        return RankTest(u=u, p=p, effect=effect, exact=True)
    ties = sum(size**3 - size for size in sizes.values())
    variance = m * n / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return RankTest(u=u, p=1.0, effect=effect, exact=False)
    distance = max(0.0, abs(u - m * n / 2) - 0.5) / math.sqrt(variance)
    return RankTest(u=u, p=min(1.0, math.erfc(distance / math.sqrt(2))), effect=effect, exact=False)


def _exact_p(u: int, m: int, n: int) -> float:
    """Twice the smaller tail of the distribution of U over all arrangements.

    The number of arrangements by U is the Gaussian binomial: a product of (1 - q^(n+i)) / (1 - q^i).
    """
    size = m * n + 1
    counts = [0] * size
    counts[0] = 1
    for i in range(1, m + 1):
        for at in range(size - 1, n + i - 1, -1):
            counts[at] -= counts[at - n - i]
        for at in range(i, size):
            counts[at] += counts[at - i]
    below, above = sum(counts[: u + 1]), sum(counts[u:])
    return _ratio(2 * min(below, above), sum(counts))


_TieGroups = Sequence[tuple[int, int]]
"""For every distinct value, ascending: how often it occurs, and twice its (mid)rank, which is an integer."""


def _tied_work(groups: _TieGroups, n: int) -> int:
    """Approximate number of bytes that `_exact_tied_p` adds up."""
    others = sum(size for size, _ in groups) - max(size for size, _ in groups)
    most = min(n, others)
    return others * most * most * 2 * others * (_slot_bits(others, most) // 8 + 1)


def _slot_bits(others: int, most: int) -> int:
    """Bits that hold the number of ways to take at most `most` of `others`."""
    return math.comb(others, min(most, others // 2)).bit_length() + 1


def _exact_tied_p(groups: _TieGroups, n: int, seen: int) -> float:
    """Twice the smaller tail of the distribution of the rank sum of `n` values over all arrangements; `seen` is twice
    the observed sum.

    The most frequent value is handled last, as it only contributes a number of ways. For the others, the number of ways
    by rank sum is a polynomial for each number of values taken, stored as one integer with a slot for each sum.
    """
    common = max(range(len(groups)), key=lambda at: groups[at][0])
    (common_size, common_rank), others = groups[common], [g for at, g in enumerate(groups) if at != common]
    count = sum(size for size, _ in others)
    most = min(n, count)
    least_rank = min((rank for _, rank in others), default=0)
    bits = _slot_bits(count, most)
    ways = [1] + [0] * most
    for size, rank in others:
        step = (rank - least_rank) * bits
        for taken in range(most, 0, -1):
            for of_this in range(1, min(size, taken) + 1):
                ways[taken] += math.comb(size, of_this) * ways[taken - of_this] << of_this * step
    below = above = 0
    for taken in range(max(0, n - common_size), most + 1):
        alike = math.comb(common_size, n - taken)
        at = seen - (n - taken) * common_rank - taken * least_rank
        up_to = _sum_of_slots(ways[taken] & ((1 << max(0, at + 1) * bits) - 1), bits)
        before = _sum_of_slots(ways[taken] & ((1 << max(0, at) * bits) - 1), bits)
        below += alike * up_to
        above += alike * (math.comb(count, taken) - before)
    return _ratio(2 * min(below, above), math.comb(common_size + count, n))


def _sum_of_slots(packed: int, bits: int) -> int:
    """The sum of all slots of an integer, which must fit into one slot: casting out nines in base 2**bits."""
    return packed % ((1 << bits) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for multiple comparisons (Holm 1979), in the order given."""
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for place, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        running = max(running, (len(p_values) - place) * p_values[at])
        adjusted[at] = min(1.0, running)
    return adjusted


def nearest_rank(ordered: Sequence[float], permille: int) -> float:
    """A quantile of an ascending sample by nearest rank: the smallest value that covers that share of it.

    The result is always a value of the sample. `permille` is the quantile in thousandths, so that ranks are computed
    with integers. Raises ValueError for an empty sample.
    """
    if not ordered:
        raise ValueError("an empty sample has no quantiles")
    return ordered[rank_of(permille, len(ordered)) - 1]


def rank_of(permille: int, size: int) -> int:
    """The rank (from 1) of a quantile, given in thousandths, among `size` values."""
    return min(size, max(1, (permille * size + 999) // 1000))
