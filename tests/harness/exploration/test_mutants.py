"""Every mutant is found within a few seeds of its scenario; the node without it passes.

How often and how fast each is found over many seeds, with a control for every finding, is measured by
`python -m benchmarks.mutants` (docs/mutants.md).
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.mutants import POWER_FORMS, POWER_RESULTS, table
from harness.errors import OperatorError
from harness.exploration.mutants import SCENARIOS, Scenario, Step, gives_away, rehearse_mutant, report_mutant
from harness.exploration.rehearsal import rehearse_test
from harness.store import Store
from harness.systems.broker import BrokerSystem
from nemesis.schedule import load_schedule
from node.mutants.catalogue import NO_MUTANT, SCRIPTED_MUTANTS

pytestmark = pytest.mark.computed

SEEDS = 10
"""Far more than any mutant needs. Which seed finds it depends on the order of events, which may change."""

SCRIPTED = {
    "commit-beyond-end", "commit-old-terms", "duplicate-apply", "end-term-from-current-term", "truncate-committed",
    "truncate-not-persisted",
}  # fmt: skip
"""Found by the same scripts in tests/schedules."""

ROUNDS = {"accept-gap": 3, "queue-offset-reuse": 4, "vote-despite-leader": 2}
"""One round of a scenario is enough for most. These need two victims, or two or three leaders."""

FIRST_SEED = {
    "members-forgotten": 2, "transfer-keeps-lead": 1, "vote-despite-leader": 8, "vote-for-shorter-log": 1,
    "vote-without-fsync": 1,
}  # fmt: skip
"""Earlier seeds show nothing, or end a majority of replicas, which is then waited for."""

RECOVERY_S = 12.0
"""From the end of the load, as in tests/schedules/test_properties.py; controls are held to it as well. The replicas of
some mutants never agree again, and would be simulated for a minute of virtual time."""

CONTROLS = (
    "checksum-ignored", "in-hand-forgotten", "lease-on-wall-clock", "timers-forgotten", "vote-not-persisted",
    "vote-without-fsync",
)  # fmt: skip
"""Scenarios whose control is run here too; those of the scripts are run there."""


def scenario_of(name: str) -> Scenario:
    return dataclasses.replace(SCENARIOS[name], rounds=ROUNDS.get(name, 1))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery within RECOVERY_S, or the replicas count as stuck."""
    monkeypatch.setattr(BrokerSystem, "recovery_timeout_s", RECOVERY_S)


@pytest.mark.parametrize("name", [name for name in SCRIPTED_MUTANTS if name not in SCRIPTED])
def test_each_mutant_is_found_under_its_scenario(name: str, soon: None, node_exceptions: list[str]) -> None:
    seen = []
    first = FIRST_SEED.get(name, 0)
    for seed in range(first, first + SEEDS):
        run = rehearse_test(*scenario_of(name).run_of(name, seed))
        if gives_away(run):
            assert not node_exceptions, "a mutant is found by what it breaks, not by an exception of its own"
            return
        seen.append(run.reason)
    pytest.fail(f"not found in {SEEDS} seeds: {seen}")


@pytest.mark.parametrize("name", CONTROLS)
def test_the_node_without_a_mutant_passes(name: str, soon: None) -> None:
    control = rehearse_test(*scenario_of(name).run_of(NO_MUTANT, 1))
    assert not gives_away(control), control.reason


def test_every_mutant_has_a_scenario() -> None:
    assert tuple(SCENARIOS) == SCRIPTED_MUTANTS
    for name, scenario in SCENARIOS.items():
        for seed in range(20):
            test, schedule = scenario.run_of(name, seed)
            assert len(schedule) == 2 * scenario.rounds * len(scenario.steps)
            assert schedule.end_s <= test.time_limit_s
            assert schedule == type(schedule).from_json(schedule.to_json())
            assert schedule == scenario.run_of("none", seed)[1], "the control's faults are the same"


def test_an_unknown_mutant_is_reported_with_similar_ones() -> None:
    with pytest.raises(OperatorError, match=r"unknown mutant 'ack-before-quorun'.*ack-before-quorum"):
        rehearse_mutant("ack-before-quorun", 1)


def test_the_report_of_a_mutant_names_the_command_that_repeats_its_run(tmp_path: Path) -> None:
    run_dir = report_mutant("stale-leader-reads", 1, Store(tmp_path))
    words = shlex.split(run_dir.read_results()["replay"])
    path = words[words.index("--nemesis-schedule") + 1]
    test, schedule = SCENARIOS["stale-leader-reads"].run_of("stale-leader-reads", 1)
    assert load_schedule(path) == schedule and test.seed == int(words[words.index("--seed") + 1])
    assert run_dir.trace_path.exists()


def test_the_table_names_the_commit_on_which_each_mutant_was_searched_for() -> None:
    result = {
        "searches": [{}], "found": 0, "runs": 1, "controls": 1, "controls_not_clean": 0, "checks": {},
    }  # fmt: skip
    measured = {name: {**result, "commit": "c" * 40} for name in SCENARIOS}
    page = table(measured | {"accept-gap": result})
    assert "\nAt an unrecorded commit: accept-gap.\n" in page
    assert "\nAt commit cccccccccccc: vote-not-persisted, vote-without-fsync, " in page
    assert "\nAt commit cccccccccccc: all.\n" in table(measured)
    by_pypy = {name: {**each, "interpreter": "PyPy 3.11"} for name, each in measured.items()}
    assert "\nAt commit cccccccccccc, run with PyPy 3.11: all.\n" in table(by_pypy)


@pytest.mark.parametrize("form", ["slow-monotonic", "fast-monotonic"])
def test_a_fault_of_the_monotonic_clock_is_proven_in_simulation(form: str) -> None:
    scenario = Scenario(steps=(Step(fault=f"clock={form}@one", at_s=(0.0, 0.1), for_s=(1.5, 1.6)),), rounds=1)
    for seed in range(4):
        run = rehearse_test(*scenario.run_of(NO_MUTANT, seed))
        assert run.valid is True, run.reason


def test_every_power_cut_of_a_scenario_takes_the_form_that_is_measured() -> None:
    scenario = SCENARIOS["late-truncate"]
    assert "power=cut-posix@n3" in scenario.faults
    for form in ("cut", "cut-posix", "cut-torn"):
        assert re.findall(r"power=[a-z-]+@n3", scenario.under(form).faults) == [f"power={form}@n3"]


def test_the_power_table_has_every_mutant_whose_scenario_cuts_power() -> None:
    measured = json.loads(POWER_RESULTS.read_text(encoding="utf-8"))
    assert list(measured) == [name for name, scenario in SCENARIOS.items() if "power=cut" in scenario.faults]
    assert all(list(by_model) == list(POWER_FORMS) for by_model in measured.values())
