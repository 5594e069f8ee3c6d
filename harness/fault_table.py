"""Which of the requested faults are available and by which mechanism, and which are not and why: before the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from harness.clusters.abilities import NamesMechanisms
from harness.execution import planned_target
from harness.faults.target import OPERATOR
from harness.test import ALL, Test
from nemesis.forms import expand_variant, is_of_all, needs_of, split_variant
from nemesis.protocol import Nemesis

__all__ = ["FaultRow", "fault_rows", "fault_table"]

BY_NAME_ONLY = "not part of all: only if requested by name"


@dataclass(frozen=True, slots=True)
class FaultRow:
    """Forms of one nemesis with the same mechanism `how`, or unavailable (None) for the same reason `why_not`."""

    nemesis: str
    forms: tuple[str, ...]
    how: str | None
    why_not: str | None = None


def fault_rows(test: Test, nemeses: Mapping[str, Nemesis], cluster_class: Any, system_class: Any) -> Sequence[FaultRow]:
    """A row for every nemesis and mechanism (or reason) of the faults that a test asks for, available ones first. Empty
    for a test with a schedule file, which contains only available faults."""
    if test.nemesis_schedule is not None:
        return []
    target = planned_target(test, cluster_class, system_class)
    named = {choice.name for choice in test.nemesis}
    rows: dict[tuple[str, str | None, str | None], dict[str, None]] = {}
    for name, variants in _asked(test, nemeses).items():
        nemesis = nemeses[name]
        for variant in variants:
            problems = target.problems(nemesis, variant)
            if ALL in named and name not in named and not is_of_all(nemesis):
                problems = [BY_NAME_ONLY]
            reason = "; ".join(dict.fromkeys(problem.removeprefix(f"{name}: ") for problem in problems))
            how = None if problems else _mechanism(nemesis, variant, cluster_class)
            rows.setdefault((name, how, reason or None), {})[variant] = None
    found = [FaultRow(name, _shortened(forms, nemeses[name]), how, why) for (name, how, why), forms in rows.items()]
    return sorted(found, key=lambda row: (row.how is None, row.nemesis))


def _asked(test: Test, nemeses: Mapping[str, Nemesis]) -> dict[str, list[str]]:
    """Nemesis -> the variants that the test asks for."""
    asked: dict[str, list[str]] = {}
    named = {choice.name for choice in test.nemesis}
    for choice in test.nemesis:
        names = sorted(nemeses.keys() - named) if choice.name == ALL else [choice.name]
        for name in names:
            asked.setdefault(name, []).extend(expand_variant(nemeses[name], choice.variant))
    return asked


def _shortened(variants: Iterable[str], nemesis: Nemesis) -> tuple[str, ...]:
    """Variants, shortened to their form if all targets of the form are present: "sigkill", "terminate@leader"."""
    there = list(variants)
    shown: dict[str, None] = {}
    for variant in there:
        form, word = split_variant(variant)
        own = [each for each in nemesis.variants if split_variant(each)[0] == form]
        shown[form if not word or set(own) <= set(there) else variant] = None
    return tuple(shown)


def _mechanism(nemesis: Nemesis, variant: str, cluster_class: Any) -> str:
    """The mechanism of a variant, as text."""
    names = []
    for interface, ability in sorted(needs_of(nemesis, [variant])):
        if interface == OPERATOR:
            names.append("the system itself")
        elif isinstance(cluster_class, NamesMechanisms):
            names.append(cluster_class.mechanism_of(interface, ability))
        else:
            names.append(f"{interface} of cluster {cluster_class.name}")
    return " and ".join(dict.fromkeys(names))


def fault_table(rows: Sequence[FaultRow]) -> Table:
    """The rows as a table for the console."""
    table = Table(show_header=True, header_style="", box=None, padding=(0, 2, 0, 0), expand=False)
    for title in ("fault", "how", "forms"):
        table.add_column(title, no_wrap=title == "fault")
    for row in rows:
        how = row.how or (BY_NAME_ONLY if row.why_not == BY_NAME_ONLY else f"not available: {row.why_not}")
        table.add_row(row.nemesis, how, ", ".join(row.forms))
    return table
