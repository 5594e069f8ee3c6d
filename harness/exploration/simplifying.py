"""Simpler forms of a failing run, searched for by Hypothesis.

The strategy generates the known run and everything simpler with the same faults or some of them: without a fault; with
a fault that is healed only at the end; with fewer replicas, clients and operations; with a load that ends sooner; with
faults that wait for no trigger, are at rounder times, or all begin sooner. Each of these is a ladder: its lowest rung
is the simplest value and its highest the known run's own, so that Hypothesis's order of simplicity is ours.

`hypothesis.find` generates before it shrinks: first the simplest example, then draws that mostly take the known run's
values, so that one of the first few fails as it does. Hypothesis could start from the known failure itself if that were
in its database, but it does not use the database if it is given a seed, and without a fixed seed the search would not
be repeatable.
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
"""Fewer replicas than this tolerate no fault, which would be a different test."""

CLIENTS = (1, 2, 3, 5)
RATES = (10.0, 25.0, 50.0)
GRIDS_S = (1.0, 0.5, 0.1)
"""Grids for round times, the roundest first."""

KNOWN = 32
"""A draw has this many values for each rung of a ladder; all beyond the last rung mean that one: the known run's."""

MAX_TRIES = 40
"""Most runs drawn in search of one that fails like the known one."""

Candidate = tuple[Test, Schedule]
Rung = TypeVar("Rung")


def simpler_runs(test: Test, schedule: Schedule) -> st.SearchStrategy[Candidate]:
    """The known run and all simpler ones, with some or all of the faults of `schedule`."""
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

        # Every value is drawn even if it is not used, so that lowering one draw does not shift the others.
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
    """The simplest run that Hypothesis finds for which `fails` is true; None if it finds none.

    The same `seed` and the same results of `fails` lead to the same run. To end the search, `fails` returns False from
    then on, except for runs that failed before. An exception of `fails` is raised here, without another call.
    """
    raised: list[Exception] = []

    def is_wanted(candidate: Candidate) -> bool:
        if raised:
            return False
        try:
            return fails(*candidate)
        except Exception as error:  # else Hypothesis would treat it as the failure to minimise
            raised.append(error)
            return False

    found = None
    with scratch_directory("hypothesis") as directory:
        set_hypothesis_home_dir(directory)  # it caches constants from our modules, else in the current directory
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
    """The rungs below `known`, then `known` itself; 0 means no limit and is above all rungs."""
    return [*(rung for rung in ladder if not known or rung < known), known]  # type: ignore[operator]


def _triggers(when: str | None) -> list[str | None]:
    """What an event may wait for: nothing, its trigger alone, its trigger with the delay."""
    return [None] if when is None else list(dict.fromkeys((None, when.partition("+")[0], when)))


def _rounder(at_s: float) -> list[float]:
    """Times near `at_s`, the roundest first and `at_s` itself last."""
    near = [round(round(at_s / grid_s) * grid_s, 6) for grid_s in GRIDS_S]
    return [*dict.fromkeys(time_s for time_s in near if time_s != at_s), at_s]
