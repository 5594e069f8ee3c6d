"""What nemeses have in common that come in forms and hit hosts by role.

A variant of such a nemesis is `FORM@TARGET`: what it does and to whom (see nemesis.victims), as in
`sigkill@leader` or `fsync@n1+n2`. Each form has targets that a run cycles through by default; any other target
can be asked for by name. On the command line a part may be left out: `kill=sigkill` cycles through the form's
own targets, `kill=@leader` through all forms at the leader.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from nemesis.protocol import Activity, AskedForByName, Injection, JudgesVariants, Nemesis, UsesAbilities
from nemesis.target import Target
from nemesis.victims import NEEDS_LEADER, TARGETS, choose_victims, target_problem

__all__ = [
    "Form",
    "FormNemesis",
    "HasForms",
    "VariantNames",
    "expand_variant",
    "hosts_of",
    "is_of_all",
    "needs_of",
    "split_variant",
]

SEPARATOR = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One kind of fault of a nemesis. `needs` are (interface, ability) pairs of nemesis.target.ABILITIES;
    `targets` are those that a run cycles through when none is asked for."""

    name: str
    description: str
    needs: tuple[tuple[str, str], ...]
    targets: tuple[str, ...] = ("one",)
    is_cycled: bool = True
    """Whether a run that names no form includes this one."""


@runtime_checkable
class HasForms(Protocol):
    """A nemesis whose variants are each a form and a target."""

    forms: Mapping[str, Form]
    """By name, including those that a run does not cycle through."""


def split_variant(variant: str) -> tuple[str, str]:
    """(form, target) of a variant; the target is empty when the variant has none."""
    form, _, word = variant.partition(SEPARATOR)
    return form, word


class FormNemesis:
    """The variants, requirements and plans of a nemesis with forms; subclasses inject, prove and heal."""

    name: str
    description: str
    forms: Mapping[str, Form]
    keeps_from: frozenset[Activity] = frozenset()
    """As `Injection.keeps_from`."""

    @property
    def variants(self) -> Sequence[str]:
        """Every form at its own targets."""
        cycled = [form for form in self.forms.values() if form.is_cycled]
        return tuple(f"{form.name}{SEPARATOR}{word}" for form in cycled for word in form.targets)

    def variant_problem(self, variant: str) -> str | None:
        """Why there is no such variant, as one line; None if it exists, whether or not a run cycles through it."""
        form, word = split_variant(variant)
        if form not in self.forms:
            return f"{self.name} has no form {form!r}; it has: {', '.join(self.forms)}"
        if not word:
            return f"{self.name}={form} needs a target: {form}{SEPARATOR}WHO, with WHO one of {', '.join(TARGETS)}"
        return target_problem(word)

    def requires(self, target: Target, variant: str | None = None) -> list[str]:
        """What the forms need and `target` lacks; for a single variant also why its target does not exist there."""
        if variant is None:
            per_form = [self._missing(target, form) for form in self.forms.values()]
            if any(not missing for missing in per_form):
                return []
            return list(dict.fromkeys(problem for missing in per_form for problem in missing))
        problem = self.variant_problem(variant)
        if problem is not None:
            return [problem]
        form, word = split_variant(variant)
        problems = self._missing(target, self.forms[form])
        unfit = target_problem(word, target.hosts)
        return problems if unfit is None else [*problems, f"{self.name}: {unfit}"]

    def needs_leader(self, variant: str) -> bool:
        """Whether a variant's target depends on who leads: the leader, or all followers."""
        return split_variant(variant)[1] in NEEDS_LEADER

    def needs(self, variant: str) -> frozenset[tuple[str, str]]:
        """The (interface, ability) pairs that a variant uses."""
        return frozenset(self.forms[split_variant(variant)[0]].needs)

    def _missing(self, target: Target, form: Form) -> list[str]:
        reasons = [target.missing(interface, ability) for interface, ability in form.needs]
        return [f"{self.name}: {reason}" for reason in reasons if reason is not None]

    async def plan(self, target: Target, rng: random.Random, *, fault_id: str, variant: str) -> Injection:
        """Choose the hosts, waiting for a leader if needed. Raises ValueError for a variant that does not exist."""
        problem = self.variant_problem(variant)
        if problem is not None:
            raise ValueError(problem)
        form, word = split_variant(variant)
        victims = await choose_victims(target, word, rng)
        value: dict[str, Any] = {
            "id": fault_id,
            "nemesis": self.name,
            "variant": variant,
            "hosts": list(victims.hosts),
        }
        if victims.leader is not None:
            value["leader"] = victims.leader
        if victims.problem is None:
            value |= self._details(self.forms[form], target, rng, victims.hosts)
        return Injection(
            fault_id=fault_id,
            nemesis=self.name,
            variant=variant,
            value=value,
            problem=victims.problem,
            evidence=await self._seen_before(self.forms[form], target, victims.hosts),
            keeps_from=self.keeps_from,
        )

    def _details(self, form: Form, target: Target, rng: random.Random, hosts: Sequence[str]) -> dict[str, Any]:
        """What else the history says about the fault, decided from `rng`; JSON data."""
        return {}

    async def _seen_before(self, form: Form, target: Target, hosts: Sequence[str]) -> Mapping[str, Any]:
        """The state before the injection, for the proof to compare with; JSON data."""
        return {}

    def _form_of(self, injection: Injection) -> str:
        return split_variant(injection.variant)[0]


class VariantNames(Collection[str]):
    """The variants of a nemesis as a schedule sees them: iterates over those a run cycles through, contains all."""

    def __init__(self, nemesis: Nemesis) -> None:
        self._nemesis = nemesis

    def __contains__(self, variant: object) -> bool:
        return isinstance(variant, str) and _problem(self._nemesis, variant) is None

    def __iter__(self) -> Iterator[str]:
        return iter(self._nemesis.variants)

    def __len__(self) -> int:
        return len(self._nemesis.variants)


def expand_variant(nemesis: Nemesis, asked: str | None) -> list[str]:
    """The variants that a choice on the command line stands for; see the module's docstring.

    Raises ValueError with one line that says what is wrong with the choice.
    """
    if asked is None:
        return list(nemesis.variants)
    if isinstance(nemesis, HasForms):
        forms = nemesis.forms
        form, word = split_variant(asked)
        if form in forms and not word:
            return [f"{form}{SEPARATOR}{own}" for own in forms[form].targets]
        if not form and word:
            problem = target_problem(word)
            if problem is not None:
                raise ValueError(f"nemesis {nemesis.name}: {problem}")
            return [f"{name}{SEPARATOR}{word}" for name, form_of_name in forms.items() if form_of_name.is_cycled]
    problem = _problem(nemesis, asked)
    if problem is not None:
        raise ValueError(problem)
    return [asked]


def needs_of(nemesis: Nemesis, variants: Collection[str]) -> frozenset[tuple[str, str]]:
    """The (interface, ability) pairs that these variants use."""
    if not isinstance(nemesis, UsesAbilities):
        return frozenset({("network", "cut")})
    return frozenset().union(*(nemesis.needs(variant) for variant in variants))


def is_of_all(nemesis: Nemesis) -> bool:
    """Whether `--nemesis all` includes this one."""
    return nemesis.is_of_all if isinstance(nemesis, AskedForByName) else True


def hosts_of(injections: Collection[Injection]) -> frozenset[str]:
    """The hosts that faults report as hit."""
    return frozenset(host for injection in injections for host in injection.value.get("hosts", ()))


def _problem(nemesis: Nemesis, variant: str) -> str | None:
    if isinstance(nemesis, JudgesVariants):
        return nemesis.variant_problem(variant)
    if variant in nemesis.variants:
        return None
    near = difflib.get_close_matches(variant, nemesis.variants, n=1, cutoff=0.55)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"nemesis {nemesis.name} has no variant {variant!r}{hint}; known: {', '.join(nemesis.variants)}"
