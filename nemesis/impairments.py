"""What each fault keeps the hosts that it hits from doing, in one table.

Whoever proves a fault, or draws a schedule, has to know what other faults leave of a host: one that is down cannot
be asked for its clock, on a full disk a replica rightly refuses to start, and so on. A fault that is not in the table
(slow links, what an operator asks for) keeps a host from nothing in this list. What a nemesis of another package keeps
hosts from, its injections say themselves (`Injection.keeps_from`).
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
    # Its replica is started again, and may refuse to serve what the flipped bit damaged.
    "bit-flip": frozenset({Activity.RUN, Activity.ANSWER}),
    # Its replica runs, and stands still with the first write that waits: silent and not down.
    "disk-stall": frozenset({Activity.ANSWER, Activity.USE_DISK}),
    "disk-slow": frozenset({Activity.USE_DISK}),
    "disk-full": frozenset({Activity.USE_DISK, Activity.START}),
    "disk-error": frozenset({Activity.USE_DISK, Activity.START}),
    # Slow enough to be silent for long, and killed for want of memory; a start needs all that is limited.
    "resources": frozenset({Activity.RUN, Activity.ANSWER, Activity.START, Activity.USE_DISK}),
    "clock": frozenset({Activity.TELL_TIME}),
    # Many systems end at once when they are started and cannot find the others.
    "name-service": frozenset({Activity.START}),
    "partition": frozenset({Activity.BE_REACHED}),
}
"""Nemesis of this package -> what a host may be unable to do while such a fault is in force."""


def faults_that_impair(*activities: Activity) -> frozenset[str]:
    """The nemeses whose faults may keep a host from any of these."""
    return frozenset(nemesis for nemesis, lost in IMPAIRMENTS.items() if not lost.isdisjoint(activities))


def hosts_kept_from(activity: Activity, in_force: Iterable[Injection]) -> frozenset[str]:
    """The hosts that some fault in force may keep from an activity."""
    kinds = faults_that_impair(activity)
    return hosts_of([fault for fault in in_force if fault.nemesis in kinds or activity in fault.keeps_from])
