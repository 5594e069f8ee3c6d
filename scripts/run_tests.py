"""The stages of `make test`, in two rows beside one another, and that of `make test-long`.

    python scripts/run_tests.py INTERPRETER [--long]

INTERPRETER is the one whose pytest runs them. Every stage runs, whatever became of those before it; the exit status is
1 when one of them failed. Ctrl-C and SIGTERM end all that is under way and the command: 130.

First row: six tests at a time where that is safe (many wait most of the time); then whole runs of real clusters, four
at a time, but for those that try `harness clean`, which takes whatever is dead: one after the other. Second row, for
what the first leaves of the cores: Spark's, those of the embedded Spark in one process and the others in another; then,
at the lowest priority, the tests that only compute. All tests are collected once before: this compiles them, which the
workers would all do at once, each for itself. All stages but the first are given the files that have their tests: to
collect all others costs each of their workers some seconds.
"""

from __future__ import annotations

import argparse
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

PATIENCE_S = 20.0
"""How long a stage that hears of a Ctrl-C may take for its end: pytest takes down what its tests have started."""

WAIT_S = 600.0
"""How often a stage is looked at although nobody has said that it ended."""

HELD = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
"""Signals that only `_next_signal` takes. A shell that runs the stages itself loses one that comes between the fork and
the exec of a stage, and waits for its end."""


class Stage(NamedTuple):
    """What pytest is asked for."""

    name: str
    arguments: Sequence[str]
    mark: str = ""
    """The files that have it are those with the stage's tests; without, any may have some."""
    niceness: int = 0


TWO_AT_A_TIME = ("-n", "2", "--dist", "loadgroup", "-m")

ROW = (
    Stage("many-at-a-time", ("-n", "6", "-m", "not serial and not spark and not computed and not long")),
    Stage("whole-runs", ("-n", "4", "--dist", "loadgroup", "-m", "serial and not systems and not long"), mark="serial"),
)
"""One after the other."""

BESIDE = (
    Stage("spark", (*TWO_AT_A_TIME, "spark and not long"), mark="spark"),
    Stage("computed", (*TWO_AT_A_TIME, "computed and not long"), mark="computed", niceness=19),
)
"""One after the other too, meanwhile; what they have said follows a stage of the row."""

LONG = Stage("long", (*TWO_AT_A_TIME, "long and not systems"), mark="long")


class Interrupted(Exception):
    """By this signal: a Ctrl-C, or SIGTERM."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


class Stages:
    """Runs stages, and ends them with this process."""

    def __init__(self, interpreter: str) -> None:
        self._interpreter = interpreter
        self._processes: list[subprocess.Popen[bytes]] = []
        # Held first: Python drops what has come while its handler is taken away.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a background process of a shell heeds no Ctrl-C
                signal.signal(number, signal.SIG_DFL)  # as the stages inherit them

    def start(self, arguments: Sequence[str], *, niceness: int = 0, output: IO[bytes] | int | None = None) -> int:
        """Run pytest; its place among all that were started is returned. Raises Interrupted."""
        argv = [self._interpreter, "-m", "pytest", "-q", *arguments]
        if niceness:
            argv = ["nice", "-n", str(niceness), *argv]
        errors = None if output is None else subprocess.STDOUT
        process = subprocess.Popen(argv, stdout=output, stderr=errors, preexec_fn=self._release)
        self._processes.append(process)
        try:
            self._heed(None)
        except Interrupted as interrupted:
            if interrupted.number == signal.SIGINT:  # which it may be younger than; of SIGTERM all stages are told
                process.terminate()  # it has nothing to take down yet
            raise
        return len(self._processes) - 1

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def wait(self, place: int, *, meanwhile: Callable[[], None] = lambda: None) -> int:
        """The exit status of what was started there; `meanwhile` is called whenever anything has ended. Raises
        Interrupted."""
        while True:
            status = self.status(place)
            meanwhile()
            self._heed(WAIT_S if status is None else None)  # what is heard may be why it has ended
            if status is not None:
                return status

    def status(self, place: int) -> int | None:
        """The exit status of what was started there; None while it is under way."""
        return self._processes[place].poll()

    def _heed(self, timeout_s: float | None) -> None:
        """Wait so long for the end of some stage; None looks for a Ctrl-C alone, and leaves that a stage has ended to
        whoever waits for it. Raises Interrupted."""
        number = self._next_signal(timeout_s)
        if number is not None and number != signal.SIGCHLD:
            raise Interrupted(number)

    def _next_signal(self, timeout_s: float | None) -> signal.Signals | None:
        """The next of those that are held and heeded; SIGCHLD last, and with a timeout only."""
        heeded = {number for number in HELD if signal.getsignal(number) is not signal.SIG_IGN}
        waits = [(heeded - {signal.SIGCHLD}, 0.0), *([] if timeout_s is None else [(heeded, timeout_s)])]
        for numbers, at_most_s in waits:
            taken = signal.sigtimedwait(numbers, at_most_s)
            if taken is not None:
                return signal.Signals(taken.si_signo)
        return None

    def end(self, heard: signal.Signals | None = None) -> None:
        """End what is under way. A Ctrl-C has been `heard` by all of it, which takes down what tests have started;
        another one cuts that short."""
        for word in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            deadline_s = time.monotonic() + PATIENCE_S
            for process in self._under_way() if word != heard else ():
                process.send_signal(word)
            while self._under_way() and (left_s := deadline_s - time.monotonic()) > 0:
                if self._next_signal(left_s) not in (None, signal.SIGCHLD):
                    break

    def _under_way(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]


def _files_with(mark: str) -> list[str]:
    """Files of tests that have a mark."""
    marked = re.compile(rf"mark\.{mark}\b")
    found = [path for path in Path("tests").rglob("test_*.py") if marked.search(path.read_text(encoding="utf-8"))]
    return sorted(str(path) for path in found)


def _arguments(stage: Stage) -> list[str]:
    return [*stage.arguments, *(_files_with(stage.mark) if stage.mark else ())]


class Aside:
    """Runs stages one after the other beside others, and keeps what they say. Attribute: failed, their names."""

    def __init__(self, stages: Stages, row: Sequence[Stage]) -> None:
        self._stages = stages
        self._left = list(row)
        self._under_way: tuple[Stage, int, IO[bytes]] | None = None
        self._ended: list[tuple[Stage, IO[bytes]]] = []
        self.failed: list[str] = []

    def go_on(self) -> None:
        """Start the next one if the one before has ended. Raises Interrupted."""
        if self._under_way is not None:
            stage, place, output = self._under_way
            status = self._stages.status(place)
            if status is None:
                return
            if status != 0:
                self.failed.append(stage.name)
            self._under_way = None
            self._ended.append((stage, output))
        if self._left:
            stage, output = self._left.pop(0), tempfile.TemporaryFile()  # noqa: SIM115 (tell closes it)
            place = self._stages.start(_arguments(stage), niceness=stage.niceness, output=output)
            self._under_way = stage, place, output

    def finish(self) -> None:
        """Wait for all that is left. Raises Interrupted."""
        while self._under_way is not None:
            self._stages.wait(self._under_way[1])
            self.go_on()

    def tell(self) -> None:
        """Print what those that have ended since have said."""
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
    for place in collecting:
        stages.wait(place)  # what cannot be collected is said by the stage that has it
    aside, failed = Aside(stages, BESIDE), []
    aside.go_on()
    for stage in ROW:
        print(f"== {stage.name}", flush=True)
        if stages.wait(stages.start(_arguments(stage)), meanwhile=aside.go_on) != 0:
            failed.append(stage.name)
        aside.tell()
    aside.finish()
    aside.tell()
    return failed + aside.failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run them. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interpreter", metavar="INTERPRETER")
    parser.add_argument("--long", action="store_true", help="the tests that take long, in the place of all others")
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
