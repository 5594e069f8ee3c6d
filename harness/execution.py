"""Performs a test: from its parts to a directory in the store with results and a report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import harness
from checker.faults import NEMESIS
from checker.verdict import Verdict
from harness.client_processes import marked_clients
from harness.clusters.abilities import OwnWorld
from harness.clusters.base import run_harness
from harness.clusters.options import MECHANISM_OPTION
from harness.errors import HarnessError, OperatorError, how_to_get
from harness.faults.target import PlannedTarget, prepare
from harness.history_writer import HistoryWriter, read_history
from harness.judge import judge
from harness.large_history import too_large_to_judge
from harness.metrics.expression import NO_METRICS, Metric, chosen
from harness.metrics.scraper import Scraper
from harness.report import LiveProgress, OutputConsole, print_summary
from harness.report.store_page import update_store_page
from harness.run_state import RunState
from harness.runner import Observed, Run
from harness.runtime import harness_runtime
from harness.seeded import seeded
from harness.signals import interrupted_by_signals
from harness.store import RunDir, Store, StoreError
from harness.systems.base import HasClientPrograms, MeetsSomeFaults, ServesMetrics
from harness.test import ALL, Test
from harness.units import plural
from harness.workloads.base import Workload
from nemesis.forms import VariantNames, is_of_all, needs_of, split_variant
from nemesis.mechanisms.reach import AUTO
from nemesis.protocol import Nemesis
from nemesis.schedule import INJECT, Schedule, ScheduleError, load_schedule, periodic, save_schedule

__all__ = [
    "ONLY_BY_NAME",
    "Parts",
    "TestClock",
    "exit_status_of",
    "judge_run",
    "left_out",
    "make_system",
    "metrics_of",
    "perform",
    "plan_faults",
    "planned_target",
    "rehearse",
]

logger = logging.getLogger(__name__)

ONLY_BY_NAME = "only if requested by name"
"""Why `all` does not include some nemeses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A test with its names resolved."""

    test: Test
    cluster_class: Any
    cluster_reason: str
    system_class: Any
    workload: Workload
    nemeses: Mapping[str, Nemesis]
    schedule: Schedule
    has_trace: bool = False
    """Whether to record a network trace; the cluster class must have `trace_to`."""
    on_made: Callable[[Any, TestClock], None] | None = None
    """Called with the cluster and the run's clock before anything is started on it."""


class TestClock:
    """Nanoseconds since the load began; 0 before that. Follows the event loop's clock."""

    __test__ = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._zero_s: float | None = None

    @property
    def zero_s(self) -> float | None:
        """The event loop's time at which the clock started; None before that."""
        return self._zero_s

    def start(self) -> None:
        """Set the clock to 0."""
        self._zero_s = self._loop.time()

    def now_ns(self) -> int:
        return 0 if self._zero_s is None else int((self._loop.time() - self._zero_s) * 1e9)


def planned_target(test: Test, cluster_class: Any, system_class: Any) -> PlannedTarget:
    """The hosts that a test will have, for asking which faults they support."""
    hosts = [f"n{i}" for i in range(1, test.nodes + 1)]
    mechanism = test.cluster_options.get(MECHANISM_OPTION, AUTO)
    return PlannedTarget(
        cluster_class, hosts, system_class=system_class, settings=test.system_settings, mechanism=mechanism
    )


def plan_faults(test: Test, nemeses: Mapping[str, Nemesis], cluster_class: Any, system_class: Any) -> Schedule:
    """The run's faults: those of the schedule file, or decided by the seed.

    A variant that this cluster or this number of nodes does not support is the operator's mistake if it was named, and
    is left out if the run cycles through several. Raises OperatorError.
    """
    target = planned_target(test, cluster_class, system_class)
    if test.nemesis_schedule is not None:
        return _load_schedule(test.nemesis_schedule, nemeses, target)
    if not test.nemesis:
        return Schedule(())
    choices: dict[str, list[str]] = {}
    problems: list[str] = []
    for choice in sorted(test.nemesis, key=lambda choice: choice.name != ALL):
        if choice.name == ALL:
            choices = {name: usable for name in sorted(nemeses) if (usable := target.usable(nemeses[name], None)[0])}
            choices = {name: usable for name, usable in choices.items() if is_of_all(nemeses[name])}
            continue
        try:
            fitting, reasons = target.usable(nemeses[choice.name], choice.variant)
        except ValueError as error:
            problems.append(str(error))
            continue
        if fitting:
            chosen = choices.setdefault(choice.name, [])
            chosen += [variant for variant in fitting if variant not in chosen]
        else:
            problems.append(f"--nemesis {choice} with {test.nodes} nodes on {cluster_class.name}: {'; '.join(reasons)}")
    problems += _never_met(test, choices, system_class)
    if problems:
        raise OperatorError("; ".join(problems))
    try:
        return periodic(
            list(choices.items()),
            seeded(f"{test.seed}/schedule"),
            time_limit_s=test.time_limit_s,
            on_s=test.nemesis_interval_s,
            off_s=test.nemesis_interval_s,
        )
    except ScheduleError as error:
        raise OperatorError(f"--nemesis-interval, --time-limit: {error}") from None


def _never_met(test: Test, chosen: Collection[str], system_class: Any) -> list[str]:
    """Why a run of only these nemeses could only end unknown; empty if the system may meet one of them."""
    reasons = system_class.never_meets if isinstance(system_class, MeetsSomeFaults) else {}
    if not chosen or any(name not in reasons for name in chosen):
        return []
    names = ",".join(chosen)
    return [
        f"--nemesis {names} alone: {'; '.join(reasons[name] for name in chosen)}, so the run could only end unknown: "
        f"combine it with faults that system {test.system} meets (--nemesis {names},kill), or use another system "
        "(--system etcd)"
    ]


def left_out(test: Test, nemeses: Mapping[str, Nemesis], cluster_class: Any, system_class: Any) -> list[str]:
    """What `all` leaves out here and why: one line for each reason, naming whole nemeses ("nemesis link") or forms of
    nemeses that are otherwise included ("disk-full=fill")."""
    if not any(choice.name == ALL for choice in test.nemesis):
        return []
    target = planned_target(test, cluster_class, system_class)
    named = {choice.name for choice in test.nemesis}
    subjects: dict[str, list[str]] = {}
    for name, nemesis in sorted(nemeses.items()):
        if name in named:
            continue
        if not is_of_all(nemesis):
            subjects.setdefault(ONLY_BY_NAME, []).append(f"nemesis {name}")
            continue
        problems = {variant: target.problems(nemesis, variant) for variant in nemesis.variants}
        is_out = {variant: bool(found) for variant, found in problems.items()}
        for variant, found in problems.items():
            for problem in found:
                subject = _subject_left_out(name, variant, is_out)
                same = subjects.setdefault(problem.removeprefix(f"{name}: "), [])
                if subject not in same:
                    same.append(subject)
    return [f"{', '.join(those)}: {reason}" for reason, those in subjects.items()]


def _subject_left_out(name: str, variant: str, is_out: Mapping[str, bool]) -> str:
    """The largest part of a nemesis that is left out with a variant: all of it, the form, or the variant."""
    if all(is_out.values()):
        return f"nemesis {name}"
    form = split_variant(variant)[0]
    if all(out for other, out in is_out.items() if split_variant(other)[0] == form):
        return f"{name}={form}"
    return f"{name}={variant}"


def _load_schedule(path: str, nemeses: Mapping[str, Nemesis], target: PlannedTarget) -> Schedule:
    try:
        schedule = load_schedule(path, known={name: VariantNames(nemesis) for name, nemesis in nemeses.items()})
    except ScheduleError as error:
        raise OperatorError(f"schedule {path}: {error}") from None
    problems = {
        problem: None
        for event in schedule
        if event.action == INJECT
        for problem in target.problems(nemeses[event.nemesis], event.variant)
    }
    if problems:
        raise OperatorError(f"schedule {path}: {'; '.join(problems)}")
    return schedule


def perform(parts: Parts, store: Store, console: OutputConsole) -> tuple[RunDir, dict[str, Any]]:
    """Run a test and store everything, even if the console's reader goes away.

    Returns the run's directory and its results. Raises HarnessError if it is interrupted while judging, and
    OperatorError or SystemUnderTestError if the system could not be brought up; what exists by then (logs, test.json)
    stays in the store.
    """
    started_at = datetime.now(UTC)
    run_id = f"{started_at:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    run_dir = store.create(parts.test.name, now=started_at)
    parts = _with_lasting_schedule(parts, run_dir)
    test = parts.test
    try:
        with _log_to(run_dir.harness_log_path), console.without_reader():
            run_dir.write_test({**test.to_json(), "run_id": run_id})
            began_s = time.monotonic()
            observed = run_harness(parts.cluster_class, _observe(parts, run_dir, run_id, console), seed=test.seed)
            console.print_line("checking the history")
            facts = {
                "started_at": started_at.isoformat(),
                "run_id": run_id,
                "cluster_detail": parts.cluster_reason,
                "hosts": [f"n{i}" for i in range(1, test.nodes + 1)],
                "duration_s": round(time.monotonic() - began_s, 3),
                **_project_version(),
            }
            try:
                with interrupted_by_signals():
                    results = judge_run(run_dir, test, parts.workload, observed, facts)
                    try:
                        _finish(run_dir, test, results, observed)
                    except Exception:  # a full disk: the verdict is known anyway
                        print_summary(results, console, test=test.to_json())
                        raise
                    update_store_page(store)
            except KeyboardInterrupt:
                at_work = "checking the history, which is stored"
                if run_dir.results_path.exists():
                    at_work = "writing the report; the verdict is stored"
                raise HarnessError(
                    f"interrupted while {at_work}: continue with harness analyze {run_dir.path}"
                ) from None
    finally:
        run_dir.release()
    return run_dir, results


def _with_lasting_schedule(parts: Parts, run_dir: RunDir) -> Parts:
    """The parts; a schedule read from a pipe is replaced by the run's own file, which the repeat line can name."""
    path = parts.test.nemesis_schedule
    if path is None or os.path.isfile(path):
        return parts
    return replace(parts, test=replace(parts.test, nemesis_schedule=str(run_dir.schedule_path)))


def rehearse(parts: Parts, directory: str, console: OutputConsole) -> dict[str, Any]:
    """Run a test below `directory` and judge it, without a report. Raises like `perform`."""
    try:
        run_dir = Store(directory).create(parts.test.name)
    except StoreError as error:
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        raise OperatorError(
            f"a simulated run needs some room in {directory}: {reason}; free some, or set TMPDIR to another place"
        ) from None
    run_id = f"rehearsal-{secrets.token_hex(6)}"
    try:
        observed = run_harness(parts.cluster_class, _observe(parts, run_dir, run_id, console), seed=parts.test.seed)
        return judge_run(run_dir, parts.test, parts.workload, observed, {})
    finally:
        run_dir.release()


async def _observe(parts: Parts, run_dir: RunDir, run_id: str, console: OutputConsole) -> Observed:
    state = RunState.create(run_id)
    try:
        return await _observe_with(state, parts, run_dir, console)
    finally:
        state.close()


def make_system(parts: Parts, state: RunState | None, work_dir: str) -> tuple[Any, Any]:
    """The cluster of a test and the system on it, prepared for its faults but not started. Files of hosts go below
    `work_dir` on this machine; created resources are recorded in `state`, if given."""
    test = parts.test
    cluster = parts.cluster_class(
        node_count=test.nodes,
        run=state,
        work_dir=work_dir,
        ports=parts.system_class.ports,
        extra_hosts=parts.system_class.extra_hosts,
        **test.cluster_options,
    )
    wanted = {(event.nemesis, event.variant) for event in parts.schedule}
    capabilities = frozenset().union(*(needs_of(parts.nemeses[name], [variant]) for name, variant in wanted))
    prepare(cluster, capabilities)
    system = parts.system_class(
        cluster=cluster,
        settings=test.system_settings,
        keys=parts.workload.keys,
        log_dir=work_dir,
        operation_timeout_s=test.operation_timeout_s,
    )
    prepare(system, capabilities)
    return cluster, system


async def _observe_with(state: RunState, parts: Parts, run_dir: RunDir, console: OutputConsole) -> Observed:
    test = parts.test
    clock = TestClock(asyncio.get_running_loop())
    save_schedule(parts.schedule, str(run_dir.schedule_path))
    cluster, system = make_system(parts, state, str(run_dir.nodes_path))
    if parts.has_trace:
        cluster.trace_to(str(run_dir.trace_path), lambda: clock.zero_s)
    if parts.on_made is not None:
        parts.on_made(cluster, clock)
    title = f"{test.name}  seed {test.seed}"
    with _client_programs(system, state), HistoryWriter(run_dir.history_path, clock.now_ns) as writer:
        progress = LiveProgress(
            writer.stats, clock_ns=clock.now_ns, time_limit_s=test.time_limit_s, title=title, console=console
        )
        async with progress:
            run = Run(
                test=test,
                cluster=cluster,
                system=system,
                workload=parts.workload,
                nemeses=parts.nemeses,
                schedule=parts.schedule,
                writer=writer,
                clock=clock,
                listener=progress,
                metrics=_scraper(parts, system, run_dir, clock),
                run_id=state.run_id,
            )
            return await run.execute(wall_ms=harness_runtime(cluster).clock.wall_ms)


def metrics_of(test: Test, system_class: Any, cluster_class: Any) -> Sequence[Metric]:
    """The metrics that a run reads; none in simulation, which has no servers that could be asked. Raises
    OperatorError."""
    if isinstance(cluster_class, OwnWorld):
        if set(test.metrics) - {NO_METRICS}:
            where = f"--cluster {test.cluster}"
            raise OperatorError(f"--metrics: simulated hosts have no page of metrics: omit it with {where}")
        return ()
    has_metrics = isinstance(system_class, ServesMetrics)
    return chosen(
        system_class.metrics if has_metrics else (), test.metrics,
        pages=system_class.metric_pages if has_metrics else (), system=test.system,
    )  # fmt: skip


def _scraper(parts: Parts, system: Any, run_dir: RunDir, clock: TestClock) -> Scraper | None:
    metrics = metrics_of(parts.test, parts.system_class, parts.cluster_class)
    if not metrics:
        return None
    hosts = [f"n{number}" for number in range(1, parts.test.nodes + 1)]
    path, limit_s = str(run_dir.metrics_path), parts.test.time_limit_s
    return Scraper(metrics, hosts, system.metrics_url, clock.now_ns, path, time_limit_s=limit_s)


@contextlib.contextmanager
def _client_programs(system: Any, state: RunState) -> Iterator[None]:
    """If clients may start programs, ends those at the end of the block."""
    if not isinstance(system, HasClientPrograms):
        yield
        return
    with marked_clients(state) as environment:
        system.client_environment = environment
        yield


def judge_run(
    run_dir: RunDir, test: Test, workload: Workload, observed: Observed, facts: Mapping[str, Any], *, judged: int = 0
) -> dict[str, Any]:
    """Read the stored history, check it, and return the content of results.json.

    `judged` is the number of client events that the history had when it was judged before. If it now has fewer, it lost
    some, which is recorded as trouble and so survives further judging.
    """
    reader = read_history(run_dir.history_path)
    too_large = too_large_to_judge(reader)
    events = list(reader) if too_large is None else [event for event in reader if event["process"] == NEMESIS]
    notes = []
    if reader.truncated:
        notes.append(f"the history ends in the middle of a line ({len(reader.dropped)} characters dropped)")
    missing = _missing_events(events) if too_large is None else 0
    if missing:
        notes.append(f"{plural(missing, 'event')} missing from the history")
    left = sum(event["process"] != NEMESIS for event in events) if too_large is None else sum(too_large.ops.values())
    if left < judged:
        observed.trouble.append(f"the history has lost its end: only {left:,} of {judged:,} client events are left")
    note = "; ".join(notes) or None
    results = judge(test, workload, events, observed, history_note=note, missing=missing, too_large=too_large)
    return {**results, **facts}


def _missing_events(events: Sequence[Mapping[str, Any]]) -> int:
    """The number of missing events before the last one: indices increase by one, from 0."""
    last = events[-1].get("index") if events else None
    return max(0, last + 1 - len(events)) if type(last) is int else 0


def _finish(run_dir: RunDir, test: Test, results: dict[str, Any], observed: Observed) -> None:
    from harness.report.page import write_report  # not needed at the start of a run

    run_dir.write_results(results)
    try:
        _convert(run_dir, test, results)
    finally:  # write the report even if the conversion met a full disk
        write_report(run_dir.path, test.to_json(), results, run_dir.history_path)
    if results["valid"] is True:
        # The logs stay; the data files of a valid run would only fill the disk.
        for data in (run_dir.path / "nodes").glob("*/data"):
            shutil.rmtree(data, ignore_errors=True)
    run_dir.finish()
    if results["valid"] is not True and observed.leave_files is not None:
        try:
            observed.leave_files()
        except OSError as error:
            raise StoreError(f"cannot write the replicas' files to {run_dir.nodes_path}: {error.strerror}") from error


def _convert(run_dir: RunDir, test: Test, results: Mapping[str, Any]) -> None:
    try:  # imported late: pyarrow is slow to import, and not every interpreter has it
        from harness.history_parquet import RunIdentity, write_parquet
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        logger.warning("no history.parquet: pyarrow is missing (%s)", how_to_get("pyarrow"))
        return
    identity = RunIdentity.of(test, run_id=results["run_id"], started_at=datetime.fromisoformat(results["started_at"]))
    write_parquet(run_dir.history_path, run_dir.parquet_path, identity)


def exit_status_of(results: Mapping[str, Any]) -> int:
    """0 valid, 1 invalid, 2 unknown."""
    verdict = {True: Verdict.VALID, False: Verdict.INVALID}.get(results["valid"], Verdict.UNKNOWN)
    return verdict.exit_status


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Redirect all logging of the harness to the run's own file."""
    handler = _RunLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        with contextlib.suppress(OSError):  # a full disk, which the history writer reports
            handler.close()


class _RunLog(logging.FileHandler):
    """A log whose write errors (a full disk) neither end a run nor print a traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error: the line is lost."""


def _project_version() -> dict[str, Any]:
    """The project's version, and its commit if it runs from a checkout."""
    here = Path(harness.__file__).resolve().parent.parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD") if (here / ".git").exists() else None
    dirty = bool(git("status", "--porcelain", "--untracked-files=no")) if commit else None
    return {"version": harness.__version__, "git_commit": commit, "git_dirty": dirty}
