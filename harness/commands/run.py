"""`harness run`: one test, from option names to an exit status."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import registry
from harness.cli_cluster import cluster_options_of
from harness.clusters.abilities import Traced
from harness.clusters.base import ClusterUnavailable
from harness.clusters.options import require_cluster
from harness.clusters.select import choose
from harness.clusters.user_namespace import reexec
from harness.descriptors import require_descriptors
from harness.errors import HarnessError, OperatorError, SystemUnderTestError
from harness.execution import Parts, exit_status_of, metrics_of, perform, plan_faults
from harness.fault_table import FaultRow, fault_rows, fault_table
from harness.faults.triggers import not_waited_for
from harness.report import OutputConsole, print_summary
from harness.report.junit import Case, case_of, require_junit_path, write_junit
from harness.report.step_summary import append_summary, require_summary_path
from harness.seeded import random_seed
from harness.signals import interrupted_by_signals
from harness.standard_streams import output_of_results
from harness.store import RunDir, Store, without_latest
from harness.systems.base import Fetched, LimitsClusters, setting_problems
from harness.test import ALL, NemesisChoice, Test
from harness.workloads.choice import make_workload, require_capabilities
from nemesis.forms import expand_variant
from nemesis.protocol import Nemesis

__all__ = [
    "Cases", "Prepared", "announce", "enter_namespace", "make_test", "prepare", "require_rereadable", "run_command",
    "test_from",
]  # fmt: skip


KNOWN_ERRORS = (OperatorError, SystemUnderTestError, HarnessError)
"""Errors whose text is sufficient, without the exception type."""

NO_FAULTS = (
    "no faults are injected: use --nemesis partition to cut the network, or --nemesis all for all kinds of faults"
)


class Cases:
    """The results of a command's runs, written at its end to the files of `--junit` and `--step-summary`.

    Paths that cannot be written are reported before the first run. Raises OperatorError.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._junit: str | None = arguments.junit
        self._step_summary: str | None = arguments.step_summary
        self._cases: list[Case] = []
        if self._junit is not None:
            require_junit_path(self._junit)
        if self._step_summary is not None:
            require_summary_path(self._step_summary)

    def judged(self, test: Test, run_dir: RunDir, results: Mapping[str, Any], *, label: str = "") -> None:
        """Add a run that has a verdict."""
        if self._junit is None and self._step_summary is None:
            return
        name = f"{test.name} {label}".strip()
        self._cases.append(case_of(results, test.to_json(), name=name, report_path=str(run_dir.report_path)))

    def did_not_run(self, test: Test | None, error: BaseException, *, label: str = "") -> None:
        """Add a run that has no verdict."""
        name = f"{'run' if test is None else test.name} {label}".strip()
        properties = {} if test is None else {"seed": str(test.seed), "repeat": test.replay_line()}
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, KNOWN_ERRORS) else str(error)
        self._cases.append(Case(name, "did-not-run", reason, properties=properties))

    def __enter__(self) -> Cases:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            self.did_not_run(None, error)
        if self._junit is not None:
            write_junit(self._junit, self._cases)
        if self._step_summary is not None:
            append_summary(self._step_summary, self._cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A test with its names resolved; nothing has been started or written."""

    parts: Parts
    faults: Sequence[FaultRow]
    """Which faults work on this cluster and how, and which do not and why."""
    in_user_namespace: bool
    """Whether the command must re-execute itself as root of a user namespace."""


def run_command(arguments: argparse.Namespace) -> int:
    """Create the test, run it, judge it, report it. Returns the exit status of the verdict.

    Several runs (--matrix, --test-count) are `harness.commands.series`.
    """
    with output_of_results(is_json=arguments.json) as output, Cases(arguments) as cases:
        prepared = prepare(arguments)
        store = Store(arguments.store)
        enter_namespace(prepared, arguments)
        console = OutputConsole(stderr=True)
        announce(prepared, console)
        run_dir, results = perform(prepared.parts, store, console)
        cases.judged(prepared.parts.test, run_dir, results)
        show = console if arguments.json else OutputConsole()  # the verdict is printed even if no file can be written
        print_summary(results, show, test=prepared.parts.test.to_json(), report_path=run_dir.report_path)
    if arguments.json:
        print(json.dumps(results, indent=2, sort_keys=True), file=output)
    if console.reader_is_gone:
        raise BrokenPipeError
    return exit_status_of(results)


def prepare(arguments: argparse.Namespace) -> Prepared:
    """The test that the arguments describe, checked against what this machine supports. Raises OperatorError."""
    with interrupted_by_signals():  # plain SIGTERM would leave the trials' temporary files behind
        return prepare_test(test_from(arguments), has_trace=arguments.trace)


def prepare_test(test: Test, *, has_trace: bool = False, system_class: Any = None) -> Prepared:
    """Check a test against what this machine supports; `system_class` replaces the lookup by name. Raises
    OperatorError."""
    if system_class is None:
        system_class = _with_client(registry.load("systems", test.system), test)
    nemeses = _nemeses(test)
    check_settings(test.system, system_class, test.system_settings)
    workload = make_workload(test.workload, system_class=system_class, system=test.system, settings=test.settings)
    require_capabilities(workload, system_class)
    if test.fail_fast and workload.online() is None:
        raise OperatorError(f"--fail-fast: workload {test.workload} can only be judged at its end: omit the option")
    try:
        choice = choose(test.cluster)
    except ClusterUnavailable as error:
        raise OperatorError(f"--cluster {test.cluster}: {error}") from None
    test = dataclasses.replace(test, cluster=choice.name)
    cluster_class = registry.load("clusters", test.cluster)
    cluster_class = require_cluster(cluster_class, test.cluster_options, extra_hosts=system_class.extra_hosts)
    if isinstance(system_class, LimitsClusters) and (reason := system_class.cannot_run_on(cluster_class)) is not None:
        raise OperatorError(f"--system {test.system}: {reason}")
    require_descriptors(test)
    metrics_of(test, system_class, cluster_class)  # raises for what cannot be read
    if has_trace and not isinstance(cluster_class, Traced):
        raise OperatorError(f"--trace: the network of cluster {test.cluster} cannot be traced: use --cluster sim")
    parts = Parts(
        test=test,
        cluster_class=cluster_class,
        cluster_reason=choice.reason,
        system_class=system_class,
        workload=workload,
        nemeses=nemeses,
        schedule=plan_faults(test, nemeses, cluster_class, system_class),
        has_trace=has_trace,
    )
    return Prepared(
        parts=parts,
        faults=fault_rows(test, nemeses, cluster_class, system_class),
        in_user_namespace=choice.in_user_namespace,
    )


def _with_client(system_class: Any, test: Test) -> Any:
    """The system with the client of `--client`, or with its own. Raises OperatorError if it has neither, or does not
    accept `--client`."""
    from harness.sdk.plugin import require_client
    from harness.systems.guest import GuestSystem, with_client

    is_guest = isinstance(system_class, type) and issubclass(system_class, GuestSystem)
    if test.client is None:
        if is_guest:
            require_client(system_class.plugin)
        return system_class
    if not is_guest:
        raise OperatorError(
            f"--client: system {test.system} has its own clients; only systems of harness.sdk accept others"
        )
    from harness.json_lines import client_program

    return with_client(system_class, client_program(test.client))


def enter_namespace(prepared: Prepared, arguments: argparse.Namespace) -> None:
    """Re-execute this command as root of a user namespace if the cluster needs one; does not return then.

    The system's packages are fetched before, as there is no network access inside. Raises OperatorError.
    """
    system_class = prepared.parts.system_class
    if isinstance(system_class, Fetched):
        settings = prepared.parts.test.system_settings
        system_class.fetch(lambda line: print(line, file=sys.stderr, flush=True), settings)
    if prepared.in_user_namespace:
        schedule = prepared.parts.test.nemesis_schedule
        if schedule is not None and not os.path.isfile(schedule):
            raise OperatorError(
                f"schedule {schedule} can be read only once, but is read again in the user namespace that cluster "
                f"{prepared.parts.test.cluster} needs here: save it to a file"
            )
        reexec([sys.executable, "-m", "harness", *arguments.words])


def require_rereadable(schedule: str | None, runs: int) -> None:
    """Raise OperatorError if several runs would read their schedule from a pipe: it can be read only once, and the
    second run would wait for more."""
    if schedule is not None and runs > 1 and os.path.exists(schedule) and not os.path.isfile(schedule):
        raise OperatorError(f"schedule {schedule} can be read only once, but {runs:,} runs read it: save it to a file")


def announce(prepared: Prepared, console: OutputConsole) -> None:
    """Print whether there are faults at all, which cluster is used and why, and which faults work on it."""
    parts = prepared.parts
    if not parts.schedule:
        console.print_line(NO_FAULTS)
    console.print_line(f"cluster {parts.test.cluster}: {parts.cluster_reason}")
    unseen = not_waited_for(parts.schedule, parts.cluster_class, parts.system_class)
    if unseen is not None:
        console.print_line(f"triggers: {unseen}")
    if prepared.faults:
        console.print(fault_table(prepared.faults))


def settings_from(arguments: argparse.Namespace) -> dict[str, str]:
    """The settings of `--set` and its shorthands. Raises OperatorError."""
    settings: dict[str, str] = {}
    for key, value in arguments.settings:
        if settings.get(key, value) != value:
            raise OperatorError(f"--set {key} is given twice with different values")
        settings[key] = value
    return settings


def test_from(arguments: argparse.Namespace) -> Test:
    """The test that a command line describes. Raises OperatorError."""
    given = {**vars(arguments), "settings": settings_from(arguments), "cluster_options": cluster_options_of(arguments)}
    return make_test(given)


def make_test(given: Mapping[str, Any]) -> Test:
    """The test for options by their names on the command line. Raises OperatorError."""
    names = [word.strip() for word in str(given["nemesis"]).split(",") if word.strip()]
    if not names:
        raise OperatorError("--nemesis: the value is empty; use none for a run without faults")
    if "none" in names and len(names) > 1:
        raise OperatorError("--nemesis: none cannot be combined with other nemeses")
    chosen = () if names == ["none"] else tuple(NemesisChoice.parse(name) for name in names)
    test = Test(
        system=given["system"],
        cluster=str(given["cluster"]),
        nodes=int(given["nodes"]),
        workload=str(given["workload"]),
        nemesis=chosen,
        nemesis_interval_s=float(given["nemesis_interval"]),
        nemesis_schedule=None if given["nemesis_schedule"] is None else without_latest(str(given["nemesis_schedule"])),
        time_limit_s=float(given["time_limit"]),
        concurrency=int(given["concurrency"]),
        rate=float(given["rate"]),
        seed=random_seed() if given["seed"] is None else int(given["seed"]),
        settings={str(key): str(value) for key, value in dict(given["settings"]).items()},
        cluster_options=dict(given["cluster_options"]),
        operation_timeout_s=float(given["operation_timeout"]),
        checker_timeout_s=float(given["checker_timeout"]),
        checker_memory_mb=int(given["checker_memory"]),
        fail_fast=bool(given["fail_fast"]),
        metrics=tuple(given.get("metrics", ())),
        client=given["client"],
    )
    problems = test.problems()
    if problems:
        raise OperatorError("; ".join(problems))
    return test


def _nemeses(test: Test) -> dict[str, Nemesis]:
    """The nemeses that the test names; all of them if it has a schedule file."""
    if test.nemesis_schedule is not None:
        return registry.load_all("nemeses")
    found: dict[str, Nemesis] = {}
    for choice in test.nemesis:
        if choice.name == ALL:
            continue
        nemesis: Nemesis = registry.load("nemeses", choice.name)
        try:
            expand_variant(nemesis, choice.variant)
        except ValueError as error:
            raise OperatorError(str(error)) from None
        if choice.name in found and choice.variant is None:
            raise OperatorError(f"nemesis {choice.name} is given twice")
        found[choice.name] = nemesis
    if any(choice.name == ALL for choice in test.nemesis):
        found = registry.load_all("nemeses")
        if problems := test.nemesis_problems(found):
            raise OperatorError("; ".join(problems))
    return found


def check_settings(system: str, system_class: Any, settings: Mapping[str, str]) -> None:
    """Raise OperatorError for settings that a system does not accept."""
    problems = setting_problems(system_class.settings, settings)
    if problems:
        raise OperatorError(f"--set (system {system}): " + "; ".join(problems))
