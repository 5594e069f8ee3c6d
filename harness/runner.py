"""One test from setup to verdict, in chronological order.

    set up      cluster, system, wait until it serves
    drive       clients run operations while the nemesis injects, proves and heals faults
    heal        all faults that are still in effect
    recover     wait until the system serves again and its replicas have caught up
    final reads read the final state
    tear down   stop the system, fetch its logs, take the cluster down
    judge       check the history, the replicas, the proofs; write results and report

The history is on disk before anything is checked or torn down. However a phase ends, the phases from "heal" on still
happen, so a run that was interrupted or lost its system gets a verdict on what it observed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.blocking import no_blocking
from harness.clusters.abilities import NotesItsLinks
from harness.clusters.base import Cluster, HoldsFiles, SeesReplicas
from harness.errors import HarnessError, InterruptedStartError, OperatorError, SystemUnderTestError
from harness.fail_fast import WatchedRecorder
from harness.faults.target import RunTarget
from harness.faults.triggers import WatchedTriggers
from harness.generator import Generator, Stagger, TimeLimit
from harness.history_writer import HistoryWriter
from harness.metrics.expression import METRICS
from harness.metrics.scraper import Scraper
from harness.plugin_files import others_code_files
from harness.recovery import Answers, read_until_answered, wait_for_recovery, with_last_words
from harness.roles import ROLES, RoleLog
from harness.runtime import harness_streams
from harness.seeded import Streams, seeded
from harness.systems.base import CheckOutcome, HasCodeFiles, RefusesFaults, System
from harness.test import Test
from harness.unawaited import telling_unawaited
from harness.worker import Client, Recorder, Workers, raising_exceptions
from harness.workloads.base import Workload
from nemesis.driver import run_schedule
from nemesis.forms import needs_of
from nemesis.protocol import Nemesis
from nemesis.schedule import INJECT, Schedule
from nemesis.target import Triggers

__all__ = ["FINAL_READ_LIMIT_S", "Listener", "Observed", "Run", "SilentListener"]

logger = logging.getLogger(__name__)

FINAL_READ_LIMIT_S = 150.0
"""For the final reads as a whole: longer than the longest setting of a workload (delay's 60 s, and 60 s without a
value). What is not read by then stays unread, where a loss would not show, so that the run cannot be valid."""

GIVE_UP_AT = 3
"""The signal at which the run stops waiting: the first ends the load, the second prints what the run waits for."""

LEADER_INTERVAL_S = 1.0
"""Polling interval of the leader, for panel and replay: short enough to see an election."""

LEADER_TIMEOUT_S = 2.0

BLOCKED_MARGIN_S = 2.0
"""How long, beyond an operation's timeout, a plug-in may block the harness."""

_EXPECTED_ERRORS = (HarnessError, OperatorError, SystemUnderTestError)
"""Errors whose message is sufficient, without type or traceback."""

CANCEL_GRACE_S = 1.0
"""For an abandoned phase to end cleanly; one that waits for a hung host would not end at all."""


class Listener(Protocol):
    """Displays a run: is told its phases, messages and faults and, if `is_watched`, its leaders and violations."""

    @property
    def is_watched(self) -> bool: ...

    def leads(self, hosts: Sequence[str] | None) -> None: ...

    def so_far(self, violation: str | None) -> None: ...

    def phase(self, text: str) -> None: ...

    def say(self, text: str) -> None: ...

    def fault(self, event: Mapping[str, Any]) -> None: ...


class SilentListener:
    """Displays nothing, for runs without a display."""

    is_watched = False

    def leads(self, hosts: Sequence[str] | None) -> None:
        """Nothing."""

    def so_far(self, violation: str | None) -> None:
        """Nothing."""

    def phase(self, text: str) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def fault(self, event: Mapping[str, Any]) -> None:
        """Nothing."""


class GivenUp(Exception):
    """A phase was abandoned before its end."""


class Clock(Protocol):
    """The history's clock: 0 until `start`, nanoseconds since then."""

    def start(self) -> None: ...

    def now_ns(self) -> int: ...


@dataclass(slots=True)
class Observed:
    """What a run observed besides its history."""

    interrupted: str | None = None
    """The first signal before the teardown, as text: with it the run is incomplete."""
    stopped_at_first_violation: str | None = None
    """The online checker's message about the violation that ended the load; None if none did."""
    load_began_wall_ms: int | None = None
    """The wall clock's time at which the history's clock was 0; None if unknown."""
    faults_planned: int = 0
    """Injections in the schedule, whether or not the load lasted until they were due."""
    trouble: list[str] = field(default_factory=list)
    """Problems of the run itself; any entry keeps the verdict from being valid."""
    unexpected_errors: dict[str, int] = field(default_factory=dict)
    timeouts: dict[str, int] = field(default_factory=dict)
    """Lines of clients at which operations waited until they timed out -> how often."""
    unexpected_exits: Mapping[str, int] = field(default_factory=dict)
    """Exits of replicas that no fault caused, as text -> count. They are reported but do not change the verdict: some
    systems stop by design, for example if a disk fails."""
    system_checks: Mapping[str, CheckOutcome] = field(default_factory=dict)
    final_reads_from: int | None = None
    """The index of the first client event after the load; None if unknown."""
    final_reads_cut: str | None = None
    """That the final reads took too long and were ended, as text. No entry of `trouble`: a system that answers nothing
    may be the reason, and is to blame for it."""
    recovery: CheckOutcome | None = None
    """The outcome of waiting for the system after the last heal; None if there was no wait."""
    system_facts: Mapping[str, Any] = field(default_factory=dict)
    leave_files: Callable[[], None] | None = None
    """Copies the hosts' data files to the run's directory, if the cluster does not do that itself."""


@dataclass(slots=True)
class Run:
    """The parts of one run, created from names by the command; `execute` performs it."""

    test: Test
    cluster: Cluster
    system: System
    workload: Workload
    nemeses: Mapping[str, Nemesis]
    schedule: Schedule
    writer: HistoryWriter
    clock: Clock
    listener: Listener
    run_id: str = ""
    """For the traceparents of operations; without it there are none."""
    metrics: Scraper | None = None
    """Reads the system's metrics beside the run."""
    observed: Observed = field(default_factory=Observed)
    recovery_timeout_s: float = field(init=False)
    """How long the system may take to recover: what it declares itself, unless the caller sets less."""
    _streams: Streams = field(init=False)
    """Random streams of the clients."""
    _faults: asyncio.Task[None] | None = None
    """The task that performs the schedule, while it runs."""
    _load: Workers | None = None
    """The workers of the load, from its beginning on."""
    _has_load: bool = True
    """Whether the load is performed, unless it has begun."""
    _readers: Workers | None = None
    """The workers of the final reads, while they run."""
    _next_process: int = 0
    _succeeded: frozenset[str] = frozenset()
    """The names of operations that succeeded at least once under load."""
    _answered: frozenset[int | str] = frozenset()
    """The keys with a successful operation under load."""
    _stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the third signal, to abandon the current phase; cleared when the next phase begins."""
    _signals_heard: int = 0
    _was_blocked: bool = False
    _load_has_begun: bool = False
    _load_is_over: bool = False
    _are_reads_through: bool = False
    """Whether some round of the final reads asked for everything."""
    _is_taken_down: bool = False
    """Whether the teardown has begun: everything that is judged was observed before."""
    _current: str = "starting"
    """The current phase, for messages about what the run waits for."""
    _target: RunTarget = field(init=False)
    _roles: RoleLog = field(default_factory=RoleLog)

    def __post_init__(self) -> None:
        self._target = RunTarget(self.cluster, self.system)
        self.recovery_timeout_s = self.system.recovery_timeout_s
        self._streams = harness_streams(self.cluster, self.test.seed)
        self.observed.faults_planned = sum(event.action == INJECT for event in self.schedule)

    async def execute(self, *, wall_ms: Callable[[], int]) -> Observed:
        """Perform every phase up to the judging, which needs no event loop and is done by the command.

        Raises SystemUnderTestError or OperatorError if the setup fails: then there is nothing to check.
        """
        if isinstance(self.cluster, HoldsFiles):
            self.observed.leave_files = self.cluster.leave_files
        with self._signals() as signals, self._telling_unawaited():
            is_through = False
            try:
                with self._no_blocking(signals, is_under_load=False):
                    await self._set_up()
                self.clock.start()
                zero_s = asyncio.get_running_loop().time()
                started_wall_ms = self.observed.load_began_wall_ms = wall_ms()
                with self._no_blocking(signals, is_under_load=True):
                    async with self._following_leaders(), self._reading_metrics():
                        await self._phases()
                is_through = True
            finally:
                try:
                    self.writer.flush()
                finally:
                    self._is_taken_down = True
                    self._enter("taking the cluster down")
                    with self._no_blocking(signals, is_under_load=False):
                        await self._tear_down()
                    self._keep_last_words()
                    if not is_through and self.observed.leave_files is not None:
                        try:
                            self.observed.leave_files()  # there will be no verdict, which would trigger this
                        except OSError as error:  # a full disk, perhaps the reason for the end, must not hide it
                            logger.warning("the replicas' files were not saved: %s", error)
            self.observed.system_checks = await self.system.check(started_wall_ms=started_wall_ms)
            if isinstance(self.cluster, SeesReplicas):
                self.observed.system_checks = {**self.observed.system_checks, **self.cluster.checks(zero_s=zero_s)}
            self.observed.system_facts = self._facts()
            self.observed.unexpected_exits = dict(self._target.processes.unexpected_exits)
        return self.observed

    def _telling_unawaited(self) -> contextlib.AbstractContextManager[None]:
        files = self.system.code_files if isinstance(self.system, HasCodeFiles) else ()
        return telling_unawaited(files) if files else contextlib.nullcontext()

    def _no_blocking(self, signals: Collection[int], *, is_under_load: bool) -> contextlib.AbstractContextManager[None]:
        files = {*self.system.code_files} if isinstance(self.system, HasCodeFiles) else set()
        allowed_s = self.test.operation_timeout_s
        if is_under_load:
            if signals:  # not in simulation, whose runs must not be affected
                files |= others_code_files([self.workload, *self.nemeses.values()])
        elif isinstance(self.system, HasCodeFiles):
            allowed_s = self.system.set_up_timeout_s
        if not files:
            return contextlib.nullcontext()
        return no_blocking(
            files, limit_s=allowed_s + BLOCKED_MARGIN_S,
            tell=self._on_blocked if is_under_load else self._on_blocked_beside_load, signals=signals,
        )  # fmt: skip

    def _on_blocked_beside_load(self, text: str, is_asked: bool) -> None:
        """Plug-in code was interrupted during setup or teardown: its caller gets the exception, so only report it."""
        self.listener.say(text)
        if is_asked:
            self._stop_requested.set()  # the signal's own handler follows once the loop runs

    def _on_blocked(self, text: str, is_asked: bool) -> None:
        """Plug-in code that blocked the harness was interrupted under load: the run is no longer a valid test."""
        if self._readers is not None:
            self._readers.stop()  # each of hundreds of reads would block as long
        if self._was_blocked:
            return  # already reported
        self._was_blocked = True
        self.observed.trouble.append(text)
        self.listener.say(text if self._load_is_over else f"{text}; stopping the load")
        self._stop_requested.set()

    async def _set_up(self) -> None:
        self._enter("starting the cluster")
        try:
            await self._unless_given_up(self.cluster.start())
        except GivenUp:
            raise InterruptedStartError(
                "interrupted before the cluster had started, which was abandoned: harness clean removes what it left"
            ) from None
        if self._stop_requested.is_set():
            raise InterruptedStartError("interrupted before the system was started: there is nothing to check")
        self._enter("starting the system")
        start = asyncio.ensure_future(self.system.start())
        stop = asyncio.ensure_future(self._stop_requested.wait())
        try:
            await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not start.done() or (self._stop_requested.is_set() and start.exception() is not None):
                raise InterruptedStartError("interrupted before the system had started: there is nothing to check")
            start.result()
        finally:
            for task in (start, stop):
                task.cancel()
            given_up = asyncio.ensure_future(self._given_up.wait())
            ended, _ = await asyncio.wait({start, given_up}, return_when=asyncio.FIRST_COMPLETED)
            given_up.cancel()
            await asyncio.gather(*ended, return_exceptions=True)  # else asyncio logs a cancelled start's exception
        for note in self._notes_on_links():
            self.listener.say(f"note: {note}")
        await self._target.learn_baseline_skew()

    def _notes_on_links(self) -> Sequence[str]:
        """The cluster's notes, if the schedule has network or link faults."""
        if not isinstance(self.cluster, NotesItsLinks):
            return ()
        events = (event for event in self.schedule if event.action == INJECT)
        needs = (needs_of(self.nemeses[event.nemesis], [event.variant]) for event in events)
        is_on_links = any(interface in ("network", "links") for each in needs for interface, _ in each)
        return self.cluster.notes_on_links() if is_on_links else ()

    async def _phases(self) -> None:
        """The phases between setup and teardown."""
        await self._phase("driving the load", self._drive)
        await self._phase("healing", self._heal)
        self.writer.flush()  # if the history cannot be written, waiting is pointless
        await self._phase("waiting for recovery", self._recover)
        await self._phase("final reads", self._final_reads)
        await self._phase("waiting for replicas to agree", self._recover)

    async def _phase(self, title: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run one phase; its errors are recorded as trouble and do not prevent the following phases."""
        self._enter(title)
        try:
            await self._unless_given_up(raising_exceptions(work()))
        except GivenUp:
            self.observed.trouble.append(f"{title}: abandoned after a third signal")
        except Exception as group:
            error = _first_of(group)
            if isinstance(error, _EXPECTED_ERRORS):
                self.observed.trouble.append(f"{title}: {error}")
                return
            logger.exception("%s failed", title)
            self.observed.trouble.append(f"{title}: {type(error).__name__}: {error}")

    async def _drive(self) -> None:
        self._load_has_begun = True
        load: Generator = self.workload.generator()
        if self.test.rate > 0:
            load = Stagger(self.test.rate, load)
        workers = self._load = self._make_workers(TimeLimit(self.test.time_limit_s, load), self._load_recorder())
        if not self._has_load:
            workers.stop()
        rng = seeded(f"{self.test.seed}/nemesis")
        async with _watching(self._target.triggers, self.schedule), asyncio.TaskGroup() as group:
            faults = self._faults = group.create_task(
                run_schedule(self.schedule, target=self._target, nemeses=self.nemeses, rng=rng, record=self._record)
            )
            stopper = group.create_task(self._stop_when_asked(workers))
            try:
                await self._work(workers)
                self._succeeded, self._answered = frozenset(workers.succeeded), frozenset(workers.answered)
            finally:
                # When cancelled, the schedule heals what it has injected.
                faults.cancel()
                stopper.cancel()

    def end_faults(self) -> None:
        """Heal active faults and inject no more, while the load goes on. May be called before the load."""
        self.schedule = Schedule(())
        if self._faults is not None:
            self._faults.cancel()

    def end_load(self) -> None:
        """Invoke no further operation of the load; open ones are waited for. May be called before the load."""
        self._has_load = False
        if self._load is not None:
            self._load.stop()

    @contextlib.asynccontextmanager
    async def _following_leaders(self) -> AsyncIterator[None]:
        """Follow leaders from the load until replicas agree: some are elected only after the last fault is healed."""
        follower = asyncio.create_task(self._follow_leaders(), name="leaders")
        try:
            yield
        finally:
            follower.cancel()
            ended, _ = await asyncio.wait({follower}, timeout=CANCEL_GRACE_S)
            for error in await asyncio.gather(*ended, return_exceptions=True):
                if isinstance(error, Exception):
                    logger.error("cannot track the leader", exc_info=error)
                    self.observed.trouble.append(f"tracking the leader: {type(error).__name__}: {error}")

    @contextlib.asynccontextmanager
    async def _reading_metrics(self) -> AsyncIterator[None]:
        """Read metrics as long as leaders are followed. Whatever goes wrong with them is no trouble of the run."""
        if self.metrics is None:
            yield
            return
        reader = asyncio.create_task(self.metrics.run(), name="metrics")
        try:
            yield
        finally:
            reader.cancel()
            ended, _ = await asyncio.wait({reader}, timeout=CANCEL_GRACE_S)
            for error in await asyncio.gather(*ended, return_exceptions=True):
                if isinstance(error, Exception):
                    logger.error("cannot read the metrics", exc_info=error)

    async def _follow_leaders(self) -> None:
        """Periodically report who leads, if the run is watched and the system can tell. Roles of systems that can tell,
        except the broker (which the logs show) and in simulation, are also recorded."""
        if isinstance(self.system, RefusesFaults) and not self.system.tells_leader:
            return
        is_asked = isinstance(self.system, RefusesFaults) and not isinstance(self.cluster, SeesReplicas)
        while is_asked or self.listener.is_watched:
            if is_asked:
                await asyncio.gather(*map(self._ask_for_role, self._target.hosts))
            if self.listener.is_watched:
                self.listener.leads(self._roles.leading() if is_asked else await self._leaders())
            await asyncio.sleep(LEADER_INTERVAL_S)

    async def _ask_for_role(self, host: str) -> None:
        try:
            status = await self.system.status(host, timeout_s=LEADER_TIMEOUT_S)
        except Exception as error:  # see `_leaders`
            logger.debug("asking %s for its role: %s: %s", host, type(error).__name__, error)
            status = None
        self._roles.note(self.clock.now_ns(), host, status)

    def _facts(self) -> Mapping[str, Any]:
        roles = {ROLES: [list(change) for change in self._roles.changes]} if self._roles.changes else {}
        metrics = {METRICS: self.metrics.summary()} if self.metrics is not None else {}
        return {**self.system.facts(), **roles, **metrics}

    async def _leaders(self) -> Sequence[str] | None:
        """Hosts that report that they lead; None if unknown. In simulation the cluster is asked instead of the system,
        whose simulated answers would be part of the run."""
        if isinstance(self.cluster, SeesReplicas):
            return self.cluster.leading()
        try:
            async with asyncio.timeout(LEADER_TIMEOUT_S):
                return await self.system.leaders()
        except Exception as error:  # only displayed: nothing in the run depends on it
            logger.debug("asking who leads: %s: %s", type(error).__name__, error)
            return None

    async def _stop_when_asked(self, workers: Workers) -> None:
        await self._stop_requested.wait()
        workers.stop()

    async def _heal(self) -> None:
        self._load_is_over = True
        await self._target.heal_all()

    async def _recover(self) -> None:
        """Wait for the system to recover. Of two waits the first counts, which follows the healing, unless only the
        second ends without success."""
        before = self.observed.recovery
        had_its_time = before is not None and before.valid is not True
        recovery = await wait_for_recovery(self.system, timeout_s=0.0 if had_its_time else self.recovery_timeout_s)
        if before is None or (before.valid is True and recovery.valid is not True):
            self.observed.recovery = recovery

    def _keep_last_words(self) -> None:
        """Add the last log lines of programs that did not come back, now that the logs are fetched."""
        if self.observed.recovery is not None:
            self.observed.recovery = with_last_words(self.observed.recovery, self.system)

    async def _final_reads(self) -> None:
        """Read the final state; if no client is answered, or none about some key, repeatedly for as long as the system
        may take to recover."""
        self.observed.final_reads_from = self.writer.stats.events
        before = self.observed.recovery
        if before is None:
            await self._read_all()
        else:
            timeout_s = self.recovery_timeout_s
            self.observed.recovery = await read_until_answered(self._read_all, before, timeout_s=timeout_s)

    async def _read_all(self) -> Answers:
        cuts: list[str] = []
        reason = f"the final reads were ended after {FINAL_READ_LIMIT_S:g} s, before everything was read"
        reads = TimeLimit(FINAL_READ_LIMIT_S, self.workload.final_generator(), on_cut=lambda: cuts.append(reason))
        workers = self._make_workers(reads, self.writer)
        self._readers = workers
        try:
            await self._work(workers)
        finally:
            self._readers = None
        if not cuts:
            self._are_reads_through = True
        self.observed.final_reads_cut = None if self._are_reads_through else reason
        return Answers(
            asked=workers.completed,
            succeeded=workers.succeeded.total(),
            should_succeed=not self._succeeded.isdisjoint(workers.asked),
            is_last=self._stop_requested.is_set(),
            has_mistakes=bool(workers.unexpected_errors),
            answered=workers.answered,
            failures={key: text for key, text in workers.last_failures.items() if key is None or key in self._answered},
        )

    async def _work(self, workers: Workers) -> None:
        try:
            await workers.run()
        except* _EXPECTED_ERRORS as errors:
            raise _first_of(errors) from None
        finally:
            self._next_process = workers.next_process
            for text, count in workers.unexpected_errors.items():
                self.observed.unexpected_errors[text] = self.observed.unexpected_errors.get(text, 0) + count
            for line, count in workers.timeouts.items():
                self.observed.timeouts[line] = self.observed.timeouts.get(line, 0) + count

    def _load_recorder(self) -> Recorder:
        """The recorder of the load's events: the history and, with `fail_fast` or a panel, also an online checker."""
        online = self.workload.online() if self.test.fail_fast or self.listener.is_watched else None
        if online is None:
            return self.writer
        self.listener.so_far(None)
        return WatchedRecorder(self.writer, online, self._at_violation)

    def _at_violation(self, violation: str, time_ns: int) -> None:
        self.listener.so_far(f"{violation} (after {time_ns / 1e9:.1f} s)")
        if self.test.fail_fast:
            self._stop_at_violation(violation, time_ns)

    def _stop_at_violation(self, violation: str, time_ns: int) -> None:
        self.observed.stopped_at_first_violation = f"{violation} (after {time_ns / 1e9:.1f} s)"
        self.listener.say(f"first violation: {violation}; stopping the load")
        self._stop_requested.set()

    def _make_workers(self, generator: Generator, recorder: Recorder) -> Workers:
        def make_client(process: int, thread: int) -> Client:
            connection = self.system.connection(self.workload.requires, process=process, thread=thread)
            return self.workload.client(connection)

        return Workers(
            generator=generator,
            threads=self.test.concurrency,
            make_client=make_client,
            recorder=recorder,
            now_ns=self.clock.now_ns,
            random=self._streams.get(f"clients/{self._next_process}"),
            operation_timeout_s=self.test.operation_timeout_s,
            first_process=self._next_process,
            run_id=self.run_id,
        )

    def _record(self, event: dict[str, Any]) -> None:
        self.listener.fault(self.writer.append(event))

    async def _tear_down(self) -> None:
        for what, work in (("stopping the system", self.system.stop), ("stopping the cluster", self.cluster.stop)):
            try:
                await self._unless_given_up(work())
            except GivenUp:
                self.observed.trouble.append(f"{what}: abandoned; harness clean removes what it left")
            except Exception as error:
                logger.exception("%s failed", what)
                self.observed.trouble.append(f"{what}: {type(error).__name__}: {error}")

    def _enter(self, phase: str) -> None:
        self._current = phase
        self.listener.phase(phase)

    async def _unless_given_up(self, work: Awaitable[None]) -> None:
        """Await a part of the run until it ends or a third signal abandons it. Raises GivenUp then, otherwise what the
        work raises. Work that ignores its cancellation keeps running, unobserved."""
        self._given_up.clear()
        task = asyncio.ensure_future(work)
        given_up = asyncio.ensure_future(self._given_up.wait())
        try:
            await asyncio.wait({task, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
            raise GivenUp
        finally:
            given_up.cancel()
            task.cancel()

    def _signals(self) -> contextlib.AbstractContextManager[Collection[int]]:
        return _stop_on_signals(self._on_signal)

    def _on_signal(self, name: str) -> None:
        """The first signal ends the load, the second prints what the run waits for, the third ends the waiting."""
        self._signals_heard += 1
        self._stop_requested.set()
        is_first = self.observed.interrupted is None and not self._is_taken_down
        if is_first:
            self.observed.interrupted = f"{name} after {self.clock.now_ns() / 1e9:.1f} s"
        if is_first and not self._load_is_over:
            self.listener.say(
                f"{name}: stopping the load; the run is healed and judged by what happened so far"
                if self._load_has_begun
                else f"{name}: stopping the run before its load has begun"
            )
        elif self._signals_heard < GIVE_UP_AT:
            more = "once" if self._signals_heard == GIVE_UP_AT - 1 else "twice"
            self.listener.say(
                f"{name}: still {self._current}; signal {more} more to stop waiting for it "
                "(harness clean then removes what is left)"
            )
        else:
            self.listener.say(f"{name}: abandoning {self._current}")
            self._given_up.set()


def _first_of(error: Exception) -> Exception:
    """An error itself; for an exception group, the first of _EXPECTED_ERRORS in it, else its first error."""
    if not isinstance(error, ExceptionGroup):
        return error
    expected = error.subgroup(_EXPECTED_ERRORS)
    return _first_of((error if expected is None else expected).exceptions[0])


def _watching(triggers: Triggers | None, schedule: Schedule) -> contextlib.AbstractAsyncContextManager[None]:
    """Watch for triggers during the load, if the schedule waits for any and they have to be watched."""
    if isinstance(triggers, WatchedTriggers) and any(event.when is not None for event in schedule):
        return triggers.watch()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _stop_on_signals(handler: Callable[[str], None]) -> Any:
    """Make Ctrl-C, SIGTERM and SIGHUP (unless ignored, as under nohup) end the load, not the run. Yields the handled
    signals; none for loops without signal handling (simulation)."""
    loop = asyncio.get_running_loop()
    installed = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        try:
            loop.add_signal_handler(number, handler, signal.Signals(number).name)
            installed.append(number)
        except (RuntimeError, ValueError):  # RuntimeError covers loops without signal handling
            continue
    try:
        yield installed
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
