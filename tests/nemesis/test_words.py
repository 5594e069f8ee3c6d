"""How many there are of something, in words."""

from __future__ import annotations

import pytest

from nemesis.words import plural, plural_with


@pytest.mark.parametrize(
    ("number", "counted", "with_verb"),
    [(0, "0 links", "0 links pass"), (1, "1 link", "1 link passes"), (12345, "12,345 links", "12,345 links pass")],
)
def test_one_is_singular(number: int, counted: str, with_verb: str) -> None:
    assert plural(number, "link") == counted
    assert plural_with(number, "link", ("passes", "pass")) == with_verb
