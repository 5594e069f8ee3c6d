"""Programs on hosts, started and watched by the hosts' agents."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from harness.clusters.agent_link import AgentLink
from harness.clusters.base import Program
from harness.errors import OperatorError
from nemesis.mechanisms.shell import ShellError
from nemesis.target import DOWN, PAUSED, RUNNING, ProcessMember

__all__ = ["AgentProcess", "AgentProcesses"]

logger = logging.getLogger(__name__)

_LOST_STATUS = -9
"""Exit status of a program whose agent has ended: the kernel killed the program with it."""

_KILL_TIMEOUT_S = 30.0
"""Time for a killed process to be gone; one whose disk is stalled ends only after the stall."""

_SIGNAL_TIMEOUT_S = 5.0
_SIGNAL_PAUSE_S = 0.02

Message = dict[str, Any]


class AgentProcess:
    """One program that an agent started; implements HostProcess. Made by `AgentProcesses.spawn`."""

    def __init__(
        self, *, host: str, name: str, host_pid: int, link: AgentLink, log_path: str, is_here: bool = False
    ) -> None:
        self.host = host
        self.name = name
        self.host_pid = host_pid
        """Its process id on its host, which is also the id of its process group."""
        self._link = link
        self.log_path = log_path
        """The path of its output on the harness's side, once it was fetched."""
        self._is_here = is_here
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._is_terminated = False
        self._is_killed = False

    @property
    def pid(self) -> int | None:
        """Its process id if its host is on the harness's machine, None otherwise; see `host_pid`."""
        return self.host_pid if self._is_here else None

    def exit_status(self) -> int | None:
        """Its exit status, negative for a signal; None as long as its end is not known."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Wait until it has ended; returns its status, negative for a signal."""
        return await asyncio.shield(self._exited)

    async def signal(self, number: signal.Signals) -> None:
        """Send it a signal: SIGKILL, SIGSTOP and SIGCONT go to all its processes, others to its process group and
        adopted strays (see host_agent). Does nothing when it has ended. Raises ShellError."""
        if not self._exited.done():
            await self._link.request("signal", {"pid": self.host_pid, "number": int(number)})

    @property
    def ended_by_harness(self) -> bool:
        """Whether a signal of the harness ended it. A status other than -9 after a kill means it had ended before."""
        return self._exited.done() and (
            self._is_terminated or (self._is_killed and self._exited.result() == -signal.SIGKILL)
        )

    async def terminate(self, *, grace_s: float = 10.0) -> int:
        """SIGTERM (and SIGCONT, in case it is stopped), then SIGKILL after `grace_s` seconds; returns the status."""
        self._is_terminated |= not self._exited.done()
        await self.signal(signal.SIGTERM)
        await self.signal(signal.SIGCONT)
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            await self.kill()
            return await self.wait()

    async def kill(self) -> None:
        """SIGKILL and wait until it is gone. Raises ShellError when it does not end or its host does not answer."""
        self._is_killed |= not self._exited.done()
        await self.signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(self.wait(), _KILL_TIMEOUT_S)
        except TimeoutError:
            raise ShellError(
                self.host, ["kill", str(self.host_pid)], -1, f"{self.name} is still running {_KILL_TIMEOUT_S:g} s later"
            ) from None

    async def pause(self) -> None:
        """SIGSTOP all its processes; returns once it has stopped or ended, or after 5 s. Raises ShellError."""
        await self.signal(signal.SIGSTOP)
        await self._while_still(RUNNING)

    async def resume(self) -> None:
        """SIGCONT all its processes; returns once it runs or has ended, or after 5 s. Raises ShellError."""
        await self.signal(signal.SIGCONT)
        await self._while_still(PAUSED)

    async def _while_still(self, state: str) -> None:
        """Wait until a signal has taken effect, which happens when the process is next scheduled. A process that waits
        for a disk may take longer than the timeout; callers that care check its state."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _SIGNAL_TIMEOUT_S
        while await self.state() == state and loop.time() < deadline_s:  # noqa: ASYNC110 - a process elsewhere
            await asyncio.sleep(_SIGNAL_PAUSE_S)

    async def state(self) -> str:
        """RUNNING, PAUSED or DOWN, as its host's /proc shows it. Raises ShellError."""
        if self._exited.done():
            return DOWN
        letter = (await self._link.request("state", {"pid": self.host_pid}))["letter"]
        if letter in ("T", "t"):
            return PAUSED
        return DOWN if letter in ("", "Z", "X") else RUNNING

    async def members(self) -> list[ProcessMember]:
        """Its own process and all that it started, except those that have ended. Raises ShellError."""
        members = (await self._link.request("members", {"pid": self.host_pid}))["members"]
        return [ProcessMember(*member) for member in members]

    def has_ended(self, status: int, tail: str = "") -> None:
        """Record its end. Its last output becomes the log on the harness's side until the full log is fetched."""
        if self._exited.done():
            return
        if tail and not os.path.exists(self.log_path):
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(self.log_path), exist_ok=True)
                with open(self.log_path, "w", encoding="utf-8") as file:
                    file.write(tail)
        self._exited.set_result(status)


class AgentProcesses:
    """The programs of one run; handles the agents' events."""

    def __init__(
        self,
        *,
        log_path: Callable[[str, str], str],
        remote_log_path: Callable[[str, str], str],
        are_here: bool = False,
    ) -> None:
        """`log_path` and `remote_log_path` map a host and a log's name to its path, on the harness's side and on the
        host. `are_here`: the hosts are on the harness's machine."""
        self._are_here = are_here
        self._log_path = log_path
        self._remote_log_path = remote_log_path
        self._processes: dict[tuple[str, int], AgentProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> list[AgentProcess]:
        """The programs that have not ended, oldest first."""
        return [process for process in self._processes.values() if process.exit_status() is None]

    async def spawn(
        self, host: str, machine: str, link: AgentLink, program: Program, *, mounts: Sequence[tuple[str, str]] = ()
    ) -> AgentProcess:
        """Start a program on a host; returns once it has started. For each (file, place) of `mounts`, only this program
        sees the file in that place. Raises OperatorError when it cannot be run."""
        try:
            answer = await link.request(
                "spawn",
                {
                    "argv": list(program.argv),
                    "environment": dict(program.environment),
                    "log": self._remote_log_path(host, program.log_name),
                    "mounts": [list(mount) for mount in mounts],
                    "directory": program.directory,
                },
            )
        except ShellError as error:
            raise OperatorError(f"cannot run {program.name} on {host}: {error.said}") from None
        process = AgentProcess(
            host=host,
            name=program.name,
            host_pid=int(answer["pid"]),
            link=link,
            log_path=self._log_path(host, program.log_name),
            is_here=self._are_here,
        )
        self._processes[machine, process.host_pid] = process
        self._in_background(self._compare(machine, link))  # it may have ended before we knew its pid
        return process

    def take_event(self, machine: str, link: AgentLink, event: Message) -> None:
        """React to an event of a machine's agent."""
        if event["event"] == "exit":
            process = self._processes.get((machine, int(event["pid"])))
            if process is not None:
                process.has_ended(int(event["status"]), str(event.get("tail", "")))
        elif event["event"] == "connected":
            if any(key[0] == machine for key in self._processes):
                self._in_background(self._compare(machine, link))
        elif event["event"] == "gone":
            self._all_lost(machine)

    async def stop_all(self, *, grace_s: float = 10.0) -> list[Exception]:
        """Terminate all running programs at the same time; returns what went wrong. Idempotent."""
        outcomes = await asyncio.gather(
            *(process.terminate(grace_s=grace_s) for process in self.running), return_exceptions=True
        )
        for task in self._tasks:
            task.cancel()
        return [outcome for outcome in outcomes if isinstance(outcome, Exception)]

    def _all_lost(self, machine: str) -> None:
        for (of_machine, _), process in self._processes.items():
            if of_machine == machine:
                process.has_ended(_LOST_STATUS)

    async def _compare(self, machine: str, link: AgentLink) -> None:
        """Ask the agent which programs have ended, in case their events were missed."""
        try:
            ended = (await link.request("list"))["ended"]
        except ShellError as error:
            logger.info("programs of %s: %s", machine, error)
            return
        for event in ended:
            self.take_event(machine, link, event)

    def _in_background(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
