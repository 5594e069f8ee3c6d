"""A program on the executors that answers requests, each a line of JSON, for work that needs another interpreter.

The Python worker that Spark starts for a task must be of the driver's implementation and version, because functions are
sent as byte code. Requests go through it to a separate process, which may be PyPy: `python -m MODULE` with the archive
shipped by the session as its only path. The process stays for later tasks of the same Python worker, so that modules
are loaded once and compiled code is kept. It must end when its input ends, and at SIGHUP, which it gets when the worker
dies.
"""

from __future__ import annotations

__all__ = ["Answers", "Program", "ask"]

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_analysis.errors import AnalysisError
from spark_analysis.session import ARCHIVE, one_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FASTER = "pypy3"
"""Default interpreter, if an executor has it in a suitable version."""

PROBE_TIMEOUT_S = 60.0
"""Timeout for an interpreter to report its version: it may take some seconds on a busy machine."""

MAX_ERROR_CHARS = 2_000
"""Bytes read from the end of a dead program's error output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`module` is run by `python` (a path or a name on the executors; empty: PyPy if an executor has it, else the
    Python worker's interpreter), which must be of version `at_least`."""

    module: str
    python: str = ""
    at_least: tuple[int, int] = (3, 11)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answers:
    """The result of one task: in order, an answer to each request for which there was time; host and interpreter."""

    host: str
    python: str
    answers: list[Any]


def ask(spark: SparkSession, program: Program, questions: Sequence[Any], *, budget_s: float) -> Answers:
    """Send requests (JSON data) to the program, in one task on one executor.

    No request is begun later than `budget_s` after the first. If an executor is lost, Spark repeats the task on
    another. Raises AnalysisError if the task failed as often as Spark tries it. May be called by several threads at a
    time.
    """
    context = spark.sparkContext
    asked = json.dumps(list(questions))
    try:
        rows = context.parallelize([asked], 1).mapPartitions(_Task(program, budget_s)).collect()
    except Exception as error:
        raise AnalysisError(_complaint(error)) from None
    return Answers(**json.loads(rows[0]))


def _complaint(error: Exception) -> str:
    """The message of a ProgramError, else Spark's own."""
    text = str(error)
    found = text.rpartition(f"{ProgramError.__name__}: ")[2].splitlines() if ProgramError.__name__ in text else []
    return found[0] if found else one_line(error)


class ProgramError(Exception):
    """The program could not be started, or died; the message is one line."""


class _Task:
    """The work of a task in its Python worker."""

    def __init__(self, program: Program, budget_s: float) -> None:
        self._program = program
        self._budget_s = budget_s

    def __call__(self, rows: Iterator[str]) -> Iterator[str]:
        running = _Running.of(self._program)
        deadline_s = time.monotonic() + self._budget_s
        for row in rows:
            answers: list[Any] = []
            for question in json.loads(row):
                if time.monotonic() >= deadline_s:
                    break
                answers.append(running.answer(question))
            yield json.dumps({"host": socket.gethostname(), "python": running.python, "answers": answers})


class _Running:
    """A running program and its pipes."""

    known: dict[str, _Running] = {}  # noqa: RUF012 - kept by this Python worker for its later tasks

    def __init__(self, program: Program) -> None:
        from pyspark import SparkFiles

        interpreter = _interpreter(program)
        environment = {**os.environ, **program.environment, "PYTHONPATH": SparkFiles.get(ARCHIVE)}
        self._name = f"{os.path.basename(interpreter)} -m {program.module} on {socket.gethostname()}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - read after the program has died
        try:
            self._process = subprocess.Popen(
                # -P: import nothing from the current directory
                [interpreter, "-P", "-m", program.module, str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, text=True,
            )  # fmt: skip
        except OSError as error:
            raise ProgramError(f"{self._name}: {error.strerror}") from None
        self.python = str(self._next())

    @classmethod
    def of(cls, program: Program) -> _Running:
        """The program if it is running, else a new one."""
        key = repr(program)
        running = cls.known.get(key)
        if running is None or running._process.poll() is not None:
            running = cls.known[key] = cls(program)
        return running

    def answer(self, question: Any) -> Any:
        """The program's answer. Raises ProgramError if it has died."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None
        return self._next()

    def _next(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._died()
        return json.loads(line)

    def _died(self) -> ProgramError:
        self._process.kill()
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - MAX_ERROR_CHARS))
        said = self._log.read().decode(errors="replace").strip().rpartition("\n")[2]
        return ProgramError(f"{self._name} {how}{f': {said}' if said else ''}")


def _interpreter(program: Program) -> str:
    """The path of the program's interpreter on this executor. Raises ProgramError."""
    if not program.python:
        faster = shutil.which(FASTER)
        fits = faster is not None and _version(faster) >= program.at_least
        return faster if faster is not None and fits else sys.executable
    found = shutil.which(program.python)
    if found is None:
        raise ProgramError(f"{program.python}: there is no such interpreter on {socket.gethostname()}")
    version = _version(found)
    if version < program.at_least:
        needed, there = (".".join(map(str, each)) for each in (program.at_least, version))
        raise ProgramError(
            f"{program.python} on {socket.gethostname()} is Python {there}, but {needed} or later is needed"
        )
    return found


def _version(interpreter: str) -> tuple[int, int]:
    """The Python version of an interpreter; (0, 0) if it does not report one."""
    words = [interpreter, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
        major, minor = map(int, done.stdout.split())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return (0, 0)
    return (major, minor)
