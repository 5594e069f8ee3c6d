"""A table of what each fault prevents its victims from doing.

Proofs and schedule generators have to know what a host under other faults can still do: a host that is down cannot
be asked for its clock, a replica rightly refuses to start on a full disk, and so on. A fault that is not in the table
(slow links, an operator's request) prevents none of these activities. For nemeses of other packages, the injections
themselves carry this information (`Injection.keeps_from`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nemesis.forms import hosts_of
from nemesis.protocol import Activity, Injection

__all__ = ["IMPAIRMENTS", "Activity", "faults_that_impair", "hosts_kept_from"]


IMPAIRMENTS: Mapping[str, frozenset[Activity]] = {
    "kill": frozenset({Activity.RUN, Activity.ANSWER}),
    "pause": frozenset({Activity.RUN, Activity.ANSWER}),
    "power": frozenset({Activity.RUN, Activity.ANSWER}),
    # The replica is restarted and may refuse to serve what the flipped bit damaged.
    "bit-flip": frozenset({Activity.RUN, Activity.ANSWER}),
    # The replica runs but hangs at its first stalled write: silent, not down.
    "disk-stall": frozenset({Activity.ANSWER, Activity.USE_DISK}),
    "disk-slow": frozenset({Activity.USE_DISK}),
    "disk-full": frozenset({Activity.USE_DISK, Activity.START}),
    "disk-error": frozenset({Activity.USE_DISK, Activity.START}),
    # Slow enough to be silent for long, or killed for lack of memory; a start needs every limited resource.
    "resources": frozenset({Activity.RUN, Activity.ANSWER, Activity.START, Activity.USE_DISK}),
    "clock": frozenset({Activity.TELL_TIME}),
    # Many systems exit at once if they cannot find the other replicas when started.
    "name-service": frozenset({Activity.START}),
    "partition": frozenset({Activity.BE_REACHED}),
}
"""Nemesis of this package -> what a host may be unable to do while such a fault is in force."""


def faults_that_impair(*activities: Activity) -> frozenset[str]:
    """The nemeses whose faults may keep a host from any of these activities."""
    return frozenset(nemesis for nemesis, lost in IMPAIRMENTS.items() if not lost.isdisjoint(activities))


def hosts_kept_from(activity: Activity, in_force: Iterable[Injection]) -> frozenset[str]:
    """The hosts that some fault in force may keep from an activity."""
    kinds = faults_that_impair(activity)
    return hosts_of([fault for fault in in_force if fault.nemesis in kinds or activity in fault.keeps_from])
