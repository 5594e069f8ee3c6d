"""Making simpler what is left of a failing run: fewer events, rounder times, fewer clients, by Hypothesis's shrinker.

Delta debugging (harness.exploration.shrinking) leaves faults out, whole. What is left can often be simpler still: a fault
need not be healed, an event need not wait for a moment, a time need not be exact. Each such choice is a place in a vector
of small numbers, 0 the simplest and the last one "as it was"; Hypothesis draws vectors, and shrinks the first one that
fails towards zeros. It cannot be given a failure to begin with, so what it draws leans towards "as it was" so far
that one of its first vectors fails again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.test import Test
from nemesis.schedule import HEAL, INJECT, FaultEvent, Schedule

__all__ = ["Choices", "Vector", "simplify"]

Vector = tuple[int, ...]

_T = TypeVar("_T")

LEANING = 24
"""How many times likelier a place is drawn as it was than as each simpler thing."""

TIME_STEPS_S = (1.0, 0.5, 0.1)
"""Times are rounded to these, the roundest first."""

MAX_EXAMPLES = 200
"""Vectors drawn before there is one that fails. One of the first does, or the run is too delicate to be changed."""


@dataclass(frozen=True, slots=True)
class _Fault:
    inject: FaultEvent
    heal: FaultEvent | None


class Choices:
    """What may be simpler about a run, place by place."""

    def __init__(self, test: Test, schedule: Schedule) -> None:
        self._test = test
        heals = {event.fault_id: event for event in schedule if event.action == HEAL}
        self._faults = [_Fault(e, heals.get(e.fault_id)) for e in schedule if e.action == INJECT]
        self._nodes = _up_to((3, 5), test.nodes)
        self._clients = _up_to((1, 2, 3, 5), test.concurrency)
        self._rates = _up_to((10.0, 25.0, 50.0), test.rate)
        self.sizes: Vector = (
            len(self._nodes), len(self._clients), len(self._rates),
            *(size for fault in self._faults for size in self._sizes(fault)),
        )  # fmt: skip
        """How many choices each place has; the last one is "as it was"."""

    @staticmethod
    def _sizes(fault: _Fault) -> Vector:
        """Fate (gone, never healed, healed), when it begins, when it ends, what each waits for."""
        events = [fault.inject] if fault.heal is None else [fault.inject, fault.heal]
        fates = 2 if fault.heal is None else 3
        return (fates, *(n for event in events for n in (len(_times(event.at_s)), len(_moments(event.when)))))

    @property
    def as_it_was(self) -> Vector:
        """The vector that changes nothing."""
        return tuple(size - 1 for size in self.sizes)

    def build(self, vector: Sequence[int]) -> tuple[Test, Schedule]:
        """The run that a vector stands for."""
        places = iter(vector)
        test = dataclasses.replace(
            self._test,
            nodes=self._nodes[next(places)],
            concurrency=self._clients[next(places)],
            rate=self._rates[next(places)],
        )
        events: list[FaultEvent] = []
        for fault in self._faults:
            fate = next(places)
            both = [fault.inject] if fault.heal is None else [fault.inject, fault.heal]
            changed = [
                dataclasses.replace(
                    event, at_s=_times(event.at_s)[next(places)], when=_moments(event.when)[next(places)]
                )
                for event in both
            ]
            events += changed[:fate]
        events.sort(key=lambda event: (event.at_s, event.action == HEAL))
        return test, Schedule(tuple(events))


def _up_to(values: Sequence[_T], own: _T) -> list[_T]:
    return [value for value in values if value < own] + [own]  # type: ignore[operator]


def _times(at_s: float) -> list[float]:
    """The same time less exactly, the roundest first; itself last."""
    rounded = [round(round(at_s / step) * step, 3) for step in TIME_STEPS_S]
    return [time_s for time_s in dict.fromkeys(rounded) if time_s != at_s] + [at_s]


def _moments(when: str | None) -> list[str | None]:
    """No moment, the moment of any host at once, the moment at once; itself last."""
    if when is None:
        return [None]
    place = when.partition("+")[0]
    return [word for word in dict.fromkeys((None, place.partition("@")[0], place)) if word != when] + [when]


def simplify(choices: Choices, fails: Callable[[Vector], bool]) -> Vector | None:
    """The simplest vector that Hypothesis finds to fail; None when none that it draws does.

    `fails` must give the same answer for the same vector. When it begins to answer False to everything, because the
    time is used up, the search is soon at its end.
    """
    import hypothesis
    from hypothesis import strategies as st

    strategy = st.tuples(
        *(st.sampled_from([*range(size), *[size - 1] * (LEANING * (size - 1))]) for size in choices.sizes)
    )
    settings = hypothesis.settings(
        max_examples=MAX_EXAMPLES,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
        deadline=None,
        database=None,
        derandomize=True,
    )
    try:
        return hypothesis.find(strategy, fails, settings=settings)
    except hypothesis.errors.NoSuchExample:
        return None


def simplify_greedily(choices: Choices, fails: Callable[[Vector], bool]) -> Vector:
    """Place after place, the simplest choice that still fails."""
    best = list(choices.as_it_was)
    for place, size in enumerate(choices.sizes):
        for value in range(size - 1):
            candidate = [*best[:place], value, *best[place + 1 :]]
            if choices.build(candidate) == choices.build(best) or fails(tuple(candidate)):
                best = candidate
                break
    return tuple(best)


_ = math
