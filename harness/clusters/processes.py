"""Child processes of a run.

Every program of a run is started here: in a session and process group of its own (so that Ctrl-C reaches the
harness only), marked in its environment with the run's id, its output appended to a log file, claimed in the
run's state. The kernel is asked to kill it when the harness dies (PR_SET_PDEATHSIG), so that not even
`kill -9` of the harness leaves it running. Children stay parented by the harness and are reaped here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from harness.clusters.base import Program
from harness.errors import OperatorError, SystemUnderTestError
from harness.pidfds import pidfd_open
from harness.run_state import RunState
from nemesis.target import DOWN, PAUSED, RUNNING

__all__ = ["ChildProcess", "Processes", "raise_descriptor_limit"]

MAX_PROCESSES = 1000
"""Children of one run at a time: far more than any cluster has, far fewer than a machine allows."""

_LOOK_S = 0.02
"""Between looks at whether a child has ended, where the kernel does not tell."""

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def raise_descriptor_limit() -> int:
    """Allow this process as many open descriptors as the system lets it; returns the new limit.

    A cluster of n nodes has some n * n links, each with several sockets, and the usual soft limit is 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems refuse "unlimited"
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


def _death_signal_setter() -> Callable[[], None] | None:
    """What a child runs before exec so that it dies with the harness; None where there is no such thing.

    The library is loaded here and not in the child: between fork and exec a child should do next to nothing.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent_pid = os.getpid()

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # the harness died before the kernel knew of our wish
            os._exit(1)

    return set_death_signal


class ChildProcess:
    """One running or ended child; implements HostProcess. Made by `Processes.spawn`."""

    def __init__(self, *, host: str, name: str, log_path: str, popen: subprocess.Popen[bytes], run: RunState) -> None:
        self._host = host
        self._name = name
        self._log_path = log_path
        self._popen = popen
        self._run = run
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pidfd: int | None = None
        self._waiter: asyncio.Task[None] | None = None
        self._watch()

    @property
    def host(self) -> str:
        return self._host

    @property
    def name(self) -> str:
        """The program's name."""
        return self._name

    @property
    def log_path(self) -> str:
        """The file that its output is appended to."""
        return self._log_path

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def host_pid(self) -> int:
        """The same: the host is on this machine."""
        return self._popen.pid

    def exit_status(self) -> int | None:
        """None while it runs; otherwise its status, negative for a signal."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Wait until it has ended; returns its status, negative for a signal."""
        return await asyncio.shield(self._exited)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and to whatever it started in its group; nothing when it has ended."""
        if not self._exited.done():
            # Not reaped yet, so the group's number cannot have been given to anybody else.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)

    async def terminate(self, *, grace_s: float = 10.0) -> int:
        """SIGTERM (and SIGCONT, should it be stopped), then SIGKILL after `grace_s` seconds; returns the status."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            await self.kill()
            return await self.wait()

    async def kill(self) -> None:
        """SIGKILL and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self.wait()

    async def pause(self) -> None:
        """SIGSTOP to its group; nothing when it has ended."""
        self.signal(signal.SIGSTOP)

    async def resume(self) -> None:
        """SIGCONT to its group; nothing when it has ended."""
        self.signal(signal.SIGCONT)

    async def state(self) -> str:
        """RUNNING, PAUSED or DOWN, as /proc shows it."""
        if self._exited.done():
            return DOWN
        try:
            with open(f"/proc/{self._popen.pid}/stat", "rb") as file:
                letter = file.read().rpartition(b")")[2].split()[0]
        except OSError:
            return DOWN
        if letter in (b"T", b"t"):
            return PAUSED
        return DOWN if letter in (b"Z", b"X") else RUNNING

    def _watch(self) -> None:
        """Have `_reap` called when it ends: by the loop where the kernel has pidfds, else by looking at it."""
        loop = asyncio.get_running_loop()
        try:
            self._pidfd = pidfd_open(self._popen.pid)
        except OSError:
            self._waiter = asyncio.create_task(self._look())
        else:
            loop.add_reader(self._pidfd, self._reap)

    async def _look(self) -> None:
        while await self.state() != DOWN:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(_LOOK_S)
        self._reap()

    def _reap(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.signal(signal.SIGKILL)  # what it started may have outlived it
        status = self._popen.wait()
        self._exited.set_result(status)
        self._run.release_process(self._popen.pid)


class Processes:
    """Starts the programs of one run and ends them all."""

    def __init__(self, run: RunState, log_dir: str) -> None:
        """Logs go to `log_dir`/<host>/<log name of the program>."""
        self._run = run
        self._log_dir = log_dir
        self._children: list[ChildProcess] = []

    @property
    def running(self) -> list[ChildProcess]:
        """The children that have not ended, oldest first."""
        self._children = [child for child in self._children if child.exit_status() is None]
        return list(self._children)

    async def spawn(
        self,
        host: str,
        program: Program,
        *,
        argv_prefix: Sequence[str] = (),
        cwd: str | None = None,
        stdin: int | None = None,
    ) -> ChildProcess:
        """Start a program for a host; returns once it runs.

        The child dies with the thread that starts it, so that must be one that lasts: the main thread's loop.

        `argv_prefix` goes before the program's own arguments (`nsenter --net=...`, say); a prefix that
        changes credentials clears the wish to die with the harness, so it is made again after the prefix
        where `setpriv` is there to do it. `stdin` is a descriptor for the child's standard input
        (default: nothing to read). The environment is the harness's own, the run's mark, the program's.

        Raises OperatorError when the program cannot be run or its log cannot be written,
        SystemUnderTestError when there are too many children.
        """
        if len(self.running) >= MAX_PROCESSES:
            raise SystemUnderTestError(f"{MAX_PROCESSES} processes run already; {program.name} was not started")
        log_path = os.path.join(self._log_dir, host, program.log_name)
        try:
            os.makedirs(os.path.dirname(log_path), exist_ok=True)
            log = open(log_path, "ab")  # noqa: SIM115 - closed below, in every case
        except OSError as error:
            raise OperatorError(f"cannot write the log {log_path}: {error.strerror}") from None
        argv = [*argv_prefix, *_die_with_parent(argv_prefix), *program.argv]
        try:
            popen = subprocess.Popen(  # noqa: ASYNC220 - returns at exec, and waiting is the loop's
                argv,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self._run.environment, program.environment),
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_death_signal_setter(),
            )
        except OSError as error:
            raise OperatorError(
                f"cannot run {program.name} on {host}: {error.filename or argv[0]}: {error.strerror}"
            ) from None
        finally:
            log.close()
        try:
            self._run.claim_process(popen.pid)
        except BaseException:
            popen.kill()
            popen.wait()
            raise
        child = ChildProcess(host=host, name=program.name, log_path=log_path, popen=popen, run=self._run)
        self._children.append(child)
        return child

    async def stop_all(self, *, grace_s: float = 10.0) -> None:
        """Terminate all that still run, at the same time. Idempotent."""
        await asyncio.gather(*(child.terminate(grace_s=grace_s) for child in self.running))


def _environment(*additions: Mapping[str, str]) -> dict[str, str]:
    environment = dict(os.environ)
    for addition in additions:
        environment.update(addition)
    return environment


@functools.cache
def _setpriv() -> str | None:
    """The path of a `setpriv` that knows about death signals (util-linux has one, busybox has not)."""
    path = shutil.which("setpriv")
    if path is None:
        return None
    tried = subprocess.run([path, "--pdeathsig", "KILL", "--", "true"], capture_output=True, check=False)
    return path if tried.returncode == 0 else None


def _die_with_parent(argv_prefix: Sequence[str]) -> list[str]:
    setpriv = _setpriv() if argv_prefix else None
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
