"""The behaviour of a simulated run, as a set of small facts that a search can compare with those of other runs.

After Mallory (Meng, Pirlea, Roychoudhury and Sergey, "Greybox fuzzing of distributed systems", CCS 2023), which
distinguishes runs by an abstraction of the order of their events. A fact describes a step of the protocol (a vote, a
change of role, a start, a comparison, a truncation, a promotion) in one of four ways:

    state    the step; the role of every member, its term relative to the newest and whether it runs; and the kinds of
             faults in force
    flight   the step; the role of its member, and what of its log is uncommitted or not on its disk; and the kinds of
             faults in force
    pair     the step and the one before it: whether the same member took both, in which roles, and the time between
    chain    three consecutive steps of the group, and which of them were by the same member

Members are distinguished by their state, not by name: facts that differ only in names are the same. A fact is stored as
a number of FACT_BITS bits, which is the same in every process; if two facts share a number, the second is overlooked.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from harness.clusters.sim.steps import Step, rank_of

__all__ = ["FACT_BITS", "Fact", "facts_of"]

FACT_BITS = 16
"""65,536 numbers; a search of a thousand runs finds about ten thousand facts."""

GAPS_S = (0.001, 0.01, 0.1, 1.0)

Fact = tuple[int, float]
"""The fact's number, and when it first held (s of the run's time)."""


def facts_of(steps: Sequence[Step], faults: Sequence[Mapping[str, Any]], *, zero_s: float) -> tuple[Fact, ...]:
    """The facts of a run, in the order in which they first held. `faults` are as from checker.faults; `zero_s` is the
    loop's time at which the run's time, in which facts are dated, was 0."""
    found: dict[int, float] = {}
    in_force = _Faults(faults)
    recent: deque[Step] = deque(maxlen=3)
    for step in steps:
        at_s = step.at_s - zero_s
        kinds = in_force.at(at_s)
        facts: list[tuple[object, ...]] = [
            ("state", step.kind, step.view, kinds),
            ("flight", step.kind, step.role, step.uncommitted, step.is_unsynced, kinds),
        ]
        if recent:
            last = recent[-1]
            gap = rank_of(step.at_s - last.at_s, GAPS_S)
            facts.append(("pair", last.kind, last.role, step.kind, step.role, last.host == step.host, gap))
        recent.append(step)
        if len(recent) == 3:
            hosts = [each.host for each in recent]
            facts.append(("chain", *(each.kind for each in recent), *(hosts.index(host) for host in hosts)))
        for fact in facts:
            found.setdefault(zlib.crc32(repr(fact).encode()) >> (32 - FACT_BITS), round(at_s, 3))
    return tuple(found.items())


class _Faults:
    """Tracks the kinds of faults in force as time advances."""

    def __init__(self, faults: Sequence[Mapping[str, Any]]) -> None:
        spans = [(each["start_ns"], each["end_ns"], str(each.get("nemesis"))) for each in faults]
        self._waiting = sorted(
            ((start / 1e9, float("inf") if end is None else end / 1e9, kind) for start, end, kind in spans if start),
            reverse=True,
        )
        self._active: list[tuple[float, str]] = []
        self._kinds: tuple[str, ...] = ()

    def at(self, at_s: float) -> tuple[str, ...]:
        """The kinds in force at a moment; moments must be queried in order of time."""
        is_changed = False
        while self._waiting and self._waiting[-1][0] <= at_s:
            _, end_s, kind = self._waiting.pop()
            self._active.append((end_s, kind))
            is_changed = True
        if is_changed or any(end_s < at_s for end_s, _ in self._active):
            self._active = [each for each in self._active if each[0] >= at_s]
            self._kinds = tuple(sorted({kind for _, kind in self._active}))
        return self._kinds
