"""Several programs of one host as the one process that faults act on: each fault hits all of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

from harness.clusters.base import HostProcess, KnowsItsEnd, ListsMembers
from harness.clusters.threads import all_of
from nemesis.target import ProcessMember

__all__ = ["HostPrograms"]


class HostPrograms:
    """The programs of a host by name, the main one first. See harness.clusters.base.HostProcess.

    `state` is the common state of all programs. If they differ it is a text naming each, which no proof accepts: a
    fault that struck only one of two programs is not proven, nor is its healing.
    """

    def __init__(self, host: str, programs: Mapping[str, HostProcess]) -> None:
        self.host = host
        self._programs = dict(programs)

    @property
    def pid(self) -> int | None:
        """PID of the main program."""
        return next(iter(self._programs.values())).pid

    @property
    def host_pid(self) -> int | None:
        """PID of the main program, as its host sees it."""
        return next(iter(self._programs.values())).host_pid

    @property
    def host_pids(self) -> list[int]:
        """Host PIDs of the programs that have not ended, as far as known."""
        running = [process.host_pid for process in self._programs.values() if process.exit_status() is None]
        return [pid for pid in running if pid is not None]

    @property
    def ended(self) -> list[str]:
        """The names of the programs that have ended."""
        return [name for name, process in self._programs.items() if process.exit_status() is not None]

    @property
    def ended_by_harness(self) -> bool:
        """Whether every program that has ended was ended by the harness."""
        return all(
            isinstance(process, KnowsItsEnd) and process.ended_by_harness
            for process in self._programs.values()
            if process.exit_status() is not None
        )

    def exit_status(self) -> int | None:
        """None while any program runs; then the first nonzero exit status, or 0."""
        statuses = [process.exit_status() for process in self._programs.values()]
        if None in statuses:
            return None
        return next((status for status in statuses if status), 0)

    async def terminate(self, *, grace_s: float = 10.0) -> int:
        """SIGTERM to all running programs at once, SIGKILL to those left after `grace_s` seconds. Returns -SIGKILL if
        any ended by it, else a nonzero exit status if there is one, else 0."""
        statuses = list[int]()

        async def end(process: HostProcess) -> None:
            statuses.append(await process.terminate(grace_s=grace_s))

        await all_of(end(process) for process in self._programs.values() if process.exit_status() is None)
        return min(statuses, key=lambda status: (status != -signal.SIGKILL, status == 0), default=0)

    async def kill(self) -> None:
        """SIGKILL to all at the same time, and wait until they are gone."""
        await all_of(process.kill() for process in self._programs.values())

    async def pause(self) -> None:
        """SIGSTOP to all that run."""
        await all_of(process.pause() for process in self._programs.values())

    async def resume(self) -> None:
        """SIGCONT to all that run."""
        await all_of(process.resume() for process in self._programs.values())

    async def state(self) -> str:
        """RUNNING, PAUSED or DOWN of nemesis.target if all agree, else a text with the state of each."""
        states = await asyncio.gather(*(process.state() for process in self._programs.values()))
        if len(set(states)) == 1:
            return states[0]
        return ", ".join(f"{name} {state}" for name, state in zip(self._programs, states, strict=True))

    async def members(self) -> list[ProcessMember]:
        """Every process of all programs whose host can list them. Raises ShellError."""
        lists = [await process.members() for process in self._programs.values() if isinstance(process, ListsMembers)]
        return [member for members in lists for member in members]

    def with_started(self, started: Mapping[str, HostProcess]) -> HostPrograms:
        """A copy with some programs replaced by their restarted processes."""
        return HostPrograms(self.host, {**self._programs, **started})

    def first_problem(self) -> str | None:
        """Which program has ended and with what status, as text; None while all run."""
        for name in self.ended:
            return f"program {name} of {self.host} ended with status {self._programs[name].exit_status()}"
        return None
