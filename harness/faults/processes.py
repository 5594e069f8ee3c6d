"""The replicas' processes under faults: which are kept down, which are paused, and by which fault.

The state that a replica should have follows from all faults that hold it: down if any keeps it down, paused if any
pauses it, running otherwise. Whenever that changes, the replica is put into that state, under a lock for each host.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from harness.clusters.abilities import SeesStrays
from harness.clusters.base import EndsInParts, HostProcess, KnowsItsEnd, ListsMembers
from harness.clusters.threads import all_of
from nemesis.target import DOWN, PAUSED, RUNNING, ProcessMember, ProcessView

__all__ = ["ReplicaProcesses"]

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 8.0
"""How long a killed process may take to end. One that waits in the kernel for a frozen disk may never end."""

TERMINATE_GRACE_S = 8.0
"""Time from SIGTERM to SIGKILL."""

PAUSE_TIMEOUT_S = 5.0
"""How long a signalled process may take to stop or to continue."""

POLL_S = 0.01


@dataclass(slots=True)
class _Hold:
    """What one fault does to the replicas of its hosts. A crash loop switches its `keeps_down` off and on."""

    hosts: frozenset[str]
    keeps_down: bool = False
    pauses: bool = False
    signal_name: str = "KILL"


@dataclass(slots=True)
class _Loop:
    """A running crash loop. It is asked to stop and never cancelled, because a start must not be interrupted."""

    task: asyncio.Task[None]
    stop: asyncio.Event


class ReplicaProcesses:
    """See nemesis.target.Processes. `process` returns the replica of a host as it was last started, `restart` starts it
    again with the same program; `hosts` are the hosts with replicas. `strays` finds processes of a host that cannot be
    traced to its programs, such as daemons that a script has given an environment of their own; before a fault, they
    are counted as the programs' processes."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        process: Callable[[str], HostProcess | None],
        restart: Callable[[str], Awaitable[None]],
        strays: SeesStrays | None = None,
    ) -> None:
        self._hosts = tuple(hosts)
        self._process = process
        self._restart = restart
        self._strays = strays
        self._holds: dict[str, _Hold] = {}
        self._loops: dict[str, _Loop] = {}
        self._starts = Counter(dict.fromkeys(hosts, 1))
        self._ended: dict[str, HostProcess] = {}
        """Host -> its process that a fault ended last."""
        self._forced: set[str] = set()
        """Hosts whose process was last ended by SIGKILL after SIGTERM had failed to end it."""
        self._forced_total: Counter[str] = Counter()
        """Host -> how often that happened there."""
        self._locks = {host: asyncio.Lock() for host in hosts}
        self.unexpected_exits: Counter[str] = Counter()
        """Exits that no fault caused, in words -> how often one was found when a replica should have been running."""

    async def end(self, fault_id: str, hosts: Collection[str], *, signal_name: str = "KILL") -> None:
        """End replicas and keep them down. Raises RuntimeError when one does not end."""
        if signal_name not in ("KILL", "TERM"):
            raise ValueError(f"the signal must be KILL or TERM, not {signal_name}")
        self._holds[fault_id] = _Hold(self._known(hosts), keeps_down=True, signal_name=signal_name)
        await self._settle_all(hosts)

    async def pause(self, fault_id: str, hosts: Collection[str]) -> None:
        """Stop replicas by SIGSTOP. Raises RuntimeError when one does not stop."""
        self._holds[fault_id] = _Hold(self._known(hosts), pauses=True)
        await self._settle_all(hosts)

    async def crash_loop(self, fault_id: str, hosts: Collection[str], *, up_s: float) -> None:
        """Kill replicas repeatedly; returns after they were killed and started for the first time."""
        hold = _Hold(self._known(hosts))
        self._holds[fault_id] = hold
        await self._crash(hold)
        stop = asyncio.Event()
        task = asyncio.get_running_loop().create_task(
            self._keep_crashing(hold, up_s, stop), name=f"crash loop {fault_id}"
        )
        self._loops[fault_id] = _Loop(task, stop)

    async def release(self, fault_id: str) -> None:
        """Undo one fault. Raises whatever a replica's start raises."""
        await self._end_loop(fault_id)
        hold = self._holds.pop(fault_id, None)
        if hold is not None:
            await self._settle_all(hold.hosts)

    async def release_all(self) -> None:
        """Undo every fault, and start every replica that is down."""
        for fault_id in list(self._loops):
            await self._end_loop(fault_id)
        self._holds.clear()
        await self._settle_all(self._hosts)

    async def revive(self, hosts: Collection[str]) -> Sequence[str]:
        """Start replicas that ended and that no fault keeps down."""
        before = dict(self._starts)
        await self._settle_all(self._known(hosts))
        return [host for host in self._hosts if self._starts[host] > before[host]]

    async def look(self, host: str) -> ProcessView:
        """The process as its host sees it."""
        process = self._process(host)
        state = DOWN if process is None else await process.state()
        has_ended = state == DOWN or (process is not None and _has_ended_in_part(process))
        return ProcessView(
            host=host,
            state=state,
            starts=self._starts[host],
            pids=() if process is None or state == DOWN else _host_pids(process),
            ended_by_itself=process is not None and has_ended and self._has_ended_by_itself(host, process),
            was_forced=host in self._forced and process is self._ended.get(host),
            forced_total=self._forced_total[host],
        )

    async def members(self, host: str) -> Sequence[ProcessMember] | None:
        """Every process of a replica that has not ended, including strays of its host; None if its host cannot list
        them."""
        process = self._process(host)
        if not isinstance(process, ListsMembers):
            return None
        members = {member.pid: member for member in await self._strays.strays(host)} if self._strays is not None else {}
        return list((members | {member.pid: member for member in await process.members()}).values())

    def _known(self, hosts: Collection[str]) -> frozenset[str]:
        unknown = set(hosts) - set(self._hosts)
        if unknown:
            raise ValueError(f"no replica runs on {', '.join(sorted(unknown))}")
        return frozenset(hosts)

    async def _settle_all(self, hosts: Collection[str]) -> None:
        """Settle all hosts; every one is tried before the first error is raised."""
        await all_of([self._settle(host) for host in sorted(hosts)])

    async def _settle(self, host: str) -> None:
        """Put one replica into the state that follows from the faults."""
        async with self._locks[host]:
            holds = [hold for hold in self._holds.values() if host in hold.hosts]
            enders = [hold for hold in holds if hold.keeps_down]
            process = self._process(host)
            if process is None:  # the system has not started it yet: there is nothing to act on
                return
            is_up = process.exit_status() is None
            if enders:
                if is_up:
                    await self._adopt_strays(host)
                    if await process.state() != DOWN:  # else it has ended on its own, and its exit event is under way
                        self._ended[host] = process
                    self._forced.discard(host)
                    if not await _end(process, enders[-1].signal_name):
                        self._forced.add(host)
                        self._forced_total[host] += 1
                return
            if is_up and process is self._ended.get(host):  # ending it was interrupted, so it may still end any time
                await _end(process, "KILL")
                is_up = False
            if not is_up or _has_ended_in_part(process):
                if self._has_ended_by_itself(host, process):
                    said = f"{host} exited unexpectedly, {_how_ended(process)}"
                    self.unexpected_exits[said] += 1
                    logger.warning("%s; restarting it", said)
                await self._restart(host)
                self._starts[host] += 1
                process = self._process(host)
            if process is None:
                raise RuntimeError(f"the replica of {host} was not started")
            if any(hold.pauses for hold in holds):
                await self._adopt_strays(host)
                await process.pause()
                await _wait_for(process, PAUSED)
            elif await process.state() not in (RUNNING, DOWN):  # even if only some of its programs are paused
                await process.resume()
                await _wait_for(process, RUNNING)

    def _has_ended_by_itself(self, host: str, process: HostProcess) -> bool:
        """Whether a process that has ended did so on its own, and not by a fault or for another reason of the harness,
        such as mounting its file system again."""
        return process is not self._ended.get(host) and not (
            isinstance(process, KnowsItsEnd) and process.ended_by_harness
        )

    async def _adopt_strays(self, host: str) -> None:
        if self._strays is not None:
            await self._strays.adopt_strays(host)

    async def _crash(self, hold: _Hold) -> None:
        hold.keeps_down = True
        await self._settle_all(hold.hosts)
        hold.keeps_down = False
        await self._settle_all(hold.hosts)

    async def _keep_crashing(self, hold: _Hold, up_s: float, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await asyncio.wait_for(stop.wait(), up_s)
            except TimeoutError:
                try:
                    await self._crash(hold)
                except Exception as error:  # the proof and the end of the run show it; the loop must continue
                    logger.warning("crash loop of %s: %s", ", ".join(sorted(hold.hosts)), error)
        hold.keeps_down = False

    async def _end_loop(self, fault_id: str) -> None:
        loop = self._loops.pop(fault_id, None)
        if loop is not None:
            loop.stop.set()
            await loop.task


async def _end(process: HostProcess, signal_name: str) -> bool:
    """End a replica; returns whether that signal ended it. Raises RuntimeError when it does not end."""
    if signal_name == "TERM":
        return await process.terminate(grace_s=TERMINATE_GRACE_S) != -signal.SIGKILL
    try:
        await asyncio.wait_for(process.kill(), END_TIMEOUT_S)
    except TimeoutError:
        raise RuntimeError(
            f"the replica of {process.host} did not exit within {END_TIMEOUT_S:g} s of SIGKILL: it is blocked in the "
            "kernel"
        ) from None
    return True


def _host_pids(process: HostProcess) -> Sequence[int]:
    """The pid of each program of a replica that has not ended; empty if its host has no pids."""
    if isinstance(process, EndsInParts):
        return process.host_pids
    return () if process.host_pid is None else (process.host_pid,)


def _has_ended_in_part(process: HostProcess) -> bool:
    """Whether one of several programs has ended, which only a restart repairs."""
    return isinstance(process, EndsInParts) and len(process.ended) > 0


def _how_ended(process: HostProcess) -> str:
    """How a replica that no longer runs completely has ended, in words."""
    status = process.exit_status()
    if status is None and isinstance(process, EndsInParts):
        return f"in part: {process.first_problem()}"
    return f"with status {status}"


async def _wait_for(process: HostProcess, state: str) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + PAUSE_TIMEOUT_S
    while (seen := await process.state()) != state:
        if seen == DOWN or _has_ended_in_part(process):
            return
        if loop.time() > deadline_s:
            raise RuntimeError(f"the replica of {process.host} is {seen}, not {state}")
        await asyncio.sleep(POLL_S)
