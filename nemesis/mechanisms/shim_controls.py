"""The hosts' control files, the faults in force in them, and the programs started under them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemesis.mechanisms.hosts import HostAccess
from nemesis.mechanisms.launcher.control import PROGRAM_SLOTS, ProgramCounts, parse_programs
from nemesis.mechanisms.launcher_archive import launcher_command
from nemesis.mechanisms.reach import PRELOAD, SECCOMP, unreached
from nemesis.mechanisms.shim import CONTROL_BYTES, Counters, HostFaults, ShimError, parse_counters, shim_environment
from nemesis.target import ProcessMember

__all__ = ["ShimControls", "ShimPlace", "StartedProgram"]

REACH_TIMEOUT_S = 10.0
_LOOKS = 3
_LOOK_PAUSE_S = 0.1
"""Pause before a program that seems out of reach is inspected again: one of its processes may be in the middle of an
exec."""


BEGIN_TIMEOUT_S = 10.0
"""Time from a program's start for its supervisor and clock driver to begin: these are Python processes, which take
0.1 s to start, and much longer on a busy machine."""

ATTACH_TIMEOUT_S = 15.0
"""For supervisors to attach, so that calls are reported; this takes some 60 ms, and they give up after 5 s."""
ATTACH_POLL_S = 0.01

_WHY_NOT_ATTACHED = {
    errno.EEXIST: "the program has a seccomp filter of its own",
    errno.EBUSY: "a thread could not be stopped, or another supervisor receives the calls",
    errno.ESRCH: "its threads have different seccomp filters",
    errno.E2BIG: "the program has too many processes",
}
"""Meaning of a supervisor's errno (launcher/attach.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimPlace:
    """Paths of the shim, the launcher and their files on one host. `undo_path` is where each program has a directory
    for its own account, None if no account is kept; `preloaded` is what is preloaded there anyway."""

    library_path: str
    launcher_path: str
    control_path: str
    data_path: str
    undo_path: str | None = None
    preloaded: str | None = None

    def has(self, path: str) -> bool:
        """Whether a file is in the data directory."""
        return path.startswith(self.data_path.rstrip("/") + "/")

    def account_path(self, program: str) -> str | None:
        """The directory of the account of unsynced data of the named program."""
        return None if self.undo_path is None else os.path.join(self.undo_path, program)

    def environment(self, number: int, program: str, *, preloaded: str | None = None) -> dict[str, str]:
        """Environment variables for a program of this number and name. `preloaded` is what it should preload besides
        the shim, None for what is preloaded there anyway."""
        return shim_environment(
            self.library_path,
            self.control_path,
            self.data_path,
            undo_path=self.account_path(program),
            preloaded=self.preloaded if preloaded is None else preloaded,
            program=number,
        )

    def probe_environment(self) -> dict[str, str]:
        """Environment variables for a probe: the same faults, without an account and without counts."""
        return shim_environment(self.library_path, self.control_path, self.data_path, preloaded=self.preloaded)


@dataclass(slots=True)
class StartedProgram:
    """A program that was started under the faults of its host. `pid` is its first process; `problem` says why no disk
    fault reaches it, `clock_problem` why its clock cannot be skewed. `attaches`: its calls are reported only from its
    first disk fault on, and its unsynced changes logged only from shortly before a power cut on, not from its start."""

    number: int
    mechanism: str
    problem: str | None = None
    clock_problem: str | None = None
    attaches: bool = False
    pid: int | None = None
    is_running: Callable[[], bool] = field(default=lambda: True)
    started_s: float = field(default_factory=time.monotonic)
    written: frozenset[str] = frozenset()
    """Its data files that were mapped shared and writable when it was last inspected."""

    @property
    def may_be_starting(self) -> bool:
        """Whether its supervisor or clock driver may not have begun yet."""
        return self.is_running() and time.monotonic() - self.started_s < BEGIN_TIMEOUT_S


class ShimControls:
    """The control files of all hosts, and the faults in force on each. The files exist before replicas start. `traps`
    are the groups of calls that are reported to the launcher in this run; `strays` finds processes of a host that can
    no longer be traced to any of its programs."""

    def __init__(
        self,
        access: HostAccess,
        places: Mapping[str, ShimPlace],
        *,
        traps: Collection[str] = (),
        strays: Callable[[str], Awaitable[Sequence[ProcessMember]]] | None = None,
    ) -> None:
        self.access = access
        self.places = dict(places)
        self.traps = frozenset(traps)
        self._strays = strays
        self.faults = {host: HostFaults() for host in places}
        self._locks = {host: asyncio.Lock() for host in places}
        self._programs: dict[str, dict[int, StartedProgram]] = {host: {} for host in places}
        """host -> slot of the control file -> the program that has it"""
        self._numbers = dict.fromkeys(places, 0)

    def initial_content(self, host: str) -> bytes:
        """The initial content of a host's control file."""
        return self.faults[host].pack().ljust(CONTROL_BYTES, b"\0")

    def require_known(self, hosts: Collection[str]) -> None:
        """Raises ValueError for a host that has no control file."""
        unknown = set(hosts) - self.places.keys()
        if unknown:
            raise ValueError(f"no replica runs on {', '.join(sorted(unknown))}")

    async def write(self, host: str) -> None:
        """Write the faults in force to the host's control file."""
        async with self._locks[host]:
            await self.access.overwrite(host, self.places[host].control_path, self.faults[host].pack())

    async def _content(self, host: str) -> bytes:
        return await self.access.read(host, self.places[host].control_path, CONTROL_BYTES)

    async def counters(self, host: str) -> Counters:
        """How often the host's processes have met disk faults so far."""
        return parse_counters(await self._content(host))

    async def counts(self, host: str) -> dict[int, ProgramCounts]:
        """What the programs of the host have done so far, by number, without probes and unknown programs."""
        numbers = {program.number for program in self._programs[host].values()}
        found = parse_programs(await self._content(host))
        return {number: counts for number, counts in found.items() if number in numbers}

    # Programs

    def begin(
        self,
        host: str,
        mechanism: str,
        *,
        problem: str | None = None,
        clock_problem: str | None = None,
        attaches: bool = False,
    ) -> StartedProgram:
        """Register a program that is about to be started on a host. Raises ShimError when too many run there."""
        programs = self._programs[host]
        taken = {slot for slot, program in programs.items() if program.is_running()}
        free = [slot for slot in range(PROGRAM_SLOTS) if slot not in taken]
        if not free:
            raise ShimError(f"more than {PROGRAM_SLOTS} programs run on {host} at a time")
        # Take the slot that was free for longest, so that the counts of ended programs remain readable for long.
        self._numbers[host] += 1
        slot = min(free, key=lambda each: programs[each].number if each in programs else 0)
        program = programs[slot] = StartedProgram(
            self._numbers[host] * PROGRAM_SLOTS + slot, mechanism, problem, clock_problem, attaches
        )
        return program

    def running(self, host: str) -> list[StartedProgram]:
        """The programs of a host that are running, as far as is known; the newest last."""
        programs = [program for program in self._programs[host].values() if program.is_running()]
        return sorted(programs, key=lambda program: program.number)

    def mechanism(self, host: str, pid: int | None = None) -> str:
        """The mechanism that reaches the host's newest program, running or not. With `pid`, only programs whose first
        process that is are considered."""
        program = self._program_of(host, pid)
        return PRELOAD if program is None else program.mechanism

    def _program_of(self, host: str, pid: int | None) -> StartedProgram | None:
        found = [program for program in self._programs[host].values() if pid is None or program.pid == pid]
        return max(found, key=lambda program: program.number, default=None)

    async def reaches(self, host: str, pid: int | None, *, needs_clock: bool = False) -> str | None:
        """None when the host's disk faults reach its process `pid` and everything that the process has started; with
        `needs_clock`, when the skew of the wall clock in force does."""
        if pid is None:
            return f"the replica of {host} is down"
        program = self._program_of(host, pid)
        why_not = None if program is None else program.clock_problem if needs_clock else program.problem
        if why_not is not None:
            return f"the replica of {host} is out of reach: {why_not}"
        mechanism = self.mechanism(host, pid)
        if mechanism == SECCOMP and not needs_clock:
            problem = await self._supervised(host, program)
            if problem is not None or not self.faults[host].wants_traps:
                return problem
        place = self.places[host]
        for attempt in range(_LOOKS):
            await asyncio.sleep(_LOOK_PAUSE_S if attempt else 0)
            looked = await self._look(host, pid)
            if isinstance(looked, str):
                return looked
            if program is not None:
                program.written = frozenset(path for each in looked for path in each["written"] if place.has(path))
            files = (place.library_path, place.control_path)
            problem = unreached(mechanism, looked, needed_files=files, needs_clock=needs_clock)
            if problem is None:
                return await self._given_away(host)
        return f"the replica of {host} is out of reach: {problem}"

    async def _given_away(self, host: str) -> str | None:
        """Why a replica is out of reach if it has processes that can no longer be traced to its programs; None if it
        has none."""
        strays = await self._strays(host) if self._strays is not None else ()
        if not strays:
            return None
        more = f" and {len(strays) - 1} more" if len(strays) > 1 else ""
        return (
            f"the replica of {host} is out of reach: {strays[0]}{more} was started in the background without the "
            "environment of its program (start it with that, or keep it in the foreground)"
        )

    def take_written(self, host: str) -> frozenset[str]:
        """Return and forget the data files that the host's programs had mapped shared and writable when last inspected:
        a power cut does not undo writes to these mappings."""
        found = frozenset[str]().union(*(program.written for program in self._programs[host].values()))
        for program in self._programs[host].values():
            program.written = frozenset()
        return found

    async def _counted(self, host: str, program: StartedProgram) -> ProgramCounts | None:
        """What a program has done so far. Waits for the supervisor of a program that has just started to begin, and to
        attach if it has to. None if no supervisor has begun."""
        while True:
            counts = (await self.counts(host)).get(program.number)
            is_ready = counts is not None and not self._awaits_traps(host, program, counts)
            if is_ready or not program.may_be_starting:
                return counts
            await asyncio.sleep(ATTACH_POLL_S)

    def _awaits_traps(self, host: str, program: StartedProgram, counts: ProgramCounts) -> bool:
        is_decided = counts.traps_reached or counts.traps_failed or counts.lost
        return program.attaches and self.faults[host].wants_traps and not is_decided

    async def _supervised(self, host: str, program: StartedProgram | None) -> str | None:
        counts = None if program is None else await self._counted(host, program)
        if counts is None:
            return f"the calls of the replica of {host} are not counted: its supervisor has not started"
        if counts.lost:
            return f"the supervisor of the replica of {host} was lost: its system calls are no longer seen"
        if counts.unseen and not counts.calls:
            return f"the supervisor of the replica of {host} may not inspect its files: it lacks the rights"
        if counts.traps_failed:
            said = _WHY_NOT_ATTACHED.get(counts.traps_error) or os.strerror(counts.traps_error)
            count = counts.traps_failed
            return f"the calls of {count} running processes of the replica of {host} cannot be reported: {said}"
        if counts.passed:
            return (
                f"{counts.passed} files of the replica of {host} have, or had meanwhile, descriptors whose calls are "
                "not reported (made by dup2, received from another program, or opened before a change of user)"
            )
        if program is not None and self._awaits_traps(host, program, counts):
            return f"the calls of the replica of {host} are not reported yet: its supervisor does not respond"
        return None

    async def attached(self, host: str) -> None:
        """Wait until the calls of the host's programs are reported as the faults written last require, or cannot be,
        which `reaches` reports. Raises RuntimeError when their supervisors do nothing."""
        generation = self.faults[host].generation
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + ATTACH_TIMEOUT_S
        while True:
            counts = await self.counts(host)
            attaching = {each.number for each in self.running(host) if each.attaches}
            waited_for = [counts[number] for number in attaching & counts.keys()]
            if all(each.traps_generation >= generation or each.lost for each in waited_for):
                return
            if loop.time() > deadline_s:
                raise RuntimeError(f"the supervisor of the replica of {host} does not respond")
            await asyncio.sleep(ATTACH_POLL_S)

    async def _look(self, host: str, pid: int) -> Sequence[Mapping[str, Any]] | str:
        """What launcher/programs.look reports about a process and its descendants, or why it cannot."""
        argv = [self.access.python(host), "-I", "-S", self.places[host].launcher_path, "look", str(pid)]
        status, output, errors = await self.access.run(host, argv, timeout_s=REACH_TIMEOUT_S)
        try:
            found: Sequence[Mapping[str, Any]] = json.loads(output)
        except ValueError:
            said = (errors.strip().splitlines() or [f"status {status}"])[-1]
            return f"the replica of {host} cannot be inspected: {said}"
        return found

    def probe_command(self, host: str, program: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The command, and variables for its environment, that runs `program` on a host under the same faults as its
        replica, by the same mechanism."""
        place = self.places[host]
        if self.mechanism(host) == PRELOAD:
            return list(program), place.probe_environment()
        command = launcher_command(
            self.access.python(host), place.launcher_path, place.control_path, program,
            root=place.data_path, traps=self.traps,
        )  # fmt: skip
        return command, {}
