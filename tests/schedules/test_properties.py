"""Under any faults at any time the node stays safe, and is live once they have stopped.

The properties that a run must have, and which of its checks verifies each (harness.clusters.sim.invariants,
harness.systems.broker_checks, the workloads' own):

    at most one leader in a term                      invariants (votes, election), leaders
    committed entries never change or vanish          invariants (completeness, commitment, end, recovery), replicas
    log matching                                      invariants (matching)
    acknowledged is present on a majority's disks     invariants (acknowledgement, durability)
    no read goes back in time                         linearizable, log
    after the last heal a leader within a bound,      replicas (unknown is "stuck"), by RECOVERY_S of virtual time
    and all replicas equal

The first phase is one of safety, with load and faults; in the second one the faults have stopped and the cluster must
make progress: take writes, bring all replicas to the same end, answer the final reads. The mutants of MUST_BREAK show
that the checks detect mistakes; for log matching, which no mutant breaks on its own, the tests of the invariants do.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.execution import rehearse
from harness.exploration.mutants import SCENARIOS
from harness.exploration.rehearsal import parts_of, rehearse_test
from harness.systems.broker import BrokerSystem
from harness.test import Test
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule
from nemesis.triggers import KINDS

pytestmark = pytest.mark.computed

LOAD_S = 4.0

SEEDS = 6
"""In one of which a mutant must be seen; how an election goes depends on the order of events."""

RECOVERY_S = 12.0
"""From the end of the load, half a second after the last heal: some elections of the fast timings, and the repair of
logs of a few seconds."""

FAULTS = (
    "partition=leader", "partition=one", "partition=one-way", "partition=halves", "partition=bridge",
    "partition=majorities-ring", "partition=n1|n2", "partition=n2>n3", "partition=n1+n2|n3",
    "kill=sigkill@leader", "kill=sigkill@one", "kill=sigkill@all", "kill=terminate@leader", "kill=crash-loop@one",
    "pause=sigstop@leader", "pause=sigstop@one", "power=cut@leader", "power=cut@one", "power=cut@all",
    "disk-stall=fsync@leader", "disk-stall=all@one", "disk-slow=mild@all", "disk-full=full@leader",
    "disk-error=write@one", "disk-error=fsync@leader", "clock=bump@leader", "clock=drift@one", "clock=strobe@one",
    "link=loss@leader", "link=reorder@all", "link=duplicate@all", "link=delay@one", "link=rate@leader",
    "bit-flip=log@one",
)  # fmt: skip

faults = st.tuples(
    st.sampled_from(FAULTS),
    st.floats(0.2, LOAD_S - 1.0),
    st.floats(0.05, 1.5),
    st.none() | st.sampled_from(sorted(KINDS)),
    st.sampled_from(("", "+0.0002", "+0.001", "+0.02")),
)


GOES_BY_WALL_CLOCK = ("delay",)
"""Workloads whose messages may come too early when a clock is wrong, as RocketMQ's do: no faults of clocks there."""


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Up to four faults, which may overlap and may wait for triggers."""
    events = []
    for number, (fault, at_s, for_s, kind, delay) in enumerate(draw(st.lists(faults, min_size=1, max_size=4))):
        nemesis, _, variant = fault.partition("=")
        when = None if kind is None else kind + delay
        for time_s, action, trigger in ((at_s, INJECT, when), (min(at_s + for_s, LOAD_S - 0.5), HEAL, None)):
            events.append(
                FaultEvent(
                    at_s=time_s,
                    action=action,
                    fault_id=f"f{number}",
                    nemesis=nemesis,
                    variant=variant,
                    when=trigger,
                )
            )
    events.sort(key=lambda event: event.at_s)
    return Schedule(tuple(events))


@pytest.fixture(scope="module")
def short_recovery() -> Any:
    """Recovery within RECOVERY_S, or the replicas count as stuck."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BrokerSystem, "recovery_timeout_s", RECOVERY_S)
        yield


@pytest.mark.timeout(900)  # a failure is shrunk run by run: that is worth more than an end in time
@settings(max_examples=10, phases=[phase for phase in Phase if phase is not Phase.explain])
@given(
    schedule=schedules(),
    seed=st.integers(0, 2**32),
    workload=st.sampled_from(("register", "log", "queue", "delay", "transactions")),
    nodes=st.sampled_from((3, 5)),
)
def test_the_node_is_safe_and_live_under_any_schedule(
    short_recovery: None, schedule: Schedule, seed: int, workload: str, nodes: int
) -> None:
    test = Test(
        system="broker", cluster="sim", nodes=nodes, workload=workload, nemesis=(), nemesis_interval_s=5.0,
        time_limit_s=LOAD_S, concurrency=4, rate=60.0, seed=seed,
    )  # fmt: skip
    if workload in GOES_BY_WALL_CLOCK:
        schedule = Schedule(tuple(event for event in schedule.events if event.nemesis != "clock"))
    run = rehearse_test(test, schedule)
    # A fault that could not be proven, such as one that found no leader, says nothing about the node.
    assert run.symptoms == (), f"{run.reason}\n{test.replay_line()}\n{schedule.to_json()}"
    assert run.operations > 0


MUST_BREAK: Mapping[str, tuple[str, ...]] = {
    "vote-not-persisted": ("invariants votes", "invariants election", "leaders"),
    "vote-for-shorter-log": ("invariants completeness", "invariants commitment", "replicas"),
    "checksum-ignored": ("invariants recovery",),
    "truncate-committed": ("invariants end",),
    "accept-gap": ("invariants durability",),
    "ack-before-quorum": ("invariants acknowledgement",),
    "ack-before-fsync": ("invariants durability",),
    "stale-leader-reads": ("linearizable",),
    "compare-index-only": ("replicas stuck",),
}
"""Mutant -> what its scenario must break."""

SLOW = {"accept-gap", "compare-index-only", "truncate-committed", "vote-for-shorter-log"}
"""Mutants that take some seeds, several rounds, or a minute of virtual time until the replicas count as stuck."""


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(name, marks=[pytest.mark.long] if name in SLOW else []) for name in MUST_BREAK],
)
def test_the_checks_detect_the_mutant(mutant: str, short_recovery: None, tmp_path: Path) -> None:
    missing = set(MUST_BREAK[mutant])
    for seed in range(SEEDS):
        quiet = Console(file=io.StringIO(), quiet=True)
        parts = parts_of(*SCENARIOS[mutant].run_of(mutant, seed))
        checks = rehearse(parts, str(tmp_path / str(seed)), quiet)["checks"]
        missing -= {name for name, check in checks.items() if check["valid"] is False}
        missing -= {f"{name} stuck" for name, check in checks.items() if check["valid"] == "unknown"}
        missing -= {f"invariants {each['rule']}" for each in checks["invariants"].get("violations", ())}
        if not missing:
            return
    pytest.fail(f"not seen in {SEEDS} seeds: {', '.join(sorted(missing))}")
