"""Counted nouns with verbs that agree, and clock offsets in readable units."""

from __future__ import annotations

import pytest

from nemesis.words import offset, plural, plural_with


@pytest.mark.parametrize(
    ("number", "counted", "with_verb"),
    [(0, "0 links", "0 links pass"), (1, "1 link", "1 link passes"), (12345, "12,345 links", "12,345 links pass")],
)
def test_one_is_singular(number: int, counted: str, with_verb: str) -> None:
    assert plural(number, "link") == counted
    assert plural_with(number, "link", ("passes", "pass")) == with_verb


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"), (-4202, "-4202 ms"), (9999, "9999 ms"), (10_000, "10.0 s"), (-5_032_145, "-5,032.1 s"),
        (7_400_000, "2.1 h"), (172_800_000, "2.0 days"), (-819_936_000_000, "-9,490.0 days"),
    ],
)  # fmt: skip
def test_a_clock_offset_is_shown_in_a_readable_unit(ms: int, text: str) -> None:
    assert offset(ms) == text
