"""What a nemesis is.

A fault goes through five steps: it is *planned* (who is hit; nothing is touched yet, so that the plan can be
written down first), *injected*, *proved*, *healed*, and the healing is proved too. Some look once more right before the
healing (`ProvesToTheEnd`): whether the system under test met a fault shows only once it has lasted. A nemesis holds no
state between the steps: everything a later step needs is in the `Injection`, and whatever the target must remember it
remembers by the fault's id. So one nemesis serves any number of overlapping faults and runs.
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
"""Failures that a proof names one by one; a history line stays readable and the rest are counted."""


class Activity(Enum):
    """What a replica does while nothing is wrong with its host."""

    RUN = "run"
    ANSWER = "answer whoever asks it over a link that is whole"
    START = "start, once it is down"
    BE_REACHED = "hear from all the others, and be heard by them"
    USE_DISK = "have its reads, writes and syncs done, soon and without an error"
    TELL_TIME = "know the time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One planned fault.

    `value` is what the history says about it (JSON data; at least id, nemesis, variant). `problem` is set
    when nothing can be injected, for instance because nobody leads; such a fault is recorded but never
    counts as proven. `evidence` is what the plan and the proof leave for the steps that come after them.
    `keeps_from` is what the hosts in `value` may be unable to do meanwhile, for the proofs of other faults; of the
    nemeses of this package `nemesis.impairments` has it. `beside` is given to `prove_met`: the other faults that have
    been in force at some time since this one began, also those that are over, for counts that they share.
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
    """Whether a fault, or its healing, is what it claims to be.

    `exercised` says of a fault whether the system under test met it: a cut that no packet ran into tested nothing. None
    where that cannot be known. `evidence` is JSON data that the step leaves to later ones, such as counters.
    `checked` counts what was looked at (links, processes, clocks); `failed` names each that was not as it
    should be; `detail` is one line for people.
    """

    proven: bool
    exercised: bool | None = None
    detail: str = ""
    checked: int = 0
    failed: Sequence[str] = field(default=())
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As the history carries it."""
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
    """Whether a fault was exercised, by what each host counts since it began, and what to add to the words of that:
    what a host counts for another fault as well, as those in `shared` do, may all be of the other one."""
    hit = {host for host, count in counts.items() if count > 0}
    unclear = sorted(hit.intersection(shared))
    note = f"; of {', '.join(unclear)} perhaps by another such fault alone" if unclear else ""
    return (None if unclear and hit == set(unclear) else bool(hit)), note


class Nemesis(Protocol):
    """A kind of fault. Implementations are stateless; see the module's docstring. What only some have are the
    protocols below: `ProvesToTheEnd`, `StepTimeout`, `AskedForByName`, `MakesRequest`, `JudgesVariants`,
    `UsesAbilities`, and `HasForms` of nemesis.forms.
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def variants(self) -> Sequence[str]:
        """Names of its forms, in a fixed order; never empty."""
        ...

    def requires(self, target: Target, variant: str | None = None) -> list[str]:
        """Everything that keeps this nemesis, or one variant of it, from working on `target`.

        Each problem is one line that names what is missing. Without a variant: what stops all of them.
        """
        ...

    async def plan(self, target: Target, rng: random.Random, *, fault_id: str, variant: str) -> Injection:
        """Decide who is hit, every choice from `rng`. May ask the system under test, touches nothing.

        Raises ValueError for an unknown variant or one that this target cannot have.
        """
        ...

    async def inject(self, target: Target, injection: Injection) -> None:
        """Put the fault in force."""
        ...

    async def prove(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Observe whether the fault is in force. `in_force` are the other faults at this moment."""
        ...

    async def heal(self, target: Target, injection: Injection) -> None:
        """Take the fault back. Idempotent; safe when `inject` failed half-way or never ran."""
        ...

    async def prove_healed(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Observe whether the fault is gone. `in_force` are the faults that remain."""
        ...


@runtime_checkable
class ProvesToTheEnd(Protocol):
    """A nemesis with evidence that is whole only once a fault ends: counts of what the system met while it lasted."""

    async def prove_met(self, target: Target, injection: Injection, *, in_force: Sequence[Injection] = ()) -> Proof:
        """Look at a fault right before it is healed, while it is still in force.

        `proven` is False when it was not in force all the time since its first proof; `exercised` says whether the
        system met it in that time. Asked only of faults that were proven.
        """
        ...


@runtime_checkable
class StepTimeout(Protocol):
    """A nemesis with a step that may take longer than the driver's own limit."""

    step_timeout_s: float
    """For each of its steps."""


@runtime_checkable
class AskedForByName(Protocol):
    """A nemesis that says whether a run with every nemesis has it."""

    is_of_all: bool
    """False where a run has it only if it is asked for by name."""


@runtime_checkable
class MakesRequest(Protocol):
    """A nemesis that says whether it only asks the system for something, again and again until that is done: other
    faults come and go meanwhile, and one that goes may be what it waits for."""

    is_request: bool


@runtime_checkable
class JudgesVariants(Protocol):
    """A nemesis with variants beyond those that it names, such as those for hosts by name."""

    def variant_problem(self, variant: str) -> str | None:
        """Why there is no such variant, as one line; None when there is, whether or not a run cycles through it."""
        ...


@runtime_checkable
class AsksForLeader(Protocol):
    """A nemesis with variants that strike the leader, so that somebody must know who that is."""

    def needs_leader(self, variant: str) -> bool:
        """Whether a variant does."""
        ...


@runtime_checkable
class UsesAbilities(Protocol):
    """A nemesis that says what of its target it uses, so that only that is prepared; others cut the network."""

    def needs(self, variant: str) -> frozenset[tuple[str, str]]:
        """The (interface, ability) pairs of nemesis.target.ABILITIES that a variant uses."""
        ...


def usable_variants(nemesis: Nemesis, target: Target) -> list[str]:
    """The variants of a nemesis that `target` can have, in the nemesis's order."""
    return [variant for variant in nemesis.variants if not nemesis.requires(target, variant)]
