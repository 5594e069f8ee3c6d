"""The mutants that are found fastest are found; without them the same seeds are clean."""

from __future__ import annotations

import pytest

from harness.errors import OperatorError
from harness.exploration.mutants import gives_away, rehearse_mutant

FOUND_AT = {
    "ack-before-quorum": 0,
    "quorum-off-by-one": 1,
    "ack-before-fsync": 3,
    "early-promotion": 3,
    "compare-index-only": 1,
    "duplicate-apply": 0,
}
"""The first seed that finds each, by `python -m benchmarks.mutants`."""


@pytest.mark.parametrize("name", FOUND_AT)
def test_a_mutant_is_found(name: str) -> None:
    run = rehearse_mutant(name, FOUND_AT[name])
    assert gives_away(run), run.reason
    control = rehearse_mutant(name, FOUND_AT[name], is_control=True)
    assert not gives_away(control), control.reason


def test_an_unknown_mutant_is_told_with_the_known_ones() -> None:
    with pytest.raises(OperatorError, match=r"unknown mutant 'ack-before-quorun'.*ack-before-quorum"):
        rehearse_mutant("ack-before-quorun", 1)
