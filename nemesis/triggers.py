"""Triggers: events at replicas that an event of a schedule can wait for.

Much of what breaks replication happens within milliseconds of something else: a crash between a vote and its sync,
a cut right after an election. An event with `when` happens when its trigger next occurs after its time:

    elected              any member is elected leader
    elected@n2           n2 is elected leader
    elected@n2+0.15      0.15 seconds after n2 was elected

Occurrences since the start of the previous event also count, because the proof of a fault takes time. If none matches
within TRIGGER_TIMEOUT_S seconds, the event happens anyway; if the cluster cannot see the trigger (simulation sees all
of them, other clusters those that replicas log at once), only the event's time counts. So `when` aims a fault; it is
not a condition for it. The history records what was waited for and whether it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["KINDS", "TRIGGER_TIMEOUT_S", "Occurrence", "Trigger", "trigger_problem"]

TRIGGER_TIMEOUT_S = 3.0
"""How long to wait for a trigger: several elections with the fast timings."""

MAX_DELAY_S = 60.0

KINDS: Mapping[str, str] = {
    "voting": "a member begins to persist a term or a vote",
    "voted": "a member has persisted a vote",
    "elected": "a member has become the leader",
    "promoted": "a leader's broker accepts messages",
    "matched": "a follower has found an entry in its log that matches the leader's",
    "storing": "a member begins to write and sync entries",
    "truncating": "a follower removes entries from the end of its log",
    "recovered": "a member has recovered its log after a start",
}
"""Trigger -> what happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """Something that happened on a host; `at_s` is the event loop's time."""

    kind: str
    host: str
    at_s: float

    def __str__(self) -> str:
        return f"{self.kind}@{self.host}"


@dataclass(frozen=True, slots=True)
class Trigger:
    """What an event of a schedule waits for; an empty `host` matches any host."""

    kind: str
    host: str = ""
    delay_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Trigger:
        """The trigger that `text` names. Raises ValueError with one line that says what is wrong."""
        problem = trigger_problem(text)
        if problem is not None:
            raise ValueError(problem)
        place, _, delay = text.partition("+")
        kind, _, host = place.partition("@")
        return cls(kind, host, float(delay or 0))

    def matches(self, occurrence: Occurrence) -> bool:
        """Whether an occurrence is one of this trigger."""
        return occurrence.kind == self.kind and self.host in ("", occurrence.host)


def trigger_problem(text: object) -> str | None:
    """Why `text` names no trigger, as one line; None when it does."""
    if not isinstance(text, str):
        return f"when must be a word such as elected@n1+0.1, not {text!r}"
    place, plus, delay = text.partition("+")
    kind, at, host = place.partition("@")
    if kind not in KINDS:
        return f"unknown trigger {kind!r}; known: {', '.join(KINDS)}"
    if at and not (host[:1] == "n" and host[1:].isdigit()):
        return f"a trigger occurs on a host such as n1, not on {host!r}"
    if plus:
        try:
            seconds = float(delay)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= MAX_DELAY_S:
            return f"the delay after + must be 0 to {MAX_DELAY_S:g} seconds, not {delay!r}"
    return None
