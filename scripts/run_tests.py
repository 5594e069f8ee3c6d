"""Run the stages of `make test`, in two parallel sequences, or the one stage of `make test-long`.

    python scripts/run_tests.py INTERPRETER [--long]

INTERPRETER's pytest runs them. Every stage runs, even if an earlier one failed; the exit status is 1 if any failed.
Ctrl-C and SIGTERM end all running stages and this command, with exit status 130.

The foreground stages: six tests at a time if that is safe (many mostly wait); then whole runs of real clusters, four at
a time, except the tests of `harness clean`, which removes whatever is dead: these run one after another. The background
stages use the processor time that is left: the tests on hosts behind SSH and Docker, all in one process, because each
process builds a Docker engine and machines of its own (half a minute of processor time); Spark's tests, those of the
embedded Spark in one process and the others in another; then, with the last foreground stage, which waits for much of
its time, and at the lowest priority, the tests that only compute. All tests are collected once beforehand: this
compiles them, which otherwise every worker would do on its own. All stages but the first are given the files that have
their tests: collecting the others costs each of their workers a few seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

__all__ = ["main"]

STOP_TIMEOUT_S = 90.0
"""Time that a stage gets to end after each signal: its workers take down what their tests have started. A Docker engine
and the machines of the SSH tests took a minute on a busy machine of two cores."""

POLL_INTERVAL_S = 600.0
"""Interval at which a stage is polled even if no SIGCHLD has arrived."""

BLOCKED_SIGNALS = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
"""Signals that are blocked, and taken only by `_next_signal`. A shell that ran the stages itself would lose a signal
that arrives between the fork and the exec of a stage, and wait for the stage to end."""


class Stage(NamedTuple):
    """One run of pytest."""

    name: str
    arguments: Sequence[str]
    mark: str = ""
    """Only files that use a mark that matches this regular expression are passed to pytest; all if it is empty."""
    niceness: int = 0
    is_late: bool = False
    """Whether it is started only with the last foreground stage."""


TWO_AT_A_TIME = ("-n", "2", "--dist", "loadgroup", "-m")

REMOTE = "ssh or docker"

FOREGROUND = (
    Stage("many-at-a-time", ("-n", "6", "-m", f"not ({REMOTE} or serial or spark or computed or long)")),
    Stage("whole-runs", ("-n", "4", "--dist", "loadgroup", "-m", "serial and not systems and not long"), mark="serial"),
)
"""Run one after another."""

BACKGROUND = (
    Stage("remote-hosts", ("-n", "1", "-m", f"({REMOTE}) and not serial and not long"), mark="(?:ssh|docker)"),
    Stage("spark", (*TWO_AT_A_TIME, "spark and not long"), mark="spark"),
    Stage("computed", (*TWO_AT_A_TIME, "computed and not long"), mark="computed", niceness=19, is_late=True),
)
"""Run one after another at the same time; their output is printed after that of a foreground stage."""

LONG = Stage("long", (*TWO_AT_A_TIME, "long and not systems"), mark="long")


class Interrupted(Exception):
    """Interrupted by `number`: SIGINT (Ctrl-C) or SIGTERM."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


class Stages:
    """Runs stages, and ends them with this process."""

    def __init__(self, interpreter: str) -> None:
        self._interpreter = interpreter
        self._processes: list[subprocess.Popen[bytes]] = []
        # Block first: Python drops a signal that arrives while its handler is being replaced.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background process ignores SIGINT
                signal.signal(number, signal.SIG_DFL)  # the stages inherit it

    def start(self, arguments: Sequence[str], *, niceness: int = 0, output: IO[bytes] | int | None = None) -> int:
        """Start pytest; returns its index among all started stages. Raises Interrupted."""
        argv = [self._interpreter, "-m", "pytest", "-q", *arguments]
        if niceness:
            argv = ["nice", "-n", str(niceness), *argv]
        errors = None if output is None else subprocess.STDOUT
        process = subprocess.Popen(argv, stdout=output, stderr=errors, preexec_fn=self._release)
        self._processes.append(process)
        try:
            self._wait_for_signal(None)
        except Interrupted as interrupted:
            if interrupted.number == signal.SIGINT:  # it may be younger than the Ctrl-C; else `end` interrupts it
                process.terminate()  # it has nothing to take down yet
            raise
        return len(self._processes) - 1

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def wait(self, index: int, *, meanwhile: Callable[[], None] = lambda: None) -> int:
        """The exit status of the stage at this index; `meanwhile` is called whenever a stage has ended. Raises
        Interrupted."""
        while True:
            status = self.status(index)
            meanwhile()
            self._wait_for_signal(POLL_INTERVAL_S if status is None else None)  # a signal may be why it has ended
            if status is not None:
                return status

    def status(self, index: int) -> int | None:
        """The exit status of the stage at this index; None while it is running."""
        return self._processes[index].poll()

    def _wait_for_signal(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s` for a stage to end; None only checks for SIGINT and SIGTERM, and leaves SIGCHLD to
        whoever waits for it. Raises Interrupted."""
        number = self._next_signal(timeout_s)
        if number is not None and number != signal.SIGCHLD:
            raise Interrupted(number)

    def _next_signal(self, timeout_s: float | None) -> signal.Signals | None:
        """The next blocked signal that is not ignored; SIGCHLD last, and only with a timeout."""
        unignored = {number for number in BLOCKED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
        waits = [(unignored - {signal.SIGCHLD}, 0.0), *([] if timeout_s is None else [(unignored, timeout_s)])]
        for numbers, at_most_s in waits:
            taken = signal.sigtimedwait(numbers, at_most_s)
            if taken is not None:
                return signal.Signals(taken.si_signo)
        return None

    def end(self, heard: signal.Signals | None = None) -> None:
        """End all running stages by SIGINT, SIGTERM and SIGKILL in turn, without `heard`: a Ctrl-C has reached them
        all, and pytest takes down what its tests have started. Another Ctrl-C goes on to the next signal."""
        if self._under_way():
            print("make test: taking down what the tests have started (Ctrl-C: do not wait)", file=sys.stderr)
        for word in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            for process in self._under_way() if word != heard else ():
                _signal(process, word)
            while self._under_way() and (left_s := deadline_s - time.monotonic()) > 0:
                if self._next_signal(left_s) not in (None, signal.SIGCHLD):
                    break

    def _under_way(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]


def _signal(stage: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a stage, and its workers first: pytest-xdist kills workers that are busy with a test, together with what
    would take down what the test has started."""
    workers: list[int] = []
    with contextlib.suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{stage.pid}/task").iterdir():
            workers += map(int, (thread / "children").read_text(encoding="ascii").split())
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    stage.send_signal(number)


def _files_with(mark: str) -> list[str]:
    """Test files that use a mark."""
    marked = re.compile(rf"mark\.{mark}\b")
    found = [path for path in Path("tests").rglob("test_*.py") if marked.search(path.read_text(encoding="utf-8"))]
    return sorted(str(path) for path in found)


def _arguments(stage: Stage) -> list[str]:
    return [*stage.arguments, *(_files_with(stage.mark) if stage.mark else ())]


class Background:
    """Runs stages one after another beside others, and keeps their output. `failed` has the names of failed stages."""

    def __init__(self, stages: Stages, row: Sequence[Stage]) -> None:
        self._stages = stages
        self._left = list(row)
        self._under_way: tuple[Stage, int, IO[bytes]] | None = None
        self._ended: list[tuple[Stage, IO[bytes]]] = []
        self.failed: list[str] = []
        self.is_late = False
        """Whether the last foreground stage has begun."""

    def start_next(self) -> None:
        """Start the next stage if the previous one has ended, and it is time for it. Raises Interrupted."""
        if self._under_way is not None:
            stage, index, output = self._under_way
            status = self._stages.status(index)
            if status is None:
                return
            if status != 0:
                self.failed.append(stage.name)
            self._under_way = None
            self._ended.append((stage, output))
        if self._left and (self.is_late or not self._left[0].is_late):
            stage, output = self._left.pop(0), tempfile.TemporaryFile()  # noqa: SIM115 (print_output closes it)
            index = self._stages.start(_arguments(stage), niceness=stage.niceness, output=output)
            self._under_way = stage, index, output

    def finish(self) -> None:
        """Wait for all remaining stages. Raises Interrupted."""
        while self._under_way is not None:
            self._stages.wait(self._under_way[1])
            self.start_next()

    def print_output(self) -> None:
        """Print the output of stages that have ended since the last call."""
        for stage, output in self._ended:
            print(f"== {stage.name}", flush=True)
            with output:
                output.seek(0)
                shutil.copyfileobj(output, sys.stdout.buffer)
            sys.stdout.flush()
        self._ended.clear()


def _run_all(stages: Stages) -> list[str]:
    """Run every stage. Returns the names of those that failed."""
    collecting = [
        stages.start(["--collect-only", *where], output=subprocess.DEVNULL)
        for where in (("tests/harness",), ("tests", "--ignore=tests/harness"))
    ]
    for index in collecting:
        stages.wait(index)  # the stage with a file that cannot be collected reports it
    background, failed = Background(stages, BACKGROUND), []
    for stage in FOREGROUND:
        print(f"== {stage.name}", flush=True)
        background.is_late = stage is FOREGROUND[-1]
        background.start_next()
        if stages.wait(stages.start(_arguments(stage)), meanwhile=background.start_next) != 0:
            failed.append(stage.name)
        background.print_output()
    background.finish()
    background.print_output()
    return failed + background.failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interpreter", metavar="INTERPRETER")
    parser.add_argument("--long", action="store_true", help="run the slow tests instead of all others")
    options = parser.parse_args(argv)
    stages = Stages(options.interpreter)
    try:
        if options.long:
            return stages.wait(stages.start(_arguments(LONG)))
        failed = _run_all(stages)
    except Interrupted as interrupted:
        stages.end(interrupted.number)
        return 130
    finally:
        stages.end()
    if failed:
        print(f"make test: failed stages: {' '.join(failed)}", file=sys.stderr)
        return 1
    print("make test: every stage passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
