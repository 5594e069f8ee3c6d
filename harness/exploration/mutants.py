"""The scenario for each scripted mutant (node.mutants), and one run of it.

A scenario is a script: the faults needed to make the mistake visible, in several rounds, with times that the seed
shifts. It was derived from what the mutant gets wrong; the comment above each scenario explains how. The same seed
without the mutant is the control, with the same faults and load: if it shows a symptom too, the finding is void.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.errors import OperatorError, nearest
from harness.exploration.keeping import keep_run
from harness.exploration.rehearsal import SIMULATED, Rehearsal, rehearse_test
from harness.store import RunDir, Store
from harness.test import Test
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule
from node.mutants.catalogue import MUTANTS, NO_MUTANT

__all__ = ["SCENARIOS", "Scenario", "Step", "gives_away", "rehearse_mutant", "report_mutant"]

Range = tuple[float, float]

FIRST_ROUND_S = 1.0
"""The load runs for this long before the first round."""

QUIET_END_S = 1.5
"""The load runs for this long after the last round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One fault of a round. It begins `at_s` after the round's begin and is healed `for_s` later, both drawn from a
    range by the seed; with `when` it then waits for that trigger to begin, with `until` for that one to be healed."""

    fault: str
    """nemesis=variant"""
    at_s: Range
    for_s: Range
    when: str | None = None
    until: str | None = None

    def events(self, fault_id: str, begin_s: float, rng: random.Random) -> list[FaultEvent]:
        """The injection and the heal."""
        nemesis, _, variant = self.fault.partition("=")
        inject_s = begin_s + rng.uniform(*self.at_s)
        heal_s = inject_s + rng.uniform(*self.for_s)
        return [
            FaultEvent(
                at_s=round(at_s, 3), action=action, fault_id=fault_id, nemesis=nemesis, variant=variant, when=when
            )
            for at_s, action, when in ((inject_s, INJECT, self.when), (heal_s, HEAL, self.until))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The faults, load and settings of a mutant's runs: `steps` in each of `rounds` rounds of `round_s` seconds."""

    steps: Sequence[Step]
    rounds: int = 2
    round_s: float = 3.0
    workload: str = "log"
    nodes: int = 3
    rate: float = 100.0
    concurrency: int = 6
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def time_limit_s(self) -> float:
        """How long the load runs."""
        return FIRST_ROUND_S + self.rounds * self.round_s + QUIET_END_S

    @property
    def faults(self) -> str:
        """The faults of a round as text."""
        return ", ".join(dict.fromkeys(step.fault for step in self.steps))

    def under(self, power_form: str) -> Scenario:
        """The same scenario with every power cut in this form of the nemesis, such as `cut-posix`."""
        steps = tuple(
            dataclasses.replace(step, fault=_POWER_CUT.sub(f"power={power_form}@", step.fault)) for step in self.steps
        )
        return dataclasses.replace(self, steps=steps)

    def run_of(self, mutant: str, seed: int) -> tuple[Test, Schedule]:
        """The test and the faults of one seed; faults and load do not depend on the mutant."""
        test = Test(
            system="broker", cluster=SIMULATED, nodes=self.nodes, workload=self.workload, nemesis=(),
            nemesis_interval_s=5.0, time_limit_s=self.time_limit_s, concurrency=self.concurrency, rate=self.rate,
            seed=seed, settings={**self.settings, "mutant": mutant},
        )  # fmt: skip
        rng = random.Random(f"{seed}/mutants")
        events: list[FaultEvent] = []
        for number in range(self.rounds):
            begin_s = FIRST_ROUND_S + number * self.round_s
            for place, step in enumerate(self.steps, start=1):
                events += step.events(f"r{number + 1}.{place}", begin_s, rng)
        return test, Schedule(tuple(sorted(events, key=lambda event: event.at_s)))


def _step(
    fault: str, at: float | Range, length: float | Range, when: str | None = None, until: str | None = None
) -> Step:
    """A step; times given as single numbers vary by a tenth of a second."""

    def range_of(value: float | Range) -> Range:
        return value if isinstance(value, tuple) else (value, value + 0.1)

    return Step(fault=fault, at_s=range_of(at), for_s=range_of(length), when=when, until=until)


_POWER_CUT = re.compile(r"power=cut(-posix|-torn)?@")

_IN_SYNC_HA = {"replication": "sync", "ha_mismatch": "heal", "acknowledged": "success"}
"""Settings of a SYNC_MASTER that will be replaced: its senders count only SUCCESS as an acknowledgement. The workload
must allow reads of unacknowledged messages, since a master serves these (docs/classic-ha.md)."""

SCENARIOS: Mapping[str, Scenario] = {
    # All members forget whom they voted for, and elect a second leader in the same term.
    "vote-not-persisted": Scenario(steps=(_step("kill=sigkill@all", (0, 1), (0.1, 0.4)),)),
    # The power cut loses term and votes of the second election; the log, which is synced, has the term.
    "vote-without-fsync": Scenario(
        steps=(_step("partition=leader", 0, 1.3), _step("power=cut@all", (1.6, 2), (0.1, 0.4))), round_s=3.5
    ),
    # One follower misses what the others acknowledge; then the leader dies and the remaining two elect a new one.
    "vote-for-shorter-log": Scenario(
        steps=(_step("partition=one", 0, (1.5, 1.8)), _step("kill=sigkill@leader", (1.2, 1.5), (1, 1.5)))
    ),
    # A leader that is cut off gets a tail of entries that no other member has. The next leader commits fewer entries
    # and dies, and the old leader's log, which is longer but of an older term, counts as the better one.
    "end-term-from-current-term": Scenario(
        steps=(
            _step("partition=leader", 0, (0.8, 1.0)),
            _step("kill=sigkill@leader", (0.4, 0.5), (1.8, 2.2), "elected+0.01"),
        ),
        round_s=4.0, rate=300.0, concurrency=24,
    ),
    # Figure 8 of the Raft paper; n1 is its S1, n5 its S5. While the others are cut from each other, the only host that
    # reaches them all is the only one that can be elected: n1 at first, then n5, n1 again, and n5.
    "commit-old-terms": Scenario(
        steps=(
            _step("partition=n2|n3|n4|n5", 0, 2.6),
            # (a) what n1 appends reaches only n2
            _step("partition=n1+n2|n3+n4+n5", (2.0, 2.05), 1.8),
            _step("partition=n3|n4", 2.3, 6.7),
            # (b) n5 is elected by n3 and n4, and is cut off before its first entry reaches them
            _step("partition=n5|n3+n4", 2.75, 2.1, "elected@n5"),
            # (c) n1 is elected by n3 and n4 and replicates to n3; n2 acknowledges the old entries, no more
            _step("partition=n2|n3|n4|n5", 2.9, 2.1),
            _step("partition=n1|n5", 3.2, 5.8),
            _step("link=delay-in@n2", 3.5, 1.3),
            _step("kill=sigkill@n4", 3.95, 0.8, "elected@n1"),
            _step("partition=n1|n2", 4.1, 2.0, "matched@n2+0.02", until="elected@n5+0.3"),
            # (d) n5 is elected by n2 and n4, and what n1 has counted is overwritten
            _step("partition=n3|n1+n2+n4+n5", 4.4, 4.6),
        ),
        rounds=1, round_s=9.5, nodes=5, rate=30.0, concurrency=5,
    ),
    # A leader that is cut off acknowledges entries, which the next leader overwrites.
    "ack-before-quorum": Scenario(steps=(_step("partition=leader", (0, 0.5), (1.3, 1.8)),), rate=200.0),
    # Power is lost during syncs, which a slow disk prolongs.
    "ack-before-fsync": Scenario(
        steps=(_step("disk-slow=mild@all", 0, (0.5, 0.9)), _step("power=cut@all", (1.0, 1.4), (0.1, 0.4))), rate=200.0
    ),
    "quorum-off-by-one": Scenario(steps=(_step("partition=leader", (0, 0.5), (1.3, 1.8)),), rate=200.0),
    # A paused follower is sent its oldest entries again, with a committed index beyond the end of its log.
    "commit-beyond-end": Scenario(
        steps=(_step("pause=sigstop@one", (0, 0.5), (0.8, 1.6)),), rounds=3, rate=400.0, concurrency=24
    ),
    # A leader that was cut off has a tail to truncate; the search for its begin takes steps of 1, 2, 4, ... entries.
    "truncate-committed": Scenario(
        steps=(_step("partition=leader", (0, 0.3), (1.3, 1.8)),), rounds=3, rate=300.0, concurrency=24
    ),
    # The same tail, and a crash between its truncation and the arrival of the entries that replace it.
    "truncate-not-persisted": Scenario(
        steps=(
            _step("partition=leader", 0, 0.5, until="elected"),
            _step("kill=sigkill@all", 0.8, (0.6, 0.8), "truncating+0.0001"),
        ),
        rate=300.0, concurrency=24,
    ),
    # The same tail: different entries at the same index.
    "compare-index-only": Scenario(
        steps=(_step("partition=leader", (0, 0.3), (1.3, 1.8)),), rate=300.0, concurrency=24
    ),
    # Pushes to a follower that is cut off are lost with their connection. Afterwards they are repeated one by one, and
    # a new one arrives in between: the follower acknowledges entries that it lacks, which the next cut of another
    # follower reveals.
    "accept-gap": Scenario(
        steps=(_step("partition=one", (0, 0.3), (1.3, 1.8)),), rounds=3, round_s=2.5, rate=400.0, concurrency=24
    ),
    "stale-leader-reads": Scenario(steps=(_step("partition=leader", (0, 0.5), 3.0),), workload="register", round_s=4.5),
    # The leader's clock is ahead; the leader is cut off, and then its clock is set back to the right time, which
    # extends its lease.
    "lease-on-wall-clock": Scenario(
        steps=(_step("clock=bump@leader", 0, (1.0, 1.05)), _step("partition=leader", 0.9, 5.5)),
        round_s=8.0, workload="register", concurrency=12, settings={"read_mode": "lease"},
    ),
    "no-step-down": Scenario(steps=(_step("partition=leader", (0, 0.5), 3.0),), round_s=4.5),
    # A new leader has dispatched only a part of its log.
    "early-promotion": Scenario(steps=(_step("kill=sigkill@leader", (0, 0.5), (1, 1.3)),), rounds=3, rate=300.0),
    # The same process leads, loses the lead to another, and leads again.
    "queue-offset-reuse": Scenario(steps=(_step("partition=leader", (0, 0.2), (1.3, 1.5)),), rounds=4, round_s=2.2),
    # An orderly stop leaves the queues and the dispatch mark consistent; what is dispatched again is then duplicated.
    "duplicate-apply": Scenario(steps=(_step("kill=terminate@all", (0, 0.5), (0.1, 0.4)),)),
    # A consumer forgets the messages that it was given, and no other consumer gets them.
    "pop-without-checkpoint": Scenario(
        steps=(_step("kill=sigkill@one", (0, 0.5), (0.5, 1.0)),), workload="queue", settings={"consume": "pop"}
    ),
    # An orderly stop leaves a checkpoint, from which the next start continues.
    "in-hand-forgotten": Scenario(
        steps=(_step("kill=terminate@all", (0, 0.5), (0.1, 0.4)),), workload="queue", settings={"consume": "pop"}
    ),
    "timers-forgotten": Scenario(steps=(_step("kill=terminate@all", (0, 0.5), (0.1, 0.4)),), workload="delay"),
    "checksum-ignored": Scenario(steps=(_step("bit-flip=log@one", (0, 0.5), (1, 1.5)),)),
    # Two of five are removed, and one of the remaining three is cut off together with those two. All restart, and
    # those three, if they use the initial configuration again, are a majority of five.
    "members-forgotten": Scenario(
        steps=(
            _step("members=remove@n4", 0, 6.6),
            _step("members=remove@n5", 0.3, 6.0),
            _step("partition=n1+n2|n3+n4+n5", (1.0, 1.1), 4.0),
            _step("kill=sigkill@all", (2.4, 2.6), (0.1, 0.2)),
        ),
        rounds=1, round_s=7.0, nodes=5, rate=200.0,
    ),
    "removed-leader-stays": Scenario(steps=(_step("members=remove@leader", (0, 0.3), 2.0),)),
    # The leader hears of its successor late, and its lease is still valid meanwhile. It takes no messages while the
    # successor catches up, so senders have moved to others by then.
    "transfer-keeps-lead": Scenario(
        steps=(_step("link=delay-in@leader", 0, 2.4), _step("transfer=to@followers", (0.5, 0.7), 0.5)),
        rounds=3, workload="register", rate=400.0, concurrency=24, settings={"read_mode": "lease"},
    ),
    # What the master sends is lost on the way; then the master is lost, too.
    "ha-ack-when-sent": Scenario(
        steps=(_step("partition=n1|n2+n3", 0, 2.0), _step("promote=failover@n1", (0.6, 0.8), 1.6)),
        rounds=1, workload="queue", settings=_IN_SYNC_HA,
    ),
    # A power cut loses what the slaves could not sync, and the master is down as well.
    "ha-ack-before-slave-syncs": Scenario(
        steps=(
            _step("disk-stall=fsync@n2+n3", 0, 1.6),
            _step("kill=sigkill@n1", (1.0, 1.1), 3.5),
            _step("power=cut@n2+n3", 1.3, 0.5),
            _step("promote=failover@n1", 2.2, 2.6),
        ),
        rounds=1, round_s=5.5, workload="queue", settings=_IN_SYNC_HA,
    ),
    # A slave has what the master loses in a power cut, and may not discard it on its own.
    "ha-send-before-sync": Scenario(
        steps=(_step("disk-slow=severe@n1", 0, (0.8, 1.2)), _step("power=cut@n1", (0.5, 0.7), 0.8)),
        rate=200.0, settings={"replication": "sync"},
    ),
    # The former master has messages that no slave got, and the new one has others at the same offsets.
    "ha-never-compares": Scenario(
        steps=(_step("partition=n1|n2+n3", 0, 1.4), _step("promote=failover@n1", (0.6, 0.8), 1.6)),
        rounds=1, workload="queue", settings=_IN_SYNC_HA,
    ),
    # Followers have the messages but cannot sync them, so senders time out; when the disks resume, all is committed.
    "indefinite-as-definite": Scenario(
        steps=(_step("disk-stall=fsync@followers", (0, 0.5), (2.6, 3.0)),), round_s=4.0
    ),
    # Three of five are killed, and the leader n1 cannot sync what it appends, which only n2 gets. n1 loses it in a
    # power cut, leads the same term again and has the three acknowledge other, fewer entries at these indexes. Then
    # it is killed. The log of n2 ends in the same term and is longer than theirs: they elect n2, which lacks theirs.
    "lead-term-again": Scenario(
        steps=(
            _step("partition=n2|n3|n4|n5", 0, 4.4),
            _step("partition=n3|n4|n5", 0.4, 6.5),
            _step("kill=sigkill@n3+n4+n5", (1.9, 1.91), 1.4),
            _step("disk-stall=fsync@n1", (1.911, 1.92), 1.0),
            _step("power=cut@n1", 2.6, 0.9),
            _step("partition=n1|n2", 2.7, 4.0),
            _step("kill=sigkill@n1", 3.7, 1.8, "promoted@n1+0.02"),
        ),
        rounds=1, round_s=7.5, nodes=5, rate=100.0, concurrency=12,
    ),
    # One follower does not hear the leader and becomes a candidate; the other, which does, votes for it before the
    # lease ends, by which the leader still serves reads. The followers store nothing meanwhile; otherwise the one that
    # hears the leader would have the longer log.
    "vote-despite-leader": Scenario(
        steps=(
            _step("disk-full=full@followers", (0, 0.01), (0.8, 0.81)),
            _step("partition=majorities-ring", (0.15, 0.16), 2.0),
            _step("partition=leader", (0.72, 0.86), 1.2),
        ),
        round_s=3.0, rate=100.0, concurrency=96, settings={"read_mode": "lease"},
    ),
    # A paused leader answers its pending reads when it resumes, by a lease that ended long before. There are more
    # clients than can wait for it, so that some ask after the next leader, which it does not hear, has taken writes.
    "lease-by-role": Scenario(
        steps=(_step("pause=sigstop@leader", 0, (1.8, 2.2)), _step("partition=leader", 0, 2.6)),
        rounds=3, round_s=3.8, rate=40.0, concurrency=96, settings={"read_mode": "lease"},
    ),
    # n2 has a tail if it led at first, as with half of the seeds. n1 is elected by n3, which cannot sync any more, and
    # is cut off from n2 when it knows what n2 has to truncate. Over its next connection n2 truncates that and an entry
    # is committed, but n1 is killed before n2 learns of the commit. Then the kernel retransmits what the first
    # connection had lost: n2 truncates again, and n3 loses the entry in a power cut.
    "late-truncate": Scenario(
        steps=(
            _step("partition=n3|n1+n2", (1.0, 1.01), 0.55),
            _step("partition=n2|n1+n3", (1.26, 1.27), (0.5, 0.51)),
            _step("disk-stall=fsync@n3", (1.7, 1.71), 1.6, "elected@n1"),
            _step("partition=n1>n2", (1.8, 1.81), (0.1, 0.11), "matched@n2", until="matched@n2+0.75"),
            _step("kill=sigkill@n1", (2.0, 2.01), 4.0, "promoted@n1"),
            _step("power=cut-posix@n3", (2.02, 2.03), 1.4),
        ),
        rounds=1, round_s=8.0, rate=40.0,
    ),
    # A follower that has elected a leader is killed and its vote damaged before it has an entry of the new term. It
    # starts in the term before and, cut off from the new leader, votes again in the next term.
    "vote-lost-with-its-file": Scenario(
        steps=(
            _step("partition=leader", 0, 2.4),
            _step("bit-flip=vote@followers", 0.4, 1.5, "elected"),
            _step("partition=leader", 0.4, 1.5, "elected"),
        ),
        round_s=4.0,
    ),
    # A member reads its log up to the damage, and continues as if it had acknowledged no more.
    "damage-cut-off": Scenario(steps=(_step("bit-flip=log@one", (0, 0.5), (1, 1.5)),)),
    # Ongaro's case. n5 was removed. n1 is cut off with it and adds it again, which no other member learns. n2 is
    # elected by n3 and n4, n4 is killed before it gets any entry of that term, and n2 removes n1: two of the remaining
    # three continue. But n1, n4 and n5 are three of five. If n2 had to commit an entry first, it would need n4.
    "change-before-own-commit": Scenario(
        steps=(
            _step("partition=n2|n3|n4|n5", (0, 0.05), (2.3, 2.35)),
            _step("members=remove@n5", 1.6, (0.65, 0.66)),
            _step("partition=n3|n4", 1.7, 5.5),
            _step("partition=n1+n5|n2+n3+n4", (2.0, 2.01), 3.5),
            _step("kill=sigkill@n4", 2.45, (0.5, 0.51), "elected@n2"),
            _step("members=remove@n1", (2.56, 2.57), 5.0),
            _step("partition=n2+n3|n1+n4+n5", (2.58, 2.59), 3.5),
        ),
        rounds=1, round_s=8.5, nodes=5, rate=40.0,
    ),
    # A leader is cut off with one of the other four and removes two of the rest at once: it has two of the remaining
    # three members, and the other side, which does not know of it, has three of five.
    "changes-overlap": Scenario(
        steps=(
            _step("partition=n2|n3|n4|n5", 0, 2.5),
            _step("partition=n1+n2|n3+n4+n5", 2.0, 3.0),
            _step("members=remove@n5", (2.15, 2.2), 3.0),
            _step("members=remove@n4", (2.2, 2.25), 3.0),
        ),
        rounds=1, round_s=6.5, nodes=5, rate=60.0,
    ),
    # A leader of four, n1, is cut off and removes n4. It is paused, so that its operator waits for an answer, and n3
    # is elected and truncates that; n1 still counts itself one of three. Only n1 gets the entries of n3, until n1 is
    # cut off together with n2: then n4 gets them, and the operator of another fault, who asks before the first one asks
    # again, removes n2. So n3 and n4 are two of three, and for n1, which n2 elects, so are n1 and n2.
    "truncated-members-stay": Scenario(
        steps=(
            _step("partition=n2|n3|n4", 0, (3.4, 3.42)),
            _step("partition=n2|n4", 1.5, 6.0),
            _step("partition=n1|n2+n3+n4", 2.0, 0.7),
            _step("members=remove@n4", 2.1, 8.0),
            _step("pause=sigstop@n1", (2.35, 2.37), (1.3, 1.32), until="elected@n3+0.04"),
            _step("kill=sigkill@n2+n4", (3.6, 3.61), (0.42, 0.43), "elected@n3"),
            _step("partition=n1+n2|n3+n4", 3.8, 3.0, "truncating@n1+0.015"),
            _step("members=remove@n2", (3.95, 3.96), 6.0),
        ),
        rounds=1, round_s=10.5, nodes=4, rate=40.0,
    ),
}  # fmt: skip


def rehearse_mutant(mutant: str, seed: int, *, is_control: bool = False, power_form: str | None = None) -> Rehearsal:
    """Run one seed of a mutant's scenario: with the mutant, or without it as the control. Power cuts have the form
    `power_form` of their nemesis; for None, that of the scenario.

    Raises OperatorError for an unknown mutant.
    """
    scenario = _scenario(mutant)
    if power_form is not None:
        scenario = scenario.under(power_form)
    return rehearse_test(*scenario.run_of(NO_MUTANT if is_control else mutant, seed))


def report_mutant(mutant: str, seed: int, store: Store) -> RunDir:
    """Run one seed of a mutant's scenario as a stored run, with its trace and a report. Raises OperatorError for an
    unknown mutant, StoreError if nothing can be written."""
    test, schedule = _scenario(mutant).run_of(mutant, seed)
    run_dir, *_ = keep_run(test, schedule, store, name=f"{mutant}-{seed}", has_trace=True)
    return run_dir


def _scenario(mutant: str) -> Scenario:
    if mutant in MUTANTS and mutant not in SCENARIOS:
        raise OperatorError(f"there is no scenario for mutant {mutant!r}: use harness explore --set mutant={mutant}")
    if mutant not in SCENARIOS:
        raise OperatorError(f"unknown mutant {mutant!r}{nearest(mutant, SCENARIOS)}; known: {', '.join(SCENARIOS)}")
    return SCENARIOS[mutant]


def gives_away(run: Rehearsal) -> bool:
    """Whether a run shows that something is wrong: a violation, or replicas that are stuck after all faults are
    healed. Other doubts, such as a fault that found no leader to hit, do not count."""
    return bool(run.symptoms)
