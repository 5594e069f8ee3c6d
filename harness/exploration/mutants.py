"""The scenario under which each mutant (node.mutants) is looked for, and one run of it.

A scenario is short and dense: many overlapping faults in a few seconds, aimed at what the mutant gets wrong. The same
seed without the mutant is the control; it must be valid, or the finding is none.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.errors import OperatorError, nearest
from harness.exploration.mixes import random_mix
from harness.exploration.rehearsal import SIMULATED, Rehearsal, rehearse_test, usable_choices
from harness.test import NemesisChoice, Test
from nemesis.schedule import Schedule
from node.mutants.catalogue import MUTANTS, NO_MUTANT

__all__ = ["SCENARIOS", "Scenario", "gives_away", "rehearse_mutant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a mutant is run under. `nemesis` lists choices as the command line takes them; a name may be given more
    than once, and is as likely to come as it is often there."""

    workload: str = "log"
    nemesis: str = "kill,partition,pause"
    nodes: int = 3
    time_limit_s: float = 8.0
    rate: float = 100.0
    concurrency: int = 6
    faults: int = 6
    settings: Mapping[str, str] = field(default_factory=dict)

    def run_of(self, mutant: str, seed: int) -> tuple[Test, Schedule]:
        """The test and the faults of one seed; faults and load do not depend on the mutant."""
        test = Test(
            system="broker", cluster=SIMULATED, nodes=self.nodes, workload=self.workload, nemesis=(),
            nemesis_interval_s=5.0, time_limit_s=self.time_limit_s, concurrency=self.concurrency, rate=self.rate,
            seed=seed, settings={**self.settings, "mutant": mutant},
        )  # fmt: skip
        choices = []
        for text in self.nemesis.split(","):
            choices += usable_choices(dataclasses.replace(test, nemesis=(NemesisChoice.parse(text),)))
        rng = random.Random(f"{seed}/mutants")
        return test, random_mix(choices, rng, time_limit_s=self.time_limit_s, events=2 * self.faults)


_ELECTIONS = Scenario(nemesis="kill=sigkill@leader,partition=leader,partition=one,pause=sigstop@one")

SCENARIOS: Mapping[str, Scenario] = {
    "vote-not-persisted": Scenario(
        nemesis="kill=crash-loop@one,kill=sigkill@minority,partition=bridge,partition=leader", faults=9
    ),
    "vote-without-fsync": Scenario(nemesis="power=cut@one,power=cut@leader,partition=leader", faults=9),
    "vote-for-shorter-log": Scenario(
        nemesis="partition=one,pause=sigstop@one,kill=sigkill@leader,partition=leader", faults=9
    ),
    "end-term-from-current-term": Scenario(nemesis="partition=leader,partition=one,kill=sigkill@all", faults=9),
    "commit-old-terms": _ELECTIONS,
    "ack-before-quorum": Scenario(nemesis="kill=sigkill@leader,partition"),
    "ack-before-fsync": Scenario(nemesis="power=cut@all,disk-slow=mild@all"),
    "quorum-off-by-one": Scenario(nemesis="partition=leader,kill=sigkill@leader"),
    "commit-beyond-end": Scenario(
        nemesis="partition=one,partition=leader,link=loss@leader,kill=sigkill@one", rate=300.0
    ),
    "truncate-committed": Scenario(nemesis="partition=leader,partition=one,kill=sigkill@leader", rate=200.0),
    "truncate-not-persisted": Scenario(nemesis="partition=leader,power=cut@one,power=cut@leader", rate=200.0, faults=9),
    "compare-index-only": Scenario(nemesis="partition=leader,partition=leader,kill=sigkill@leader"),
    "accept-gap": Scenario(nemesis="link=loss@leader,partition=one,kill=sigkill@leader,link=reorder@all", rate=300.0),
    "stale-leader-reads": Scenario(workload="register", nemesis="partition=leader"),
    "lease-on-wall-clock": Scenario(
        workload="register", nemesis="partition=leader,clock=bump@leader,clock=drift@leader", faults=8,
        settings={"read_mode": "lease"},
    ),
    "no-step-down": _ELECTIONS,
    "early-promotion": Scenario(nemesis="kill=sigkill@leader,partition"),
    "queue-offset-reuse": Scenario(nemesis="partition=leader,pause=sigstop@leader", faults=8),
    "duplicate-apply": Scenario(nemesis="kill=sigkill@leader,kill=terminate@leader"),
    "checksum-ignored": Scenario(nemesis="power=cut@all,power=cut@leader,disk-slow=mild@all", faults=8, rate=200.0),
    "indefinite-as-definite": Scenario(nemesis="partition=leader,kill=sigkill@leader"),
}  # fmt: skip


def rehearse_mutant(mutant: str, seed: int, *, is_control: bool = False) -> Rehearsal:
    """Run one seed of a mutant's scenario: with the mutant, or without it as the control.

    Raises OperatorError for a name that stands for no mutant.
    """
    if mutant not in SCENARIOS:
        raise OperatorError(f"unknown mutant {mutant!r}{nearest(mutant, MUTANTS)}; known: {', '.join(MUTANTS)}")
    return rehearse_test(*SCENARIOS[mutant].run_of(NO_MUTANT if is_control else mutant, seed))


def gives_away(run: Rehearsal) -> bool:
    """Whether a run shows that something is wrong: a violation, or replicas that do not become equal after all faults
    are healed. Other doubts, such as a fault that found no leader to strike, say nothing."""
    return run.valid is False or (run.valid == "unknown" and "did not catch up" in run.reason)
