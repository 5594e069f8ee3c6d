"""`harness list`: the workloads, nemeses, systems and clusters that can be chosen by name."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from harness import registry
from harness.errors import OperatorError, nearest
from harness.report import OutputConsole
from harness.systems.base import ServesMetrics, Setting
from harness.test import WORKLOAD_PREFIX
from harness.workloads.base import AlsoByCapability, ByCapability, OffersClients
from harness.workloads.capability import missing_capabilities

__all__ = ["list_command"]


def list_command(arguments: argparse.Namespace) -> int:
    """Print every workload, nemesis, system and cluster with its description and options, including those of other
    distributions; broken ones are listed with the reason. With the name of a kind print only that kind, with another
    name only what has it, with a file the system in it. Returns 0; raises OperatorError if nothing has that name, or if
    the system in the file cannot be used."""
    console = OutputConsole()
    for kind, survey in _chosen(arguments.what).items():
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, found in survey.items():
            try:
                lines = list(_lines(kind, found))
                if arguments.what is not None:
                    lines += filter(None, (_fitting(found), _metrics(found)))
            except Exception as error:  # a plug-in may have anything as its variants or settings
                title = f"{registry.KINDS[kind]} {name!r}"
                lines = [f"broken: {title} cannot be described: {type(error).__name__}: {error}"]
            for index, line in enumerate(lines):
                table.add_row("" if index else name, escape(line))
        console.print(table)
        console.print()
    return 0


def _chosen(what: str | None) -> Mapping[str, Mapping[str, Any]]:
    """What to list, by kind and name. Raises OperatorError."""
    if what is None:
        return {kind: registry.survey(kind) for kind in registry.KINDS}
    if what in registry.KINDS:
        return {what: registry.survey(what)}
    surveys = {kind: registry.survey(kind) for kind in registry.KINDS}
    named = {kind: {what: survey[what]} for kind, survey in surveys.items() if what in survey}
    if named or registry.is_file(what):
        return named or {"systems": {(found := registry.load("systems", what)).name: found}}
    known = [*registry.KINDS, *(name for survey in surveys.values() for name in survey)]
    raise OperatorError(
        f"nothing is named {what!r}{nearest(what, known)}: harness list shows all names, and harness list FILE.py the "
        "system in a file"
    )


def _fitting(system_class: Any) -> str | None:
    """A line with the workloads that a system's clients can run; None if its clients are not of harness.sdk."""
    if not isinstance(system_class, OffersClients):
        return None
    client_class = system_class.client_class
    forms = {name: _by_capability(found) for name, found in registry.survey("workloads").items()}
    names = [name for name, form in forms.items() if form is not None and not missing_capabilities(form, client_class)]
    return f"workloads: {', '.join(names) or f'none ({client_class.__name__} lacks methods for each)'}"


def _metrics(system_class: Any) -> str | None:
    """A line with the series that a run of a system draws; None if it has no page of metrics."""
    if not isinstance(system_class, ServesMetrics) or not system_class.metric_pages:
        return None
    series = (f"{metric.text} ({metric.page})" for metric in system_class.metrics)
    return f"metrics: {', '.join(series) or 'none, unless --metrics adds one'}"


def _by_capability(workload: Any) -> Any:
    """The variant of a workload for clients of harness.sdk; None if it has none."""
    form = workload.by_capability if isinstance(workload, AlsoByCapability) else workload
    return form if isinstance(form, ByCapability) else None


def _lines(kind: str, found: Any) -> Iterator[str]:
    """The description of one entry; each line is a row of the table."""
    if isinstance(found, registry.Broken):
        yield f"broken: {found.reason}"
        return
    yield found.description
    if kind == "nemeses":
        yield from (f"={variant}" for variant in found.variants)
    if kind == "systems":
        yield from _settings(found.settings, "")
    if kind == "workloads":
        form = _by_capability(found)
        if form is not None:
            yield f"any client with {', '.join(form.capabilities)}"
            yield from _settings(form.settings, WORKLOAD_PREFIX)


def _settings(settings: Iterable[Setting], prefix: str) -> Iterator[str]:
    for setting in settings:
        choices = f"({', '.join(setting.choices)})" if setting.choices else ""
        words = " ".join(filter(None, (setting.description, choices)))
        yield f"--set {prefix}{setting.name}={setting.default}: {words}"
