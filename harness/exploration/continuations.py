"""Continuations of a simulated run: they repeat the run up to a moment and then go on with other randomness.

A simulation cannot be saved and loaded, but its process can be forked. One process, the *course*, repeats the run. At
each requested moment it forks a child for each seed. The child reseeds every stream of random numbers (network, disks,
elections, clients) and goes on until the symptom shows or its time is over: as planned, or with an intervention, which
heals all faults and may end the load too. So no part of the run is simulated twice.

The course is a child of the caller, to which it reports the fate of each continuation through a pipe. Each process dies
with the one that forked it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import io
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from checker.codecs.jsonl import read_batches
from checker.faults import faults_of
from checker.workers import end_with_parent
from harness.clusters.base import run_harness
from harness.clusters.sim.loop import SimLoop
from harness.errors import HarnessError
from harness.execution import Parts, TestClock, make_system
from harness.exploration.account import Account, Happening
from harness.exploration.symptoms import STUCK, is_stuck
from harness.history_writer import MAX_LINE_BYTES, HistoryWriter
from harness.judge import judge
from harness.recovery import RECOVERS, judge_recovery
from harness.runner import Observed, Run, SilentListener
from harness.runtime import harness_runtime
from harness.scratch import scratch_directory
from harness.signals import fork

__all__ = ["INVARIANTS", "ONLINE", "Branch", "Course", "Fate", "Intervention", "Passage", "Symptom", "follow"]

OWN_DIRECTORY = "/proc/self/cwd"
"""Where hosts keep their files. The path resolves to each process's own directory, even after a fork, so that no part
that knows the path needs to be told."""

RECOVERY_TIMEOUT_SHARE = 1 / 3
"""Share of the recovery timeout after which a continuation counts as not recovered. A simulated cluster that is not
stuck recovers within seconds of the 60; waiting for all of them would take longer than the load."""

INVARIANTS, ONLINE = "invariants", "online"


class Intervention(StrEnum):
    """What a continuation changes besides the randomness."""

    NONE = "none"
    """Faults and load go on as planned."""
    HEAL = "heal"
    """All faults are healed, and no other follows."""
    END_LOAD = "end-load"
    """The same, and the clients invoke no further operations; those that are open are waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What a continuation is watched for: that `check` finds a violation, of `rule` unless that is empty.

    With `until_s` (seconds on the history's clock) it must show by then, and the continuation ends when it does. That
    is for `INVARIANTS` and for `ONLINE`, the workload's online checker, which may miss violations but reports no false
    ones. Without `until_s` the whole run is judged, with healing and final reads; `RECOVERS` is settled earlier, when
    the system has not recovered after `RECOVERY_TIMEOUT_SHARE` of the timeout.
    """

    check: str
    """The check's name, or `STUCK`."""
    rule: str = ""
    until_s: float | None = None

    def is_in(self, results: Mapping[str, Any]) -> bool | None:
        """Whether the results of a whole run show the symptom; None if its check was undecided."""
        if self.check == STUCK:
            return is_stuck(results)
        check = results["checks"].get(self.check, {})
        fails = {False: True, True: False}.get(check.get("valid"))
        if fails and self.rule:
            return any(one["rule"] == self.rule for one in check.get("violations", ()))
        return fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A moment (seconds on the history's clock) at which continuations branch off, one for each seed."""

    at_s: float
    intervention: Intervention = Intervention.NONE
    seeds: Sequence[int | None] = ()
    """None keeps the run's own randomness: nothing is reseeded."""
    act: Callable[[], None] | None = None
    """Called in the process of each continuation at that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The outcome of a continuation: whether the symptom shows; None if unknown."""

    branch: int
    seed: int | None
    fails: bool | None


@dataclass(slots=True)
class Course:
    """The result of one passage through the run."""

    fates: list[Fate] = field(default_factory=list)
    zero_s: float = 0.0
    """The loop's time at which the history's clock was 0."""
    end_s: float = 0.0
    """The end of the passage, on the history's clock."""
    fails: bool | None = None
    """Whether the symptom shows in the run itself."""
    parts_at: int | None = None
    """The first event (from 1) that differs from the stored history; None if none does."""
    account: list[Happening] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """The parameters of one passage."""

    symptom: Symptom
    branches: Sequence[Branch] = ()
    zero_s: float | None = None
    """`Course.zero_s` of an earlier passage; needed for branches."""
    account_s: tuple[float, float] | None = None
    """The interval for which to return an account of events."""
    accounts_for_load: bool = False
    """Whether the account lists the invocations of operations."""
    history_path: Path | None = None
    """The stored history to compare with."""
    is_whole: bool = True
    """Whether the run itself is performed to its end; otherwise it stops after its last branch, with `fails` None."""
    jobs: int = 1


def follow(parts: Parts, passage: Passage) -> Course:
    """Perform a simulated run once, with continuations. Raises HarnessError if that fails."""
    read_fd, write_fd = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with scratch_directory("course") as directory:
        parent = os.getpid()
        pid = fork()
        if pid == 0:
            os.close(read_fd)
            _perform(parts, passage, directory, write_fd, parent)
        os.close(write_fd)
        try:
            with open(read_fd, encoding="utf-8") as lines:
                return _collect(lines)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _collect(lines: io.TextIOWrapper) -> Course:
    course = Course()
    is_through = False
    for line in lines:
        message = json.loads(line)
        if "problem" in message:
            raise HarnessError(f"a continuation could not be run: {message['problem']}")
        if "branch" in message:
            course.fates.append(Fate(**message))
        elif "happening" in message:
            course.account.append(Happening(**message["happening"]))
        else:
            is_through = True
            for name, value in message.items():
                setattr(course, name, value)
    if not is_through:
        raise HarnessError("the process that ran the simulation was killed, perhaps because memory ran out")
    return course


def _perform(parts: Parts, passage: Passage, directory: str, out_fd: int, parent_pid: int) -> None:
    """The forked process; does not return."""
    try:
        end_with_parent(parent_pid)
        os.chdir(directory)
        logging.getLogger().addHandler(logging.NullHandler())  # else Python writes every process's warnings to stderr
        run_harness(parts.cluster_class, _main(parts, passage, out_fd), seed=parts.test.seed)
    except BaseException as error:
        _send(out_fd, {"problem": f"{type(error).__name__}: {error}"[:1000]})
    finally:
        os._exit(1)  # reached only on failure: successful processes exit in _leave


async def _main(parts: Parts, passage: Passage, out_fd: int) -> None:
    conductor = _Conductor(parts, passage, out_fd)
    conductor.finish(await conductor.execute())


def _send(fd: int, message: Mapping[str, Any]) -> None:
    """Write a line atomically: lines of several processes do not mix, as none exceeds PIPE_BUF (4,096 bytes)."""
    os.write(fd, (json.dumps(message) + "\n").encode())


class KeptHistory(HistoryWriter):
    """A history in memory, so that each forked process has its own."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self.data = bytearray()
        self._read_bytes = 0
        self._events: list[dict[str, Any]] = []
        super().__init__("a history in memory", clock_ns)

    def _open(self) -> int:
        return -1

    def _write(self, fd: int, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        """Nothing to close."""

    def events(self) -> Sequence[Mapping[str, Any]]:
        """Every event so far; each is parsed only once."""
        self.flush()
        fresh = io.BytesIO(self.data[self._read_bytes :])
        self._read_bytes = len(self.data)
        for batch in read_batches(fresh, max_line_bytes=MAX_LINE_BYTES):
            self._events += [event for _, event in batch.whole()]
        return self._events


class _Watcher(SilentListener):
    """Reports the first violation that the workload's online checker finds, and the begin of every phase."""

    is_watched = True

    def __init__(self, on_violation: Callable[[], None], on_phase: Callable[[], None]) -> None:
        self._on_violation, self._on_phase = on_violation, on_phase

    def phase(self, text: str) -> None:
        """Report that a phase begins."""
        self._on_phase()

    def so_far(self, violation: str | None) -> None:
        """Report a violation."""
        if violation is not None:
            self._on_violation()


class _Conductor:
    """Performs the run and forks its continuations; after a fork, performs one continuation."""

    def __init__(self, parts: Parts, passage: Passage, out_fd: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self._loop, self._parts, self._passage, self._out_fd = loop, parts, passage, out_fd
        self._symptom = passage.symptom
        self._clock = TestClock(loop)
        self._cluster, system = make_system(parts, None, OWN_DIRECTORY)
        self._history = KeptHistory(self._clock.now_ns)
        listener = _Watcher(self._seen_online, self._look_at_recovery)
        self._run = Run(
            test=parts.test, cluster=self._cluster, system=system, workload=parts.workload, nemeses=parts.nemeses,
            schedule=parts.schedule, writer=self._history, clock=self._clock, listener=listener,
        )  # fmt: skip
        self._self: tuple[int, int | None] | None = None
        """Branch number and seed of this continuation; None in the course."""
        self._forked: set[int] = set()
        self._parted = 0
        """How many branches have had all their continuations forked."""
        self._online_has_seen = False
        self._account = None if passage.account_s is None else Account(self._cluster, self._clock)
        self._cluster.invariants.on_violation = lambda _: self._look()
        self._set_times()

    def _set_times(self) -> None:
        passage, loop = self._passage, self._loop
        zero_s = passage.zero_s
        if zero_s is None:  # it is not known yet when the load begins
            assert not passage.branches
            self._run.clock = _Starting(self._clock, self._set_times_of_load)
            return
        if self._symptom.until_s is not None:
            loop.event_at(zero_s + self._symptom.until_s, self._conclude)
        for number, branch in sorted(enumerate(passage.branches), key=lambda item: item[1].at_s):
            if zero_s + branch.at_s > loop.now:
                loop.event_at(zero_s + branch.at_s, self._part, number)
            else:  # now, before any random number is drawn
                self._part(number)

    def _set_times_of_load(self) -> None:
        if self._symptom.until_s is not None:
            self._loop.event_at(self._loop.now + self._symptom.until_s, self._conclude)

    async def execute(self) -> Observed:
        """Perform the run to its end."""
        return await self._run.execute(wall_ms=harness_runtime(self._cluster).clock.wall_ms)

    # The course

    def _part(self, number: int) -> None:
        """Fork every continuation of a branch."""
        branch = self._passage.branches[number]
        if self._self is not None:
            return
        self._history.events()  # parse them here, so that no child has to
        for seed in branch.seeds:
            self._wait(self._passage.jobs - 1)
            course_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                end_with_parent(course_pid)
                if branch.act is not None:
                    branch.act()
                if hasattr(gc, "freeze"):  # PyPy's collector does not have it
                    gc.freeze()  # keeps collections from touching, and so copying, the memory shared with the parent
                self._self = number, seed
                self._forked.clear()
                directory = f"{number}.{seed}"
                os.mkdir(directory)
                os.chdir(directory)
                self._loop.continue_forked(seed)
                self._run.recovery_timeout_s *= RECOVERY_TIMEOUT_SHARE
                if branch.intervention is not Intervention.NONE:
                    self._run.end_faults()
                if branch.intervention is Intervention.END_LOAD:
                    self._run.end_load()
                self._look()
                return
            self._forked.add(pid)
        self._parted += 1
        if not self._passage.is_whole and self._parted == len(self._passage.branches):
            self._leave(fails=None)

    def _wait(self, most: int) -> None:
        """Wait until at most `most` continuations are running."""
        while len(self._forked) > most:
            pid, status = os.waitpid(-1, 0)
            self._forked.discard(pid)
            if status != 0:
                raise HarnessError("a continuation was killed, perhaps because memory ran out: use fewer --jobs")

    # Course and continuations

    def _seen_online(self) -> None:
        self._online_has_seen = True
        self._look()

    def _look(self) -> None:
        """End a continuation if its symptom has shown."""
        if self._self is not None and self._symptom.until_s is not None and self._shows():
            self._leave(fails=True)

    def _look_at_recovery(self) -> None:
        """Judge the recovery when a phase begins: a failure recorded by then is final."""
        if self._self is None or self._symptom != Symptom(check=RECOVERS):
            return
        recovery = self._run.observed.recovery
        if recovery is not None and recovery.valid is False:
            faults = faults_of(self._history.events())
            outcome = judge_recovery(recovery, faults, self._run.observed.trouble)
            self._leave(fails=True if outcome.valid is False else None)

    def _shows(self) -> bool:
        """Whether the symptom has shown so far."""
        if self._symptom.check == INVARIANTS:
            return any(self._symptom.rule in ("", one.rule) for one in self._cluster.invariants.violations)
        return self._online_has_seen

    def _conclude(self) -> None:
        """Leave because the time for the symptom is over."""
        self._leave(fails=self._shows())

    def finish(self, observed: Observed) -> None:
        """Leave at the end of the run; a symptom without a time limit is judged now."""
        # The load may end before the time limit of the symptom: with --fail-fast, or near its end.
        if self._symptom.until_s is not None:
            self._leave(fails=self._shows())
        results = judge(self._parts.test, self._parts.workload, self._history.events(), observed)
        self._leave(fails=self._symptom.is_in(results))

    def _leave(self, *, fails: bool | None) -> None:
        """Report the outcome and end this process."""
        if self._self is not None:
            branch, seed = self._self
            shutil.rmtree(os.getcwd(), ignore_errors=True)
            _send(self._out_fd, dataclasses.asdict(Fate(branch=branch, seed=seed, fails=fails)))
            os._exit(0)
        self._wait(0)
        if self._account is not None and self._passage.account_s is not None:
            happenings = self._account.between(
                *self._passage.account_s, self._history.events(), has_invocations=self._passage.accounts_for_load
            )
            for happening in happenings:
                _send(self._out_fd, {"happening": dataclasses.asdict(happening)})
        zero_s = self._clock.zero_s or 0.0
        found = {
            "zero_s": zero_s, "end_s": self._loop.now - zero_s, "fails": fails,
            "parts_at": self._parts_at(),
        }  # fmt: skip
        _send(self._out_fd, found)
        os._exit(0)

    def _parts_at(self) -> int | None:
        """The first event (from 1) that differs from the stored history; None if none does."""
        path = self._passage.history_path
        if path is None:
            return None
        self._history.flush()
        stored = path.read_bytes()
        if stored.startswith(self._history.data):
            return None
        pairs = zip(stored.splitlines(), bytes(self._history.data).splitlines(), strict=False)
        return 1 + next((n for n, (one, other) in enumerate(pairs) if one != other), stored.count(b"\n"))


class _Starting:
    """A history's clock that calls `on_start` when it is started."""

    def __init__(self, clock: TestClock, on_start: Callable[[], None]) -> None:
        self._clock, self._on_start = clock, on_start

    def start(self) -> None:
        """Set the clock to 0."""
        self._clock.start()
        self._on_start()

    def now_ns(self) -> int:
        """Nanoseconds since the start."""
        return self._clock.now_ns()
