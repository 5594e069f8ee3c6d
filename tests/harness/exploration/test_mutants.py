"""Every mutant is found at once under its scenario; the node without it passes.

How often and how fast each is found over many seeds, with a control for every finding, is measured by
`python -m benchmarks.mutants` (docs/mutants.md).
"""

from __future__ import annotations

import pytest

from harness.errors import OperatorError
from harness.exploration.mutants import SCENARIOS, gives_away, rehearse_mutant
from node.mutants.catalogue import MUTANTS

SEEDS = 10
"""More than any mutant needs by far. Which seed it takes depends on the order of events, which may change."""

CONTROLS = ("commit-old-terms", "truncate-not-persisted", "vote-not-persisted", "checksum-ignored")
"""Scenarios whose control is run here too: those of the most violent faults, and Figure 8."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str) -> None:
    seen = []
    for seed in range(SEEDS):
        run = rehearse_mutant(name, seed)
        if gives_away(run):
            return
        seen.append(run.reason)
    pytest.fail(f"not found in {SEEDS} seeds: {seen}")


@pytest.mark.parametrize("name", CONTROLS)
def test_the_node_itself_passes(name: str) -> None:
    control = rehearse_mutant(name, 1, is_control=True)
    assert not gives_away(control), control.reason


def test_every_mutant_has_a_scenario() -> None:
    assert SCENARIOS.keys() == MUTANTS.keys()
    for name, scenario in SCENARIOS.items():
        for seed in range(20):
            test, schedule = scenario.run_of(name, seed)
            assert len(schedule) == 2 * scenario.rounds * len(scenario.steps)
            assert schedule.end_s <= test.time_limit_s
            assert schedule == type(schedule).from_json(schedule.to_json())
            assert schedule == scenario.run_of("none", seed)[1], "the control's faults are the same"


def test_an_unknown_mutant_is_told_with_the_known_ones() -> None:
    with pytest.raises(OperatorError, match=r"unknown mutant 'ack-before-quorun'.*ack-before-quorum"):
        rehearse_mutant("ack-before-quorun", 1)
