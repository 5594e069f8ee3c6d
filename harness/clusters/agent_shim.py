"""Clock and disk faults for programs on hosts: installs the mechanism there, tries it, and controls it from here.

There are two mechanisms (nemesis.mechanisms.reach): a preloaded library, and a launcher that runs the program under a
supervisor. Which of them a program gets depends on its executable on the host, unless `--mechanism` names one.

The harness's machine has the library or builds it. If that does not load on a host (another processor, an older C
library), one that was prebuilt for the host's processor is tried, and then the host's own compiler builds it from the
same sources. In every case a Python on the host must have shown the library's effect before a replica is started.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.clusters.agent_access import AgentAccess, put_file
from harness.clusters.agent_link import AgentLink
from harness.clusters.base import ClusterUnavailable, HostProcess, Program
from harness.clusters.threads import all_of, begin_in_thread
from harness.errors import OperatorError
from nemesis.mechanisms.hosts import EMPTY_SCRIPT, CheckedShell, script_arguments
from nemesis.mechanisms.launcher.control import CONTROL_BYTES, ProgramCounts, parse_programs
from nemesis.mechanisms.launcher.programs import DYNAMIC
from nemesis.mechanisms.launcher_archive import (
    ATTACH_TRIAL_PROCESSES,
    attach_trial,
    launcher_archive,
    launcher_command,
)
from nemesis.mechanisms.reach import AUTO, PRELOAD, SECCOMP, kind_in_words, mechanism_for, wanted_traps
from nemesis.mechanisms.shim import (
    COMPILERS,
    TRIAL_SCRIPT,
    ShimError,
    build_command,
    build_shim,
    can_be_preloaded,
    prebuilt_shim,
    shim_environment,
    shim_sources,
    trial_control,
    trial_problem,
)
from nemesis.mechanisms.shim_controls import ShimControls, ShimPlace, StartedProgram
from nemesis.mechanisms.shim_faults import ShimClocks, ShimDisks
from nemesis.target import ProcessMember

__all__ = ["UNDO_INSIDE", "AgentShim", "LauncherTrial", "agent_shim_missing"]

UNDO_INSIDE = ".splitbrain-undo"
"""Name of the undo directory on a host's own file system. Names that begin like this (.splitbrain-) are not data."""

_BUILD_TIMEOUT_S = 120.0
"""Enough for a compiler on an emulated machine; anywhere else it takes less than a second."""

_TRIAL_TIMEOUT_S = 30.0
_JUDGE_TIMEOUT_S = 10.0

_TRIAL_NUMBER = 1
_TRAP_TRIAL = "import os, sys; os.fsync(os.open(sys.argv[1], os.O_RDONLY))"
_CLOCK_TRIAL = """
import time
deadline = time.monotonic() + 10
while time.time() - TRUE > -3000 and time.monotonic() < deadline:
    time.sleep(0.01)
print(time.time())
"""
"""Waits for its clock to be set back by an hour (see `trial_control`), and prints it."""

_FOR_ALL = 0o666
"""Mode of files that programs of any user write to: the control file, for its counters."""


def agent_shim_missing() -> str | None:
    """Why this machine cannot inject clock and disk faults on hosts with agents; None when it can."""
    try:
        build_shim()
    except ShimError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class LauncherTrial:
    """Why the launcher on a host cannot report calls from a program's start, why it cannot attach to a running program
    at its first disk fault, and why it cannot move clocks; None for what it can do."""

    why_no_traps: str | None
    why_not_attached: str | None
    why_no_clock: str | None


class AgentShim:
    """The shim's files on all replicas' hosts, and the fault interfaces that act through it. `places` has their paths
    on each host; they are removed with the directories that contain them."""

    def __init__(
        self,
        access: AgentAccess,
        links: Mapping[str, AgentLink],
        places: Mapping[str, ShimPlace],
        *,
        capabilities: Collection[tuple[str, str]],
        mechanism: str = AUTO,
        strays: Callable[[str], Awaitable[Sequence[ProcessMember]]] | None = None,
    ) -> None:
        """Nothing is on the hosts before `install`. `capabilities` are what the run will use, `mechanism` is one of
        nemesis.mechanisms.reach.MECHANISMS; for `strays` see ShimControls."""
        self._access = access
        self._links = dict(links)
        self._mechanism = mechanism
        self._needs_clock = ("clocks", "wall") in capabilities
        self._controls = ShimControls(access, places, traps=wanted_traps(capabilities), strays=strays)
        self._judged: dict[tuple[str, ...], str] = {}
        """(host, argv...) -> the kind of the executable; "" if it is unknown"""
        self._trials: dict[str, asyncio.Task[LauncherTrial]] = {}
        self.clocks = ShimClocks(self._controls)
        self.disks = ShimDisks(self._controls)

    async def install(self, *, have_library: bool = False) -> None:
        """Put the files on every host and check that the library takes effect in a Python there. If the hosts
        `have_library`, already tried, install only the remaining files.

        Raises ClusterUnavailable naming what a host lacks, ShellError when a host does not answer, ShimError.
        """
        await all_of(self._install(host, have_library) for host in self._links)

    async def _install(self, host: str, have_library: bool) -> None:
        place, link = self._controls.places[host], self._links[host]
        if not have_library:
            await self._bring_library(host)
            await put_file(link, place.launcher_path, launcher_archive())
        await put_file(link, place.control_path, self._controls.initial_content(host), mode=_FOR_ALL)
        # A replica may run as another user, who must be able to write there and to reach it.
        if place.undo_path is not None:
            await link.run(["mkdir", "-p", "-m", "1777", place.undo_path])

    async def begin_account(self, host: str) -> None:
        """Forget what the host's programs have not synced. They must be down. Raises ShellError."""
        undo_path = self._controls.places[host].undo_path
        if undo_path is not None:
            argv = script_arguments(self._access.python(host), EMPTY_SCRIPT, undo_path)
            await CheckedShell(self._access).run(host, argv)
            await self.disks.begin_account(host)

    async def _bring_library(self, host: str) -> None:
        place, link = self._controls.places[host], self._links[host]
        if not can_be_preloaded(place.library_path):
            raise ClusterUnavailable(
                f"{host}: LD_PRELOAD cannot load {place.library_path}, because its path contains a space, colon "
                "or $: set another `directory` for the host in the inventory"
            )
        library = await begin_in_thread(build_shim)
        await put_file(link, place.library_path, library)
        problem = await self._trial_problem(host)
        if problem is not None and await self._put_prebuilt(host):
            problem = await self._trial_problem(host)
        if problem is not None:
            await self._build_there(host, problem)

    async def _trial_problem(self, host: str) -> str | None:
        place, link = self._controls.places[host], self._links[host]
        control_path = os.path.join(os.path.dirname(place.control_path), "trial.control")
        await put_file(link, control_path, trial_control())
        wall_ns, _ = await self._access.now(host)
        python = self._access.python(host)
        environment = shim_environment(place.library_path, control_path, place.data_path)
        argv = [python, "-I", "-S", "-c", TRIAL_SCRIPT]
        _, output, errors = await link.run(argv, timeout_s=_TRIAL_TIMEOUT_S, environment=environment)
        return trial_problem(python, output, errors, true_s=wall_ns / 1e9)

    async def _put_prebuilt(self, host: str) -> bool:
        """Put the prebuilt shim for the host's processor there; False when there is none."""
        link = self._links[host]
        _, machine, _ = await link.run(["uname", "-m"])
        library = prebuilt_shim(machine.strip())
        if library is None:
            return False
        await put_file(link, self._controls.places[host].library_path, library)
        return True

    async def _build_there(self, host: str, problem: str) -> None:
        """Build the library with the host's compiler; `problem` is why ours failed. Raises ClusterUnavailable."""
        link, library_path = self._links[host], self._controls.places[host].library_path
        find = " || ".join(f"command -v {shlex.quote(name)}" for name in COMPILERS)
        _, found, _ = await link.run(["sh", "-c", find])
        compiler = found.strip()
        if not compiler:
            raise ClusterUnavailable(
                f"{host}: {problem}; to build the shim on the host instead: apt-get install gcc libc6-dev on {host}"
            )
        sources = os.path.join(os.path.dirname(library_path), "shim")
        for name, content in shim_sources().items():
            await put_file(link, os.path.join(sources, name), content)
        argv = build_command(compiler, sources, library_path)
        status, _, errors = await link.run(argv, timeout_s=_BUILD_TIMEOUT_S)
        if status != 0:
            said = next((line for line in errors.splitlines() if "error" in line), errors.strip()[:200])
            raise ClusterUnavailable(
                f"{host}: {compiler} cannot build the clock and disk shim there (apt-get install libc6-dev): {said}"
            )
        problem_there = await self._trial_problem(host)
        if problem_there is not None:
            raise ClusterUnavailable(f"{host}: {problem_there}")

    # Programs

    async def prepared(self, host: str, program: Program) -> tuple[Program, StartedProgram | None]:
        """Adapt a program so that the faults of its host reach it; returns it with the record to complete once it was
        started (`note_started`). Programs on hosts without replicas are left as they are. Raises OperatorError when the
        mechanism that was asked for is not available, ShellError."""
        place = self._controls.places.get(host)
        if place is None:
            return program, None
        mechanism, problem, clock_problem = await self._choose(host, program)
        traps = self._controls.traps if mechanism == SECCOMP and problem is None else frozenset[str]()
        attaches = bool(traps) and (await self._trial(host)).why_not_attached is None
        started = self._controls.begin(host, mechanism, problem=problem, clock_problem=clock_problem, attaches=attaches)
        account_path = place.account_path(program.name)
        if account_path is not None:  # it may run as another user
            await self._links[host].run(["mkdir", "-p", "-m", "1777", account_path])
        if mechanism == PRELOAD:
            preloaded = program.environment.get("LD_PRELOAD")  # such as another allocator
            added = place.environment(started.number, program.name, preloaded=preloaded)
            return replace(program, environment={**program.environment, **added}), started
        argv = launcher_command(
            self._access.python(host), place.launcher_path, place.control_path, program.argv,
            root=place.data_path, traps=traps, attaches=attaches, undo_path=account_path if traps else None,
            moves_clock=self._needs_clock and clock_problem is None, number=started.number,
        )  # fmt: skip
        return replace(program, argv=argv), started

    @staticmethod
    def note_started(started: StartedProgram, process: HostProcess | None) -> None:
        """Record that a program that was `prepared` has been started; None when it could not be."""
        if process is not None:
            started.pid = process.host_pid
        started.is_running = lambda: process is not None and process.exit_status() is None

    async def _choose(self, host: str, program: Program) -> tuple[str, str | None, str | None]:
        """(mechanism, why disk faults will not reach the program even so, why clock faults will not). Raises
        OperatorError."""
        if self._mechanism == PRELOAD:
            return PRELOAD, None, None
        kind = await self._kind(host, program) if self._mechanism == AUTO else ""
        is_loaded = not kind or mechanism_for(kind) == PRELOAD
        # The library keeps an account of unsynced writes for a single process, the launcher for all of a program.
        follows_all = program.multiprocess and self._controls.places[host].undo_path is not None
        if self._mechanism == AUTO and is_loaded and not follows_all:
            return PRELOAD, None, None
        tried = await self._trial(host)
        why_no_traps, why_no_clock = tried.why_no_traps, tried.why_no_clock
        problems = {problem for problem in (why_no_traps, why_no_clock) if problem is not None}
        if problems and self._mechanism == SECCOMP:
            raise OperatorError(f"--mechanism seccomp is not available on {host}: {'; '.join(sorted(problems))}")
        needed = bool(self._controls.traps) + self._needs_clock
        if not needed or (why_no_traps is not None) + (why_no_clock is not None) < needed:
            return SECCOMP, why_no_traps, why_no_clock
        if self._mechanism == AUTO and is_loaded:
            return PRELOAD, None, None  # a power cut reports on its own that it cannot vouch for the loss
        why_not = f"{program.argv[0]} is {kind_in_words(kind)}; {'; '.join(sorted(problems))}"
        return PRELOAD, why_not, why_not

    async def _kind(self, host: str, program: Program) -> str:
        """The kind of a program's executable (launcher/programs.py); "" if there is none: its start will fail."""
        if program.argv[0] == self._access.python(host):
            return DYNAMIC  # the library was tried in it
        key = (host, *program.argv)
        if key not in self._judged:
            place = self._controls.places[host]
            argv = [self._access.python(host), "-I", "-S", place.launcher_path, "judge", *program.argv]
            _, output, _ = await self._links[host].run(
                argv, timeout_s=_JUDGE_TIMEOUT_S, environment=program.environment
            )
            try:
                self._judged[key] = str(json.loads(output).get("kind", ""))
            except ValueError:
                self._judged[key] = ""
        return self._judged[key]

    async def _trial(self, host: str) -> LauncherTrial:
        """What the launcher can do on a host; tried once."""
        if host not in self._trials:
            trial = self._trials[host] = asyncio.ensure_future(self._try_launcher(host))
            # After an interrupted start nobody awaits the trial: retrieve its exception so that it is not logged.
            trial.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._trials[host])

    async def _try_launcher(self, host: str) -> LauncherTrial:
        place, link, python = self._controls.places[host], self._links[host], self._access.python(host)
        control_path = os.path.join(os.path.dirname(place.control_path), "launcher-trial.control")

        async def attempt(
            script: str, *, traps: Collection[str] = (), attaches: bool = False, moves_clock: bool = False
        ) -> tuple[str, str, ProgramCounts]:
            await put_file(link, control_path, trial_control())
            program = [python, "-I", "-S", "-c", script, place.data_path, control_path]
            argv = launcher_command(
                python, place.launcher_path, control_path, program, root=place.data_path, traps=traps,
                attaches=attaches, moves_clock=moves_clock, number=_TRIAL_NUMBER,
            )  # fmt: skip
            _, output, errors = await link.run(argv, timeout_s=_TRIAL_TIMEOUT_S)
            counts = parse_programs(await self._access.read(host, control_path, CONTROL_BYTES))
            return output, " ".join(errors.split())[:200], counts.get(_TRIAL_NUMBER, ProgramCounts(id=0))

        why_no_traps = why_not_attached = why_no_clock = None
        if self._controls.traps:
            _, errors, counts = await attempt(_TRAP_TRIAL, traps=("sync",))
            if counts.syncs != 1:
                why_no_traps = errors or "a reported system call was not counted"
        if self._controls.traps:
            _, errors, counts = await attempt(attach_trial(), traps=("sync",), attaches=True)
            if counts.syncs != 1 or counts.traps_reached != ATTACH_TRIAL_PROCESSES:
                said = os.strerror(counts.traps_error)
                why_not_attached = errors or f"cannot attach a filter to a running program: {said}"
        if self._needs_clock:
            wall_ns, _ = await self._access.now(host)
            output, errors, _ = await attempt(f"TRUE = {wall_ns / 1e9}\n{_CLOCK_TRIAL}", moves_clock=True)
            if not output.strip() or abs(float(output) - (wall_ns / 1e9 - 3600)) > 600:
                why_no_clock = errors or "the program's clock did not move"
        return LauncherTrial(why_no_traps, why_not_attached, why_no_clock)

    async def release_all(self) -> None:
        """Release all faults: a replica that waits for its disk does not shut down cleanly. Raises ShellError."""
        await self.disks.release_all()
        await self.clocks.release_all()
