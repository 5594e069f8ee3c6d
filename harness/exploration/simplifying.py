"""Simpler forms of a failing run, searched for by Hypothesis.

A strategy stands for the known run and everything simpler that has the same faults or some of them: without a fault;
with one that is never healed, and so until the end; with fewer replicas, clients and operations; a load that ends
sooner; faults that wait for no trigger, happen at rounder times, and all of them sooner. Each of these is a ladder:
its lowest rung is the simplest and its highest the known run's own, so what Hypothesis takes for simpler is so.

`hypothesis.find` generates before it shrinks: the simplest of all first, then draws of which most are the known run's
own, so that one of the first few fails as it does. Hypothesis could begin with the known failure itself if its
database held it, but leaves the database alone once it is given a seed, and with a random one it is not the same each
time.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import Phase, Verbosity, find, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.errors import NoSuchExample

from harness.scratch import scratch_directory
from harness.test import Test
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule

__all__ = ["CLIENTS", "FEW_NODES", "RATES", "simpler_runs", "simplest_that_fails"]

FEW_NODES = 3
"""Fewer replicas than this tolerate no fault, which is another test."""

CLIENTS = (1, 2, 3, 5)
RATES = (10.0, 25.0, 50.0)
GRIDS_S = (1.0, 0.5, 0.1)
"""Round times, the roundest first."""

KNOWN = 32
"""So many draws of a ladder stand for each of its rungs, and all above the highest for the highest: the known one."""

MAX_TRIES = 40
"""Runs drawn in search of one that fails as the known one does."""

Candidate = tuple[Test, Schedule]
Rung = TypeVar("Rung")


def simpler_runs(test: Test, schedule: Schedule) -> st.SearchStrategy[Candidate]:
    """The known run and what is simpler. Its faults are some of those of `schedule`, or all."""
    heals = {event.fault_id: event for event in schedule if event.action == HEAL}
    faults = [(event, heals.get(event.fault_id)) for event in schedule if event.action == INJECT]
    places = {(event.fault_id, event.action): place for place, event in enumerate(schedule)}
    begin_s = math.floor(schedule.events[0].at_s) if faults else 0

    @st.composite
    def runs(draw: st.DrawFn) -> Candidate:
        def choose(rungs: Sequence[Rung]) -> Rung:
            if len(rungs) == 1:
                return rungs[0]
            return rungs[min(draw(st.integers(0, KNOWN * len(rungs) - 1)), len(rungs) - 1)]

        def event_of(event: FaultEvent) -> FaultEvent:
            return dataclasses.replace(event, when=choose(_triggers(event.when)), at_s=choose(_rounder(event.at_s)))

        # All is drawn whether or not it is used: then lowering one draw does not shift the meaning of the others.
        is_kept = [choose((False, True)) for _ in faults]
        is_healed = [heal is not None and choose((False, True)) for _, heal in faults]
        simpler = dataclasses.replace(
            test,
            nodes=choose(_at_most((FEW_NODES,), test.nodes)),
            concurrency=choose(_at_most(CLIENTS, test.concurrency)),
            rate=choose(_at_most(RATES, test.rate)),
        )
        whole = [float(second) for second in range(1, math.ceil(test.time_limit_s))]
        simpler = dataclasses.replace(simpler, time_limit_s=choose([*whole, test.time_limit_s]))
        aimed = [(event_of(inject), heal and event_of(heal)) for inject, heal in faults]
        earlier_s = choose(range(begin_s, -1, -1))
        events: list[FaultEvent] = []
        for (inject, heal), kept, healed in zip(aimed, is_kept, is_healed, strict=True):
            inject_s = round(inject.at_s - earlier_s, 6)
            if kept:
                events.append(dataclasses.replace(inject, at_s=inject_s))
            if kept and healed and heal is not None:
                events.append(dataclasses.replace(heal, at_s=max(inject_s, round(heal.at_s - earlier_s, 6))))
        events.sort(key=lambda event: (event.at_s, places[event.fault_id, event.action]))
        return simpler, Schedule(tuple(events))

    return runs()


def simplest_that_fails(
    test: Test, schedule: Schedule, fails: Callable[[Test, Schedule], bool], *, seed: str
) -> Candidate | None:
    """The simplest run that Hypothesis finds for which `fails` is true; None when it finds none.

    The same `seed` and the same answers give the same run. Whoever wants it to end answers False from then on, but for
    what failed before. What `fails` raises is raised here, without another call.
    """
    raised: list[Exception] = []

    def is_wanted(candidate: Candidate) -> bool:
        if raised:
            return False
        try:
            return fails(*candidate)
        except Exception as error:  # else it would count as the failure that is looked for
            raised.append(error)
            return False

    found = None
    with scratch_directory("hypothesis") as directory:
        set_hypothesis_home_dir(directory)  # it keeps what it reads of our modules, and would do so where we are run
        try:
            found = find(
                simpler_runs(test, schedule),
                is_wanted,
                settings=settings(
                    max_examples=MAX_TRIES,
                    phases=(Phase.generate, Phase.shrink),
                    database=None,
                    deadline=None,
                    verbosity=Verbosity.quiet,
                ),
                random=random.Random(seed),
            )
        except NoSuchExample:
            pass
        finally:
            set_hypothesis_home_dir(None)
    if raised:
        raise raised[0]
    return found


def _at_most(ladder: Sequence[Rung], known: Rung) -> list[Rung]:
    """The rungs below `known`, which 0 is above all of (no limit), and then itself."""
    return [*(rung for rung in ladder if not known or rung < known), known]  # type: ignore[operator]


def _triggers(when: str | None) -> list[str | None]:
    """What an event may wait for: nothing, its trigger, its trigger with its delay."""
    return [None] if when is None else list(dict.fromkeys((None, when.partition("+")[0], when)))


def _rounder(at_s: float) -> list[float]:
    """Times near this one, the roundest first, itself last."""
    near = [round(round(at_s / grid_s) * grid_s, 6) for grid_s in GRIDS_S]
    return [*dict.fromkeys(time_s for time_s in near if time_s != at_s), at_s]
