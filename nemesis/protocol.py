"""The protocol of a nemesis.

A fault goes through five steps: it is *planned* (who is hit; nothing is touched yet, so that the plan can be
recorded first), *injected*, *proved*, *healed*, and the healing is proved too. Some nemeses check once more right
before the healing (`ProvesToTheEnd`): whether the system under test met a fault shows only while the fault lasts. A
nemesis holds no state between the steps: everything a later step needs is in the `Injection`, and the target keeps its
own state by the fault's id. So one nemesis serves any number of overlapping faults and runs.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from nemesis.target import Target

__all__ = [
    "Activity",
    "AskedForByName",
    "AsksForLeader",
    "Injection",
    "JudgesVariants",
    "MakesRequest",
    "Nemesis",
    "Proof",
    "ProvesToTheEnd",
    "StepTimeout",
    "UsesAbilities",
    "told_apart",
    "usable_variants",
]

MAX_NAMED_FAILURES = 20
"""Failures that a proof names one by one; the rest are only counted, so that history lines stay readable."""


class Activity(Enum):
    """What a replica can do on a healthy host."""

    RUN = "run"
    ANSWER = "answer whoever asks it over a link that is whole"
    START = "start, once it is down"
    BE_REACHED = "hear from all the others, and be heard by them"
    USE_DISK = "have its reads, writes and syncs done, soon and without an error"
    TELL_TIME = "know the time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One planned fault.

    `value` is what the history records about it (JSON data; at least id, nemesis, variant). `problem` is set
    when nothing can be injected, for instance because nobody leads; such a fault is recorded but never
    counts as proven. `evidence` is data that the plan and the proof leave for later steps. `keeps_from` are the
    activities that the hosts in `value` may be incapable of meanwhile, for the proofs of other faults; for nemeses of
    this package see `nemesis.impairments`. `beside`, set for `prove_met` only, are all other faults that have been in
    force since this one began, including those that are over; counters may have counted for them too.
    """

    fault_id: str
    nemesis: str
    variant: str
    value: Mapping[str, Any]
    problem: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    keeps_from: frozenset[Activity] = frozenset()
    beside: Sequence[Injection] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Whether a fault, or its healing, has taken effect.

    `exercised` tells whether the system under test met the fault (a cut that no packet ran into tested nothing); None
    if that is not known. `evidence` is JSON data that the step leaves for later ones, such as counters.
    `checked` counts what was inspected (links, processes, clocks); `failed` names each of these that was not as it
    should be; `detail` is one line for people.
    """

    proven: bool
    exercised: bool | None = None
    detail: str = ""
    checked: int = 0
    failed: Sequence[str] = field(default=())
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As recorded in the history."""
        named = list(self.failed[:MAX_NAMED_FAILURES])
        if len(self.failed) > len(named):
            named.append(f"and {len(self.failed) - len(named)} more")
        fields = {"proven": self.proven, "links": self.checked, "failed": named, "detail": self.detail}
        if self.exercised is not None:
            fields["exercised"] = self.exercised
        if self.evidence:
            fields["evidence"] = dict(self.evidence)
        return fields


def told_apart(counts: Mapping[str, int], shared: Collection[str]) -> tuple[bool | None, str]:
    """(whether a fault was exercised, judging by each host's count since it began; a note to append to the detail).
    The counts of hosts in `shared` also count for another fault, and may all be due to that one."""
    hit = {host for host, count in counts.items() if count > 0}
    unclear = sorted(hit.intersection(shared))
    note = f"; those on {', '.join(unclear)} may all be due to another such fault" if unclear else ""
    return (None if unclear and hit == set(unclear) else bool(hit)), note


class Nemesis(Protocol):
    """A kind of fault. Implementations are stateless; see the module's docstring. The protocols below are optional:
    `ProvesToTheEnd`, `StepTimeout`, `AskedForByName`, `MakesRequest`, `JudgesVariants`, `AsksForLeader`,
    `UsesAbilities`, and `HasForms` of nemesis.forms.
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def variants(self) -> Sequence[str]:
        """Names of the variants that a run cycles through, in a fixed order; never empty."""
        ...

    def requires(self, target: Target, variant: str | None = None) -> list[str]:
        """Everything that keeps this nemesis, or one variant of it, from working on `target`.

        Each problem is one line that names what is missing. Without a variant: problems that rule out all variants.
        """
        ...

    async def plan(self, target: Target, rng: random.Random, *, fault_id: str, variant: str) -> Injection:
        """Decide who is hit, every choice from `rng`. May query the system under test, but changes nothing.

        Raises ValueError for an unknown variant or one that this target cannot have.
        """
        ...

    async def inject(self, target: Target, injection: Injection) -> None:
        """Put the fault in force."""
        ...

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Observe whether the fault is in force. `in_force` are the other faults in force."""
        ...

    async def heal(self, target: Target, injection: Injection) -> None:
        """Take the fault back. Idempotent; safe when `inject` failed half-way or never ran."""
        ...

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Observe whether the fault is gone. `in_force` are the faults that remain."""
        ...


@runtime_checkable
class ProvesToTheEnd(Protocol):
    """A nemesis whose evidence is complete only at the end of a fault: it counts what the system met meanwhile."""

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Inspect a fault right before it is healed, while it is still in force.

        `proven` is False if the fault was not in force all the time since its first proof; `exercised` tells whether
        the system met it in that time. Called only for faults that were proven.
        """
        ...


@runtime_checkable
class StepTimeout(Protocol):
    """A nemesis with a step that may take longer than the driver's own limit."""

    step_timeout_s: float
    """For each of its steps."""


@runtime_checkable
class AskedForByName(Protocol):
    """A nemesis that declares whether `--nemesis all` includes it."""

    is_of_all: bool
    """False if a run includes it only when asked for by name."""


@runtime_checkable
class MakesRequest(Protocol):
    """A nemesis that declares whether it only makes a request to the system, repeated until it is granted. Other faults
    begin and end meanwhile; the request may depend on one of them ending."""

    is_request: bool


@runtime_checkable
class JudgesVariants(Protocol):
    """A nemesis with variants beyond those in `variants`, such as variants for hosts by name."""

    def variant_problem(self, variant: str) -> str | None:
        """Why there is no such variant, as one line; None if it exists, whether or not a run cycles through it."""
        ...


@runtime_checkable
class AsksForLeader(Protocol):
    """A nemesis with variants that depend on who leads, so that the leader must be known."""

    def needs_leader(self, variant: str) -> bool:
        """Whether a variant depends on who leads."""
        ...


@runtime_checkable
class UsesAbilities(Protocol):
    """A nemesis that declares which abilities of its target it uses: only these are prepared, else the network."""

    def needs(self, variant: str) -> frozenset[tuple[str, str]]:
        """The (interface, ability) pairs of nemesis.target.ABILITIES that a variant uses."""
        ...


def usable_variants(nemesis: Nemesis, target: Target) -> list[str]:
    """The variants of a nemesis that work on `target`, in the nemesis's order."""
    return [variant for variant in nemesis.variants if not nemesis.requires(target, variant)]
