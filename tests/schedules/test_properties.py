"""Whatever faults happen when: the node stays safe, and is live once they have stopped.

Safety is every check of a run and every invariant of the simulation: one leader a term, logs that match, committed
entries that neither change nor vanish, acknowledged ones on a majority's disks, reads that do not go back. Liveness is
the second phase of a run: the faults end, and a leader takes writes and all replicas become equal.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.exploration.rehearsal import rehearse_test
from harness.test import Test
from nemesis.moments import KINDS
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule

LOAD_S = 4.0
FAULTS = (
    "partition=leader", "partition=one", "partition=one-way", "partition=n1|n2", "partition=n2>n3",
    "kill=sigkill@leader", "kill=sigkill@one", "kill=sigkill@all", "kill=terminate@leader", "pause=sigstop@leader",
    "pause=sigstop@one", "power=cut@leader", "power=cut@all", "disk-stall=fsync@leader", "disk-slow=mild@all",
    "clock=bump@leader", "clock=drift@one", "link=loss@leader", "link=reorder@all", "bit-flip=log@one",
)  # fmt: skip

faults = st.tuples(
    st.sampled_from(FAULTS),
    st.floats(0.2, LOAD_S - 1.0),
    st.floats(0.05, 1.5),
    st.none() | st.sampled_from(sorted(KINDS)),
    st.sampled_from(("", "+0.0002", "+0.001", "+0.02")),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Up to four faults, which may overlap and may wait for moments."""
    events = []
    for number, (fault, at_s, for_s, kind, delay) in enumerate(draw(st.lists(faults, min_size=1, max_size=4))):
        nemesis, _, variant = fault.partition("=")
        when = None if kind is None else kind + delay
        for time_s, action, moment in ((at_s, INJECT, when), (min(at_s + for_s, LOAD_S - 0.5), HEAL, None)):
            events.append(
                FaultEvent(
                    at_s=time_s,
                    action=action,
                    fault_id=f"f{number}",
                    nemesis=nemesis,
                    variant=variant,
                    when=moment,
                )
            )
    events.sort(key=lambda event: event.at_s)
    return Schedule(tuple(events))


@settings(max_examples=10)
@given(schedule=schedules(), seed=st.integers(0, 2**32), workload=st.sampled_from(("register", "log")))
def test_the_node_is_safe_and_live(schedule: Schedule, seed: int, workload: str) -> None:
    test = Test(
        system="broker", cluster="sim", nodes=3, workload=workload, nemesis=(), nemesis_interval_s=5.0,
        time_limit_s=LOAD_S, concurrency=4, rate=60.0, seed=seed,
    )  # fmt: skip
    run = rehearse_test(test, schedule)
    # A fault that could not be proven, such as one that found no leader, says nothing about the node.
    assert run.symptoms == (), f"{run.reason}\n{schedule.to_json()}"
    assert run.operations > 0
