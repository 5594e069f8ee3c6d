"""A host: power, one process at a time, and what outlives the process (disk, clock, log).

start    a program, as a process with a runtime of its own
kill     SIGKILL: the process ends where it stands; the kernel closes its connections, the page cache stays
pause    SIGSTOP: the process does nothing; the kernel keeps accepting connections and bytes
power_fail   everything is lost except what was durable; peers receive nothing at all
restart  kill (or boot after a power failure) and start the same program again
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from harness.clusters.sim.clock import SimClock
from harness.clusters.sim.disk import SimDisk
from harness.clusters.sim.errors import SimulationError
from harness.clusters.sim.lane import LANE, Lane
from harness.clusters.sim.line_file import SimLineFile
from harness.clusters.sim.logs import HostLog
from harness.clusters.sim.process_disk import ProcessDisk
from node.runtime import Runtime

if TYPE_CHECKING:
    from harness.clusters.sim.loop import SimLoop
    from harness.clusters.sim.network import SimNetwork
    from harness.clusters.sim.watch import ReplicaWatch

__all__ = ["Incarnation", "ProgramMain", "SimHost"]

logger = logging.getLogger("node")

EXIT_FAILED = 1
"""Status of a process that ended in an exception."""


class Incarnation(Lane):
    """One process on a host, from its start to its end. `stop_requested` is set by SIGTERM."""

    __slots__ = ("_ended", "_exit_status", "_main", "host", "log_level", "runtime", "stop_requested")

    def __init__(self, host: SimHost, number: int) -> None:
        super().__init__(host.loop, f"{host.name}#{number}", host.address)
        self.host = host
        self.stop_requested = asyncio.Event()
        self.log_level = logging.INFO
        self.runtime = host.runtime_for(self)
        self._exit_status: int | None = None
        self._ended: asyncio.Future[int] = host.loop.create_future()
        self._main: asyncio.Task[Any] | None = None

    def run(self, program: ProgramMain) -> None:
        """Start the program's coroutine in this lane."""
        context = copy_context()
        context.run(LANE.set, self)
        self._main = self.host.loop.create_task(program(self), name=self.name, context=context)
        self._main.add_done_callback(self._main_done, context=context)

    def _main_done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.end(EXIT_FAILED)
            return
        error = task.exception()
        if error is not None:
            logger.critical("the process failed: %s: %s", type(error).__name__, error, exc_info=error)
            self.end(EXIT_FAILED)
        else:
            result = task.result()
            self.end(result if isinstance(result, int) else 0)

    def log_record(self, record: logging.LogRecord) -> None:
        """Add a record of this process to the host's log."""
        if not self.is_dead and record.levelno >= self.log_level:
            self.host.log.add(record, self.host.clock.shown_ms())

    def exit_status(self) -> int | None:
        """The exit status, negative for a signal; None while it lives."""
        return self._exit_status

    def exit(self, status: Any) -> None:
        """End the process because some of its code raised SystemExit."""
        if self._main is not None and self._main.done() and not self._main.cancelled():
            self._main.exception()  # retrieved: it is what ends the process
        self.end(status if isinstance(status, int) else 0 if status is None else EXIT_FAILED)

    def end(self, status: int) -> None:
        """End the process: nothing of it runs again, and the kernel closes its connections. Idempotent."""
        if self._exit_status is None:
            self._exit_status = status
            self.host.network.process_died(self)
            self.kill()
            self._ended.set_result(status)
            if self.host.on_end is not None:
                self.host.on_end(self)

    async def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        return await asyncio.shield(self._ended)


ProgramMain = Callable[[Incarnation], Coroutine[Any, Any, Any]]
"""A program: its coroutine runs on the incarnation's runtime, ends when `stop_requested` is set and returns the
exit status (None counts as 0)."""


class SimHost:
    """One host. It has no process until `start`."""

    def __init__(self, loop: SimLoop, network: SimNetwork, name: str, address: str) -> None:
        self.loop = loop
        self.network = network
        self.name = name
        self.address = address
        self.clock = SimClock(loop)
        self.disk = SimDisk(loop, name)
        self.log = HostLog()
        self.line_files: dict[str, list[str]] = {}
        """Path -> the lines that its programs have added there (node.runtime.LineFile); no power cut takes them."""
        self.process: Incarnation | None = None
        """The current process, or the last one."""
        self.on_end: Callable[[Incarnation], None] | None = None
        """Called when a process has ended, for whatever reason."""
        self.watch: ReplicaWatch | None = None
        """Observes every broker that starts here."""
        self._program: ProgramMain | None = None
        self._starts = 0
        network.add_host(name, address)

    def runtime_for(self, lane: Lane) -> Runtime:
        """The runtime of the newest process of this host. Each start has a random stream of its own."""
        return Runtime(
            clock=self.clock,
            disk=ProcessDisk(self.disk, self.loop, lane),
            random=self.loop.streams.get(f"process/{self.name}/{self._starts}"),
            open_lines=lambda path: SimLineFile(self.line_files.setdefault(path, []), lane),
        )

    @property
    def is_up(self) -> bool:
        """Whether the host has power."""
        return self.network.has_power(self.name)

    @property
    def is_running(self) -> bool:
        """Whether a process lives here, paused or not."""
        return self.process is not None and not self.process.is_dead

    def start(self, program: ProgramMain) -> Incarnation:
        """Start a program. Raises SimulationError when one lives here already or there is no power."""
        if self.is_running:
            raise SimulationError(f"{self.name} already runs a process")
        if not self.is_up:
            raise SimulationError(f"{self.name} has no power")
        self._starts += 1
        self._program = program
        self.process = Incarnation(self, self._starts)
        self.process.run(program)
        return self.process

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self.process is not None:
            self.process.end(-signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: ask the process to end. A paused one handles this when it is resumed."""
        process = self.process
        if process is not None and not process.is_dead:
            context = copy_context()
            context.run(LANE.set, process)
            self.loop.call_soon(process.stop_requested.set, context=context)

    def pause(self) -> None:
        """SIGSTOP. Idempotent; no effect without a process."""
        if self.process is not None:
            self.process.pause()

    def resume(self) -> None:
        """SIGCONT. Idempotent."""
        if self.process is not None:
            self.process.resume()

    def power_fail(self, model: str | None = None) -> None:
        """Cut the power; the disk loses data by the given model of `POWER_MODELS`, or a random one. Idempotent."""
        if not self.is_up:
            return
        self.network.power_lost(self.name, [self.process] if self.process is not None else [])
        self.kill()
        self.disk.power_fail(model)

    def boot(self) -> None:
        """Restore the power, without starting a process. Idempotent."""
        self.network.power_restored(self.name)

    def restart(self) -> Incarnation:
        """Kill what runs, boot if necessary, start the last program again. Raises SimulationError without one."""
        if self._program is None:
            raise SimulationError(f"{self.name} has never run a program")
        self.kill()
        self.boot()
        return self.start(self._program)
