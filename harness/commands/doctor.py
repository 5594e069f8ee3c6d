"""`harness doctor`: which nemeses work on which clusters of this machine, and proof of it.

Without `--prove` it only reports whether each cluster is available and what each form of each nemesis lacks there. With
`--prove` it starts a small cluster of each kind with the system on it, and injects, proves and heals every form once,
one after the other. Each cluster then has its own process, since some need the whole process in a namespace.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from harness import registry
from harness.cli_cluster import cluster_options_of
from harness.clusters.abilities import NamesLinkMechanism, TakesOptions
from harness.clusters.base import ClusterUnavailable
from harness.clusters.options import MECHANISM_OPTION, require_cluster
from harness.clusters.select import choose
from harness.clusters.user_namespace import reexec
from harness.commands.doctor_programs import mechanism_lines
from harness.commands.run import check_settings, settings_from
from harness.errors import OperatorError, SystemUnderTestError
from harness.faults.prove import Trial, prove_variants
from harness.faults.target import PlannedTarget
from harness.report import OutputConsole
from harness.systems.base import LimitsClusters
from harness.test import MAX_NODES, NemesisChoice
from nemesis.forms import SEPARATOR, HasForms, expand_variant, split_variant
from nemesis.mechanisms.reach import AUTO
from nemesis.protocol import Nemesis

__all__ = ["AskedForm", "Cell", "diagnose", "doctor_command", "forms_of"]

NODES = 5
"""The default of a run; five hosts are enough for every form."""

LINK_NEMESIS = "link"

WORKS, PROVEN, FAILED, MISSING = "works", "proven", "FAILED", "-"


@dataclass(frozen=True, slots=True)
class Cell:
    """One form of one nemesis on one cluster. `reason` is what is missing, what was proven, or what failed."""

    nemesis: str
    form: str
    cluster: str
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AskedForm:
    """One form of one nemesis, and the variant with which it is diagnosed and proven."""

    nemesis: str
    form: str
    variant: str


def doctor_command(arguments: argparse.Namespace) -> int:
    """Print the table. Returns 0, or 255 if something that should work could not be proven."""
    names = _split(arguments.cluster) or registry.names("clusters")
    forms = forms_of(_split(arguments.nemesis) or registry.names("nemeses"))
    options = cluster_options_of(arguments)
    if arguments.nodes > MAX_NODES:
        raise OperatorError(f"--nodes must be 1 to {MAX_NODES}, not {arguments.nodes}")
    check_settings(arguments.system, registry.load("systems", arguments.system), settings_from(arguments))
    if arguments.prove and len(names) == 1:
        cells = _prove_here(names[0], forms, options, arguments)
    elif arguments.prove:
        cells = [cell for name in names for cell in _prove_apart(name, arguments, _options_for(name, options))]
    else:
        cells = [cell for name in names for cell in _diagnose(name, forms, _options_for(name, options), arguments)]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(cell) for cell in cells], indent=1))
    else:
        _print(cells, names, OutputConsole())
        if any(form.nemesis == LINK_NEMESIS for form in forms):
            _tell_what_shapes_links(names, OutputConsole())
        _tell_mechanisms(arguments, options, OutputConsole())
    return 255 if any(cell.state == FAILED for cell in cells) else 0


def diagnose(
    name: str,
    forms: Sequence[AskedForm],
    options: Mapping[str, str],
    system: str = registry.DEFAULT_SYSTEM,
    *,
    node_count: int = NODES,
    settings: Mapping[str, str] | None = None,
) -> list[Cell]:
    """Whether each form of each nemesis works on a cluster with a system. Starts nothing."""
    system_class = registry.load("systems", system)
    try:
        cluster_class = _usable_class(name, options, system_class)
    except OperatorError as error:
        return [Cell(form.nemesis, form.form, name, MISSING, str(error)) for form in forms]
    hosts = [f"n{number}" for number in range(1, node_count + 1)]
    mechanism = options.get(MECHANISM_OPTION, AUTO)
    target = PlannedTarget(
        cluster_class, hosts, system_class=system_class, settings=dict(settings or {}), mechanism=mechanism
    )
    cells = []
    for form in forms:
        problems = target.problems(registry.load("nemeses", form.nemesis), form.variant)
        state, reason = (MISSING, "; ".join(problems)) if problems else (WORKS, "")
        cells.append(Cell(form.nemesis, form.form, name, state, reason))
    return cells


def _diagnose(
    name: str, forms: Sequence[AskedForm], options: Mapping[str, str], arguments: argparse.Namespace
) -> list[Cell]:
    return diagnose(
        name, forms, options, arguments.system, node_count=arguments.nodes, settings=settings_from(arguments)
    )


def _tell_what_shapes_links(names: Sequence[str], console: OutputConsole) -> None:
    """Print the link mechanism of clusters that know it without hosts; for the others the proofs name it."""
    clusters: dict[str, list[str]] = {}
    for name in names:
        cluster_class = registry.load("clusters", name)
        if isinstance(cluster_class, NamesLinkMechanism):
            clusters.setdefault(cluster_class.link_mechanism(), []).append(name)
    for mechanism, alike in clusters.items():
        console.print_line(f"links on {', '.join(alike)} are shaped by {mechanism}")


def _tell_mechanisms(arguments: argparse.Namespace, options: Mapping[str, str], console: OutputConsole) -> None:
    """Print the mechanisms by which disk, power and clock faults reach the system's programs."""
    system_class = registry.load("systems", arguments.system)
    asked = options.get(MECHANISM_OPTION, AUTO)
    for line in mechanism_lines(system_class, settings_from(arguments), asked):
        console.print_line(line)


def _usable_class(name: str, options: Mapping[str, str], system_class: Any) -> Any:
    """The class of a cluster that works on this machine and can run the system. Raises OperatorError."""
    cluster_class = registry.load("clusters", name)
    try:
        choose(name)
    except ClusterUnavailable as error:
        raise OperatorError(str(error)) from None
    cluster_class = require_cluster(cluster_class, options, extra_hosts=system_class.extra_hosts)
    if isinstance(system_class, LimitsClusters) and (reason := system_class.cannot_run_on(cluster_class)) is not None:
        raise OperatorError(reason)
    return cluster_class


def _options_for(name: str, options: Mapping[str, str]) -> dict[str, str]:
    """The given options that a cluster accepts: with several clusters, each gets its own."""
    cluster_class = registry.load("clusters", name)
    known = cluster_class.options if isinstance(cluster_class, TakesOptions) else ()
    return {option: value for option, value in options.items() if option in known}


def forms_of(words: Iterable[str]) -> list[AskedForm]:
    """The forms for NAME, NAME=FORM and NAME=FORM@TARGET, as in `harness run --nemesis`, each once. A NAME alone
    includes the forms that a run does not cycle through. Raises OperatorError."""
    found: dict[tuple[str, str], AskedForm] = {}
    for choice in sorted(map(NemesisChoice.parse, words), key=lambda choice: choice.name):
        nemesis: Nemesis = registry.load("nemeses", choice.name)
        if isinstance(nemesis, HasForms) and choice.variant is None:
            variants = [f"{form.name}{SEPARATOR}{form.targets[0]}" for form in nemesis.forms.values()]
        else:
            try:
                variants = expand_variant(nemesis, choice.variant)
            except ValueError as error:
                raise OperatorError(str(error)) from None
        for variant in variants:
            form = split_variant(variant)[0] if isinstance(nemesis, HasForms) else variant
            found.setdefault((choice.name, form), AskedForm(choice.name, form, variant))
    return list(found.values())


def _prove_here(
    name: str, forms: Sequence[AskedForm], options: Mapping[str, str], arguments: argparse.Namespace
) -> list[Cell]:
    """Prove every form that works according to `diagnose`, on a cluster in this process."""
    cells = _diagnose(name, forms, options, arguments)
    usable = {(cell.nemesis, cell.form) for cell in cells if cell.state == WORKS}
    wanted = [(form.nemesis, form.variant) for form in forms if (form.nemesis, form.form) in usable]
    if not wanted:
        return cells
    if choose(name).in_user_namespace:
        reexec([sys.executable, "-m", "harness", *arguments.words])
    console = OutputConsole(stderr=True)

    def tell(trial: Trial) -> None:
        state = "proven and healed" if trial.is_good else "FAILED"
        line = f"{name}: {trial.nemesis}={trial.variant}: {state} in {trial.seconds:.1f} s: {trial.detail}"
        console.print_line(line)

    try:
        trials = asyncio.run(
            prove_variants(
                cluster_class=registry.load("clusters", name),
                cluster_options=options,
                system_class=registry.load("systems", arguments.system),
                nemeses={nemesis: registry.load("nemeses", nemesis) for nemesis, _ in wanted},
                variants=wanted,
                node_count=arguments.nodes,
                settings=settings_from(arguments),
                tell=tell,
            )
        )
    except (OperatorError, SystemUnderTestError) as error:
        failed = {"state": FAILED, "reason": str(error)}
        return [dataclasses.replace(cell, **failed) if cell.state == WORKS else cell for cell in cells]
    tried = {(trial.nemesis, trial.variant.partition("@")[0]): trial for trial in trials}
    return [_with_trial(cell, tried.get((cell.nemesis, cell.form))) for cell in cells]


def _with_trial(cell: Cell, trial: Trial | None) -> Cell:
    if trial is None:
        return cell
    return dataclasses.replace(cell, state=PROVEN if trial.is_good else FAILED, reason=trial.detail)


def _prove_apart(name: str, arguments: argparse.Namespace, options: Mapping[str, str]) -> list[Cell]:
    """Prove the forms on one cluster in a child process."""
    words = ["doctor", "--prove", "--json", "--cluster", name, "--system", arguments.system]
    words += ["--nodes", str(arguments.nodes)]
    for key, value in arguments.settings:
        words += ["--set", f"{key}={value}"]
    if arguments.nemesis:
        words += ["--nemesis", arguments.nemesis]
    for option, value in options.items():
        words += [f"--{option}", value]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.run(
        [sys.executable, "-m", "harness", *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        return [Cell(**entry) for entry in json.loads(child.stdout)]
    except (ValueError, TypeError):
        raise OperatorError(f"harness doctor --prove --cluster {name} ended with status {child.returncode}") from None


def _print(cells: Sequence[Cell], clusters: Sequence[str], console: OutputConsole) -> None:
    """Print a row for each form, a column for each cluster, and numbered notes on what is missing or failed."""
    notes: dict[str, dict[str, None]] = {}  # reason -> the nemeses that it names, in order
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("nemesis", no_wrap=True)
    for cluster in clusters:
        table.add_column(cluster, no_wrap=True, min_width=len(cluster))
    rows: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.nemesis, cell.form), {})[cell.cluster] = cell
    for (nemesis, form), by_cluster in rows.items():
        shown = []
        for cluster in clusters:
            cell = by_cluster[cluster]
            text = cell.state
            if cell.state in (MISSING, FAILED):
                reason = cell.reason.replace(f"; {nemesis}: ", "; ").removeprefix(f"{nemesis}: ")
                named = notes.setdefault(reason, {})
                if reason != cell.reason:
                    named[nemesis] = None
                text = f"{cell.state} ({list(notes).index(reason) + 1})"
            shown.append(text)
        table.add_row(f"{nemesis}={form}", *shown)
    console.print(table)
    for number, (reason, named) in enumerate(notes.items(), 1):
        console.print_line(f"({number}) {', '.join(named)}{': ' if named else ''}{reason}")


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
